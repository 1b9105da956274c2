"""Interval arithmetic of every operation, in deviation coordinates.

`interval(op, clean inputs, boxes)` encloses how far the output may deviate from its clean value when every
input entry deviates independently within its box. Cheap, never the last word, and always intersected with
whatever a linear bound says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.network import Add, Apply, Bilinear, Linear, Normalise, Op, Softmax
from buffet.network.functions import FUNCTIONS

EPS = torch.finfo(torch.float64).eps


@dataclass(frozen=True)
class Box:
    """``lower ≤ deviation ≤ upper`` for every task and every entry of a node (float64)."""

    lower: Float[Tensor, "tasks tokens features"]
    upper: Float[Tensor, "tasks tokens features"]

    def __and__(self, other: Box) -> Box:
        """The intersection; a NaN on either side stays a NaN."""
        return Box(torch.maximum(self.lower, other.lower), torch.minimum(self.upper, other.upper))

    def widest(self, clean: Float[Tensor, "tokens features"]) -> Float[Tensor, "tasks"]:
        """The largest width relative to one more than the clean values, or NaN."""
        return ((self.upper - self.lower) / (1 + clean.abs())).amax((1, 2))


@singledispatch
def interval(op: Op, clean: tuple[Tensor, ...], *boxes: Box) -> Box:
    """Enclose the deviation of `op`'s output; `clean` are its inputs' clean values."""
    raise NotImplementedError(type(op).__name__)


@interval.register
def _linear(op: Linear, clean: tuple[Tensor, ...], x: Box) -> Box:
    """``P⁺·lower + P⁻·upper`` below, and the other way round above."""
    coefs, low, high = op.coefficients(clean[0]), x.lower.unsqueeze(-1), x.upper.unsqueeze(-1)
    if op.increasing:
        lower, upper = op.act(coefs, low), op.act(coefs, high)
    else:
        positive, negative = coefs.clamp_min(0), coefs.clamp_max(0)
        lower = op.act(positive, low) + op.act(negative, high)
        upper = op.act(positive, high) + op.act(negative, low)
    found = Box(lower.squeeze(-1), upper.squeeze(-1))
    if op.floor == -math.inf:
        return found
    value = op.evaluate(*clean)
    return replace(found, lower=torch.maximum(found.lower, op.floor - value - EPS * value.abs()))


@interval.register
def _add(op: Add, clean: tuple[Tensor, ...], a: Box, b: Box) -> Box:
    return Box(a.lower + b.lower, a.upper + b.upper)


@interval.register
def _apply(op: Apply, clean: tuple[Tensor, ...], x: Box) -> Box:
    f = FUNCTIONS[op.function]
    low, high = clean[0] + x.lower, clean[0] + x.upper
    # Where f is steep, what the sums lose counts too; relative to them, no end leaves a domain.
    ends = torch.stack([low - EPS * low.abs(), high + EPS * high.abs()])
    return Box(*_outward(f.image(ends), f.value(clean[0])))


@interval.register
def _bilinear(op: Bilinear, clean: tuple[Tensor, ...], x: Box, y: Box) -> Box:
    """Σ of the exact range of each term: ``(x̂+a)(ŷ+b) − x̂ŷ = ŷa + x̂b + ab`` is extreme at a corner."""
    (x_clean, *x_ends), (y_clean, *y_ends) = (
        box_terms(op, clean[0], x, op.x),
        box_terms(op, clean[1], y, op.y),
    )
    a, b = torch.stack(x_ends).unsqueeze(1), torch.stack(y_ends)
    corners = torch.addcmul(y_clean * a, x_clean + a, b)
    return Box(sum_terms(op, corners.amin((0, 1))), sum_terms(op, corners.amax((0, 1))))


def as_terms(op: Bilinear, value: Tensor, axes: str) -> Tensor:
    """View ``[..., tokens, features]`` over all term axes of `op`, of size 1 where it has no such axis."""
    first = value.ndim - 2
    value = op.split(value, axes)
    value = value.permute(*range(first), *(first + axes.index(c) for c in op.terms if c in axes))
    return value[(..., *(slice(None) if c in axes else None for c in op.terms))]


def box_terms(op: Bilinear, clean: Tensor, box: Box, axes: str) -> tuple[Tensor, ...]:
    """Clean value, lower and upper end of a box over the term axes of `op`, in one go."""
    return as_terms(op, torch.stack([clean.expand_as(box.lower), box.lower, box.upper]), axes).unbind(0)


def sum_terms(op: Bilinear, value: Tensor) -> Tensor:
    """``scale · Σ`` over the term axes the output does not have, as ``[tasks, tokens, features]``."""
    summed = [op.terms.index(c) + 1 for c in op.terms if c not in op.out]  # the others keep their order
    return op.scale * (value.sum(summed) if summed else value).flatten(2)


@interval.register
def _normalise(op: Normalise, clean: tuple[Tensor, ...], x: Box, y: Box) -> Box:
    """``e_j / Σ e`` over a box of positive e: the own entry against all the others."""
    e = clean[0].unflatten(-1, (op.heads, -1))
    ends = torch.stack([x.lower, x.upper]).unflatten(-1, (op.heads, -1))
    # The clean value and its deviation may cancel; e itself is never negative.
    slack = EPS * (e + ends.abs())
    low, high = (e + ends).unbind(0)
    ends = torch.stack([low - slack[0], high + slack[1]]).clamp_min(0)
    p = ends / (ends + _others(ends.flip(0)))
    roundings = e.shape[-1] + 8.0
    return Box(*(v.flatten(2) for v in _outward(p, e / e.sum(-1, keepdim=True), roundings)))


@interval.register
def _softmax(op: Softmax, clean: tuple[Tensor, ...], x: Box, direct: Box | None = None) -> Box:
    """``p_j = 1 / Σ_k e^{s_k − s_j}``: decreasing in every difference, each of them extreme at once.

    Without bounds of the differences: increasing in the own score, decreasing in the others, ``p_j =
    σ(s_j − log Σ_{k≠j} e^{s_k})``.
    """
    s = clean[0].unflatten(-1, (op.heads, -1))
    # Shifted by the largest clean score, so that log Σ is not lost next to it.
    s = s - s.amax(-1, keepdim=True)
    low, high = (s + v.unflatten(-1, (op.heads, -1)) for v in (x.lower, x.upper))
    p_lower = torch.sigmoid(low - _log_others(high))
    p_upper = torch.sigmoid(high - _log_others(low))
    if direct is not None:
        smallest, largest = difference_range(s, low, high, direct)
        p_lower = torch.maximum(p_lower, (-largest.logsumexp(-1)).exp())
        p_upper = torch.minimum(p_upper, (-smallest.logsumexp(-1)).exp())
    # An exponent errs by units of the largest score in it; beyond 800 a weight is 0 or 1 to the last bit.
    largest = torch.maximum(low.abs(), high.abs()).amax(-1, keepdim=True).clamp_max(800.0)
    roundings = s.shape[-1] + 8 + 4 * largest
    return Box(*(v.flatten(2) for v in _outward(torch.stack([p_lower, p_upper]), s.softmax(-1), roundings)))


def difference_range(s: Tensor, low: Tensor, high: Tensor, direct: Box | None) -> tuple[Tensor, Tensor]:
    """The range of ``s_k − s_j`` as [..., j, k]; exactly 0 on the diagonal.

    From the ends of the scores, and from bounds of the deviations of the differences with j < k if there are
    some: a NaN there is a NaN here.
    """
    keys = low.shape[-1]
    eye = torch.eye(keys, dtype=torch.bool, device=low.device)
    smallest = low.unsqueeze(-2) - high.unsqueeze(-1)
    largest = high.unsqueeze(-2) - low.unsqueeze(-1)
    if direct is not None:
        first, second = torch.triu_indices(keys, keys, 1, device=low.device)
        apart = s[..., second] - s[..., first]
        slack = 4 * EPS * apart.abs()
        ends = (v.unflatten(-1, (low.shape[-2], -1)) for v in (direct.lower, direct.upper))
        less, more = apart + next(ends) - slack, apart + next(ends) + slack
        between, reverse = torch.full_like(smallest, -math.inf), torch.full_like(largest, math.inf)
        between[..., first, second], reverse[..., first, second] = less, more
        between[..., second, first], reverse[..., second, first] = -more, -less
        smallest, largest = torch.maximum(smallest, between), torch.minimum(largest, reverse)
    return smallest.masked_fill(eye, 0.0), largest.masked_fill(eye, 0.0)


def _outward(ends: Tensor, clean: Tensor, roundings: Tensor | float = 4.0) -> tuple[Tensor, Tensor]:
    """The deviations of two ends from the clean value, rounded outward: the two may nearly cancel.

    `roundings` is how often either was rounded, relative to itself; what underflow took is added.
    """
    slack = EPS * roundings * (ends.abs() + clean.abs()) + torch.finfo(ends.dtype).tiny
    (less, more), (below, above) = (ends - clean).unbind(0), slack.unbind(0)
    return less - below, more + above


def _others(values: Tensor) -> Tensor:
    """The sum of all entries of a row but the own one; nothing is taken off, so nothing cancels."""
    return values @ (1 - torch.eye(values.shape[-1], dtype=values.dtype, device=values.device))


def _log_others(values: Tensor) -> Tensor:
    """``log Σ exp`` of all entries of a row but the own one, from those before and those after it."""
    nothing = torch.full_like(values[..., :1], -math.inf)
    before = torch.cat([nothing, values[..., :-1].logcumsumexp(-1)], -1)
    after = torch.cat([values[..., 1:].flip(-1).logcumsumexp(-1).flip(-1), nothing], -1)
    return torch.logaddexp(before, after)
