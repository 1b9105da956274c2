"""The optimiser."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor


class Adam:
    """Adam (Kingma & Ba 2015) on parameters: every step is followed by the projection to [0, 1].

    PyTorch's own costs seconds of imports at its first use, which is more than most bounds take.
    """

    def __init__(self, values: Tensor, rate: float, betas: tuple[float, float] = (0.9, 0.999)) -> None:
        """Of `values`, which are changed in place."""
        self.values, self.rate, self.betas = values, rate, betas
        self._first, self._second = (torch.zeros_like(values, requires_grad=False) for _ in range(2))
        self._steps = 0

    def descend(self, gradient: Float[Tensor, "*values"], share: float = 1.0) -> None:
        """One step (or a `share` of it) down a gradient; where it is NaN, nothing moves."""
        self._steps += 1
        beta1, beta2 = self.betas
        with torch.no_grad():
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            self._first.lerp_(gradient, 1 - beta1)
            self._second.lerp_(gradient.square_(), 1 - beta2)
            # Not below 1e-8; and numbers so small that they are stored without leading 1 take a hundred times
            # as long to take a root of.
            size = self._second.div(1 - beta2**self._steps).add_(1e-16).sqrt_()
            reach = -self.rate * share / (1 - beta1**self._steps)
            self.values.addcdiv_(self._first, size, value=reach).clamp_(0, 1)
