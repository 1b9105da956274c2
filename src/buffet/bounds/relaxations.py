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

from buffet.bounds.functions import FUNCTIONS, Function

Side = Literal["lower", "upper"]
SIDES: tuple[Side, Side] = ("lower", "upper")

_EPS = torch.finfo(torch.float64).eps
_TINY = torch.finfo(torch.float64).tiny  # what an underflow may lose
_DOWN, _UP = torch.tensor(-math.inf), torch.tensor(math.inf)
# A chord over less than this (relative) width is noise: the derivative at the middle differs from the true
# chord by O(width²), 1e-12, and the intercept is the conjugate of whichever slope is used.
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
    given = [k for k in (lower_slope, upper_slope) if k is not None]
    center = torch.broadcast_tensors(center, lower, upper, *given)[0]
    c, low, high = _interval(f, center, lower, upper)
    if lower_slope is None or upper_slope is None:
        defaults = _default_slopes(name, low, high)
    # As the engine will store them.
    below = (lower_slope if lower_slope is not None else defaults[0]).to(dtype).expand_as(low)
    above = (upper_slope if upper_slope is not None else defaults[1]).to(dtype).expand_as(low)
    bottom, top = _intercepts(f, c, low, high, below.double(), above.double())
    if dtype != torch.float64:
        bottom, top = _stepped(bottom.to(dtype), _DOWN), _stepped(top.to(dtype), _UP)
    moves = (lower != 0) | (upper != 0)
    return Lines(below, bottom * moves, above, top * moves)


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
    _, low, high = _interval(FUNCTIONS[name], center, lower, upper)
    return _default_slopes(name, low, high)


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
    _, low, high = _interval(f, center, lower, upper)
    if f.curvature is None:
        left, right = _envelope(f, low, high, side)
        return (left, right) if side == "lower" else (right, left)
    if (f.curvature == "convex") == (side == "upper"):
        chord = _chord(f, low, high)
        return chord, chord
    left, right = f.derivative(low), f.derivative(high)
    return (left, right) if f.curvature == "convex" else (right, left)


# --- intervals and rounding ---------------------------------------------------------------------------------


def _interval(f: Function, center: Tensor, lower: Tensor, upper: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Center and ends in float64, NaN below the domain; the ends contain center + [lower, upper] exactly."""
    center, lower, upper = torch.broadcast_tensors(center.double(), lower.double(), upper.double())
    least = center + lower
    low, high = _stepped(least, _DOWN), _stepped(center + upper, _UP)
    if f.domain > -math.inf:
        # The domains start at 0, and no sum of a negative value rounds to 0.
        low = torch.where(least >= f.domain, low.clamp(min=f.domain), math.nan)
    return f.admit(center), low, high


def _stepped(x: Tensor, towards: Tensor) -> Tensor:
    """The numbers, moved by one step of their precision."""
    if not x.requires_grad:
        return torch.nextafter(x, towards)
    with torch.no_grad():
        step = torch.nextafter(x, towards) - x
    return x + step


# --- the conjugate ------------------------------------------------------------------------------------------


def _intercepts(
    f: Function, center: Tensor, low: Tensor, high: Tensor, below: Tensor, above: Tensor
) -> tuple[Tensor, Tensor]:
    """``min over x in [low, high] of f(x) − f(c) − k(x − c)`` for k = `below`, the max for k = `above`.

    Rounded safely: x − c, k·(x − c) and two subtractions round once each, f(x) and f(c) as `f.rounding` says.
    An infinite value makes its allowance infinite and their difference NaN, so that an overflow at one end
    cannot hide behind a finite value at the other.
    """
    with torch.no_grad():
        stationary = f.minima(below.detach()), f.maxima(above.detach())
    # a point outside gives way to an end: with its gradient, as equal values share theirs
    minima, maxima = ([torch.where((x > low) & (x < high), x, low) for x in points] for points in stationary)
    x = torch.stack([center, *minima, low, high, *maxima])
    value = f.value(x)
    with torch.no_grad():
        slack = f.rounding(x, value, also=1.0)
        slack = slack + (slack[0] + _TINY)
    rise, run = value - value[0], x - center

    def gap(rows: slice, slope: Tensor, sign: int) -> Tensor:
        drop = slope * run[rows]
        allowance = torch.add(slack[rows], drop.detach().abs(), alpha=2 * _EPS)
        return torch.add(rise[rows] - drop, allowance, alpha=sign)

    lower, upper = slice(1, 3 + len(minima)), slice(1 + len(minima), None)
    return gap(lower, below, -1).amin(0), gap(upper, above, 1).amax(0)


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


def _chord(f: Function, low: Tensor, high: Tensor) -> Tensor:
    """The slope of the chord over the interval. For ReLU in closed form: u⁺/(u⁺ + l⁻)."""
    if f is not FUNCTIONS["relu"]:
        return _ratio(f, low, high)
    positive = high.clamp(min=0)
    width = positive - low.clamp(max=0)
    flat = (high <= 0).detach()
    return torch.where(flat, 0 * low, positive / torch.where(flat, 1.0, width))


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


def _envelope(f: Function, low: Tensor, high: Tensor, side: Side) -> tuple[Tensor, Tensor]:
    """The slopes, at the low and at the high end, of the convex (lower) or concave (upper) envelope of f."""
    sign = low.new_tensor([-1.0, 1.0] if side == "lower" else [1.0, -1.0]).view(2, *(1 for _ in low.shape))
    slopes = _support(f, torch.stack([low, high]), torch.stack([high, low]), side, sign)
    return slopes[0], slopes[1]


def _default_slopes(name: str, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    f = FUNCTIONS[name]
    if name == "relu":
        lower = torch.where(low.isnan(), low, (high > -low).to(low.dtype))
        return lower, _chord(f, low, high)
    middle = 0.5 * (low + high)
    if f.curvature is not None:
        tangent = f.derivative(torch.minimum(middle, low + _EXP_REACH) if name == "exp" else middle)
        chord = _chord(f, low, high)
        return (tangent, chord) if f.curvature == "convex" else (chord, tangent)
    if name == "tanh":
        tangent = f.derivative(middle)
        # as tanh is odd, the lower line through the high end is the upper one of the mirrored interval
        far = _support(f, torch.stack([low, -high]), torch.stack([high, -low]), "upper", 1.0)
        return torch.where(high <= 0, tangent, far[1]), torch.where(low >= 0, tangent, far[0])
    return _least_area(f, low, high, "lower"), _least_area(f, low, high, "upper")


def _least_area(f: Function, low: Tensor, high: Tensor, side: Side) -> Tensor:
    """The slope of the sound line nearest to f at the middle, which is the one with the least area to f.

    It supports the envelope there: it is the tangent at the middle where that is sound (right curvature, no
    end on the wrong side), else the better one of the envelope's lines through the two ends.
    """
    sign = 1.0 if side == "lower" else -1.0
    middle = 0.5 * (low + high)
    left, right = _envelope(f, low, high, side)
    value, at_low, at_high = f.value(middle), f.value(low), f.value(high)
    through_low = at_low + left * (middle - low)
    through_high = at_high + right * (middle - high)
    ends = torch.where((sign * through_low >= sign * through_high).detach(), left, right)
    assert f.second is not None  # mixed curvature
    tangent = f.derivative(middle)
    with torch.no_grad():
        under_low = sign * (at_low - value - tangent * (low - middle)) >= 0
        under_high = sign * (at_high - value - tangent * (high - middle)) >= 0
        sound = under_low & under_high & (sign * f.second(middle) >= 0)
    return torch.where(sound, tangent, ends)
