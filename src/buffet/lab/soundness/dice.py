"""Random choices from one seed, and numbers that are hard on floating point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

LEAST, MOST = -149, 124
"""Powers of 2 that float32 weights have."""
LEAST_ROW = -1070
"""What rows and sizes of regions, in float64, go down to."""
DIGITS = (0, 0, 0, 1, 1, 1, 1, -1, -1, -1, 2, -2, 3, 5, -7)


class Dice:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self.generator))]

    def power(self, low: int, high: int) -> int:
        """An exponent, both ends included."""
        return int(torch.randint(low, high + 1, (1,), generator=self.generator))

    def chance(self, share: float) -> bool:
        return float(self.uniform(1)) < share

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def size(self, *shape: int) -> Tensor:
        """Sizes of regions, from 1e-4 to 1."""
        return 10 ** (-4 + 4 * self.uniform(*shape))

    def digits(self, *shape: int) -> Tensor:
        """Small whole numbers, many of them 0 and ±1: sums of them cancel exactly."""
        values = torch.tensor(DIGITS, dtype=torch.float64)
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
