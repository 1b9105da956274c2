"""The learned parameters of many nodes in one tensor, so that an optimiser's step is a few operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.relaxations.relaxation import Parameters

Gradient = Callable[[Float[Tensor, "tasks others"]], Float[Tensor, "tasks numbers"]]
"""From weights of margins to the derivative of their weighted sum by every parameter."""


class FlatParameters:
    """Copies of parameters side by side.

    `values`, from which gradients can be taken, holds those of a task in a row.
    """

    def __init__(self, parameters: Mapping[int, Parameters], dtype: torch.dtype = torch.float64) -> None:
        self._names = [(index, key) for index, node in parameters.items() for key in node]
        self._nodes = list(parameters)
        given = [parameters[index][key].detach() for index, key in self._names]
        self._shapes = [tuple(share.shape[1:]) for share in given]
        rows = [share.reshape(len(share), -1) for share in given]
        self._sizes = [row.shape[1] for row in rows]
        together = torch.cat(rows, 1) if rows else torch.empty(0, 0)
        self.values: Float[Tensor, "tasks numbers"] = together.to(dtype).requires_grad_()

    @property
    def parameters(self) -> dict[int, Parameters]:
        """The parameters by node, as views of the values."""
        return self.reading(self.values)

    @cached_property
    def current(self) -> dict[int, Parameters]:
        """The same, made once and without gradients: the values only ever change in place."""
        with torch.inference_mode(False):
            return self.reading(self.values.detach())

    def reading(self, values: Float[Tensor, "tasks numbers"]) -> dict[int, Parameters]:
        """The parameters by node that other values (or their gradient) stand for, as views of them."""
        named: dict[int, Parameters] = {index: {} for index in self._nodes}
        if not self._names:
            return named
        parts = values.split(self._sizes, 1)
        for (index, key), part, shape in zip(self._names, parts, self._shapes, strict=True):
            named[index][key] = part.view(len(values), *shape)
        return named

    def gradient(self, found: Tensor, weights: Tensor | None = None) -> Float[Tensor, "tasks numbers"]:
        """That of a number (or of a weighted sum of numbers) that was computed from `parameters`."""
        return torch.autograd.grad(found, [self.values], weights)[0]


class Best:
    """For every task the parameters that had the largest margin (or whatever is to grow) so far."""

    def __init__(self, values: Float[Tensor, "tasks numbers"]) -> None:
        self.values = values.detach().clone()
        self.margin = values.new_full((len(values),), -torch.inf, dtype=torch.float64)

    @property
    def proven(self) -> bool:
        return bool((self.margin > 0).all())

    def offer(self, values: Float[Tensor, "tasks numbers"], margin: Float[Tensor, "tasks"]) -> Tensor:
        """Keep what is better than all before; for which tasks that is so."""
        better = margin > self.margin  # not for NaN
        torch.where(better[:, None], values, self.values, out=self.values)
        torch.where(better, margin, self.margin, out=self.margin)
        return better
