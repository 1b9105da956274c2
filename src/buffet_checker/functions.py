"""Scalar functions: rigorous values, and lines that are valid by construction.

A line below f on [L, H] may have any slope k; what makes it valid is its intercept, a lower bound of
``f(x) − k·x``. It is found piece by piece, on intervals where f is convex or concave:

    concave   the minimum is at an end of the piece;
    convex    f is above its tangent at any point t, so ``f(x) − kx ≥ f(t) − kt + (f'(t) − k)(x − t)``, and
    the
              right side is smallest at an end. The bound is valid whatever t is, and sharp where f'(t) = k.

A line above f is one below −f. So nothing rests on how well t, or the slope, was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import Array, Ball, down, up

Value = Callable[[Ball], Ball]
LINEAR, CONVEX, CONCAVE = 0, 1, -1
_BEND = 1e-14
"""Ends of pieces are known to 1e-15, and no |f'''| here exceeds 4: on a piece, f'' errs in sign by
less than this.
"""
_SECTIONS = 40


@dataclass(frozen=True)
class Function:
    """f, its derivative, and the pieces of its domain on which it is convex or concave.

    `touch` says about where ``f'(x) = k`` on a piece; None: it is found by sections (f' is monotone there).
    """

    value: Value
    derivative: Value
    pieces: tuple[tuple[float, float, int], ...]
    touch: Callable[[Array], Array] | None = None
    bend: float = 0.0  # sup |f''|, where f' is not monotone
    positive: bool = False  # defined for x > 0 only
    least: float = -math.inf
    greatest: float = math.inf
    turns: tuple[float, float] | None = None  # f falls before this interval and rises after it
    rises: bool = True

    def image(self, low: Array, high: Array) -> tuple[Array, Array]:
        """An interval that contains f([low, high])."""
        left, right = self.value(Ball.exact(low)), self.value(Ball.exact(high))
        bottom, top = np.minimum(left.low, right.low), np.maximum(left.high, right.high)
        if self.turns is not None:
            dips = (low < self.turns[1]) & (high > self.turns[0])
            bottom = np.where(dips, self.least, bottom)
        if self.positive:
            bottom = np.where(low > 0, bottom, np.nan)
        return np.maximum(bottom, self.least), np.minimum(top, self.greatest)

    def slopes(self, x: Array, y: Array) -> tuple[Array, Array]:
        """The least and the largest f' between x and y."""
        x, y = np.minimum(x, y), np.maximum(x, y)
        ends = [self.derivative(Ball.exact(at)) for at in (x, y)]
        least, most = np.minimum(ends[0].low, ends[1].low), np.maximum(ends[0].high, ends[1].high)
        # f' is monotone between its turns, so that the ends decide; near a turn it moves by |f''| at most
        reach = self.bend * (y - x)
        return least - reach, most + reach

    def intercept(self, x: Array, y: Array, low: Array, high: Array, slope: Array, side: int) -> Array:
        """An i with ``side·(f(x+a) − y) ≥ side·(k·a + i)`` for all x + a in [low, high]; side 1: a line
        below.

        NaN where f is not defined on all of the interval.
        """
        if self.positive:
            low = np.where(low > 0, low, np.nan)
        best = np.full(np.broadcast(low, slope).shape, np.inf)

        def gap(at: Array) -> Ball:
            point = Ball.exact(at)
            over = self.value(point) - Ball.exact(y) - Ball.exact(slope) * (point - Ball.exact(x))
            return over if side > 0 else -over

        for start, end, curvature in self.pieces:
            left, right = np.clip(low, start, end), np.clip(high, start, end)
            inside = ~((low > end) | (high < start))  # NaN stays inside
            width = up(right - left)
            bend = 0.0 if curvature == LINEAR else _BEND * width * width
            if curvature * side <= 0:
                found = np.minimum(gap(left).low, gap(right).low) - bend
            else:
                at = self._touch(slope, left, right, curvature)
                tilt = self.derivative(Ball.exact(at)) - Ball.exact(slope)
                tilt = tilt if side > 0 else -tilt
                ends = (tilt * (Ball.exact(end) - Ball.exact(at)) for end in (left, right))
                at_left, at_right = (gap(at) + fall for fall in ends)
                found = np.minimum(at_left.low, at_right.low) - bend
            best = np.where(inside, np.minimum(best, down(found)), best)
        return side * best

    def _touch(self, slope: Array, left: Array, right: Array, curvature: int) -> Array:
        if self.touch is not None:
            at = self.touch(slope)
            return np.clip(np.where(np.isnan(at), 0.5 * (left + right), at), left, right)
        low, high = left.copy(), right.copy()
        for _ in range(_SECTIONS):
            at = 0.5 * (low + high)
            over = curvature * (self.derivative(Ball.exact(at)).mid - slope) > 0
            low, high = np.where(over, low, at), np.where(over, at, high)
        return 0.5 * (low + high)


def _half_normal(x: Ball) -> Ball:
    """``Φ(x) = erfc(−x/√2) / 2``."""
    return Ball.exact(0.5) * (x * -_ROOT_HALF).erfc()


def _density(x: Ball) -> Ball:
    return (Ball.exact(-0.5) * (x * x)).exp() * _INVERSE_ROOT


def _constant(value: float) -> Ball:
    """A constant that was rounded a few times."""
    return Ball(np.asarray(value), np.asarray(4 * abs(value) * 2.0**-53))


_ROOT_HALF, _INVERSE_ROOT = _constant(math.sqrt(0.5)), _constant(1 / math.sqrt(2 * math.pi))
_TWICE_C, _CUBIC = _constant(2 * math.sqrt(2 / math.pi)), _constant(0.044715)
_ONE = Ball.exact(1.0)


def _logistic(y: Ball) -> Ball:
    """``1 / (1 + e^−y)``.

    The argument is kept where exp is finite, which moves the value by at most e⁻⁶⁹⁰ < 2.4e-300.
    """
    found = _ONE / (_ONE + (-Ball(np.clip(y.mid, -690.0, 690.0), y.rad)).exp())
    return Ball(found.mid, found.rad + 1e-299)


def _gelu_tanh(x: Ball) -> Ball:
    return x * _logistic(_TWICE_C * (x + _CUBIC * (x * x * x)))


def _gelu_tanh_slope(x: Ball) -> Ball:
    s = _logistic(_TWICE_C * (x + _CUBIC * (x * x * x)))
    inner = _TWICE_C * (_ONE + Ball.exact(3.0) * _CUBIC * (x * x))
    return s + x * (s * (_ONE - s)) * inner


def _tanh_slope(x: Ball) -> Ball:
    t = x.tanh()
    return _ONE - t * t


def _gelu(value: Value, derivative: Value, turn: float, least: float) -> Function:
    """f'' < 0 outside [−t, t], > 0 inside; the minimum lies near −0.75."""
    pieces = ((-math.inf, -turn, CONCAVE), (-turn, turn, CONVEX), (turn, math.inf, CONCAVE))
    return Function(
        value,
        derivative,
        pieces,
        least=least,
        turns=(-0.76, -0.75),
        bend=0.8,
    )


FUNCTIONS: dict[str, Function] = {
    "relu": Function(
        lambda x: Ball(np.maximum(x.mid, 0), x.rad),
        lambda x: Ball.exact((x.mid > 0).astype(np.float64)),  # 0 or 1 at the kink: either is a slope
        ((-math.inf, 0.0, LINEAR), (0.0, math.inf, LINEAR)),
        least=0.0,
    ),
    "gelu": _gelu(
        lambda x: x * _half_normal(x),
        lambda x: _half_normal(x) + x * _density(x),
        math.sqrt(2),
        -0.16997120747990373,
    ),
    "gelu_tanh": _gelu(_gelu_tanh, _gelu_tanh_slope, 1.4185040087908284, -0.1700407505712541),
    "tanh": Function(
        Ball.tanh,
        _tanh_slope,
        ((-math.inf, 0.0, CONVEX), (0.0, math.inf, CONCAVE)),
        least=-1.0,
        greatest=1.0,
        bend=0.77,
    ),
    "exp": Function(
        Ball.exp,
        Ball.exp,
        ((-math.inf, math.inf, CONVEX),),
        touch=lambda k: np.log(np.maximum(k, 0.0)),
        least=0.0,
    ),
    "reciprocal": Function(
        lambda x: _ONE / x,
        lambda x: -(_ONE / (x * x)),
        ((0.0, math.inf, CONVEX),),
        touch=lambda k: 1 / np.sqrt(np.maximum(-k, 0.0)),
        positive=True,
        least=0.0,
    ),
    "rsqrt": Function(
        lambda x: _ONE / x.sqrt(),
        lambda x: Ball.exact(-0.5) / (x * x.sqrt()),
        ((0.0, math.inf, CONVEX),),
        touch=lambda k: np.maximum(-2 * k, 0.0) ** (-2 / 3),
        positive=True,
        least=0.0,
    ),
    "square": Function(
        lambda x: x * x,
        lambda x: Ball.exact(2.0) * x,
        ((-math.inf, math.inf, CONVEX),),
        touch=lambda k: 0.5 * k,
        least=0.0,
        turns=(0.0, 0.0),
    ),
}
