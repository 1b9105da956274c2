"""Lines above and below a scalar function on an interval, around the value of the clean run.

One mechanism for all functions. A line is a slope and an intercept; *any* slope k is sound if the intercept
is the conjugate ``min (or max) over x of f(x) − f(c) − k·(x − c)``, and that extreme value is attained at an
end of the interval or where f' = k. So choosing slopes is a matter of tightness only (`default_slopes`,
`slope_range`, or an optimiser), and soundness rests on `_intercept` alone.

Everything is computed in float64. Slopes are rounded to the engine's precision *before* the intercept is
computed for them; intercepts are rounded outward, after an allowance for every rounding made on the way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.network.functions import FUNCTIONS, Function

Side = Literal["lower", "upper"]
SIDES: tuple[Side, Side] = ("lower", "upper")

_EPS = torch.finfo(torch.float64).eps
_TINY = torch.finfo(torch.float64).tiny  # what an underflow may lose
_OUTWARD = torch.tensor([-math.inf, math.inf])
# A quotient over less than this (relative) width is noise: the derivative at the middle differs from the true
# one by O(width²), 1e-12, and the intercept is the conjugate of whichever slope is used.
_NARROW = 1e-6
_DINKELBACH_STEPS = 3
_EXP_REACH = 0.99  # the tangent of exp at t is positive for x > t − 1


@dataclass(frozen=True)
class Lines:
    """For every real a in [lower, upper]:

    ``lower_slope·a + lower_intercept ≤ f(center + a) − f(center) ≤ upper_slope·a + upper_intercept``,

    exactly, for the numbers as stored. Where f is undefined or overflows, the intercepts are NaN.
    """

    lower_slope: Float[Tensor, "*shape"]
    lower_intercept: Float[Tensor, "*shape"]
    upper_slope: Float[Tensor, "*shape"]
    upper_intercept: Float[Tensor, "*shape"]


def relax(
    name: str,
    center: Float[Tensor, "*#shape"],
    lower: Float[Tensor, "*#shape"],
    upper: Float[Tensor, "*#shape"],
    *,
    lower_slope: Float[Tensor, "*#shape"] | None = None,
    upper_slope: Float[Tensor, "*#shape"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Lines:
    """Lines for the function `name` of ``center + a``, ``lower ≤ a ≤ upper``, in precision `dtype`.

    Slopes may be given (any value is sound) or left to `default_slopes`. Differentiable in the slopes and in
    `lower` and `upper`; the point where an intercept is attained is held fixed, as the envelope theorem
    allows. Where ``lower = upper = 0`` only a = 0 is possible and the intercepts are exactly 0.
    """
    f = FUNCTIONS[name]
    slopes = [k for k in (lower_slope, upper_slope) if k is not None]
    center, lower, upper, *slopes = torch.broadcast_tensors(center, lower, upper, *slopes)
    center, ends = _interval(f, center, lower, upper)
    if len(slopes) < 2:
        below, above = _default_slopes(name, ends)
        slopes = [*slopes, above] if lower_slope is not None else [below, *(slopes or [above])]
    slope = torch.stack(slopes).to(dtype)  # as the engine will store them
    intercept = _intercepts(f, center, ends, slope.double())
    if dtype != torch.float64:
        # What is exact stays so. A step away from 0, as of a ReLU that is always off, would be a denormal
        # number, and processors take a hundred times as long to multiply by these.
        rounded = intercept.to(dtype)
        intercept = torch.where(rounded.double() == intercept, rounded, _stepped(rounded))
    below, above = (intercept * torch.logical_or(lower, upper)).unbind(0)
    return Lines(slope[0], below, slope[1], above)


def default_slopes(
    name: str,
    center: Float[Tensor, "*#shape"],
    lower: Float[Tensor, "*#shape"],
    upper: Float[Tensor, "*#shape"],
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The slopes (lower, upper) of CROWN.

    Convex side: the chord; other side: the tangent at the middle (exp: no further than 0.99 from the lower
    end, so that the line stays positive; ReLU: 0 or 1, whichever leaves less area). Tanh across 0: the
    tangent through the far end, or the chord. GELU: the line of least area.
    """
    return _default_slopes(name, _ends(FUNCTIONS[name], center, lower, upper))


def slope_range(
    name: str,
    center: Float[Tensor, "*#shape"],
    lower: Float[Tensor, "*#shape"],
    upper: Float[Tensor, "*#shape"],
    side: Side,
) -> tuple[Float[Tensor, "*shape"], Float[Tensor, "*shape"]]:
    """The smallest and largest useful slope: those of the convex (concave) envelope of f at the two ends.

    Every other slope gives a line that is nowhere better than that of the nearest end of the range. ReLU
    across 0, lower: [0, 1]; convex, lower: [f'(l), f'(u)]; convex, upper: the chord twice.
    """
    f = FUNCTIONS[name]
    ends = _ends(f, center, lower, upper)
    if f.curvature is None:
        left, right = _envelope(f, ends, side)
        return (left, right) if side == "lower" else (right, left)
    if (f.curvature == "convex") == (side == "upper"):
        chord = _chord(f, ends)
        return chord, chord
    left, right = f.derivative(ends).unbind(0)
    return (left, right) if f.curvature == "convex" else (right, left)


# --- intervals and rounding ---------------------------------------------------------------------------------


def _ends(f: Function, center: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """The ends of the interval, as `_interval` makes them."""
    center, lower, upper = torch.broadcast_tensors(center, lower, upper)
    return _interval(f, center, lower, upper)[1]


def _interval(f: Function, center: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor]:
    """Center and ends in float64, NaN below the domain; the ends contain center + [lower, upper] exactly."""
    center = center.double()
    # The domains start at 0, and no sum of a negative value rounds to 0.
    ends = _stepped(f.admit(center + torch.stack([lower, upper])))
    return f.admit(center), ends if f.domain == -math.inf else ends.clamp(min=f.domain)


def _stepped(pair: Tensor) -> Tensor:
    """Lower and upper numbers, moved apart by one step of their precision each."""
    towards = _OUTWARD.to(pair.device).view(2, *(1 for _ in pair.shape[1:]))
    if not pair.requires_grad:
        return torch.nextafter(pair, towards)
    with torch.no_grad():
        step = torch.nextafter(pair, towards) - pair
    return pair + step


# --- the conjugate ------------------------------------------------------------------------------------------


def _intercepts(f: Function, center: Tensor, ends: Tensor, slopes: Tensor) -> Tensor:
    """``min over x in [low, high] of f(x) − f(c) − k(x − c)`` for the first slope, the max for the second.

    Rounded safely: x − c, k·(x − c) and three subtractions round once each, the product may underflow, f(x)
    and f(c) err as `f.rounding` says. An infinite value makes its allowance infinite and their difference
    NaN, so that an overflow at one end cannot hide behind a finite value at the other.
    """
    low, high = ends.unbind(0)
    below, above = slopes.unbind(0)
    with torch.no_grad():
        stationary = *f.minima(below), *f.maxima(above)
    # Every point inside may stand for either side. One outside (or none, NaN) gives way to an end: with its
    # gradient, as equal values share theirs.
    x = torch.stack([low, high, *(torch.minimum(torch.fmax(x, low), high) for x in stationary)])
    value, clean, run = f.value(x), f.value(center), x - center
    gaps = torch.addcmul(value - clean, slopes.unsqueeze(1), run, value=-1)
    with torch.no_grad():
        error = f.rounding(x, value, also=2.0) + f.rounding(center, clean, also=2.0)
        steep = slopes.abs().unsqueeze(1)
        slack = torch.addcmul(error + _TINY * steep.sign(), steep, run.abs(), value=2 * _EPS)
    return torch.stack([(gaps[0] - slack[0]).amin(0), (gaps[1] + slack[1]).amax(0)])


# --- slopes -------------------------------------------------------------------------------------------------


def _ratio(f: Function, x: Tensor, y: Tensor) -> Tensor:
    """The slope of the chord from x to y; f' at the middle where they are too close for a quotient.

    Functions on x > 0 are powers and have no scale of their own, the others change over a length of 1.
    """
    width = y - x
    scale = torch.maximum(x.abs(), y.abs())
    if f.domain == -math.inf:
        scale = scale.clamp(min=1)
    narrow = (width.abs() <= _NARROW * scale).detach()
    quotient = (f.value(y) - f.value(x)) / torch.where(narrow, 1.0, width)
    return torch.where(narrow, f.derivative(0.5 * (x + y)), quotient)


def _chord(f: Function, ends: Tensor) -> Tensor:
    """The slope of the chord of a convex or concave function.

    It lies between the slopes at the two ends, which is all that is left of it where the ends are too close
    for a quotient.
    """
    (first, last), (low, high) = f.value(ends).unbind(0), ends.unbind(0)
    left, right = f.derivative(ends).unbind(0)
    least, most = (left, right) if f.curvature == "convex" else (right, left)
    return torch.clamp((last - first) / (high - low), least, most)


def _support(f: Function, end: Tensor, other: Tensor, side: Side, sign: Tensor | float) -> Tensor:
    """The largest (sign −1: smallest) slope of a chord from `end` to a point between `end` and `other`.

    This is the slope at `end` of the convex or concave envelope (`side`) of f. Dinkelbach's iteration finds
    it: from a slope k to the x that maximises f(x) − k·x, to the quotient at that x. It rises quadratically
    from its start, the tangent point of the cubic with the same inflection (half as far behind it as the end
    is before, within 1), and the quotient's error is quadratic in that of x, so a rough x will do. The
    gradient passes through the quotient with x held fixed, which is exact at the maximum.
    """
    near = (f.near_minima or f.minima) if side == "lower" else (f.near_maxima or f.maxima)
    chord = _ratio(f, end, other)
    with torch.no_grad():
        low, high = torch.minimum(end, other), torch.maximum(end, other)
        value, apart = f.value(end), _NARROW * end.abs().clamp(min=1)
        touch, best = other, sign * chord
        start = [t + (0.5 * (t - end)).clamp(-1, 1) for t in f.inflections]
        for step in range(_DINKELBACH_STEPS):
            for point in near(sign * best) if step else start:
                inside = torch.minimum(torch.maximum(point, low), high)
                width = inside - end
                slope = sign * (f.value(inside) - value) / width
                better = (slope > best) & (width.abs() > apart)  # False for the NaN of no point
                touch, best = torch.where(better, inside, touch), torch.where(better, slope, best)
    touch = torch.where(touch == other, other, touch)  # equal slopes share their gradient: it must not be cut
    found = torch.stack([chord, _ratio(f, end, touch), f.derivative(end)])
    return sign * (sign * found).amax(0)


def _envelope(f: Function, ends: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """The slopes, at the low and at the high end, of the convex (lower) or concave (upper) envelope of f."""
    sign = ends.new_tensor([-1.0, 1.0] if side == "lower" else [1.0, -1.0])
    slopes = _support(f, ends, ends.flip(0), side, sign.view(2, *(1 for _ in ends.shape[1:])))
    return slopes[0], slopes[1]


def _default_slopes(name: str, ends: Tensor) -> tuple[Tensor, Tensor]:
    f = FUNCTIONS[name]
    low, high = ends.unbind(0)
    if name == "relu":
        return (low + high > 0).to(low.dtype), _chord(f, ends)
    middle = 0.5 * (low + high)
    if f.curvature is not None:
        tangent = f.derivative(torch.minimum(middle, low + _EXP_REACH) if name == "exp" else middle)
        chord = _chord(f, ends)
        return (tangent, chord) if f.curvature == "convex" else (chord, tangent)
    if name == "tanh":
        tangent = f.derivative(middle)
        # as tanh is odd, the lower line through the high end is the upper one of the mirrored interval
        far = _support(f, torch.stack([low, -high]), torch.stack([high, -low]), "upper", 1.0)
        return torch.where(high <= 0, tangent, far[1]), torch.where(low >= 0, tangent, far[0])
    return _least_area(f, ends, "lower"), _least_area(f, ends, "upper")


def _least_area(f: Function, ends: Tensor, side: Side) -> Tensor:
    """The slope of the sound line nearest to f at the middle, which is the one with the least area to f.

    It supports the envelope there: it is the tangent at the middle where that is sound (right curvature, no
    end on the wrong side), else the better one of the envelope's lines through the two ends.
    """
    sign = 1.0 if side == "lower" else -1.0
    low, high = ends.unbind(0)
    middle = 0.5 * (low + high)
    left, right = _envelope(f, ends, side)
    value, (at_low, at_high) = f.value(middle), f.value(ends).unbind(0)
    through_low = at_low + left * (middle - low)
    through_high = at_high + right * (middle - high)
    better = torch.where((sign * through_low >= sign * through_high).detach(), left, right)
    assert f.second is not None  # mixed curvature
    tangent = f.derivative(middle)
    with torch.no_grad():
        under_low = sign * (at_low - value - tangent * (low - middle)) >= 0
        under_high = sign * (at_high - value - tangent * (high - middle)) >= 0
        sound = under_low & under_high & (sign * f.second(middle) >= 0)
    return torch.where(sound, tangent, better)
