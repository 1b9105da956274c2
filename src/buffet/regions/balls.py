"""Balls: every moved row within a distance of its clean one."""

from __future__ import annotations

import math
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
from buffet.regions.norms import (
    largest_norm,
    lp_norm,
    project_l1,
    rounded,
    steepest,
    unit_directions,
    unit_vertices,
)


@dataclass(frozen=True, eq=False, init=False, repr=False)
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

    @property
    def resizable(self) -> bool:
        return True

    def size_of(self, delta: Delta) -> Float[Tensor, "*restarts tasks"]:
        return lp_norm(delta.double(), self.p, -1).amax(-1)

    def growth(self, form: Delta) -> Float[Tensor, "*restarts tasks"]:
        return lp_norm(form.double(), self.q, -1).sum(-1)

    def select(self, index: Sequence[int] | Tensor) -> LpBall:
        index = self._index(index)
        return self._with(moved=self.moved[index], eps=None if self.eps is None else self.eps[index])

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

    def support(self) -> Support:
        return Support(self.q, self._sizes()[:, None, None])

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        return least.abs()  # by symmetry

    def extent(self) -> tuple[Float[Tensor, "tasks moved width"], Float[Tensor, "tasks moved width"]]:
        size = self._sizes()[:, None, None].expand(-1, self.moved.shape[1], self.width)
        return -size, size

    def extreme(self, form: Delta) -> Delta:
        # ‖·‖_q does not change its direction of steepest growth when the form is scaled.
        scale = form.abs().amax(-1, keepdim=True)
        direction = steepest(form / torch.where(scale > 0, scale, 1), self.q)
        return self._shrink(-rounded(self._sizes(), form.dtype, up=False)[:, None, None] * direction)

    def lowest(self, form: Delta) -> Delta:
        if self.p not in (1, 2, math.inf):
            return LpBall.extreme(self, form)  # powers of the form as it is might underflow
        return self._outer(form.dtype)[:, None, None] * steepest(form, self.q)

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

    def probes(self, row: int) -> tuple[Float[Tensor, "probes width"], Float[Tensor, "probes width"]]:
        """As far as the ball goes, back and forth along every axis."""
        ends = self._sizes()[0] * torch.eye(self.width, dtype=torch.float64, device=self.center.device)
        return ends, -ends

    def cuttable(self, changes: Sequence[Float[Tensor, "_ some"]]) -> tuple[Region, Halve]:
        """Parts are cells, cut across the directions in which the scores move most."""
        from buffet.regions.cells import cut_ball

        return cut_ball(self, changes)

    def describe(self) -> Description:
        facts = {"kind": "ball", "moved": self.moved[0].tolist(), **self._measures()}
        return Description(facts)

    def _measures(self) -> dict[str, object]:
        return {"p": "inf" if math.isinf(self.p) else self.p, "eps": float(self._sizes()[0])}

    def _details(self) -> str:
        sizes = [] if self.eps is None else self.eps.unique().tolist()
        size = "open" if not sizes else f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g}…{sizes[-1]:g}"
        return f"p={self.p:g}, eps={size}"

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
