"""The value of a network at points, in exact arithmetic: what every claim is held against in the end.

The network is meant as claims mean it: weights and rows as they are stored, ``1/width`` and ``1/√d`` the
real numbers, the constant of a LayerNorm the float64 of the configuration. Linear maps, products and ReLU are
exact; softmax, roots and the other functions are intervals of limited precision (`spans`). The constants of
`gelu_new` are intervals that hold both the real numbers and their floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from buffet.lab.soundness import spans
from buffet.lab.soundness.spans import Span, linear, span_of, trimmed
from buffet.network import (
    Add,
    Affine,
    Apply,
    Bilinear,
    Center,
    Diagonal,
    First,
    Input,
    Mean,
    Offset,
    Op,
    Program,
    Scores,
    Softmax,
)

BITS = (256, 2400)
"""Bits of what is not exact: few first, and many where these do not decide."""
VAGUE = 64
"""Scores that are not known to within this say nothing about a softmax."""


@dataclass(frozen=True, eq=False)
class Judge:
    """Evaluates a program (in float64: its weights as stored) at exact rows, without padding."""

    program: Program

    @cached_property
    def constants(self) -> list[dict[str, Span]]:
        """The weights of every node."""
        return [_constants(node.op) for node in self.program.nodes]

    def logits(self, rows: Span, bits: int) -> Span:
        """points × classes, from rows points × tokens × width."""
        values: list[Span] = []
        for node, weights in zip(self.program.nodes, self.constants, strict=True):
            if isinstance(node.op, Input):
                values.append(rows)
            else:
                inputs = [values[i] for i in node.inputs]
                values.append(trimmed(_evaluate(node.op, weights, inputs, bits), bits))
        return values[-1].map(lambda v: v[:, 0])

    def margins(self, rows: Span, label: int, bits: int) -> Span:
        """``logit[label] − logit[other]``, points × others."""
        logits = self.logits(rows, bits)
        others = [c for c in range(logits.shape[1]) if c != label]
        return logits.map(lambda v: v[:, [label]]) - logits.map(lambda v: v[:, others])


def _constants(op: Op) -> dict[str, Span]:
    names = {"weight", "bias", "value"} & set(vars(op))
    found = {name: span_of(getattr(op, name).numpy()) for name in names}
    if isinstance(op, Affine) and op.least > -math.inf:  # the mean of a LayerNorm's squares
        ones = span_of(np.ones(tuple(op.weight.shape)))
        found = {"weight": ones.over_whole(op.weight.shape[1]), "bias": span_of(np.array([op.least]))}
    return found


def _evaluate(op: Op, weights: Mapping[str, Span], inputs: list[Span], bits: int) -> Span:
    x = inputs[0]
    match op:
        case Affine():
            return linear(x, weights["weight"]) + weights["bias"]
        case Diagonal():
            return x * weights["weight"] + weights["bias"]
        case Center():
            width = x.shape[-1]
            eye = np.eye(width)
            return linear(x, span_of(width * eye - 1)).over_whole(width)
        case Add():
            return x + inputs[1]
        case Offset():
            return x + weights["value"]
        case First():
            return x.map(lambda v: v[:, :1])
        case Mean():
            return x.map(lambda v: v.sum(1)[:, None]).over_whole(x.shape[1])
        case Apply():
            return FUNCTIONS[op.function](x, bits)
        case Softmax():
            return _softmax(x, op.heads, bits)
        case Bilinear():
            return _products(op, x, inputs[1], bits)
        case _:
            raise NotImplementedError(type(op).__name__)


def _products(op: Bilinear, x: Span, y: Span, bits: int) -> Span:
    def spread(value: Span, axes: str) -> Span:
        """The axes of a single product, with a 1 where a value does not have one."""
        split = value.map(lambda v: _split(v, op.heads) if len(axes) == 3 else v)
        order = [axes.index(a) for a in op.terms if a in axes]
        shape = [a in axes for a in op.terms]

        def place(v: Any) -> Any:
            v = v.transpose(0, *(1 + i for i in order))
            sizes = iter(v.shape[1:])
            return v.reshape(v.shape[0], *(next(sizes) if there else 1 for there in shape))

        return split.map(place)

    terms = spread(x, op.x) * spread(y, op.y)
    for axis in reversed(range(len(op.terms))):
        if op.terms[axis] not in op.out:
            terms = terms.sum(axis + 1)
    left = [a for a in op.terms if a in op.out]
    result = terms.map(lambda v: v.transpose(0, *(1 + left.index(a) for a in op.out)))
    result = result.map(lambda v: v.reshape(*v.shape[:2], -1))
    if isinstance(op, Scores):
        inner = x.shape[-1] // op.heads
        return (result * spans.root(inner, bits)).over_whole(inner)  # √d/d
    assert op.scale == 1
    return result


def _split(v: Any, heads: int) -> Any:
    return v.reshape(*v.shape[:-1], heads, -1)


def _softmax(x: Span, heads: int, bits: int) -> Span:
    s = x.map(lambda v: _split(v, heads))
    # Whatever is taken off all scores of a query, the result is the same.
    peak = s.lower.max(-1)[..., None]
    limit = VAGUE * s.scale
    e = spans.exponential(Span(s.lower - peak, np.minimum(s.upper - peak, limit), s.scale), bits)
    p = spans.over_sum(e, bits)
    vague = np.broadcast_to((s.upper - peak >= limit).any(-1)[..., None], p.shape)
    if vague.any():  # nobody knows which score is the largest
        p = Span(np.where(vague, 0, p.lower), np.where(vague, p.scale, p.upper), p.scale)
    return p.map(lambda v: v.reshape(*v.shape[:2], -1))


def _gelu(x: Span, bits: int) -> Span:
    return x * spans.normal_share(x, bits)


def _gelu_tanh(x: Span, bits: int) -> Span:
    """``x·σ(2√(2/π)(x + 0.044715x³))``."""
    cubic = _hull(0.044715, Fraction(44715, 1_000_000))
    inner = x + x * x * x * cubic
    return x * spans.logistic(inner * _twice_c(bits), bits)


def _hull(number: float, meant: Fraction) -> Span:
    """Between a decimal number and its float."""
    stored = Fraction(number)
    scale = math.lcm(stored.denominator, meant.denominator)
    ends = sorted(int(v * scale) for v in (stored, meant))
    return Span(np.array([ends[0]], object), np.array([ends[1]], object), scale)


def _twice_c(bits: int) -> Span:
    """``2√(2/π)``, between its float and the real number."""
    mp = spans.library()
    wide = bits + spans.GUARD
    real = mp.mpf_sqrt(mp.mpf_div(mp.from_int(8), mp.mpf_pi(wide), wide), wide)
    return _hull(2 * math.sqrt(2 / math.pi), Fraction(*mp.to_rational(real)))


FUNCTIONS: Mapping[str, Callable[[Span, int], Span]] = {
    "relu": lambda x, bits: spans.relu(x),
    "square": lambda x, bits: spans.square(x),
    "reciprocal": spans.inverse,
    "rsqrt": spans.inverse_root,
    "tanh": spans.tanh,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
}
"""The functions of `network.functions` that networks are made of, from the maths."""
