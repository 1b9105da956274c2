"""Parts of a ball between parallel planes: what a ball is cut into, to be proven part by part."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions.norms import lp_norm
from buffet.regions.regions import Delta, Form, LpBall, Region

FURTHEST = 0.9
"""A plane further out than this share of ε is treated as one there: weights stay below 4 times the form."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Planes across the moved rows of a task: cut i is along `directions[i]`, which moves row `rows[i]`.

    Directions of the same row are orthonormal, up to rounding: no bound depends on it, only how tight it is.
    """

    rows: tuple[int, ...]  # places in the task's moved rows
    directions: Float[Tensor, "cuts width"]
    places: tuple[tuple[float, ...], ...]  # of the planes of every cut: rising values of direction·δ

    @property
    def cells(self) -> list[tuple[tuple[float, float], ...]]:
        """The two ends of every cell along every cut; together they cover everything."""
        ends = ([-math.inf, *places, math.inf] for places in self.places)
        return list(itertools.product(*(list(itertools.pairwise(end)) for end in ends)))


@dataclass(frozen=True, eq=False, init=False)
class Cell(LpBall):
    """The parts of an L2 ball between planes: ``lower ≤ direction·δ ≤ upper`` for every cut, a part per task.

    The minimum of a form A is at least ``−ε Σ_d ‖A_d − λ u‖ + λ⁺·lower − λ⁻·upper`` for *every* λ. For one
    cut the best λ has a closed form; several are taken one after the other.
    """

    cuts: Cuts
    lower: Float[Tensor, "tasks cuts"]  # −inf: no plane on that side
    upper: Float[Tensor, "tasks cuts"]

    def __init__(self, ball: LpBall, cuts: Cuts, cells: Sequence[Sequence[tuple[float, float]]]) -> None:
        """The cells of one task of a ball, a task each."""
        if ball.p != 2 or ball.tasks != 1:
            raise BuffetError(f"cells: got {ball.tasks} tasks in L{ball.p:g}; only a single L2 ball is cut")
        size = None if ball.eps is None else ball.eps.expand(len(cells))
        super().__init__(ball.center, ball.moved.expand(len(cells), -1), 2, size)
        ends = torch.tensor(cells, dtype=torch.float64, device=ball.center.device).reshape(len(cells), -1, 2)
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "lower", ends[..., 0])
        object.__setattr__(self, "upper", ends[..., 1])

    def with_eps(self, eps: float | int | Sequence[float] | Tensor) -> Cell:
        return self._changed(LpBall(self.center, self.moved, self.p, eps), self.lower, self.upper)

    def select(self, index: Sequence[int] | Tensor) -> Cell:
        index = self._index(index)
        return self._changed(super().select(index), self.lower[index], self.upper[index])

    def _changed(self, ball: LpBall, lower: Tensor, upper: Tensor) -> Cell:
        other = copy.copy(self)
        other.__dict__.pop("_rounded", None)
        new = {"moved": ball.moved, "eps": ball.eps, "lower": lower, "upper": upper}
        for name, value in new.items():
            object.__setattr__(other, name, value)
        return other

    def names(self) -> list[Hashable]:
        ends = (tuple(cell) for cell in torch.cat([self.lower, self.upper], 1).tolist())
        return list(zip(super().names(), ends, strict=True))

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        rest, gain = self._reduced(form)
        return super().minimise(rest) + gain

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        return Region.minimise_sums(self, a, b)

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        # Every plane may take out four times what is there, and is worth as much.
        return 4 ** len(self.cuts.rows) * super().minimise(form.detach()).abs()

    def lowest(self, form: Delta) -> Delta:
        tasks = form.movedim((-3, -2, -1), (0, 1, 2))
        return super().lowest(self._reduced(tasks)[0].movedim((0, 1, 2), (-3, -2, -1)))

    def extreme(self, form: Delta) -> Delta:
        """A δ of the region near where the form is least."""
        return self.project(self.lowest(form))

    def project(self, delta: Delta) -> Delta:
        """A point of the cell near by: between the planes, and then towards the middle until in the ball.

        Where a cell is empty, some point of the ball.
        """
        inside = super().project(delta)
        between, middle = inside.clone(), torch.zeros_like(inside)
        for row, direction, low, high in self._planes(delta.dtype):
            along = between[..., row, :] @ direction
            between[..., row, :] += (along.clamp(low, high) - along).unsqueeze(-1) * direction
            middle[..., row, :] += torch.zeros_like(along).clamp(low, high).unsqueeze(-1) * direction
        step, start = (between - middle).double(), middle.double()
        size = self._sizes()[:, None, None]
        square, half, rest = (
            (x * y).sum(-1, keepdim=True) for x, y in ((step, step), (start, step), (start, start))
        )
        root = (half.square() + square * (size.square() - rest)).clamp_min(0).sqrt()
        share = ((root - half) / square.clamp_min(1e-300)).clamp(0, 1).to(delta.dtype)
        moved = self._shrink(middle + share * (between - middle))
        return torch.where(self.contains(inside)[..., None, None], inside, moved)

    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        inside = super().contains(delta, slack)
        for row, direction, low, high in self._planes(torch.float64):
            along = delta[..., row, :].double() @ direction
            inside = inside & (along >= low - slack) & (along <= high + slack)
        return inside

    def _planes(self, dtype: torch.dtype) -> list[tuple[int, Tensor, Tensor, Tensor]]:
        """Row, direction and ends of every cut."""
        directions, lower, upper = (v.to(dtype) for v in (self.cuts.directions, self.lower, self.upper))
        return list(zip(self.cuts.rows, directions, lower.unbind(1), upper.unbind(1), strict=True))

    def _reduced(self, form: Form) -> tuple[Form, Float[Tensor, "tasks *rows"]]:
        """What is left of a form when the planes have taken their share, and what they are worth."""
        rest, gain = form, form.new_zeros(form.shape[0], *form.shape[3:])
        shape = [-1, *[1] * (form.ndim - 3)]
        size = self._sizes().to(form.dtype).reshape(shape)
        for row, direction, low, high in self._planes(form.dtype):
            low, high = low.reshape(shape), high.reshape(shape)
            with torch.no_grad():
                weight = _best_weight(rest[:, row], direction, size, low, high)
                zero = torch.zeros_like(low)
                gain = gain + weight.clamp_min(0) * torch.where(low.isinf(), zero, low)
                gain = gain + weight.clamp_max(0) * torch.where(high.isinf(), zero, high)
            across = direction.reshape(-1, *[1] * (form.ndim - 3)) * weight.unsqueeze(1)
            if form.shape[1] == 1:
                rest = rest - across.unsqueeze(1)
            else:
                part = torch.zeros_like(rest)
                part[:, row] = across
                rest = rest - part
        return rest, gain


def _best_weight(form: Tensor, direction: Tensor, size: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How much of a direction is taken out of forms (tasks × width × rows) for the largest lower bound.

    Where the minimum over the ball lies between the planes, nothing; else so much that it lies on one.
    """
    along = torch.einsum("w,tw...->t...", direction, form)
    norm = lp_norm(form, 2.0, 1)
    across = (norm.square() - along.square()).clamp_min(0).sqrt()
    free = -along / torch.where(norm > 0, norm, 1)
    place = torch.minimum(torch.maximum(free, low / size), high / size).clamp(-FURTHEST, FURTHEST)
    weight = torch.where(place == free, 0.0, along + place * across / (1 - place.square()).sqrt())
    # A side without a plane bears no weight.
    weight = torch.where(low.isinf(), weight.clamp_max(0), weight)
    weight = torch.where(high.isinf(), weight.clamp_min(0), weight)
    return weight.nan_to_num(0.0, 0.0, 0.0)
