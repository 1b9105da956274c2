"""What a relaxation is: linear bounds of a nonlinear operation over boxes, and what is free in them.

Every free number is a *parameter* in [0, 1], and every value of it is sound: α between the two planes of a
product, the slope of a line between the least and the largest useful one, the point of the box where a
softmax bound touches, the mixture of two such bounds, the constant that Σp = 1 allows to take off. So
projecting parameters means clamping, and whoever learns, keeps or reuses them need not know what they are.

Parameters become *choices*, the numbers that linear bounds are made of and that a certificate stores: slopes,
say, instead of places in a range of slopes. Where nothing was learned, a choice may be left open, and
`linearise` makes the usual one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Form, Local, Stop
from buffet.bounds.intervals import Box
from buffet.network import Node
from buffet.regions import Region
from buffet.relaxations.dual_passes import DualPass
from buffet.relaxations.elementwise import Side
from buffet.relaxations.enclosures import Enclosure

Parameters = dict[str, Tensor]
"""The parameters of one node by name, an axis of tasks first."""
Choice = float | Tensor
"""One number, or a tensor with an axis of tasks and further ones."""
Choices = Mapping[str, Choice]


@runtime_checkable
class Known(Protocol):
    """What a walk over the graph knows of the nodes so far (`propagation.substitution.Bounds`)."""

    @property
    def region(self) -> Region: ...

    @property
    def dtype(self) -> torch.dtype:
        """The precision of linear bounds."""

    @property
    def nodes(self) -> tuple[Node, ...]: ...

    @property
    def clean(self) -> list[Tensor]: ...

    @property
    def boxes(self) -> dict[int, Box]: ...

    @property
    def enclosures(self) -> dict[int, Enclosure]: ...

    @property
    def forms(self) -> dict[int, Form]: ...

    @property
    def locals(self) -> dict[int, Local]: ...

    def slopes(self, index: int, side: Side) -> tuple[Tensor, Tensor]:
        """The least and the largest useful slope of an elementwise function."""

    def forms_of(
        self, nodes: Sequence[int], stops: Mapping[int, Stop]
    ) -> tuple[dict[int, Form], dict[int, Box]]: ...

    def least_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]: ...


@dataclass(frozen=True)
class Site:
    """A nonlinear node, and what is known of the nodes that it reads."""

    known: Known
    index: int

    @property
    def node(self) -> Node:
        return self.known.nodes[self.index]

    @property
    def clean(self) -> tuple[Tensor, ...]:
        """The clean values of the inputs."""
        return tuple(self.known.clean[i] for i in self.node.inputs)

    @property
    def boxes(self) -> tuple[Box, ...]:
        """How far the inputs may deviate from these."""
        return tuple(self.known.boxes[i] for i in self.node.inputs)

    def first(self, tokens: int) -> list[tuple[Tensor, Box]]:
        """Clean values and boxes of the tokens of the inputs that the first ones of the output read."""
        found = []
        for place, (clean, box) in enumerate(zip(self.clean, self.boxes, strict=True)):
            count = self.node.op.reads(place, tokens, len(clean))
            found.append((clean[:count], Box(box.lower[:, :count], box.upper[:, :count])))
        return found


@runtime_checkable
class Alphas(Protocol):
    """Chooses α, below and above, for every term of a product that has no learned ones."""

    def __call__(self, site: Site) -> tuple[Choice, Choice]: ...


class Relaxation(ABC):
    """Of one kind of nonlinear operation; it has no state of its own."""

    has_alpha: ClassVar[bool] = False  # whether it fuses two planes by α, which is all that o-BuFFeT learns

    @abstractmethod
    def start(self, site: Site, alphas: Alphas, only_alphas: bool) -> Parameters:
        """Parameters that learning starts from, for every task: those of the usual choices."""

    @abstractmethod
    def choices(self, site: Site, parameters: Parameters, alphas: Alphas) -> Choices:
        """What parameters stand for. Without any, `alphas` chooses, and the rest is left open."""

    def complete(self, site: Site, choices: Choices) -> Choices:
        """The same with nothing left open."""
        return choices

    @abstractmethod
    def linearise(self, site: Site, choices: Choices) -> Enclosure:
        """Linear bounds of the operation, sound for whatever parameters in [0, 1]."""

    @abstractmethod
    def dual_pass(self, site: Site, tokens: int, dtype: torch.dtype) -> DualPass:
        """What the operation does, at its first tokens, to the multipliers and values of a Lagrangian."""
