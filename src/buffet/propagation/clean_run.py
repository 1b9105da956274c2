"""A network on one sentence: all that bounds need to know of it before anything moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.network import Program
from buffet.propagation.rounding import residual, roundings
from buffet.properties import Property
from buffet.relaxations.enclosures import Enclosure, exact_enclosure


@dataclass(frozen=True)
class CleanRun:
    """A program that ends in margins, with its clean run on one sentence (both float64)."""

    program: Program
    clean: list[Tensor]
    asked: Property | None = None  # what the margins are the rows of; None: all of them have to be positive
    _exact: dict[torch.dtype, list[Enclosure | None]] = field(default_factory=dict)

    def deciding(
        self, margins: Float[Tensor, "tasks rows"]
    ) -> tuple[Float[Tensor, "tasks"], Int[Tensor, "tasks"]]:
        """The margin that what is asked depends on, and which one it is: the smallest, row by row or case by
        case."""
        return self.asked.deciding(margins) if self.asked else margins.min(-1)

    @cached_property
    def residuals(self) -> list[Tensor]:
        """How far every clean value may be from the exact operation on the clean values it was made of."""
        with torch.inference_mode(False), torch.no_grad():  # it outlives the call
            return [
                residual(n.op, value, *(self.clean[i] for i in n.inputs))
                for n, value in zip(self.program.nodes, self.clean, strict=True)
            ]

    def rounding(self, dtype: torch.dtype) -> float:
        """How far sums may be off in a precision, relative to the sizes of their terms."""
        return roundings(self.program, self.clean, dtype)

    def exact(self, dtype: torch.dtype) -> list[Enclosure | None]:
        """The enclosure of every linear operation, made once per precision; None for the nonlinear ones."""
        if dtype not in self._exact:
            # The enclosures outlive the call: ordinary tensors, even if this call needs no gradients.
            with torch.inference_mode(False):
                self._exact[dtype] = [
                    exact_enclosure(n.op, tuple(self.clean[i] for i in n.inputs), dtype)
                    for n in self.program.nodes
                ]
        return self._exact[dtype]
