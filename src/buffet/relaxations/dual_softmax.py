"""Softmax, bounded as a whole (`softmax.softmax_enclosure`), as a dual pass of a Lagrangian.

The bounds are tangents of a function g at a point t of the box, ``g(t) + ∇g(t)·(x − t)``, so the value at x
changes with t by ``∇²g(t)·(x − t)``. With x and t deviations of the scores and w = x − t, per output j:

    U_LSE   g = chord·log p_j + c, p = softmax(t)      −chord · p_k (w_k − p·w)
    L_LSE   g = e^{t_j} / S, S = Σ C_k(t_k), q = C'/S  g [(δ_jk − q_k)(w_j − q·w) + q_k q·w]
    L_ER    g = 1 / (1 + Σ_{k≠j} C_jk(t_k − t_j))      2g³ C'_k Σ C'w    (by the differences)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from buffet.bounds.intervals import Box, difference_range
from buffet.bounds.medians import lower_median
from buffet.network import Softmax
from buffet.relaxations.dual_passes import DualPass, State
from buffet.relaxations.softmax import chord_slope, log_chord, scores_of


@dataclass(frozen=True, eq=False)
class _Tangents:
    """The tangents at a point t, as slopes ``[..., outputs, keys]`` and constants, with what made them."""

    t: Tensor
    p: Tensor
    upper: Tensor
    upper_constant: Tensor
    lse: Tensor
    q: Tensor
    lse_slope: Tensor
    er: Tensor
    inside: Tensor  # differences of t, kept in their ranges,
    free: Tensor  # and where that changes nothing
    er_slope: Tensor  # by the differences
    mixture: Tensor
    lower: Tensor
    lower_constant: Tensor


@dataclass(frozen=True, eq=False)
class SoftmaxDual(DualPass):
    """Attention weights between tangents of all scores of their query.

    Shares are the points where they touch, the mixture of the two lower bounds, and the constant that Σp = 1
    allows to take off the multipliers. All tensors are float64, ``[tasks, tokens, heads, keys]``, and
    ``[..., outputs, keys]`` where they depend on the output too; ranges are those of deviations.
    """

    heads: int
    scores: Tensor
    peak: Tensor
    weights: Tensor  # the clean ones
    low: Tensor
    width: Tensor
    above: tuple[Tensor, Tensor]  # the chord of exp over the range of log p: slope and constant
    below: tuple[Tensor, Tensor]  # chords of exp over the scores: values at their lower ends, and slopes
    apart: tuple[Tensor, Tensor]  # ranges of the differences of the scores,
    between: tuple[Tensor, Tensor]  # and chords over them

    @staticmethod
    def over(op: Softmax, clean: Tensor, scores: Box, direct: Box | None = None) -> SoftmaxDual:
        s, low, high = scores_of(op, clean, scores)
        peak = high.amax(-1, keepdim=True)
        smallest, largest = difference_range(s, low, high, direct)
        slope, start = chord_slope(smallest, largest), smallest.exp()
        # Where a chord overflows, the bound falls back to 0, as in `softmax_enclosure`.
        lost = ~((largest.exp() + slope).isfinite().all(-1, keepdim=True))
        eye = torch.eye(low.shape[-1], dtype=torch.bool, device=low.device)
        clean_apart = s.unsqueeze(-2) - s.unsqueeze(-1)
        return SoftmaxDual(
            heads=op.heads,
            scores=s,
            peak=peak,
            weights=s.softmax(-1),
            low=low - s,
            width=high - low,
            above=log_chord((smallest, largest)),
            below=((low - peak).exp(), chord_slope(low - peak, high - peak)),
            apart=(smallest - clean_apart, largest - clean_apart),
            between=(
                start.masked_fill(lost, torch.inf).masked_fill(eye, 1.0),
                slope.masked_fill(lost | eye, 0.0),
            ),
        )

    def _tangents(self, point: Tensor, mixture: Tensor) -> _Tangents:
        eye = torch.eye(self.low.shape[-1], dtype=self.low.dtype, device=self.low.device)
        reach = point * self.width.unsqueeze(-2)
        t = self.low.unsqueeze(-2) + reach
        own = _diagonal(t)

        log_p = (self.scores.unsqueeze(-2) + t).log_softmax(-1)
        p = log_p.exp()
        chord, constant = self.above
        slope = eye - p
        upper_constant = chord * (_diagonal(log_p) - (slope * t).sum(-1)) + constant - self.weights

        start, rise = (v.unsqueeze(-2) for v in self.below)
        total = (start + rise * reach).sum(-1)
        lse = (self.scores + own - self.peak).exp() / total
        q = rise / total.unsqueeze(-1)
        lse_slope = lse.unsqueeze(-1) * (eye - q)

        apart = t - own.unsqueeze(-1)
        inside = torch.clamp(apart, *self.apart)
        start, rise = self.between
        er = (start + rise * (inside - self.apart[0])).sum(-1).reciprocal()
        er_slope = (er * er).unsqueeze(-1).neg() * rise

        weight = mixture.unsqueeze(-1)
        by_scores = er_slope - er_slope.sum(-1, keepdim=True) * eye
        value = mixture * (er - (er_slope * inside).sum(-1)) + (1 - mixture) * (lse - (lse_slope * t).sum(-1))
        return _Tangents(
            t=t,
            p=p,
            upper=chord.unsqueeze(-1) * slope,
            upper_constant=upper_constant,
            lse=lse,
            q=q,
            lse_slope=lse_slope,
            er=er,
            inside=inside,
            free=apart == inside,
            er_slope=er_slope,
            mixture=mixture,
            lower=torch.lerp(lse_slope, by_scores, weight),
            lower_constant=value - self.weights,
        )

    def pull(self, multipliers: Tensor, given: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], State]:
        point, mixture, shift = (given[key].double() for key in ("point", "mixture", "shift"))
        tangents = self._tangents(point, mixture)
        whole = self._split(multipliers)
        middle, largest, smallest = lower_median(whole, 3), whole.amax(3, True), whole.amin(3, True)
        away = (shift - 0.5).to(whole.dtype)[..., None, None]
        size = largest - smallest
        shifted = whole - torch.addcmul(middle, away, size)
        parts = torch.stack([shifted.clamp_min(0), shifted.clamp_max(0)])
        slopes = torch.stack([tangents.lower, tangents.upper]).to(whole.dtype)
        pulled = torch.einsum("stihjr,stihjk->tihkr", parts, slopes).flatten(2, 3)
        # How what was taken off changes with every multiplier.
        middle, largest, smallest = (_places(whole == value) for value in (middle, largest, smallest))
        taken = torch.addcmul(middle, away, largest - smallest)
        return (pulled,), (tangents, shifted, parts, slopes, size, taken)

    def push(self, state: State, *values: Tensor) -> tuple[Tensor, State]:
        tangents, shifted, parts, slopes, size, taken = state
        value = self._split(values[0])
        constants = torch.stack([tangents.lower_constant, tangents.upper_constant]).to(value.dtype)
        below, above = torch.einsum("stihjk,tihkr->stihjr", slopes, value) + constants.unsqueeze(-1)
        line = torch.where(shifted.signbit(), above, below)
        total = line.sum(3, keepdim=True)
        pushed = torch.addcmul(line, taken, total, value=-1).flatten(2, 3)
        return pushed, (tangents, parts, (size * total).squeeze(3), value)

    def gradient(self, state: State, weights: Tensor) -> dict[str, Tensor]:
        tangents, parts, gained, value = state
        weighted = parts * weights.unsqueeze(3)
        # All is linear in the values: of the rows, these sums are enough.
        below, above = weighted.sum(-1).double()
        below_x, above_x = torch.einsum("stihjr,tihkr->stihjk", weighted, value).double()
        below_w, above_w = (
            x - part.unsqueeze(-1) * tangents.t for x, part in ((below_x, below), (above_x, above))
        )
        p, q, mixture = tangents.p, tangents.q, tangents.mixture
        pw, qw = ((v * w).sum(-1, keepdim=True) for v, w in ((p, above_w), (q, below_w)))
        eye = torch.eye(p.shape[-1], dtype=p.dtype, device=p.device)

        found = self.above[0].unsqueeze(-1) * p * (pw - above_w)
        lse = ((1 - mixture) * tangents.lse).unsqueeze(-1)
        found = found + lse * ((eye - q) * (_diagonal(below_w).unsqueeze(-1) - qw) + q * qw)
        away = below_x - _diagonal(below_x).unsqueeze(-1) - below.unsqueeze(-1) * tangents.inside
        tilt = (tangents.er_slope * away).sum(-1)
        # 2g³ C' Σ C'w, as the slopes are −g² C'; by the differences, that of t_k and of −t_j
        er = (-2 * mixture * tangents.er * tilt).unsqueeze(-1) * self.between[1] * tangents.free
        found = found + er - er.sum(-1, keepdim=True) * eye

        touched = below * (tangents.er - tangents.lse) + tilt - (tangents.lse_slope * below_w).sum(-1)
        return {
            "point": found * self.width.unsqueeze(-2),
            "mixture": touched,
            "shift": -(weights * gained).sum(-1),
        }

    def _split(self, value: Tensor) -> Tensor:
        return value.unflatten(2, (self.heads, -1))


def _diagonal(value: Tensor) -> Tensor:
    return value.diagonal(dim1=-2, dim2=-1)


def _places(chosen: Tensor) -> Tensor:
    """The derivative of a chosen entry by all of them; where several are equal, each has its part of it."""
    return chosen / chosen.sum(3, keepdim=True)
