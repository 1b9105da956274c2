"""Softmax: taken apart into operations the rest knows, or bounded as a whole.

`decompose` replaces every softmax by ``exp``, a sum, ``1/·`` and a product (Shi et al. 2020);
`softmax_enclosure` bounds the attention weights directly (Wei et al. 2023), the tighter the more is known of
the differences of their scores (`with_differences`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.intervals import EPS, Box, difference_range
from buffet.network import Affine, Apply, Input, Node, Normalise, Offset, Op, Program, Softmax
from buffet.relaxations.enclosures import SoftmaxEnclosure


def decompose(program: Program, x: Float[Tensor, "tokens width"]) -> tuple[Program, list[Tensor]]:
    """The same function with every softmax taken apart, for inputs near `x`, and its values at `x`.

    The scores are shifted by their maximum at `x`, a constant of every query and head: softmax does not
    change and neither do its relaxations, but ``exp`` stays in range.
    """

    def replacement(write: _Writer, op: Softmax, scores: int) -> int:
        heads = op.heads
        value = write.values[scores].unflatten(-1, (heads, -1))
        peak = value.amax(-1, keepdim=True).expand_as(value).flatten(-2)
        sums = torch.eye(heads, dtype=x.dtype, device=x.device).repeat_interleave(value.shape[-1], 1)
        e = write(Apply("exp"), write(Offset(-peak), scores))
        total = write(Affine(sums, sums.new_zeros(heads)), e)
        return write(Normalise(heads=heads), e, write(Apply("reciprocal"), total))

    return _rewrite(program, x, replacement)


def with_differences(program: Program, x: Float[Tensor, "tokens width"]) -> tuple[Program, list[Tensor]]:
    """The same function where every softmax also reads the differences between the scores of a query.

    It does not need them, but their bounds are tighter than what the boxes of the scores say of them.
    """

    def replacement(write: _Writer, op: Softmax, scores: int) -> int:
        keys = write.values[scores].shape[-1] // op.heads
        if keys == 1:
            return write(op, scores)
        first, second = torch.triu_indices(keys, keys, 1, device=x.device)
        eye = torch.eye(keys, dtype=x.dtype, device=x.device)
        each = torch.eye(op.heads, dtype=x.dtype, device=x.device)
        matrix = torch.kron(each, eye[second] - eye[first])
        return write(op, scores, write(Affine(matrix, matrix.new_zeros(len(matrix))), scores))

    return _rewrite(program, x, replacement)


def as_it_is(program: Program, x: Float[Tensor, "tokens width"]) -> tuple[Program, list[Tensor]]:
    """The program itself, and its values at `x`."""
    return program, program.values(x)


Rewrite = Callable[[Program, Float[Tensor, "tokens width"]], tuple[Program, list[Tensor]]]
SOFTMAXES: Mapping[str, Rewrite] = {"decomposed": decompose, "lse": as_it_is, "differences": with_differences}
"""Softmax taken apart (as published with CROWN-BaF); bounded as a whole; or that with the differences between
the scores of a query bounded directly, not only by subtracting their boxes."""


class _Writer:
    """Writes a program node by node together with its values at one input."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.nodes: list[Node] = []
        self.values: list[Tensor] = []

    def __call__(self, op: Op, *inputs: int) -> int:
        self.nodes.append(Node(op, inputs))
        self.values.append(
            self.x if isinstance(op, Input) else op.evaluate(*(self.values[i] for i in inputs))
        )
        return len(self.nodes) - 1


def _rewrite(
    program: Program, x: Tensor, replacement: Callable[[_Writer, Softmax, int], int]
) -> tuple[Program, list[Tensor]]:
    """The program with every softmax replaced, and its values at `x`."""
    write = _Writer(x)
    moved: list[int] = []  # old index → new index
    for node in program.nodes:
        inputs = tuple(moved[i] for i in node.inputs)
        if isinstance(node.op, Softmax):
            moved.append(replacement(write, node.op, inputs[0]))
        else:
            moved.append(write(node.op, *inputs))
    return Program(tuple(write.nodes)), write.values


def softmax_enclosure(
    op: Softmax,
    clean: Float[Tensor, "tokens features"],
    scores: Box,
    direct: Box | None = None,
    *,
    point: Float[Tensor, "#tasks #tokens #heads #keys #keys"] | float = 0.5,
    mixture: Float[Tensor, "#tasks #tokens #heads #keys"] | None = None,
    shift: Float[Tensor, "#tasks #tokens #heads"] | None = None,
    dtype: torch.dtype = torch.float64,
) -> SoftmaxEnclosure:
    """Linear bounds of every attention weight in the scores of its query (Wei et al. 2023).

    With x the scores of one query and head, x_k ∈ [l_k, u_k], and C_k the chord of exp over that range:

        above   p_j = exp(log p_j), log p_j = x_j − LSE(x): the chord of exp over [log p̲_j, log p̄_j] of the
                concave log p_j                                                          (U_LSE)
        below   e^{x_j} / Σ_k C_k(x_k)                                                   (L_LSE)
                1 / (1 + Σ_{k≠j} C_jk(x_k − x_j)), chords over [l_k − u_j, u_k − l_j]    (L_ER)

    The first is concave, the others are convex, so their tangents at any point of the box are sound lines,
    and so is any convex mixture of the lower ones.

    Args:
        direct: bounds of the differences of the scores (`with_differences`), if there are any.
        point: where the tangents touch, as a share of the box (0: lower end, 1: upper end), per output j.
        mixture: weight of L_ER against L_LSE, 0 to 1; by default the one that is larger at the tangent point.
        shift: what is taken off the coefficients of the weights, as `SoftmaxEnclosure` says.
    """
    s, low, high = scores_of(op, clean, scores)
    touch = low.unsqueeze(-2) + point * (high - low).unsqueeze(-2)
    touch = touch.expand(*low.shape, low.shape[-1])  # tasks, queries, heads, outputs, keys
    differences = difference_range(s, low, high, direct)
    upper, upper_constant = _above(differences, touch)
    lower, lower_constant = _below(low, high, differences, touch, mixture)

    # From scores x to deviations a = x − ŝ, and from p to p − p̂. What rounding the slopes to the engine's
    # precision may cost over the box goes into the constant, which is rounded outward.
    p = s.softmax(-1)
    reach = torch.maximum((low - s).abs(), (high - s).abs()).unsqueeze(-2)

    def finish(slope: Tensor, constant: Tensor, side: int) -> tuple[Tensor, Tensor]:
        constant = constant + (slope * s.unsqueeze(-2)).sum(-1) - p
        stored = slope.to(dtype)
        with torch.no_grad():
            lost = ((slope - stored.double()).abs() * reach).sum(-1)
            far = s.unsqueeze(-2).abs() + reach
            sums = (slope.abs() * far).sum(-1) + 1 + far.amax(-1).clamp_max(800.0)  # exponents err by units
            slack = side * (lost + torch.finfo(dtype).eps * constant.abs() + 16 * EPS * sums)
        return stored, (constant + slack).flatten(2).to(dtype)

    lower, lower_constant = finish(lower, lower_constant, -1)
    upper, upper_constant = finish(upper, upper_constant, 1)
    return SoftmaxEnclosure(
        lower, upper, lower_constant, upper_constant, None if shift is None else shift.to(dtype)
    )


def _above(differences: tuple[Tensor, Tensor], touch: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes and constant (in absolute scores) of the tangent of U_LSE at `touch`."""
    chord, c = log_chord(differences)
    at = touch.log_softmax(-1)  # outputs, keys
    value = at.diagonal(dim1=-2, dim2=-1)
    slope = torch.eye(touch.shape[-1], dtype=touch.dtype, device=touch.device) - at.exp()
    constant = value - (slope * touch).sum(-1)
    return chord.unsqueeze(-1) * slope, chord * constant + c


def log_chord(differences: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Slope and constant of the chord of exp over ``[log p̲_j, log p̄_j]``."""
    # p_j = 1 / Σ_k e^{x_k − x_j}; logarithms are never taken of a number that may have underflowed.
    log_low, log_high = -differences[1].logsumexp(-1), -differences[0].logsumexp(-1)
    p_low, p_high = log_low.exp(), log_high.exp()
    spread = log_high - log_low
    narrow = spread < 1e-9
    chord = torch.where(narrow, p_high, (p_high - p_low) / torch.where(narrow, 1.0, spread))
    # e^y ≤ chord·y + c for y in [log p̲, log p̄]: exp is convex, so the worst y is an end.
    return chord, torch.maximum(p_low - chord * log_low, p_high - chord * log_high)


def better_bound(
    op: Softmax, clean: Float[Tensor, "tokens features"], scores: Box, direct: Box | None = None
) -> Float[Tensor, "tasks tokens heads keys"]:
    """The mixture that takes the larger one of L_ER (1) and L_LSE (0) in the middle of the box."""
    s, low, high = scores_of(op, clean, scores)
    middle = (0.5 * (low + high)).unsqueeze(-2).expand(*low.shape, low.shape[-1])
    (er, _), (lse, _) = _lower_bounds(low, high, difference_range(s, low, high, direct), middle)
    return (er >= lse).to(er.dtype)


def scores_of(op: Softmax, clean: Tensor, scores: Box) -> tuple[Tensor, Tensor, Tensor]:
    """Clean scores by head and the ends of their ranges, shifted so that large ones do not cancel."""
    s = clean[None].unflatten(-1, (op.heads, -1))
    s = s - s.amax(-1, keepdim=True)  # softmax does not change
    low, high = (s + v.unflatten(-1, (op.heads, -1)) for v in (scores.lower, scores.upper))
    return s, low, high


def _below(
    low: Tensor, high: Tensor, differences: tuple[Tensor, Tensor], touch: Tensor, mixture: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Slopes and constant (in absolute scores) of a mixture of the tangents of L_ER and L_LSE at `touch`."""
    (er, er_slope), (lse, lse_slope) = _lower_bounds(low, high, differences, touch)
    if mixture is None:
        mixture = (er >= lse).to(er.dtype)
    weight = mixture.unsqueeze(-1)
    slope = weight * er_slope + (1 - weight) * lse_slope
    value = mixture * er + (1 - mixture) * lse
    return slope, value - (slope * touch).sum(-1)


def _lower_bounds(
    low: Tensor, high: Tensor, differences: tuple[Tensor, Tensor], touch: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Values and slopes of L_ER and of L_LSE at `touch`."""
    own = touch.diagonal(dim1=-2, dim2=-1)
    eye = torch.eye(low.shape[-1], dtype=torch.bool, device=low.device)

    # L_LSE, scaled by the largest score of the row.
    peak = high.amax(-1, keepdim=True)
    value, chord = _chord_at(
        (low - peak).unsqueeze(-2), (high - peak).unsqueeze(-2), touch - peak.unsqueeze(-1)
    )
    total = value.sum(-1)
    lse = (own - peak).exp() / total
    lse_slope = lse.unsqueeze(-1) * (eye.to(lse.dtype) - chord / total.unsqueeze(-1))

    # L_ER on the differences x_k − x_j, touched inside their ranges: a chord may be negative outside.
    apart = touch - own.unsqueeze(-1)
    inside = torch.minimum(torch.maximum(apart, differences[0]), differences[1])
    value, chord = _chord_at(*differences, inside)
    # Where a chord overflows, the bound falls back to 0, which every weight exceeds.
    lost = ~((value + chord).isfinite().all(-1, keepdim=True))
    value, chord = value.masked_fill(lost, torch.inf), chord.masked_fill(lost, 0.0)
    er = 1 / value.masked_fill(eye, 1.0).sum(-1)
    outward = (-(er * er).unsqueeze(-1) * chord).masked_fill(eye, 0.0)
    at_touch = er + (outward * (apart - inside)).sum(-1)
    return (at_touch, outward - torch.diag_embed(outward.sum(-1))), (lse, lse_slope)


def _chord_at(low: Tensor, high: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Value at `x` and slope of the chord of exp over ``[low, high]``; that of a point is its tangent."""
    slope = chord_slope(low, high)
    return low.exp() + slope * (x - low), slope


def chord_slope(low: Tensor, high: Tensor) -> Tensor:
    """The slope of the chord of exp over ``[low, high]``."""
    width = high - low
    wide = width > 0
    return low.exp() * torch.where(wide, torch.expm1(width) / torch.where(wide, width, 1.0), 1.0)
