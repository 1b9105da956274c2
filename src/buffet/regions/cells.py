"""Parts of a ball between parallel planes: what a ball is cut into, to be proven part by part."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions.balls import LpBall
from buffet.regions.base import Delta, Description, Form, Halve, Region
from buffet.regions.norms import lp_norm, steepest

DIRECTIONS = 3
"""The most directions across which a ball is cut."""

FURTHEST = 0.9
"""A cell that is all further out than this share of ε is treated as one that begins there: weights stay below
three times the form."""
GOLDEN = (math.sqrt(5) - 1) / 2
STEPS = {torch.float32: 14, torch.float64: 44}
"""Of the golden section, in norms other than L2: weights are found to a thousandth of their range, or a
billionth, so that whoever computes them again finds the same."""
HALVINGS = 40
"""Steps of the search for how far one may go inside the ball."""


@dataclass(frozen=True, eq=False)
class Cuts:
    """Directions along which the moved rows of a task are cut: cut i along `directions[i]`, of row `rows[i]`.

    Directions are unit vectors, and those of the same row orthogonal, up to rounding; else bounds are loose.
    """

    rows: tuple[int, ...]  # places in the task's moved rows
    directions: Float[Tensor, "cuts width"]


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Cell(LpBall):
    """The parts of a ball between planes: ``lower ≤ direction·δ ≤ upper`` for every cut, a part per task.

    The minimum of a form A is at least ``−ε Σ_d ‖A_d − λ u‖ + λ⁺·lower − λ⁻·upper`` for *every* λ. The best
    is found for one cut after the other.
    """

    cuts: Cuts
    lower: Float[Tensor, "tasks cuts"]  # −inf: no plane on that side
    upper: Float[Tensor, "tasks cuts"]

    def __init__(self, ball: LpBall, cuts: Cuts, cells: Sequence[Sequence[tuple[float, float]]]) -> None:
        """The cells of one task of a ball, a task each."""
        if ball.tasks != 1:
            raise BuffetError(f"cells: got {ball.tasks} tasks; only a single ball is cut")
        size = None if ball.eps is None else ball.eps.expand(len(cells))
        super().__init__(ball.center, ball.moved.expand(len(cells), -1), ball.p, size)
        ends = torch.tensor(cells, dtype=torch.float64, device=ball.center.device).reshape(len(cells), -1, 2)
        object.__setattr__(self, "cuts", cuts)
        object.__setattr__(self, "lower", ends[..., 0])
        object.__setattr__(self, "upper", ends[..., 1])

    def with_eps(self, eps: float | int | Sequence[float] | Tensor) -> Cell:
        return self._changed(LpBall(self.center, self.moved, self.p, eps), self.lower, self.upper)

    def select(self, index: Sequence[int] | Tensor) -> Cell:
        index = self._index(index)
        return self._changed(super().select(index), self.lower[index], self.upper[index])

    def halves(self, cut: int, place: float) -> tuple[Cell, Cell]:
        """What lies below a plane across some cut, and what lies above it."""
        lower, upper = self.lower.clone(), self.upper.clone()
        lower[:, cut], upper[:, cut] = lower[:, cut].clamp_min(place), upper[:, cut].clamp_max(place)
        return self._changed(self, self.lower, upper), self._changed(self, lower, self.upper)

    def _changed(self, ball: LpBall, lower: Tensor, upper: Tensor) -> Cell:
        cell: Cell = self._with(moved=ball.moved, eps=ball.eps, lower=lower, upper=upper)
        return cell

    def names(self) -> list[Hashable]:
        ends = (tuple(cell) for cell in torch.cat([self.lower, self.upper], 1).tolist())
        return list(zip(super().names(), ends, strict=True))

    @property
    def symmetric(self) -> bool:
        return False

    def parents(self) -> list[Hashable]:
        return super().names()

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        rest, gain = self._reduced(form)
        return super().minimise(rest) + gain

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        return Region.minimise_sums(self, a, b)

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        # Every plane may leave four times what was there, and is worth three times as much.
        planes = (self.lower.isfinite() | self.upper.isfinite()).sum(1)
        most = (4.0**planes).to(form.dtype).reshape(-1, *[1] * (form.ndim - 3))
        return most * super().minimise(form.detach()).abs()

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
            shortest = steepest(direction, self.q)
            shortest = shortest / (shortest @ direction)
            middle[..., row, :] += torch.zeros_like(along).clamp(low, high).unsqueeze(-1) * shortest
        share, fits = torch.ones_like(middle[..., :1]), torch.zeros_like(middle[..., :1])
        for _ in range(HALVINGS):
            out = self._outside(middle + share * (between - middle))
            fits = torch.where(out, fits, share)
            share = torch.where(out, (fits + share) / 2, (1 + share) / 2)
        moved = self._shrink(middle + fits * (between - middle))
        return torch.where(self.contains(inside)[..., None, None], inside, moved)

    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        inside = super().contains(delta, slack)
        for row, direction, low, high in self._planes(torch.float64):
            along = delta[..., row, :].double() @ direction
            inside = inside & (along >= low - slack) & (along <= high + slack)
        return inside

    def describe(self) -> Description:
        lower, upper = (
            [end if math.isfinite(end) else None for end in side[0].tolist()]
            for side in (self.lower, self.upper)
        )
        facts: dict[str, object] = {
            "kind": "cell",
            "moved": self.moved[0].tolist(),
            **self._measures(),
            "cuts": None,
            "rows": list(self.cuts.rows),
            "lower": lower,
            "upper": upper,
        }
        return Description(facts, common={"cuts.{}": self.cuts.directions}, whole=self.cuts)

    def _details(self) -> str:
        return (
            f"{super()._details()}, {self.tasks} parts between planes across {len(self.cuts.rows)} directions"
        )

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
            if bool((low.isinf() & high.isinf()).all()):
                continue
            low, high = low.reshape(shape), high.reshape(shape)
            with torch.no_grad():
                if self.p == 2:
                    weight = _best_weight(rest[:, row], direction, size, low, high)
                else:
                    weight = _weight_found(rest[:, row], direction, size, low, high, self.q)
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


def cut_ball(ball: LpBall, changes: Sequence[Float[Tensor, "_ some"]]) -> tuple[Cell, Halve]:
    """A ball of one task as a cell, and how to halve cells: across the direction in which scores move most
    within them. The `changes` of scores go with moves along the axes of every row.
    """
    found = [(row, *pair) for row, change in enumerate(changes) for pair in _directions(change)]
    found = sorted(found, key=lambda one: -one[1])[:DIRECTIONS]
    cuts = Cuts(tuple(row for row, _, _ in found), torch.stack([direction for _, _, direction in found]))
    strengths = torch.tensor([s for _, s, _ in found], dtype=torch.float64, device=ball.center.device)

    def halve(cell: Cell) -> tuple[Region, Region]:
        # No plane further out meets the ball.
        reach = cell._sizes()[0] * lp_norm(cell.cuts.directions, cell.q, 1)
        lower, upper = torch.maximum(cell.lower[0], -reach), torch.minimum(cell.upper[0], reach)
        cut = int((strengths * (upper - lower)).argmax())
        return cell.halves(cut, float(lower[cut] + upper[cut]) / 2)

    return Cell(ball, cuts, [[(-math.inf, math.inf)] * len(cuts.rows)]), halve


def _directions(changes: Float[Tensor, "axes some"]) -> list[tuple[float, Float[Tensor, "width"]]]:
    """Orthonormal directions of a row in which all scores together move most, with how much they do."""
    left, strengths, _ = torch.linalg.svd(changes.nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    return [(float(s), u) for s, u in zip(strengths[:DIRECTIONS], left.T, strict=False)]


def _best_weight(form: Tensor, direction: Tensor, size: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """How much of a direction is taken out of forms (tasks × width × rows) for the largest lower bound.

    Where the minimum over the ball lies between the planes, nothing; else so much that it lies on one.
    """
    along = torch.einsum("w,tw...->t...", direction, form)
    norm = lp_norm(form, 2.0, 1)
    across = (norm.square() - along.square()).clamp_min(0).sqrt()
    free = -along / torch.where(norm > 0, norm, 1)
    place = torch.maximum(free, (low / size).clamp_max(FURTHEST))
    place = torch.minimum(place, (high / size).clamp_min(-FURTHEST))
    weight = torch.where(place == free, 0.0, along + place * across / (1 - place.square()).sqrt())
    # A side without a plane bears no weight.
    weight = torch.where(low.isinf(), weight.clamp_max(0), weight)
    weight = torch.where(high.isinf(), weight.clamp_min(0), weight)
    return weight.nan_to_num(0.0, 0.0, 0.0)


def _weight_found(
    form: Tensor, direction: Tensor, size: Tensor, low: Tensor, high: Tensor, q: float
) -> Tensor:
    """The same in any norm, by golden section: the bound is a concave function of the weight."""
    across = direction.reshape(-1, *[1] * (form.ndim - 2))
    reach = 3 * lp_norm(form, q, 1) / lp_norm(direction, q, 0)
    left = torch.where(high.isinf(), 0.0, -reach)
    right = torch.where(low.isinf(), 0.0, reach)
    low, high = (torch.where(end.isinf(), 0.0, end) for end in (low, high))

    def bound(weight: Tensor) -> Tensor:
        rest = lp_norm(form - across * weight.unsqueeze(1), q, 1)
        return weight.clamp_min(0) * low + weight.clamp_max(0) * high - size * rest

    a, b = right - GOLDEN * (right - left), left + GOLDEN * (right - left)
    at_a, at_b = bound(a), bound(b)
    for _ in range(STEPS[form.dtype]):
        better = at_a > at_b  # the best lies left of b
        right, left = torch.where(better, b, right), torch.where(better, left, a)
        new = torch.where(better, right - GOLDEN * (right - left), left + GOLDEN * (right - left))
        a, b = torch.where(better, new, b), torch.where(better, a, new)
        at_new = bound(new)
        at_a, at_b = torch.where(better, at_new, at_b), torch.where(better, at_a, at_new)
    weight = (left + right) / 2
    return torch.where(bound(weight) > bound(torch.zeros_like(weight)), weight, 0.0).nan_to_num(0.0, 0.0, 0.0)
