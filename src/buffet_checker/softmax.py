"""Linear bounds of attention weights in the scores of their query, valid by construction.

With x the scores of one query and head (shifted by a constant, which softmax does not see) and t a point of
their box:

    above   log p_j is concave, so at most its tangent at t, and p = e^y ≤ κ·y + c for y in [log p̲, log p̄],
            where c makes the line valid at both ends: exp is convex.
    below   e^{x_j} / Σ_k C_k(x_k), C_k a line above exp over the range of x_k      (log-sum-exp)
            1 / (1 + Σ_{k≠j} C_jk(x_k − x_j)), the same over ranges of differences  (exponential-reciprocal)
            are convex where they are defined, so at least their tangents at t; so is any mixture.

Slopes are rounded to floats first; constants are balls, and what rounding the slopes may cost over the box is
added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import Array, Ball, U, up, where
from buffet_checker.graph import Node
from buffet_checker.intervals import Box, differences, magnitude
from buffet_checker.pieces import SoftmaxPiece

_NARROW = 1e-9


@dataclass(frozen=True)
class SoftmaxShares:
    """What a certificate chooses for a softmax: shares in [0, 1], every one of them valid."""

    point: Array  # where in the box the tangents touch
    mixture: Array  # of the two lower bounds
    shift: Array | None


def softmax_piece(
    node: Node,
    value: Array,
    values: list[Array],
    boxes: list[Box],
    out: Box,
    shares: SoftmaxShares,
    rounding: Array,
) -> SoftmaxPiece:
    """The piece of a softmax."""
    shape = len(value), node.heads, -1
    c = values[0].reshape(shape)
    box = boxes[0][0].reshape(shape), boxes[0][1].reshape(shape)
    s = Ball.exact(c) - Ball.exact(c.max(-1, keepdims=True))
    low, high = (s + Ball.exact(box[0])).low, (s + Ball.exact(box[1])).high
    touch = low[..., None, :] + shares.point * (high - low)[..., None, :]
    touch = np.clip(
        np.broadcast_to(touch, (*low.shape, low.shape[-1])), low[..., None, :], high[..., None, :]
    )
    ranges = differences(node, values, boxes)
    reach = magnitude(box)[..., None, :]
    p = Ball.exact(value.reshape(c.shape))

    def finish(gradient: Ball, constant: Ball, side: int) -> tuple[Array, Array]:
        """Slopes as floats, and the constant in deviations: ``x = s + a``, ``p = p̂ + …``."""
        slope = gradient.mid
        constant = constant + (gradient * s[..., None, :]).sum() - p
        lost = Ball.exact(up((gradient - Ball.exact(slope)).size * reach)).sum()
        end = (constant + lost).high if side > 0 else (constant - lost).low
        return slope, end.reshape(value.shape)

    lower_slope, lower = finish(*_below(low, high, ranges, touch, shares.mixture), -1)
    upper_slope, upper = finish(*_above(ranges, touch), 1)
    leak = np.stack([(Ball.exact(1.0) - p.sum()).size, rounding.reshape(c.shape).sum(-1) * (1 + 1e-8)])
    return SoftmaxPiece(4 * U * magnitude(out), lower_slope, upper_slope, lower, upper, shares.shift, leak)


def _above(ranges: Box, touch: Array) -> tuple[Ball, Ball]:
    """Gradient and constant (in shifted scores) of the tangent of the upper bound at `touch`."""
    least, largest = (-(Ball.exact(end).exp().sum().log()) for end in (ranges[1], ranges[0]))
    y_low, y_high = least.low, largest.high
    width = y_high - y_low
    chord = np.where(
        width < _NARROW, np.exp(y_high), (np.exp(y_high) - np.exp(y_low)) / np.where(width > 0, width, 1.0)
    )
    over = [(Ball.exact(y).exp() - Ball.exact(chord) * Ball.exact(y)).high for y in (y_low, y_high)]
    c = Ball.exact(np.maximum(*over))
    t, peak = Ball.exact(touch), Ball.exact(touch.max(-1))
    total = (t - peak[..., None]).exp().sum().log() + peak
    own = Ball.exact(np.diagonal(touch, axis1=-2, axis2=-1))
    gradient = Ball.exact(np.eye(touch.shape[-1])) - (t - total[..., None]).exp()
    constant = own - total - (gradient * t).sum()
    slope = Ball.exact(chord)
    return slope[..., None] * gradient, slope * constant + c


def _below(low: Array, high: Array, ranges: Box, touch: Array, mixture: Array) -> tuple[Ball, Ball]:
    eye = np.eye(low.shape[-1], dtype=bool)
    one, t = Ball.exact(1.0), Ball.exact(touch)

    # e^{x_j} / Σ C_k(x_k), scaled by the largest score
    peak = high.max(-1, keepdims=True)
    chord, base = _chord((Ball.exact(low) - Ball.exact(peak)).low, (Ball.exact(high) - Ball.exact(peak)).high)
    k = Ball.exact(chord[..., None, :])
    # the lines are over [low − peak, high − peak], rounded outward: shift the variable alike
    start = Ball.exact((Ball.exact(low) - Ball.exact(peak)).low[..., None, :]) + Ball.exact(peak[..., None])
    total = (k * (t - start) + Ball.exact(base[..., None, :])).sum()
    own = Ball.exact(np.diagonal(touch, axis1=-2, axis2=-1))
    lse = (own - Ball.exact(peak)).exp() / total
    lse_gradient = lse[..., None] * (Ball.exact(eye.astype(np.float64)) - k / total[..., None])
    lse_constant = lse - (lse_gradient * t).sum()

    # 1 / (1 + Σ C_jk(x_k − x_j)), touched inside the ranges of the differences
    inside = np.clip(touch - np.diagonal(touch, axis1=-2, axis2=-1)[..., None], *ranges)
    chord, base = _chord(*ranges)
    lost = np.asarray(~np.isfinite(chord + base).all(-1, keepdims=True))  # overflow: 0 is below every weight
    chord, base = np.where(lost | eye, 0.0, chord), np.where(lost | eye, eye * 1.0, base)
    at = Ball.exact(chord) * (Ball.exact(inside) - Ball.exact(ranges[0])) + Ball.exact(base)
    er = one / where(np.broadcast_to(eye, base.shape), Ball.exact(np.ones_like(base)), at).sum()
    outward = -((er * er)[..., None] * Ball.exact(chord))
    nothing = Ball.exact(np.zeros_like(base))
    er = where(lost[..., 0], nothing[..., 0], er)
    outward = where(np.broadcast_to(lost | eye, base.shape), nothing, outward)
    er_gradient = where(np.broadcast_to(eye, base.shape), (-(outward.sum()))[..., None] + nothing, outward)
    er_constant = er - (outward * Ball.exact(inside)).sum()

    share = Ball.exact(mixture)
    rest = one - share
    gradient = share[..., None] * er_gradient + rest[..., None] * lse_gradient
    return gradient, share * er_constant + rest * lse_constant


def _chord(low: Array, high: Array) -> tuple[Array, Array]:
    """A slope κ ≥ 0 and a base b with ``e^x ≤ κ·(x − low) + b`` on [low, high].

    Valid at both ends, so between.
    """
    width = high - low
    slope = np.exp(low) * np.where(width > 0, np.expm1(width) / np.where(width > 0, width, 1.0), 1.0)
    at_low, at_high = Ball.exact(low).exp(), Ball.exact(high).exp()
    rise = Ball.exact(slope) * (Ball.exact(high) - Ball.exact(low))
    return slope, np.maximum(at_low.high, (at_high - rise).high)
