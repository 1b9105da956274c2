"""Arrays of numbers that are known exactly, or to hundreds of digits: whole numbers over one denominator.

Sums, differences and products are exact, whatever the sizes: nothing is rounded, nothing underflows. Only
roots, `exp`, `tanh` and the like are intervals, rounded outward to a given number of bits of every entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffet.errors import optional

Ints = np.ndarray
"""Python's whole numbers, which have no largest."""
Raw = tuple[int, int, int, int]
"""A number of mpmath: sign, mantissa, exponent of 2, bits."""
GUARD = 64
"""More bits than a result needs, for functions whose last ones are not trusted."""
LONG, SPARE = 4096, 16
"""Bits that exact numbers may have, whatever is asked for; those that an interval has more than it knows."""


@dataclass(frozen=True, eq=False)
class Span:
    """Numbers ``lower/scale ≤ value ≤ upper/scale``; exact where both are one and the same array."""

    lower: Ints
    upper: Ints
    scale: int

    @property
    def exact(self) -> bool:
        return self.lower is self.upper

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lower.shape

    def map(self, change: Callable[[Ints], Ints]) -> Span:
        """The same entries in another order or shape."""
        lower = change(self.lower)
        return Span(lower, lower if self.exact else change(self.upper), self.scale)

    def over(self, scale: int) -> Span:
        """The same numbers over a multiple of the denominator."""
        factor = scale // self.scale
        assert factor * self.scale == scale
        return self if factor == 1 else replaced(self, lambda v: v * factor, scale)

    def __add__(self, other: Span) -> Span:
        scale = math.lcm(self.scale, other.scale)
        a, b = self.over(scale), other.over(scale)
        lower = a.lower + b.lower
        return Span(lower, lower if a.exact and b.exact else a.upper + b.upper, scale)

    def __neg__(self) -> Span:
        upper = -self.lower
        return Span(upper if self.exact else -self.upper, upper, self.scale)

    def __sub__(self, other: Span) -> Span:
        return self + -other

    def __mul__(self, other: Span) -> Span:
        scale = self.scale * other.scale
        if self.exact and other.exact:
            product = self.lower * other.lower
            return Span(product, product, scale)
        ends = [a * b for a in (self.lower, self.upper) for b in (other.lower, other.upper)]
        lower, upper = ends[0], ends[0]
        for end in ends[1:]:
            lower, upper = np.minimum(lower, end), np.maximum(upper, end)
        return Span(lower, upper, scale)

    def followed_by(self, other: Span) -> Span:
        """The entries of both along the first axis."""
        scale = math.lcm(self.scale, other.scale)
        a, b = self.over(scale), other.over(scale)
        return Span(np.concatenate([a.lower, b.lower]), np.concatenate([a.upper, b.upper]), scale)

    def sum(self, axis: int) -> Span:
        return self.map(lambda v: v.sum(axis))

    def over_whole(self, number: int) -> Span:
        """Divided by a whole number."""
        return Span(self.lower, self.upper, self.scale * number)

    def about(self, place: tuple[int, ...]) -> float:
        """An upper bound of an entry, rounded to nearest."""
        try:
            return int(self.upper[place]) / self.scale
        except OverflowError:
            return math.copysign(math.inf, self.upper[place])

    def below(self, bound: float) -> Ints:
        """Which entries are below a float, for certain."""
        top, bottom = bound.as_integer_ratio()
        return self.upper * bottom < top * self.scale

    def above(self, bound: float) -> Ints:
        """Which entries are at least a float, for certain."""
        top, bottom = bound.as_integer_ratio()
        return self.lower * bottom >= top * self.scale


def depth(bits: int) -> int:
    """What is not exact and below ``2^-depth`` is only known to be between that and 0."""
    return 4 * bits + 512


def replaced(span: Span, change: Callable[[Ints], Ints], scale: int) -> Span:
    """The entries changed, over another denominator."""
    lower = change(span.lower)
    return Span(lower, lower if span.exact else change(span.upper), scale)


def span_of(values: np.ndarray) -> Span:
    """Finite floats as they are."""
    ratios = [float(v).as_integer_ratio() for v in values.ravel().tolist()]
    scale = max((bottom for _, bottom in ratios), default=1)  # powers of 2
    return whole([top * (scale // bottom) for top, bottom in ratios], values.shape, scale)


def whole(entries: Sequence[int], shape: tuple[int, ...] = (1,), scale: int = 1) -> Span:
    """Exact numbers: whole ones over a denominator."""
    array = np.array(entries, dtype=object).reshape(shape)
    return Span(array, array, scale)


def between(lower: Sequence[int], upper: Sequence[int], shape: tuple[int, ...], scale: int) -> Span:
    """Intervals: whole numbers over a denominator."""
    return Span(whole(lower, shape).lower, whole(upper, shape).lower, scale)


def linear(x: Span, weight: Span) -> Span:
    """``x W^T``: a product of matrices along the last axis, with an exact W."""
    assert weight.exact
    w, scale = weight.lower.T, x.scale * weight.scale
    if x.exact:
        product = x.lower @ w
        return Span(product, product, scale)
    positive, negative = np.maximum(w, 0), np.minimum(w, 0)
    return Span(x.lower @ positive + x.upper @ negative, x.upper @ positive + x.lower @ negative, scale)


def relu(x: Span) -> Span:
    return replaced(x, lambda v: np.maximum(v, 0), x.scale)


def square(x: Span) -> Span:
    if x.exact:
        return x * x
    low, high = x.lower * x.lower, x.upper * x.upper
    inside = (x.lower < 0) & (x.upper > 0)
    return Span(np.where(inside, 0, np.minimum(low, high)), np.maximum(low, high), x.scale * x.scale)


def root(number: int, bits: int) -> Span:
    """The square root of a whole number, known to `bits` bits."""
    exact = math.isqrt(number)
    if exact * exact == number:
        return whole([exact])
    near = math.isqrt(number << (2 * bits))
    return between([near], [near + 1], (1,), 1 << bits)


def inverse(x: Span, bits: int) -> Span:
    """``1/x`` of positive numbers, each known to `bits` bits."""
    shift = bits + max(int(v).bit_length() for v in x.upper.ravel())
    lower = [(x.scale << shift) // v for v in x.upper.ravel()]
    upper = [-((-x.scale << shift) // v) for v in x.lower.ravel()]
    return between(lower, upper, x.shape, 1 << shift)


def inverse_root(x: Span, bits: int) -> Span:
    """``1/√x`` of positive numbers, each known to `bits` bits."""
    size = max(int(v).bit_length() for v in x.upper.ravel()) - x.scale.bit_length()
    shift = bits + max(0, size // 2 + 2)

    def near(top: int) -> int:
        return math.isqrt((x.scale << (2 * shift)) // top)

    lower = [near(v) for v in x.upper.ravel()]
    upper = [near(v) + 1 for v in x.lower.ravel()]
    return between(lower, upper, x.shape, 1 << shift)


def trimmed(x: Span, bits: int) -> Span:
    """The same numbers or intervals around them, rounded outward where they are far longer than necessary.

    An interval needs few digits more than its ends have in common, an entry no more than `bits`.
    """
    length = x.scale.bit_length()
    if length < (LONG + 4 * bits if x.exact else 2 * bits):
        return x
    shift = 0
    for low, high in zip(x.lower.ravel(), x.upper.ravel(), strict=True):
        if low or high:
            known = bits - max(abs(low), abs(high)).bit_length()
            wide = high - low
            shift = max(shift, min(known, SPARE - wide.bit_length()) if wide else known)
    shift = min(shift + length, depth(bits))
    if shift + 64 > length:
        return x
    lower = [(v << shift) // x.scale for v in x.lower.ravel()]
    upper = [-((-v << shift) // x.scale) for v in x.upper.ravel()]
    return between(lower, upper, x.shape, 1 << shift)


# --- functions that mpmath knows ----------------------------------------------------------------------------


def library() -> Any:
    """mpmath's functions on raw numbers."""
    return optional("mpmath", "exact", "exact points need mpmath").libmp


Function = Callable[[Raw, int, str], Raw]
"""A function of mpmath: takes a number, a precision in bits, and whether to round down ("f") or up ("c")."""


def increasing(x: Span, function: Function, bits: int) -> Span:
    """An increasing function of every entry; `function` may be off by ``2^-bits`` of its value."""
    mp = library()
    precision = bits + GUARD

    def end(top: int, rounding: str) -> tuple[int, int]:
        value = function(mp.from_rational(top, x.scale, precision, rounding), precision, rounding)
        # The last bits are not reliable, so the ends are moved outward by far more than those.
        slack = mp.mpf_shift(mp.mpf_abs(value), -bits)
        change = mp.mpf_sub if rounding == "f" else mp.mpf_add
        found: tuple[int, int] = mp.to_rational(change(value, slack, precision, rounding))
        return found

    low, high = [end(v, "f") for v in x.lower.ravel()], [end(v, "c") for v in x.upper.ravel()]
    length = min(max((b.bit_length() for _, b in (*low, *high)), default=0), depth(bits))
    # What is too deep for the common denominator goes outward.
    lower, upper = [(t << length) // b for t, b in low], [-((-t << length) // b) for t, b in high]
    return between(lower, upper, x.shape, 1 << length)


def saturated(x: Span, function: Function, far: int, bits: int) -> Span:
    """An increasing function that is within ``2^-depth`` of 0 below ``−far``, and of 1 above `far`."""
    mp = library()
    tiny, limit = mp.mpf_shift(mp.fone, -depth(bits)), mp.from_int(far)

    def near(at: Raw, precision: int, rounding: str) -> Raw:
        if not mp.mpf_gt(mp.mpf_abs(at), limit):
            return function(at, precision, rounding)
        if at[0]:
            return mp.fzero if rounding == "f" else tiny
        return mp.mpf_sub(mp.fone, tiny) if rounding == "f" else mp.fone

    return increasing(x, near, bits)


def clipped(x: Span, lower: int, upper: int) -> Span:
    """No entry outside two whole numbers."""
    low, high = lower * x.scale, upper * x.scale
    return Span(np.clip(x.lower, low, high), np.clip(x.upper, low, high), x.scale)


def exponential(x: Span, bits: int) -> Span:
    """``e^x`` of numbers that are not large."""
    return saturated(x, library().mpf_exp, depth(bits), bits)  # e^-n is below 2^-n


def tanh(x: Span, bits: int) -> Span:
    return clipped(increasing(x, library().mpf_tanh, bits), -1, 1)


def normal_share(x: Span, bits: int) -> Span:
    """``Φ(x) = erfc(−x/√2)/2``, where ``Φ(−x)`` is below ``e^(−x²/2)``."""
    mp = library()

    def phi(at: Raw, precision: int, rounding: str) -> Raw:
        wide = precision + GUARD
        point = mp.mpf_div(mp.mpf_neg(at), mp.mpf_sqrt(mp.from_int(2), wide), wide)
        return mp.mpf_shift(mp.mpf_erfc(point, precision, rounding), -1)

    return clipped(saturated(x, phi, 2 + math.isqrt(2 * depth(bits)), bits), 0, 1)


def logistic(x: Span, bits: int) -> Span:
    """``1/(1 + e^-x)``."""
    mp = library()

    def sigma(at: Raw, precision: int, rounding: str) -> Raw:
        e = mp.mpf_exp(mp.mpf_neg(at), precision + 8)
        return mp.mpf_div(mp.fone, mp.mpf_add(mp.fone, e, precision + 8), precision)

    return clipped(saturated(x, sigma, depth(bits), bits), 0, 1)


def over_sum(e: Span, bits: int) -> Span:
    """``e_j / Σ_k e_k`` of numbers ≥ 0 along the last axis, one of which is about 1."""
    low, high = e.lower.sum(-1)[..., None], e.upper.sum(-1)[..., None]
    # With the other entries at their worst, and the own one on both sides of the fraction.
    most = high - e.upper + e.lower
    least = low - e.lower + e.upper
    shift = max(e.scale.bit_length(), bits) + bits
    lower, upper = (e.lower << shift) // most, -((-e.upper << shift) // least)
    return Span(lower, upper, 1 << shift)
