"""What may move: the sets of input deviations a proof or an attack ranges over.

A region holds the clean rows of one sentence and T *tasks*; a task moves m of the rows, row d by δ_d. The
rest of the engine sees three things: the minimum of a linear form Σ_d A_d·δ_d over the region (exact), a
projection onto it, and samples from it. Every operation is batched over the tasks.
"""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions import arguments
from buffet.regions.arguments import Words
from buffet.regions.norms import (
    difference,
    largest_norm,
    lp_norm,
    project_l1,
    random_signs,
    rounded,
    unit_directions,
    unit_vertices,
)

SUMS_BYTES = 1 << 20
"""Size aimed at for the sums of forms that `Region.minimise_sums` builds at a time: about a cache."""
Form = Float[Tensor, "tasks moved width *rows"]
Delta = Float[Tensor, "*restarts tasks moved width"]


@dataclass(frozen=True, eq=False)
class Region(ABC):
    """Rows `moved[t]` of `center` may move in task t; the subclass says how far."""

    center: Float[Tensor, "tokens width"]
    moved: Int[Tensor, "tasks moved"]

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return self.moved.shape[0]

    @property
    def width(self) -> int:
        """The number of features of a row."""
        return self.center.shape[1]

    @abstractmethod
    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        """``min_δ Σ_d form_d·δ_d`` for every task and row, in the precision of `form`; differentiable."""

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        """``minimise(a_i + b_j)`` for all pairs of forms of a group, up to rounding; no bound to rely on."""
        shape = self.moved.shape[1], self.width
        per_group = a[:, 0].numel() * b.shape[2] * a.element_size()
        parts = [
            self.minimise((x.unsqueeze(3) + y.unsqueeze(2)).movedim(-1, 1).unflatten(1, shape))
            for x, y in zip(*(v.split(max(1, SUMS_BYTES // per_group), 1) for v in (a, b)), strict=True)
        ]
        return torch.cat(parts, 1)

    @abstractmethod
    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        """``max_δ Σ |form·δ|`` or more, which rounding errors scale with; `least` is ``minimise(form)``."""

    @abstractmethod
    def extent(self) -> tuple[Float[Tensor, "tasks moved width"], Float[Tensor, "tasks moved width"]]:
        """The smallest and the largest value of every entry of δ (float64)."""

    @abstractmethod
    def extreme(self, form: Delta) -> Delta:
        """A δ of the region that attains the minimum of ``Σ_d form_d·δ_d``."""

    def lowest(self, form: Delta) -> Delta:
        """The δ that attains the minimum, up to rounding."""
        return self.extreme(form)

    @abstractmethod
    def project(self, delta: Delta) -> Delta:
        """A δ of the region near `delta`; a δ already inside comes back unchanged."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "count tasks moved width"]:
        """Random float64 points: interior, boundary, vertices. The first is ``project(0)``."""

    @abstractmethod
    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        """Whether `delta` is in the region enlarged by `slack`, judged in float64."""

    @abstractmethod
    def select(self, index: Sequence[int] | Tensor) -> Region:
        """The region of the tasks `index` only (integers, or one bool per task)."""

    def names(self) -> list[Hashable]:
        """What tells the tasks apart, whatever their size: the rows that move."""
        return [tuple(rows) for rows in self.moved.tolist()]

    @property
    def symmetric(self) -> bool:
        """Whether −δ may happen wherever δ may."""
        return False

    def wholes(self) -> list[Hashable]:
        """The names of the tasks that these are parts of: themselves, if they are whole."""
        return self.names()

    def points(self, delta: Delta) -> Float[Tensor, "*restarts tasks tokens width"]:
        """The sentence's rows with the moved ones shifted by `delta`, in the precision of `delta`."""
        rows = self.center.to(delta.dtype).expand(*delta.shape[:-2], -1, -1)
        index = self.moved[..., None].expand_as(delta)
        return rows.scatter_add(-2, index, delta)

    def without_padding(self, mask: Bool[Tensor, "tokens"]) -> Region:
        """The same region of the sentence without its padding rows (False in `mask`).

        Padding is never read, so a network answers both alike.
        """
        if mask.shape[0] != len(self.center):
            raise BuffetError(f"the mask has {mask.shape[0]} entries, the sentence {len(self.center)} rows")
        if not bool(mask[self.moved].all()):
            raise BuffetError("a moved word is padding; only unmasked rows can change the answer")
        shorter = copy.copy(self)
        object.__setattr__(shorter, "center", self.center[mask])
        object.__setattr__(shorter, "moved", (mask.cumsum(0) - 1)[self.moved])
        return shorter

    def _start(self, x: Tensor, words: Words) -> None:
        object.__setattr__(self, "center", arguments.checked_rows(x))
        object.__setattr__(self, "moved", arguments.checked_words(words, len(x)).to(x.device))

    def _rows(self) -> Float[Tensor, "tasks moved width"]:
        return self.center.double()[self.moved]

    def _index(self, index: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(index, device=self.moved.device)
        return index.nonzero()[:, 0] if index.dtype == torch.bool else index.long()


@dataclass(frozen=True, eq=False, init=False)
class LpBall(Region):
    """Every moved row within ``‖δ_d‖_p ≤ ε``, with one ε per task.

    Args:
        x: the clean rows, tokens × width.
        words: ``[2]`` one task moving row 2, ``[2, 5]`` one task moving both, ``[[1], [2]]`` two tasks.
        p: the norm, any number ≥ 1 or infinity (also ``"inf"``).
        eps: one number, or one per task; ``None`` leaves the size open (see `with_eps`).

    The minimum of a form is ``−ε Σ_d ‖A_d‖_q`` with ``1/p + 1/q = 1``.
    """

    p: float
    eps: Float[Tensor, "tasks"] | None

    def __init__(
        self,
        x: Tensor,
        words: Words,
        p: float | int | str = 2,
        eps: float | int | Sequence[float] | Tensor | None = None,
    ) -> None:
        self._start(x, words)
        object.__setattr__(self, "p", arguments.checked_norm(p))
        sizes = None if eps is None else arguments.checked_eps(eps, self.tasks).to(x.device)
        object.__setattr__(self, "eps", sizes)

    @property
    def q(self) -> float:
        """The exponent of the dual norm."""
        return 1.0 if math.isinf(self.p) else math.inf if self.p == 1 else self.p / (self.p - 1)

    def with_eps(self, eps: float | int | Sequence[float] | Tensor) -> LpBall:
        """The same ball with another size, one for all tasks or one per task."""
        return LpBall(self.center, self.moved, self.p, eps)

    def select(self, index: Sequence[int] | Tensor) -> LpBall:
        index = self._index(index)
        return LpBall(self.center, self.moved[index], self.p, None if self.eps is None else self.eps[index])

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        norms = largest_norm(form, self.q, dim=2).squeeze(2)
        norms = norms.sum(1) if norms.shape[1] > 1 else norms.squeeze(1)
        return self._outer(form.dtype).reshape(-1, *[1] * (norms.ndim - 1)) * norms

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        scale = torch.maximum(a.abs().amax(), b.abs().amax())  # no power of what is left overflows
        scale = torch.where((scale > 0) & scale.isfinite(), scale, 1)
        a, b = (v.div(scale).unflatten(-1, (self.moved.shape[1], self.width)).transpose(2, 3) for v in (a, b))
        if self.p == 2:  # ‖a + b‖² = ‖a‖² + 2a·b + ‖b‖²
            square = 2 * (a @ b.mT) + a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2)
            norms = square.clamp_min(0).sqrt()
        else:
            norms = torch.cdist(a, -b, self.q)
        return self._outer(a.dtype)[:, None, None, None] * norms.sum(2) * scale

    @property
    def symmetric(self) -> bool:
        return True

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        return least.abs()  # by symmetry

    def extent(self) -> tuple[Float[Tensor, "tasks moved width"], Float[Tensor, "tasks moved width"]]:
        size = self._sizes()[:, None, None].expand(-1, self.moved.shape[1], self.width)
        return -size, size

    def extreme(self, form: Delta) -> Delta:
        # ‖·‖_q does not change its direction of steepest growth when the form is scaled.
        scale = form.abs().amax(-1, keepdim=True)
        direction = self.steepest(form / torch.where(scale > 0, scale, 1))
        return self._shrink(-rounded(self._sizes(), form.dtype, up=False)[:, None, None] * direction)

    def lowest(self, form: Delta) -> Delta:
        if self.p not in (1, 2, math.inf):
            return LpBall.extreme(self, form)  # powers of the form as it is might underflow
        return self._outer(form.dtype)[:, None, None] * self.steepest(form)

    def steepest(self, form: Tensor) -> Tensor:
        """Where in the unit ball a form is largest."""
        if self.p == 1:
            corner = torch.nn.functional.one_hot(form.abs().argmax(-1), self.width)
            return corner * form.sign()
        direction = form if self.p == 2 else form.sign() * form.abs() ** (self.q - 1)
        return torch.nn.functional.normalize(direction, self.p, -1, torch.finfo(form.dtype).tiny)

    def project(self, delta: Delta) -> Delta:
        """For p = 1, 2 and ∞ the nearest point in L2; for another p the row scaled back onto the ball."""
        if math.isinf(self.p):
            limit = rounded(self._sizes(), delta.dtype, up=False)[:, None, None]
            return torch.minimum(torch.maximum(delta, -limit), limit)
        if self.p == 1:
            delta = torch.where(self._outside(delta), project_l1(delta, self._sizes()[:, None, None]), delta)
        return self._shrink(delta)

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "count tasks moved width"]:
        shape = (count, *self.moved.shape, self.width)
        radius = torch.rand(shape[:-1], generator=generator, dtype=torch.float64)[..., None]
        dense = unit_directions(shape, self.p, generator)
        unit = unit_vertices(shape, self.p, generator)
        # By turns interior (the very first point the centre), boundary and vertices.
        unit[::3], unit[1::3] = (radius * dense)[::3], dense[1::3]
        unit[:1] = 0
        return self.project(self._sizes()[:, None, None] * unit.to(self.center.device))

    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        return (lp_norm(delta.double(), self.p, -1) <= self._sizes()[:, None] + slack).all(-1)

    def _sizes(self) -> Float[Tensor, "tasks"]:
        if self.eps is None:
            raise BuffetError("the LpBall has no size yet: give eps=..., or call region.with_eps(eps)")
        return self.eps

    def _outer(self, dtype: torch.dtype) -> Float[Tensor, "tasks"]:
        """The sizes, negative and rounded away from 0, made once per precision."""
        if dtype not in self._rounded:
            with torch.inference_mode(False):  # it outlives the call
                self._rounded[dtype] = -rounded(self._sizes(), dtype, up=True)
        return self._rounded[dtype]

    @cached_property
    def _rounded(self) -> dict[torch.dtype, Tensor]:
        return {}

    def _outside(self, delta: Tensor) -> Tensor:
        return lp_norm(delta.double(), self.p, -1, keepdim=True) > self._sizes()[:, None, None]

    def _shrink(self, delta: Tensor) -> Tensor:
        """Scale the rows that stick out, so that rounding never leaves a point outside."""
        limit = self._sizes()[:, None, None]
        for _ in range(2):
            norm = lp_norm(delta.double(), self.p, -1, keepdim=True)
            if not bool((norm > limit).any()):
                return delta
            factor = limit / norm * (1 - 8 * torch.finfo(delta.dtype).eps)
            delta = torch.where(norm > limit, (delta.double() * factor).to(delta.dtype), delta)
        return torch.where(self._outside(delta), torch.zeros_like(delta), delta)


@dataclass(frozen=True, eq=False, init=False)
class Box(Region):
    """Every feature of a moved row between a lower and an upper value.

    Args:
        x: the clean rows, tokens × width.
        lower, upper: bounds of the *values* of the rows: tokens × width (the moved rows are picked), or
            moved × width for all tasks, or tasks × moved × width. The last two are in the order of `words`.
        words: as for `LpBall`; ``None`` moves all rows in one task.

    The minimum of a form is ``Σ A⁺l + A⁻u`` with l, u the bounds of the deviation.
    """

    lower: Float[Tensor, "tasks moved width"]
    upper: Float[Tensor, "tasks moved width"]

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
        return Box(self.center, self.lower[index], self.upper[index], self.moved[index])

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        lower, upper = (
            bound.reshape(*bound.shape, *[1] * (form.ndim - 3))
            for bound in self._limits(form.dtype, inward=False)
        )
        # In float64: a box that does not contain the clean rows has terms of both signs.
        total = (form.clamp(min=0).double() * lower + form.clamp(max=0).double() * upper).sum((1, 2))
        return (total - torch.finfo(form.dtype).eps * total.abs()).to(form.dtype)

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        lower, upper = self._limits(torch.float64, inward=False)
        reach = torch.maximum(lower.abs(), upper.abs()).to(form.dtype)
        return torch.einsum("tmw,tmw...->t...", reach, form.abs())

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

    def _limits(self, dtype: torch.dtype, inward: bool = True) -> tuple[Tensor, Tensor]:
        """Bounds of the deviation in a precision, rounded into the box (or out of it)."""
        lower, upper = (
            difference(self.lower, self._rows(), up=inward),
            difference(self.upper, self._rows(), up=not inward),
        )
        return rounded(lower, dtype, up=inward), rounded(upper, dtype, up=not inward)
