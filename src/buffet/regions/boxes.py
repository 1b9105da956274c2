"""Boxes: every entry of a moved row between two values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions import arguments
from buffet.regions.arguments import Words
from buffet.regions.base import Delta, Description, Form, Halve, Region, Support
from buffet.regions.norms import difference, random_signs, rounded

CENTRED = 1e-4
"""A box is symmetric if its middle is off the clean rows by no more than this share of its half-widths. Then
``Σ |V_k||δ|`` exceeds what ``V·δ`` can get to by no more than this share either: a thousandth of what the
account of rounding has to spare."""
SAME = 1e-12
"""A middle as near as this to the clean rows, relative to the half-width, is taken for them, and the box for
so much wider: ends that were rounded outward are no reason for another pass over every form."""


@dataclass(frozen=True, eq=False, init=False, repr=False)
class Box(Region):
    """Every feature of a moved row between a lower and an upper value.

    Args:
        x: the clean rows, tokens × width.
        lower, upper: bounds of the *values* of the rows: tokens × width (the moved rows are picked), or
            moved × width for all tasks, or tasks × moved × width. The last two are in the order of `words`.
        words: as for `LpBall`; ``None`` moves all rows in one task.

    With m the middle and r the half-widths of the deviations, the minimum of a form is ``m·A − r·|A|``.
    """

    lower: Float[Tensor, "tasks moved width"]
    upper: Float[Tensor, "tasks moved width"]
    origin: Box | None = None  # of a part, what was cut

    def __init__(self, x: Tensor, lower: Tensor, upper: Tensor, words: Words | None = None) -> None:
        self._start(x, range(len(x)) if words is None else words)
        for name, bound in (("lower", lower), ("upper", upper)):
            checked = arguments.checked_bound(name, bound, self.moved, self.center)
            object.__setattr__(self, name, checked)
        if bool((self.lower > self.upper).any()):
            t, d, feature = (self.lower > self.upper).nonzero()[0].tolist()
            where = f"row {int(self.moved[t, d])}, feature {feature}"
            raise BuffetError(
                f"Box: lower is above upper at {where}; every lower bound must be ≤ the upper one"
            )

    def select(self, index: Sequence[int] | Tensor) -> Box:
        index = self._index(index)
        found: Box = self._with(moved=self.moved[index], lower=self.lower[index], upper=self.upper[index])
        return found

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        size = _weighted(rounded(self._radius, form.dtype, up=True), form.abs())
        if self._middle is None:
            return -size
        # In float64: what a box that does not contain the clean rows adds up to may cancel.
        total = _weighted(self._middle, form.double()) - size.double()
        return (total - torch.finfo(form.dtype).eps * total.abs()).to(form.dtype)

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        radius = self._radius.flatten(1)[:, None, None].to(a.dtype)
        least = -torch.cdist(a * radius, -b * radius, 1.0)
        if self._middle is not None:
            middle = self._middle.flatten(1)[:, None, :, None].to(a.dtype)
            least = least + a @ middle + (b @ middle).mT
        return least

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        if self._middle is None:
            return least.abs()
        return _weighted((self._middle.abs() + self._radius).to(form.dtype), form.abs())

    def support(self) -> Support:
        return Support(1.0, self._radius, middle=self._middle)

    @property
    def symmetric(self) -> bool:
        return self._centred

    def extent(self) -> tuple[Float[Tensor, "tasks moved width"], Float[Tensor, "tasks moved width"]]:
        return self._limits(torch.float64, inward=False)

    def extreme(self, form: Delta) -> Delta:
        lower, upper = self._limits(form.dtype)
        still = self.project(torch.zeros_like(form))
        return torch.where(form > 0, lower, torch.where(form < 0, upper, still))

    def project(self, delta: Delta) -> Delta:
        """The nearest point, in every norm. Where no number of the precision is inside, the lower bound."""
        lower, upper = self._limits(delta.dtype)
        return torch.maximum(torch.minimum(delta, upper), lower)

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "count tasks moved width"]:
        shape = (count, *self.lower.shape)
        inside = torch.rand(shape, generator=generator, dtype=torch.float64)
        corner = (random_signs(shape, generator) + 1) / 2
        # The share of coordinates on a face: none, about half, all.
        share = torch.arange(count).remainder(3)[:, None, None, None] / 2
        faces = torch.rand(shape, generator=generator, dtype=torch.float64) < share
        weight = torch.where(faces, corner, inside).to(self.center.device)
        lower, upper = self._limits(torch.float64)
        delta = lower * (1 - weight) + upper * weight
        delta[:1] = 0
        return self.project(delta)

    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        lower, upper = self._limits(torch.float64)
        wide = delta.double()
        return ((wide >= lower - slack) & (wide <= upper + slack)).all(-1).all(-1)

    def probes(self, row: int) -> tuple[Float[Tensor, "probes width"], Float[Tensor, "probes width"]]:
        """From one end to the other along every entry, the others in their middle."""
        middle = (self.lower[0, row] + self.upper[0, row]) / 2 - self._rows()[0, row]
        ends = torch.diag((self.upper[0, row] - self.lower[0, row]) / 2)
        return middle + ends, middle - ends

    def cuttable(self, changes: Sequence[Float[Tensor, "_ some"]]) -> tuple[Region, Halve]:
        """Parts are boxes, halved along the entry in which the scores move most."""
        wide = self.upper[0] - self.lower[0]
        moves = torch.stack([change.square().sum(-1).sqrt() for change in changes])
        slopes = torch.where(wide > 0, moves / wide, 0.0).nan_to_num(0.0, 0.0, 0.0)

        def halve(part: Box) -> tuple[Region, Region] | None:
            lower, upper = part.lower[0], part.upper[0]
            place = (lower + upper) / 2
            open_ = (lower < place) & (place < upper)
            if not bool(open_.any()):
                return None
            # Where nothing is known of the scores, the widest entry is as good as any.
            worth = torch.where(open_, slopes * (upper - lower), -1.0)
            row, entry = divmod(int(worth.argmax()), self.width)
            return part.halves(row, entry, float(place[row, entry]))

        return self, halve

    def halves(self, row: int, entry: int, place: float) -> tuple[Box, Box]:
        """What lies below a value of one entry of a moved row, and what lies above it."""
        lower, upper = self.lower.clone(), self.upper.clone()
        lower[:, row, entry], upper[:, row, entry] = place, place
        origin = self.origin or self
        return self._with(upper=upper, origin=origin), self._with(lower=lower, origin=origin)

    def describe(self) -> Description:
        facts: dict[str, object] = {"kind": "box", "moved": self.moved[0].tolist()}
        arrays = {"lower": self.lower[0], "upper": self.upper[0]}
        if self.origin is None:
            return Description(facts, arrays)
        common = {"whole.{}.lower": self.origin.lower[0], "whole.{}.upper": self.origin.upper[0]}
        return Description({**facts, "whole": None}, arrays, common, self.origin)

    def _details(self) -> str:
        wide = (self.upper - self.lower) / 2
        return f"half-widths {float(wide.min()):.3g} to {float(wide.max()):.3g}"

    @cached_property
    def _ends(self) -> tuple[Tensor, Tensor]:
        """Bounds of the deviation in float64, rounded outward."""
        with torch.inference_mode(False):  # they outlive the call
            rows = self._rows()
            return difference(self.lower, rows, up=False), difference(self.upper, rows, up=True)

    @cached_property
    def _around(self) -> tuple[Tensor | None, Tensor]:
        """A middle (None: the clean rows) and half-widths of a box in float64 that holds the deviations."""
        lower, upper = self._ends
        with torch.inference_mode(False):
            middle = (lower + upper) / 2
            middle = torch.where(middle.abs() <= SAME * (upper - lower) / 2, 0.0, middle)
            radius = torch.maximum(difference(upper, middle, up=True), difference(middle, lower, up=True))
            return (middle if bool(middle.any()) else None), radius

    @property
    def _middle(self) -> Tensor | None:
        return self._around[0]

    @property
    def _radius(self) -> Tensor:
        return self._around[1]

    @cached_property
    def _centred(self) -> bool:
        middle, radius = self._around
        return middle is None or bool((middle.abs() <= CENTRED * radius).all())

    def _limits(self, dtype: torch.dtype, inward: bool = True) -> tuple[Tensor, Tensor]:
        """Bounds of the deviation in a precision, rounded into the box (or out of it)."""
        lower, upper = self._ends
        if inward:
            rows = self._rows()
            lower, upper = difference(self.lower, rows, up=True), difference(self.upper, rows, up=False)
        return rounded(lower, dtype, up=inward), rounded(upper, dtype, up=not inward)


def _weighted(weights: Float[Tensor, "tasks moved width"], form: Form) -> Float[Tensor, "tasks *rows"]:
    return torch.einsum("tmw,tmw...->t...", weights, form)
