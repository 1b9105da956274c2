"""Multi-norm zonotopes: values as affine functions of the words' moves and of noise symbols.

    x = c + A·φ + B·ε    with ‖φ_d‖_p ≤ 1 for every moved word d, and ε ∈ [−1, 1]^E

An entry lies within ``c ± (Σ_d ‖A_d‖_q + ‖B‖_1)``, 1/p + 1/q = 1. Affine maps are exact. A function is
replaced by a line, and a symbol of its own covers the distance; so it does for the quadratic part of a
product. The lines and the bounds of products are those of DeepT-Fast (Bonaert et al., PLDI 2021). All is
float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.network import Bilinear

ABOVE_ZERO = 0.01
"""How much nearer than necessary the tangents of exp and 1/x touch for their lines to stay positive."""
ROUNDINGS = 8 * torch.finfo(torch.float64).eps
"""Relative to its two ends, what the distance between a function and its line may be wrong by."""
SLICE = 1 << 19
"""Numbers that are worked on at a time where a whole product would not fit into a cache."""

Linear = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Zonotope:
    """A value of any shape; `least` is a number no entry falls below, whatever the coefficients say.

    The first symbols of two values are the same symbols; the one with fewer does not depend on the others.
    """

    center: Float[Tensor, "*entries"]
    moves: Float[Tensor, "words width *entries"]
    noise: Float[Tensor, "symbols *entries"]
    q: float
    least: float = -math.inf

    @property
    def symbols(self) -> int:
        """How many noise symbols the value knows of."""
        return len(self.noise)

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """The centre and the coefficients, for what treats them alike."""
        return self.center, self.moves, self.noise

    def reach(self) -> tuple[Float[Tensor, "*entries"], Float[Tensor, "*entries"]]:
        """How far the moves and the noise take an entry from the centre, each for itself."""
        return _reach(self.moves, self.q), _total(self.noise)

    def radius(self) -> Float[Tensor, "*entries"]:
        """How far they take it together."""
        moves, noise = self.reach()
        return moves + noise

    def box(self) -> tuple[Float[Tensor, "*entries"], Float[Tensor, "*entries"]]:
        """The smallest and the largest value of every entry."""
        radius = self.radius()
        return (self.center - radius).clamp_min(self.least), (self.center + radius).clamp_min(self.least)

    def map(self, linear: Linear, bias: Tensor | float = 0.0) -> Zonotope:
        """``linear(x) + bias``; the function keeps all axes in front of those of the value."""
        center, moves, noise = (linear(v) for v in self.parts)
        return Zonotope(center + bias, moves, noise, self.q)

    def plus(self, other: Zonotope) -> Zonotope:
        """The sum, entry by entry."""
        few, many = sorted((self, other), key=lambda z: z.symbols)
        noise = many.noise.clone()
        noise[: few.symbols] += few.noise
        return Zonotope(few.center + many.center, few.moves + many.moves, noise, self.q)

    def blurred(self, radius: Float[Tensor, "*entries"], used: int) -> Zonotope:
        """Every entry ± its radius, by symbols of their own after the `used` ones; none where it is 0."""
        fresh = (radius != 0).flatten().nonzero()[:, 0]
        noise = radius.new_zeros(used + len(fresh), radius.numel())
        noise[: self.symbols] = self.noise.flatten(1)
        noise[used + torch.arange(len(fresh), device=fresh.device), fresh] = radius.flatten()[fresh]
        return replace(self, noise=noise.unflatten(1, radius.shape))

    def reduced(self, symbols: int) -> Zonotope:
        """The given number of symbols, those with the largest coefficients, and one per entry for the rest.

        This is DeepT's DecorrelateMin_k, left out where there would be no fewer symbols than before. The new
        ones have nothing to do with those of other values.
        """
        if self.symbols <= symbols + self.center.numel():
            return self
        order = self.noise.abs().flatten(1).sum(1).argsort(descending=True)
        kept, rest = self.noise[order[:symbols].sort().values], self.noise[order[symbols:]]
        return replace(self, noise=kept).blurred(_total(rest), symbols)


def _reach(moves: Float[Tensor, "words width *entries"], q: float) -> Float[Tensor, "*entries"]:
    """``Σ_d ‖A_d‖_q``."""
    return torch.linalg.vector_norm(moves, q, dim=1).sum(0)


def _total(noise: Float[Tensor, "symbols *entries"]) -> Float[Tensor, "*entries"]:
    """``‖B‖_1``, in slices that fit into a cache."""
    total = noise.new_zeros(noise.shape[1:])
    for part in noise.split(max(1, SLICE // max(1, total.numel()))):
        total += part.abs().sum(0)
    return total


# --- functions of one variable ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Line:
    """``|f(x) − slope·x − shift| ≤ slack`` on an interval."""

    slope: Float[Tensor, "*entries"]
    shift: Float[Tensor, "*entries"]
    slack: Float[Tensor, "*entries"]

    def of(self, z: Zonotope, used: int) -> Zonotope:
        """The function of a value whose box the line was made for."""
        return z.map(lambda v: v * self.slope, self.shift).blurred(self.slack, used)


def _between(slope: Tensor, lowest: Tensor, highest: Tensor, varies: Tensor) -> Line:
    """The line in the middle if ``f − slope·x`` ranges from lowest to highest; exact where nothing varies."""
    slack = (highest - lowest).clamp_min(0) / 2 + ROUNDINGS * (lowest.abs() + highest.abs())
    return Line(slope, (lowest + highest) / 2, torch.where(varies, slack, 0.0))


def _convex(f: Linear, slope: Linear, touch: Tensor, lower: Tensor, upper: Tensor) -> Line:
    """The tangent at a point of the interval from below, its parallel through the higher end from above."""
    k = slope(touch)
    ends = torch.maximum(f(lower) - k * lower, f(upper) - k * upper)
    return _between(k, f(touch) - k * touch, ends, upper > lower)


def relu_line(lower: Tensor, upper: Tensor) -> Line:
    """λ = u/(u − l) where the sign is open: the least area."""
    top, bottom = upper.clamp_min(0), lower.clamp_max(0)
    slope = torch.where(top == 0, 0.0, top / (top - bottom))
    stable = (bottom == 0) | (top == 0)
    return _between(slope, torch.zeros_like(slope), -slope * bottom, ~stable)


def tanh_line(lower: Tensor, upper: Tensor) -> Line:
    """λ = the smaller slope at an end, which is the smallest of all: ``tanh x − λx`` grows."""
    low, high = lower.tanh(), upper.tanh()
    slope = torch.minimum(1 - low * low, 1 - high * high)
    return _between(slope, low - slope * lower, high - slope * upper, upper > lower)


def exp_line(lower: Tensor, upper: Tensor) -> Line:
    """The tangent parallel to the chord, or one that touches sooner and is positive at the lower end."""
    wide = upper - lower
    parallel = torch.where(wide > 0, torch.log(torch.expm1(wide) / wide), 0.0)
    touch = lower + torch.minimum(torch.minimum(parallel, wide), torch.full_like(wide, 1 - ABOVE_ZERO))
    return _convex(torch.exp, torch.exp, touch, lower, upper)


def reciprocal_line(lower: Tensor, upper: Tensor) -> Line:
    """The tangent parallel to the chord, or one that touches later and is positive at the upper end."""
    lower = torch.where(lower > 0, lower, math.nan)
    touch = torch.maximum((lower * upper).sqrt(), (1 + ABOVE_ZERO) / 2 * upper)
    touch = torch.minimum(torch.maximum(touch, lower), upper)
    return _convex(torch.reciprocal, lambda t: -1 / (t * t), touch, lower, upper)


def rsqrt_line(lower: Tensor, upper: Tensor) -> Line:
    """The tangent parallel to the chord."""
    lower = torch.where(lower > 0, lower, math.nan)
    low, high = lower.sqrt(), upper.sqrt()
    touch = (low * high * (low + high) / 2) ** (2 / 3)
    touch = torch.minimum(torch.maximum(touch, lower), upper)
    return _convex(torch.rsqrt, lambda t: -0.5 * t.rsqrt() / t, touch, lower, upper)


def square_line(lower: Tensor, upper: Tensor) -> Line:
    """The tangent parallel to the chord, in the middle."""
    return _convex(torch.square, lambda t: 2 * t, lower + (upper - lower) / 2, lower, upper)


LINES: Mapping[str, Callable[[Tensor, Tensor], Line]] = {
    "relu": relu_line,
    "tanh": tanh_line,
    "exp": exp_line,
    "reciprocal": reciprocal_line,
    "rsqrt": rsqrt_line,
    "square": square_line,
}


# --- products -----------------------------------------------------------------------------------------------


def product(op: Bilinear, x: Zonotope, y: Zonotope, used: int) -> Zonotope:
    """``scale · Σ x·y``: what is affine in the symbols is exact, the rest is one more symbol per entry.

    The remainder ``Σ_k (A₁φ + B₁ε)_k (A₂φ + B₂ε)_k`` has four parts. Where φ takes part its dual norm is
    taken last, ``|Σ_k (A₁φ)_k r_k| ≤ Σ_d ‖Σ_k |A₁|_kd r_k‖_q`` with r_k the reach of the other factor; of the
    two orders for φ·φ the better one counts. For ε·ε it is ``Σ_k ‖B₁‖_1 ‖B₂‖_1``. (That ``ε_e² ∈ [0, 1]`` was
    tried: it costs a product more, and raises margins of trained encoders by less than 1 %.)
    """
    x, y = x.map(lambda v: op.split(v, op.x)), y.map(lambda v: op.split(v, op.y))
    symbols = max(x.symbols, y.symbols)

    def times(a: Tensor, b: Tensor, lead: str = "", other: str = "") -> Tensor:
        axes = f"{lead}{op.x},{other}{op.y}->{lead}{other}{op.out}"
        return torch.einsum(axes, a, b)

    moves = times(x.moves, y.center, "de") + times(x.center, y.moves, other="de")
    noise = moves.new_zeros(symbols, *moves.shape[2:])
    noise[: x.symbols] += times(x.noise, y.center, "e")
    noise[: y.symbols] += times(x.center, y.noise, other="e")
    (xm, xn), (ym, yn) = x.reach(), y.reach()

    def nested_x(reach: Tensor) -> Tensor:
        return _reach(times(x.moves.abs(), reach, "de"), x.q)

    def nested_y(reach: Tensor) -> Tensor:
        return _reach(times(reach, y.moves.abs(), other="de"), x.q)

    radius = torch.minimum(nested_x(ym + yn) + nested_y(xn), nested_x(yn) + nested_y(xm + xn)) + times(xn, yn)
    z = Zonotope(times(x.center, y.center), moves, noise, x.q).blurred(radius, used)
    return z.map(lambda v: op.scale * v.flatten(-2))


# --- softmax ------------------------------------------------------------------------------------------------


def softmax(scores: Zonotope, heads: int, used: int) -> Zonotope:
    """``p_i = 1 / Σ_j exp(s_j − s_i)`` over the keys of every head.

    Differences are taken before anything is bounded, so what scores have in common cancels. The symbols of
    the exponentials reach one entry only, so one symbol of their total size replaces them, and that of the
    reciprocal, without any loss. At the end the entries are rewritten knowing that they sum to 1.
    """
    s = scores.map(lambda v: v.unflatten(-1, (heads, -1)))
    line = exp_line(*_difference_box(s))
    own = torch.eye(s.center.shape[-1], dtype=torch.bool, device=s.center.device)
    slope = line.slope.masked_fill(own, 0.0)  # exp(s_i − s_i) = 1
    through = slope - torch.diag_embed(slope.sum(-1))
    bias = 1 + line.shift.masked_fill(own, 0.0).sum(-1)
    total = s.map(lambda v: torch.einsum("...ihj,ihkj->...ihk", v, through), bias)
    blur = line.slack.masked_fill(own, 0.0).sum(-1)
    lower, upper = total.box()
    inverse = reciprocal_line((lower - blur).clamp_min(1.0), upper + blur)
    p = total.map(lambda v: v * inverse.slope, inverse.shift)
    p = p.blurred(inverse.slack + inverse.slope.abs() * blur, used)
    return _summing_to_one(p).map(lambda v: v.flatten(-2))


def _difference_box(s: Zonotope) -> tuple[Float[Tensor, "*rows keys keys"], Float[Tensor, "*rows keys keys"]]:
    """The range of ``s_j − s_i``, at place [i, j]."""
    center = s.center.unsqueeze(-2) - s.center.unsqueeze(-1)
    radius = torch.zeros_like(center)
    for coefficients, q in ((s.noise, 1.0), *((word, s.q) for word in s.moves)):
        points = coefficients.movedim(0, -1).contiguous()
        radius += torch.cdist(points, points, q, compute_mode="donot_use_mm_for_euclid_dist")
    return center - radius, center + radius


def _summing_to_one(p: Zonotope) -> Zonotope:
    """Entries of softmax rows, each replaced by ``1 − the others`` where that is narrower.

    In between, ``p_i − t·(Σp − 1)`` is just as sound for every t, but what is narrowest is one or the other:
    the sum depends on the symbols of the entries' own errors, hardly on any other. (DeepT does so with one
    entry, and from the sum also narrows the ranges of symbols, which divides by small coefficients.)
    """
    rest = p.map(lambda v: v - v.sum(-1, keepdim=True), 1.0)
    swap = rest.radius() < p.radius()
    center, moves, noise = (torch.where(swap, r, v) for r, v in zip(rest.parts, p.parts, strict=True))
    return Zonotope(center, moves, noise, p.q)
