"""The scalar functions of the networks: one table, `FUNCTIONS`, with what the relaxations need of each.

A sound line of slope k above or below f needs only the extrema of ``f(x) − k·x``, which lie at the ends of
the interval or where ``f'(x) = k``. So an entry says how to find those points; a new function is one entry.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

Map = Callable[[Tensor], Tensor]
Points = Callable[[Tensor], tuple[Tensor, ...]]
Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]  # f' and f''


def _nowhere(slope: Tensor) -> tuple[Tensor, ...]:
    return ()


@dataclass(frozen=True, eq=False)
class Function:
    """A function of one variable on ``x > domain`` (and at `domain` itself where its value is finite there).

    Guarantees, for float64 (and float32) `x` in the domain:
      * ``value(x)`` is within ``rounding(x, value(x))`` of f(x);
      * every local minimum of ``f(x) − k·x`` inside the domain is among ``minima(k)``, every local maximum
        among ``maxima(k)`` (NaN or any other point where there is none), so accurately that ``f(x) − k·x``
        there is the extreme value up to `rounding`;
      * f decreases up to `valley` and increases after it (−inf: increasing, +inf: decreasing).
    """

    value: Map
    derivative: Map
    minima: Points = _nowhere
    maxima: Points = _nowhere
    near_minima: Points | None = None  # the same points, roughly but fast, for choosing slopes;
    near_maxima: Points | None = None  # only where the exact ones are costly
    second: Map | None = None  # f'' and its zeros, for functions of mixed curvature
    inflections: tuple[float, ...] = ()
    curvature: Literal["convex", "concave"] | None = None
    domain: float = -math.inf
    valley: float = -math.inf
    least: float = -math.inf  # inf f, where it is a number that float64 can hold
    greatest: float = math.inf  # sup f, same
    relative: float = 2.0  # value(x) errs by at most eps · (relative·|f(x)| + condition·|x|)
    condition: float = 0.0

    def stationary(self, slope: Float[Tensor, "*shape"]) -> tuple[Float[Tensor, "*shape"], ...]:
        """All points with f'(x) = slope (NaN where there is none), and the kinks."""
        points = (*self.minima(slope), *self.maxima(slope))
        return tuple(torch.where(x.isfinite(), x, math.nan) for x in points)

    def rounding(
        self, x: Float[Tensor, "*shape"], value: Float[Tensor, "*shape"], also: float = 0.0
    ) -> Float[Tensor, "*shape"]:
        """A bound on |computed − exact| value at `x`, underflow included; and `also` further roundings."""
        if self.relative + also == 0:
            return torch.zeros_like(value)
        info = torch.finfo(value.dtype)
        bound = ((self.relative + also) * info.eps) * value.abs()
        # Nothing underflows where a function that is computed exactly is 0.
        bound = bound + (info.tiny if self.relative else info.tiny * value.abs().sign())
        return bound + (self.condition * info.eps) * x.abs() if self.condition else bound

    def admit(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`x`, with NaN for what lies below the domain."""
        return x if self.domain == -math.inf else torch.where(x >= self.domain, x, math.nan)

    def image(self, ends: Float[Tensor, "2 *shape"]) -> Float[Tensor, "2 *shape"]:
        """The ends of the range of f between two `ends`, widened by rounding only; NaN outside the domain.

        As f falls and then rises, its minimum is at the point nearest to `valley`, its maximum at an end.
        """
        ends = self.admit(ends)
        values = self.value(ends)
        errors = self.rounding(ends, values)
        top = (values + errors).amax(0)
        if math.isinf(self.valley):
            bottom = (values - errors).amin(0)
        else:
            deepest = torch.minimum(ends[0].clamp(min=self.valley), ends[1])
            low = self.value(deepest)
            bottom = low - self.rounding(deepest, low)
        return torch.stack([bottom, top]).clamp(self.least, self.greatest)


def _bisect(f: Map, low: float, high: float) -> float:
    """The root of f, which rises from f(low) < 0 to f(high) > 0, to the last bit."""
    while low < (middle := (low + high) / 2) < high:
        if f(torch.tensor(middle, dtype=torch.float64)) < 0:
            low = middle
        else:
            high = middle
    return low


# --- GELU ---------------------------------------------------------------------------------------------------
# Both forms are f(x) = x·c(x) with a distribution function c of a symmetric bell, so f'(x) + f'(−x) = 1. f'
# falls from 0 to f'(−t) on (−∞, −t], rises to f'(t) on [−t, t] and falls to 1 on [t, ∞).

_ROOT_HALF = math.sqrt(0.5)
_CUBIC = 0.044715
_FURTHEST = 0.1  # of the distance from −t: longer Newton steps are noise
_TWICE_C = 2 * math.sqrt(2 / math.pi)  # gelu_tanh is x·σ(2√(2/π)(x + 0.044715x³)), as (1 + tanh y)/2 = σ(2y)


def _gelu(x: Tensor) -> Tensor:
    # erfc, unlike 1 + erf, keeps its relative accuracy in the negative tail
    return x * (0.5 * torch.special.erfc(x * -_ROOT_HALF))


def _gelu_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """``f' = Φ(x) + xφ(x)`` and ``f'' = (2 − x²)φ(x)``."""
    square = x * x
    density = torch.exp(-0.5 * square) * (1 / math.sqrt(2 * math.pi))
    return 0.5 * torch.special.erfc(x * -_ROOT_HALF) + x * density, (2 - square) * density


def _gelu_tanh(x: Tensor) -> Tensor:
    return x * torch.sigmoid(_TWICE_C * (x * (1 + _CUBIC * (x * x))))


def _gelu_tanh_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """With s = σ(y), y = 2√(2/π)(x + 0.044715x³): ``f' = s + xs'``, ``f'' = 2s' + xs''``,
    ``s' = s(1−s)y'``, ``s'' = s(1−s)((1−2s)y'² + y'')``."""
    square = x * x
    y = _TWICE_C * (x * (1 + _CUBIC * square))
    y1, y2 = _TWICE_C * (1 + 3 * _CUBIC * square), 6 * _TWICE_C * _CUBIC * x
    s = torch.sigmoid(y)
    bell = s * torch.sigmoid(-y)
    return s + x * (bell * y1), bell * (2 * y1 + x * ((1 - 2 * s) * (y1 * y1) + y2))


@dataclass(frozen=True, eq=False)
class _Branch:
    """The inverse of f' on a piece that starts at its minimum f'(−t) < 0: a table and Newton's method.

    The table is even in a variable v(k) in which the inverse is smooth, also at k = f'(−t) where it has a
    square root singularity: ``v = √(k − f'(−t))`` on the piece that rises to the right, and
    ``v = √−log(k/f'(−t))`` on the left one, whose k fades like exp(−x²/2), or exp(x). Interpolation leaves
    an error below 1e-2, relative to the distance from −t, and two Newton steps leave rounding only. A longer
    step is noise: f'' vanishes at −t.
    """

    slopes: Slopes
    variable: Map
    nodes: Float[Tensor, " n"]
    lowest: float
    highest: float
    per_unit: float  # table cells per unit of v

    @staticmethod
    def tabulate(slopes: Slopes, variable: Map, start: float, stop: float, cells: int = 2048) -> _Branch:
        lowest, highest = (float(slopes(torch.tensor(x, dtype=torch.float64))[0]) for x in (start, stop))
        extent = float(variable(torch.tensor(highest, dtype=torch.float64)))
        v = torch.linspace(0, extent, cells + 1, dtype=torch.float64)
        low, high = torch.full_like(v, start), torch.full_like(v, stop)
        for _ in range(60):
            middle = 0.5 * (low + high)
            before = variable(slopes(middle)[0].clamp(lowest, highest)) < v
            low, high = torch.where(before, middle, low), torch.where(before, high, middle)
        return _Branch(slopes, variable, low, lowest, highest, cells / extent)

    @torch.no_grad()
    def __call__(self, slope: Tensor, steps: int) -> Tensor:
        known = (slope >= self.lowest) & (slope <= self.highest)
        place = self.variable(torch.where(known, slope, self.lowest)) * self.per_unit
        index = place.long().clamp_(max=len(self.nodes) - 2)
        nodes = self.nodes.to(slope.device)
        x = torch.lerp(nodes.take(index), nodes.take(index + 1), place - index)
        furthest = _FURTHEST * (x - nodes[0]).abs()
        for _ in range(steps):
            first, second = self.slopes(x)
            step = ((first - slope) / second).nan_to_num(nan=0.0)  # 0/0 only at −t itself
            x = x - torch.minimum(torch.maximum(step, -furthest), furthest)
        return torch.where(known, x, math.nan)


def _gelu_entry(value: Map, slopes: Slopes) -> Function:
    """The entry of a GELU form, its constants found from f' and f''.

    Only the rising piece of f' holds minima of f − k·x and only the falling ones hold maxima. The symmetry
    f'(−x) = 1 − f'(x) leaves two branches to invert: left of −t, and from −t to 0.
    """
    turn = _bisect(lambda x: -slopes(x)[1], 0.5, 3.0)
    valley = _bisect(lambda x: slopes(x)[0], -turn, 0.0)
    # beyond the tail |f'| < 1e-280: what happens there is far below the rounding of x itself
    tail = _bisect(lambda x: slopes(-x)[0] + 1e-280, turn, 800.0)
    least = float(slopes(torch.tensor(-turn, dtype=torch.float64))[0])
    # k/least rounds to no more than 1; least/k, which torch computes as (1/k)·least, may round below it
    outer = _Branch.tabulate(slopes, lambda k: torch.sqrt(-torch.log(k / least)), -turn, -tail)
    inner = _Branch.tabulate(slopes, lambda k: torch.sqrt(k - least), -turn, 0.0)

    def minima(slope: Tensor, steps: int = 2) -> tuple[Tensor, ...]:
        mirrored = slope > 0.5
        x = inner(torch.where(mirrored, 1 - slope, slope), steps)
        return (torch.where(mirrored, -x, x),)

    def maxima(slope: Tensor, steps: int = 2) -> tuple[Tensor, ...]:
        left, right = outer(torch.stack([slope, 1 - slope]), steps).unbind(0)
        return left, -right

    return Function(
        value=value,
        derivative=lambda x: slopes(x)[0],
        second=lambda x: slopes(x)[1],
        inflections=(-turn, turn),
        minima=minima,
        maxima=maxima,
        near_minima=lambda slope: minima(slope, 0),
        near_maxima=lambda slope: maxima(slope, 0),
        valley=valley,
        # the argument of erfc or σ carries a few roundings; |x·d(arg)| stays below |x|
        condition=2.0,
    )


# --- the others ---------------------------------------------------------------------------------------------


def _tanh_bend(slope: Tensor) -> Tensor:
    """The x ≥ 0 with ``1 − tanh²x = k``: ``sinh²x = 1/k − 1``, stable for k near 0 and near 1."""
    return torch.asinh(torch.sqrt((1 - slope) / slope))


def _tanh_second(x: Tensor) -> Tensor:
    value = torch.tanh(x)
    return -2 * value * (1 - value * value)


FUNCTIONS: dict[str, Function] = {
    "relu": Function(
        value=torch.relu,
        derivative=lambda x: torch.relu(x).sign(),
        minima=lambda k: (torch.zeros_like(k),),
        curvature="convex",
        least=0.0,
        relative=0.0,
    ),
    "gelu": _gelu_entry(_gelu, _gelu_slopes),
    "gelu_tanh": _gelu_entry(_gelu_tanh, _gelu_tanh_slopes),
    "tanh": Function(
        value=torch.tanh,
        derivative=lambda x: 1 - torch.tanh(x).square(),
        second=_tanh_second,
        inflections=(0.0,),
        minima=lambda k: (-_tanh_bend(k),),
        maxima=lambda k: (_tanh_bend(k),),
        least=-1.0,
        greatest=1.0,
    ),
    "exp": Function(
        value=torch.exp,
        derivative=torch.exp,
        minima=lambda k: (torch.log(k),),
        curvature="convex",
        least=0.0,
    ),
    "reciprocal": Function(
        value=torch.reciprocal,
        derivative=lambda x: -1 / (x * x),
        minima=lambda k: (torch.rsqrt(-k),),
        curvature="convex",
        domain=0.0,
        valley=math.inf,
        least=0.0,
    ),
    "sqrt": Function(
        value=torch.sqrt,
        derivative=lambda x: 0.5 / torch.sqrt(x),
        maxima=lambda k: (torch.where(k > 0, (0.5 / k).square(), math.nan),),
        curvature="concave",
        domain=0.0,
        least=0.0,
    ),
    "rsqrt": Function(
        value=torch.rsqrt,
        derivative=lambda x: -0.5 * torch.rsqrt(x) / x,
        minima=lambda k: ((-2 * k) ** (-2 / 3),),
        curvature="convex",
        domain=0.0,
        valley=math.inf,
        least=0.0,
    ),
    "square": Function(
        value=torch.square,
        derivative=lambda x: 2 * x,
        minima=lambda k: (0.5 * k,),
        curvature="convex",
        valley=0.0,
        least=0.0,
    ),
}
