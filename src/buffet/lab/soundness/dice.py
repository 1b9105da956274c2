"""Random choices for extreme cases: numbers that are hard on floating point."""

from __future__ import annotations

import torch
from torch import Tensor

from buffet.lab.soundness.cases import Dice

LEAST, MOST = -149, 124
"""Powers of 2 that float32 weights have; rows and sizes of regions, in float64, go down to the second."""
LEAST_ROW = -1070


class ExtremeDice(Dice):
    """Random choices, and numbers that are hard on floating point."""

    def power(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def chance(self, share: float) -> bool:
        return float(self.uniform(1)) < share

    def digits(self, *shape: int) -> Tensor:
        """Small whole numbers, many of them 0 and ±1: sums of them cancel exactly."""
        values = torch.tensor([0, 0, 0, 1, 1, 1, 1, -1, -1, -1, 2, -2, 3, 5, -7], dtype=torch.float64)
        return values[torch.randint(len(values), shape, generator=self.generator)]

    def odd(self, *shape: int) -> Tensor:
        """Numbers near 1 with all their digits."""
        return self.normal(*shape).double()

    def weights(self, *shape: int) -> Tensor:
        return self.digits(*shape) if self.chance(0.6) else self.odd(*shape)

    def sized(self, values: Tensor, low: int, high: int) -> Tensor:
        """Every entry times a power of 2 of its own."""
        powers = torch.randint(low, high + 1, values.shape, generator=self.generator)
        return values * torch.exp2(powers.double())
