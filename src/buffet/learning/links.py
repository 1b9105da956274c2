"""Operations over fixed boxes as links of a `lagrangian`: multipliers go back, values come forth.

A link takes the multipliers of its output to those of its inputs, through the line (or plane) that their sign
selects, and then the values of its inputs to that of its output, through the same line. The value of a line
depends on its share, and the product of multiplier and derivative is the gradient of the whole bound.

All that depends on a box alone is made once. Multipliers and values are ``[tasks, rows, tokens, features]``,
in single precision; lines are made in float64 (`lines`), as differences of nearly equal numbers. There is no
allowance for rounding: links help to choose shares, and prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from buffet.bounds.choices import Shares
from buffet.bounds.intervals import Box, as_terms
from buffet.bounds.pieces import LinesPiece
from buffet.bounds.relaxations import SIDES, Side
from buffet.bounds.wholes import Whole
from buffet.program import Add, Affine, Bilinear, Center, Diagonal, Offset, Op, Pool
from buffet.regions import LpBall

State = tuple[Any, ...]


class Link:
    """One operation. What `pull` and `push` find out on the way is handed on to the next call."""

    def pull(self, multipliers: Tensor, given: Any) -> tuple[tuple[Tensor, ...], State]:
        """The multipliers of the inputs; `given` are the shares of the node, or lines made of them."""
        raise NotImplementedError

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        """The value of the output from those of the inputs."""
        raise NotImplementedError

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        """The derivative of ``Σ weights · bound`` by every share; `weights` are ``[tasks, rows, 1, 1]``."""
        return {}


@dataclass(frozen=True, eq=False)
class LinearLink(Link):
    """A linear operation and its transpose."""

    forth: Callable[..., Tensor]
    back: Callable[[Tensor], tuple[Tensor, ...]]

    def pull(self, multipliers: Tensor, given: Any) -> tuple[tuple[Tensor, ...], State]:
        return self.back(multipliers), ()

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        return self.forth(*values), ()


def linear_link(op: Op, like: Tensor, dtype: torch.dtype) -> Link:
    """The link of a linear operation on values such as `like`."""
    match op:
        case Affine():
            weight = op.weight.to(dtype)
            transposed = weight.mT
            return LinearLink(lambda x: x @ transposed, lambda m: (m @ weight,))
        case Diagonal():
            scale = op.weight.to(dtype)
            return LinearLink(lambda x: x * scale, lambda m: (m * scale,))
        case Center():
            mean = like.new_full((like.shape[-1], 1), 1 / like.shape[-1], dtype=dtype)
            return LinearLink(lambda x: x - x @ mean, lambda m: (m - m @ mean,))
        case Offset():
            return LinearLink(lambda x: x, lambda m: (m,))
        case Add():
            return LinearLink(torch.add, lambda m: (m, m))
        case Pool(kind="first"):
            return LinearLink(lambda x: x, lambda m: (m,))  # token 0 is all that is read
        case Pool():
            share = op.weights(len(like), None, like).to(dtype)[:, None]
            return LinearLink(lambda x: (share * x).sum(-2, keepdim=True), lambda m: (share * m,))
    raise NotImplementedError(type(op).__name__)


class Line(NamedTuple):
    """Slope and intercept, and how far from the centre it touches: minus the derivative of the intercept."""

    slope: Tensor
    intercept: Tensor
    run: Tensor


@dataclass(frozen=True, eq=False)
class LinesLink(Link):
    """An elementwise function between two lines, those made of its shares (`Lines`) or the default ones."""

    default: Mapping[Side, tuple[Tensor, Tensor]]  # slope and intercept; all are [tasks, 1, tokens, features]
    room: Mapping[Side, Tensor]  # by how much a share can change the slope

    @staticmethod
    def over(
        lines: LinesPiece, slopes: Mapping[Side, tuple[Tensor, Tensor]], dtype: torch.dtype
    ) -> LinesLink:
        """Between the given lines, as far as shares do not make others; of the tokens that slopes are for."""
        tokens = slopes["lower"][0].shape[1]

        def row(value: Tensor) -> Tensor:
            return value[:, :tokens].to(dtype).unsqueeze(1)

        return LinesLink(
            default={
                "lower": (row(lines.lower_slope), row(lines.lower_intercept)),
                "upper": (row(lines.upper_slope), row(lines.upper_intercept)),
            },
            room={side: row(most - least) for side, (least, most) in slopes.items()},
        )

    def pull(self, multipliers: Tensor, given: Mapping[str, Line]) -> tuple[tuple[Tensor, ...], State]:
        below, above = (given.get(side) or Line(*self.default[side], self.room[side]) for side in SIDES)
        negative = multipliers.signbit()
        slope = torch.where(negative, above.slope, below.slope)
        intercept = torch.where(negative, above.intercept, below.intercept)
        runs = {side: given[side].run for side in given}
        return (multipliers * slope,), (multipliers, slope, intercept, runs)

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        multipliers, slope, intercept, runs = state
        return torch.addcmul(intercept, slope, values[0]), (multipliers, runs, values[0])

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        multipliers, runs, value = state
        parts = {"lower": multipliers.clamp_min, "upper": multipliers.clamp_max}
        return {
            side: over_rows(parts[side](0) * (value - run) * (weights * self.room[side]))
            for side, run in runs.items()
        }


@dataclass(frozen=True, eq=False)
class PlanesLink(Link):
    """A sum of products, each between two planes per side; a share is α between them.

    At deviations a, b of the factors the planes of a term are ``P + α·D``: below ``P = L1``, ``D = L2 − L1``,
    above ``P = U1``, ``D = U2 − U1``. The first axis is the side, the last ones are the terms'.
    """

    a: _Axes
    b: _Axes
    out: _Axes
    x: Tensor  # coefficient of a in P
    x_step: Tensor  # and in D
    y: Tensor  # that of b, on both sides
    y_step: Tensor
    constant: Tensor
    constant_step: Tensor

    @staticmethod
    def over(op: Bilinear, clean: tuple[Tensor, Tensor], x: Box, y: Box, dtype: torch.dtype) -> PlanesLink:
        def ends(value: Tensor, box: Box, axes: str) -> tuple[Tensor, ...]:
            parts = (value.expand_as(box.lower), box.lower, box.upper)
            return tuple(as_terms(op, v, axes).unsqueeze(1) for v in parts)

        x_clean, x_low, x_high = ends(clean[0], x, op.x)
        y_clean, y_low, y_high = ends(clean[1], y, op.y)
        first, second = torch.stack([y_low, y_high]), torch.stack([y_high, y_low])
        constant = x_low * first

        def cast(value: Tensor) -> Tensor:
            return (op.scale * value).to(dtype)

        shapes = {
            c: n
            for axes, v in ((op.x, clean[0]), (op.y, clean[1]))
            for c, n in zip(axes, op.split(v, axes).shape, strict=True)
        }
        return PlanesLink(
            a=_Axes.of(op, op.x, shapes),
            b=_Axes.of(op, op.y, shapes),
            out=_Axes.of(op, op.out, shapes),
            x=cast(y_clean + first),
            x_step=cast(second - first),
            y=cast(x_clean + x_low),
            y_step=cast(x_high - x_low),
            constant=cast(-constant),
            constant_step=cast(constant - x_high * second),
        )

    def pull(self, multipliers: Tensor, given: Shares) -> tuple[tuple[Tensor, ...], State]:
        alpha = torch.stack([given[side] for side in SIDES]).unsqueeze(2)
        whole = self.out.terms(multipliers)
        parts = torch.stack([whole.clamp_min(0), whole.clamp_max(0)])
        to_a, to_b = torch.addcmul(self.x, alpha, self.x_step), torch.addcmul(self.y, alpha, self.y_step)
        pulled = self.a.total(parts * to_a), self.b.total(parts * to_b)
        return pulled, (multipliers, parts, alpha)

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        multipliers, parts, alpha = state
        a, b = self.a.terms(values[0]), self.b.terms(values[1])
        step = torch.addcmul(torch.addcmul(self.constant_step, self.x_step, a), self.y_step, b)
        plane = torch.addcmul(torch.addcmul(self.constant, self.x, a), self.y, b)
        below, above = self.out.each(torch.addcmul(plane, alpha, step))
        return torch.where(multipliers.signbit(), above, below), (parts, step)

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        parts, step = state
        weighted = parts * weights.reshape(*weights.shape[:2], *[1] * (parts.ndim - 3))
        below, above = over_rows(weighted * step, 2)
        return {"lower": below, "upper": above}


@dataclass(frozen=True, eq=False)
class WholeLink(PlanesLink):
    """The same, mixed with a bound of all features of a head as a whole (`wholes`): a share of it."""

    whole: Whole
    steepest: Callable[[Tensor], Tensor]  # where in the unit ball a form is largest

    @staticmethod
    def mixing(planes: PlanesLink, whole: Whole, tokens: int, ball: LpBall, dtype: torch.dtype) -> WholeLink:
        """With the first tokens of it."""
        first = replace(
            whole,
            values=whole.values.to(dtype),
            middle=whole.middle[:, :tokens].to(dtype),
            reach=whole.reach[:, :tokens].to(dtype),
            factors=whole.factors.to(dtype),
        )
        return WholeLink(**vars(planes), whole=first, steepest=ball.steepest)

    def pull(self, multipliers: Tensor, given: Shares) -> tuple[tuple[Tensor, ...], State]:
        share = given["whole"][:, None, ..., None]
        m = self._split(multipliers)
        (a, b), state = super().pull(((1 - share) * m).flatten(3), given)
        taken = share * m
        to_a = torch.einsum("tnihk,jhk->tnihj", taken, self.whole.values)
        to_b = torch.einsum("tnihk,tihj->tnjhk", taken, self.whole.middle)
        return (a + to_a.flatten(3), b + to_b.flatten(3)), (state, m, share)

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        state, m, share = state
        plane, state = super().push(state, *values)
        a, b = (self._split(value) for value in values)
        value = torch.einsum("tnihj,jhk->tnihk", a, self.whole.values)
        value = value + torch.einsum("tihj,tnjhk->tnihk", self.whole.middle, b)
        # What is left over is largest in size there, and grows so much with every multiplier.
        form = (m.unsqueeze(-2) @ self.whole.factors).squeeze(-2)
        worst = (self.whole.factors @ self.steepest(form).unsqueeze(-1)).squeeze(-1)
        value = value - self.whole.reach[:, None, ..., None] * worst
        plane = self._split(plane)
        return torch.lerp(plane, value, share).flatten(3), (state, m * (value - plane))

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        state, better = state
        found = super().gradient(state, weights)
        return {**found, "whole": over_rows(better.sum(-1) * weights)}

    def _split(self, value: Tensor) -> Tensor:
        return value.unflatten(-1, (self.whole.factors.shape[0], -1))


@dataclass(frozen=True)
class _Axes:
    """How a factor or the output of a product lies in its terms: views, made out once."""

    split: tuple[int, ...]  # its axes after tasks and rows,
    order: tuple[int, ...] | None  # all of them in the order of the terms, if that is another one,
    spread: tuple[int, ...]  # and those of the terms, of size 1 where it has none
    gone: tuple[int, ...]  # from the end, axes of the terms that it does not have
    back: tuple[int, ...] | None  # from the order of the terms to its own

    @staticmethod
    def of(op: Bilinear, axes: str, sizes: Mapping[str, int]) -> _Axes:
        kept = [c for c in op.terms if c in axes]
        straight = "".join(kept) == axes
        return _Axes(
            split=tuple(sizes[c] for c in axes),
            order=None if straight else (0, 1, *(2 + axes.index(c) for c in kept)),
            spread=tuple(sizes[c] if c in axes else 1 for c in op.terms),
            gone=tuple(place - len(op.terms) for place, c in enumerate(op.terms) if c not in axes),
            back=None if straight else (0, 1, *(2 + kept.index(c) for c in axes)),
        )

    def terms(self, value: Tensor) -> Tensor:
        """``[tasks, rows, tokens, features]`` over the axes of the terms."""
        tasks, rows, *_ = value.shape
        if self.order is not None:
            value = value.reshape(tasks, rows, *self.split).permute(self.order)
        return value.reshape(tasks, rows, *self.spread)

    def total(self, terms: Tensor) -> Tensor:
        """The sum of ``[sides, tasks, rows, *terms]`` over the sides and the axes it does not have."""
        total = terms.sum((0, *self.gone))
        return (total if self.back is None else total.permute(self.back)).flatten(3)

    def each(self, terms: Tensor) -> Tensor:
        """The same for every side, where the order is that of the terms."""
        return (terms.sum(self.gone) if self.gone else terms).flatten(4)


def over_rows(value: Tensor, axis: int = 1) -> Tensor:
    """The sum over the rows."""
    return value.squeeze(axis) if value.shape[axis] == 1 else value.sum(axis)
