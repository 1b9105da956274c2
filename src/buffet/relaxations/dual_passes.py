"""Operations over fixed boxes as steps of a Lagrangian: multipliers go back, values come forth.

A dual pass takes the multipliers of its output to those of its inputs, through the line (or plane) that their
sign selects, and then the values of its inputs to that of its output, through the same line. The value of a
line depends on its parameter; multiplier times derivative is the gradient of the whole bound.

All that depends on a box alone is made once. Multipliers and values are ``[tasks, tokens, features, rows]``,
in single precision; lines are made in float64 (`lines`), as differences of nearly equal numbers. There is no
allowance for rounding: dual passes help to choose parameters, and prove nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from buffet.bounds.forms import Local
from buffet.bounds.intervals import Box, as_terms
from buffet.network import Bilinear, Linear, Op
from buffet.network.ops import matrix_product
from buffet.regions.norms import steepest
from buffet.relaxations.elementwise import SIDES, Side
from buffet.relaxations.enclosures import LinesEnclosure, split_axes
from buffet.relaxations.headwise import HeadwiseProduct

State = tuple[Any, ...]


class DualPass:
    """One operation. What `pull` and `push` find out on the way is handed on to the next call."""

    def pull(self, multipliers: Tensor, given: Any) -> tuple[tuple[Tensor, ...], State]:
        """The multipliers of the inputs; `given` are the parameters of the node, or lines made of them."""
        raise NotImplementedError

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        """The value of the output from those of the inputs."""
        raise NotImplementedError

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        """The derivative of ``Σ weights · bound`` by every share; `weights` are ``[tasks, 1, 1, rows]``."""
        return {}


@dataclass(frozen=True, eq=False)
class LinearDual(DualPass):
    """A linear operation of one value and its transpose."""

    op: Linear
    coefs: Tensor

    def pull(self, multipliers: Tensor, given: Any) -> tuple[tuple[Tensor, ...], State]:
        return (self.op.act_transposed(self.coefs, multipliers),), ()

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        return self.op.forth(self.coefs, values[0]), ()


class SumDual(DualPass):
    """The sum of two values."""

    def pull(self, multipliers: Tensor, given: Any) -> tuple[tuple[Tensor, ...], State]:
        return (multipliers, multipliers), ()

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        return values[0] + values[1], ()


def linear_dual(op: Op, like: Tensor, dtype: torch.dtype) -> DualPass:
    """The dual of a linear operation on values such as `like`."""
    return LinearDual(op, op.coefficients(like).to(dtype)) if isinstance(op, Linear) else SumDual()


@dataclass(frozen=True, eq=False)
class LocalDual(DualPass):
    """A node that is an exact function of the moved rows of the input, token by token.

    Its input has these rows instead of tokens.
    """

    matrix: Tensor
    places: Tensor  # of the moved tokens, [tasks, moved, 1, 1],
    read: Tensor  # and whether they are among those that count
    tokens: int

    @staticmethod
    def over(local: Local, tokens: int, dtype: torch.dtype) -> LocalDual:
        """Of the first tokens."""
        places = local.moved[..., None, None]
        read = (places < tokens).to(dtype)
        return LocalDual(local.unrounded.to(dtype), places.clamp_max(tokens - 1), read, tokens)

    def pull(self, multipliers: Tensor, given: Any) -> tuple[tuple[Tensor, ...], State]:
        places = self.places.expand(-1, -1, *multipliers.shape[2:])
        return (matrix_product(self.matrix.mT, self.read * multipliers.gather(1, places)),), ()

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        moved = self.read * matrix_product(self.matrix, values[0])
        full = moved.new_zeros(len(moved), self.tokens, *moved.shape[2:])
        return full.scatter_add_(1, self.places.expand_as(moved), moved), ()


class Curve(NamedTuple):
    """A node with its function, the clean value it is applied to, the box of that, and the useful slopes."""

    node: int
    function: str
    clean: Tensor
    box: Box
    slopes: Mapping[Side, tuple[Tensor, Tensor]]


class Line(NamedTuple):
    """Slope and intercept, and how far from the centre it touches: minus the derivative of the intercept."""

    slope: Tensor
    intercept: Tensor
    run: Tensor


@dataclass(frozen=True, eq=False)
class LinesDual(DualPass):
    """An elementwise function between two lines, made of its parameters (`Lines`) or the default ones."""

    curve: Curve
    default: Mapping[Side, tuple[Tensor, Tensor]]  # slope and intercept; all are [tasks, tokens, features, 1]
    room: Mapping[Side, Tensor]  # by how much a share can change the slope

    @staticmethod
    def over(lines: LinesEnclosure, curve: Curve, dtype: torch.dtype) -> LinesDual:
        """Between the given lines, as far as parameters do not make others; of the tokens of the curve."""
        slopes, tokens = curve.slopes, len(curve.clean)

        def row(value: Tensor) -> Tensor:
            return value[:, :tokens].to(dtype).unsqueeze(-1)

        return LinesDual(
            curve,
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
            side: _over_rows(parts[side](0) * (value - run) * (weights * self.room[side]))
            for side, run in runs.items()
        }


@dataclass(frozen=True, eq=False)
class PlanesDual(DualPass):
    """A sum of products, each between two planes per side; a share is α between them.

    At deviations a, b of the factors the planes of a term are ``P + α·D``: below ``P = L1``, ``D = L2 − L1``,
    above ``P = U1``, ``D = U2 − U1``. All tensors are ``[sides, tasks, *terms]``, of size 1 where they do not
    depend on an axis. Rows only ever meet terms in contractions: there are many of both.
    """

    op: Bilinear
    x: Tensor  # coefficient of a in P
    x_step: Tensor  # and in D
    y: Tensor  # that of b
    y_step: Tensor
    constant: Tensor
    constant_step: Tensor

    @staticmethod
    def over(op: Bilinear, clean: tuple[Tensor, Tensor], x: Box, y: Box, dtype: torch.dtype) -> PlanesDual:
        def ends(value: Tensor, box: Box, axes: str) -> tuple[Tensor, ...]:
            return tuple(as_terms(op, v, axes) for v in (value.expand_as(box.lower), box.lower, box.upper))

        x_clean, x_low, x_high = ends(clean[0], x, op.x)
        y_clean, y_low, y_high = ends(clean[1], y, op.y)
        first, second = torch.stack([y_low, y_high]), torch.stack([y_high, y_low])
        constant = x_low * first

        def cast(value: Tensor) -> Tensor:
            return (op.scale * value).to(dtype)

        return PlanesDual(
            op=op,
            x=cast(y_clean + first),
            x_step=cast(second - first),
            y=cast(x_clean + x_low)[None],
            y_step=cast(x_high - x_low)[None],
            constant=cast(-constant),
            constant_step=cast(constant - x_high * second),
        )

    def pull(self, multipliers: Tensor, given: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], State]:
        op = self.op
        alpha = torch.stack([given[side] for side in SIDES])
        planes = torch.addcmul(self.x, alpha, self.x_step), torch.addcmul(self.y, alpha, self.y_step)
        whole = split_axes(op, multipliers, op.out)
        parts = torch.stack([whole.clamp_min(0), whole.clamp_max(0)])
        pulled = [
            torch.einsum(f"st{op.out}r,st{op.terms}->t{axes}r", parts, plane)
            for plane, axes in zip(planes, (op.x, op.y), strict=True)
        ]
        return tuple(one.flatten(2, -2) for one in pulled), (multipliers, parts, alpha, planes)

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        op = self.op
        multipliers, parts, alpha, planes = state
        constant = torch.addcmul(self.constant, alpha, self.constant_step)
        if gone := [2 + place for place, axis in enumerate(op.terms) if axis not in op.out]:
            constant = constant.sum(gone)
        total = constant.unsqueeze(-1)
        factors = [split_axes(op, value, axes) for value, axes in zip(values, (op.x, op.y), strict=True)]
        for plane, factor, axes in zip(planes, factors, (op.x, op.y), strict=True):
            total = total + torch.einsum(f"st{op.terms},t{axes}r->st{op.out}r", plane, factor)
        below, above = total.flatten(3, -2)
        return torch.where(multipliers.signbit(), above, below), (parts, *factors)

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        op = self.op
        parts, *factors = state
        weighted = parts * weights.reshape(len(weights), *[1] * len(op.out), -1)
        everywhere = [slice(None) if axis in op.out else None for axis in op.terms]
        total = self.constant_step * weighted.sum(-1)[:, :, *everywhere]
        for step, factor, axes in zip((self.x_step, self.y_step), factors, (op.x, op.y), strict=True):
            moved = torch.einsum(f"st{op.out}r,t{axes}r->st{op.terms}", weighted, factor)
            total = torch.addcmul(total, step, moved)
        return dict(zip(SIDES, total, strict=True))


@dataclass(frozen=True, eq=False)
class HeadwiseDual(PlanesDual):
    """The same, mixed with a bound of all features of a head as a whole (`parents`): a share of it."""

    whole: HeadwiseProduct

    @staticmethod
    def mixing(planes: PlanesDual, whole: HeadwiseProduct, tokens: int, dtype: torch.dtype) -> HeadwiseDual:
        """With the first tokens of it."""
        first = replace(
            whole,
            values=whole.values.to(dtype),
            middle=whole.middle[:, :tokens].to(dtype),
            offset=None if whole.offset is None else whole.offset[:, :tokens].to(dtype),
            reach=whole.reach[:, :tokens].to(dtype),
            factors=whole.factors.to(dtype),
        )
        return HeadwiseDual(**vars(planes), whole=first)

    def pull(self, multipliers: Tensor, given: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], State]:
        share = given["whole"][..., None, None]
        m = self._split(multipliers)
        (a, b), state = super().pull(((1 - share) * m).flatten(2, 3), given)
        taken = share * m
        to_a = torch.einsum(f"tihkr,{self._keys}->tihjr", taken, self.whole.values)
        to_b = torch.einsum("tihkr,tihj->tjhkr", taken, self.whole.middle)
        return (a + to_a.flatten(2, 3), b + to_b.flatten(2, 3)), (state, m, share)

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        state, m, share = state
        plane, state = super().push(state, *values)
        a, b = (self._split(value) for value in values)
        value = torch.einsum(f"tihjr,{self._keys}->tihkr", a, self.whole.values)
        value = value + torch.einsum("tihj,tjhkr->tihkr", self.whole.middle, b)
        if self.whole.offset is not None:
            value = value + self.whole.offset.unsqueeze(-1)
        value = value - self._left(m)
        plane = self._split(plane)
        return torch.lerp(plane, value, share).flatten(2, 3), (state, m * (value - plane))

    def _left(self, m: Tensor) -> Tensor:
        """What is left over is largest in size somewhere, and grows so much with every multiplier there."""
        factors, reach, groups = self.whole.factors, self.whole.reach, self.whole.groups
        factors = factors.unsqueeze(1) if factors.ndim == 4 else factors
        forms = m.mT @ factors
        if groups == 1:
            return reach.unsqueeze(-1) * (factors @ steepest(forms, self.whole.exponent).mT)
        worst = steepest(forms.unflatten(-1, (groups, -1)), self.whole.exponent)
        return factors @ (worst * reach[..., None, :, None]).flatten(-2).mT

    @property
    def _keys(self) -> str:
        return "tjhk" if self.whole.values.ndim == 4 else "jhk"

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        state, better = state
        found = super().gradient(state, weights)
        return {**found, "whole": _over_rows(better.sum(-2) * weights)}

    def _split(self, value: Tensor) -> Tensor:
        return value.unflatten(2, (self.whole.factors.shape[-3], -1))


def _over_rows(value: Tensor) -> Tensor:
    """The sum over the rows."""
    return value.squeeze(-1) if value.shape[-1] == 1 else value.sum(-1)
