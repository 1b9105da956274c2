"""The planes of a product, and the choice of alpha between them (BuFFeT).

For ``x ∈ [lx, ux]``, ``y ∈ [ly, uy]`` two planes bound ``x·y`` on each side,

    L1 = ly·x + lx·y − lx·ly      L2 = uy·x + ux·y − ux·uy
    U1 = uy·x + lx·y − lx·uy      U2 = ly·x + ux·y − ux·ly

and every convex combination ``(1−α)·L1 + α·L2``, ``(1−α)·U1 + α·U2`` is a sound plane: α = 0 is CROWN-BaF's
choice. In deviation coordinates, ``x = x̂ + a`` and ``y = ŷ + b``, the slopes are the same and only the
constant changes: L1's is ``−la·lb``, with no cancellation of large clean values.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from buffet.bounds.forms import Form
from buffet.bounds.intervals import Box, box_terms
from buffet.network import Bilinear
from buffet.relaxations.enclosures import PlanesEnclosure, split_axes

TIE = 1e-4
"""Ranges whose ends differ by less than this share of their width are a tie: rounding must not choose."""

Alpha = float | Tensor
"""One α for all product terms, or a tensor over the task and term axes (`Bilinear.terms`; 1 = shared)."""


def planes(
    op: Bilinear,
    clean: tuple[Tensor, ...],
    x: Box,
    y: Box,
    *,
    alpha_lower: Alpha = 0.0,
    alpha_upper: Alpha = 0.0,
    dtype: torch.dtype = torch.float64,
) -> PlanesEnclosure:
    """Bound every term of `op` by the plane its α selects on each side; sound for any α in [0, 1].

    Args:
        clean: the clean values of the two inputs.
        x, y: how far each input may deviate from its clean value.
    """
    x_clean, x_low, x_high = box_terms(op, clean[0], x, op.x)
    y_clean, y_low, y_high = box_terms(op, clean[1], y, op.y)

    def x_slope(alpha: Alpha, first: Tensor, second: Tensor) -> Tensor:
        return cast(y_clean + _blend(alpha, first, second))

    def y_slope(alpha: Alpha) -> Tensor:
        return cast(x_clean + _blend(alpha, x_low, x_high))

    def cast(value: Tensor) -> Tensor:
        return (value if op.scale == 1 else op.scale * value).to(dtype)

    floats = isinstance(alpha_lower, float) and isinstance(alpha_upper, float)
    same_y = alpha_lower is alpha_upper or (floats and alpha_lower == alpha_upper)
    y_lower = y_slope(alpha_lower)
    return PlanesEnclosure(
        op=op,
        x_lower=x_slope(alpha_lower, y_low, y_high),
        x_upper=x_slope(alpha_upper, y_high, y_low),
        y_lower=y_lower,
        y_upper=y_lower if same_y else y_slope(alpha_upper),
        lower=_constant(op, alpha_lower, (x_low, y_low), (x_high, y_high)).to(dtype),
        upper=_constant(op, alpha_upper, (x_low, y_high), (x_high, y_low)).to(dtype),
    )


def _blend(alpha: Alpha, first: Tensor, second: Tensor) -> Tensor:
    if isinstance(alpha, float) and alpha in (0.0, 1.0):
        return second if alpha else first
    return torch.lerp(first, second, alpha)


def _constant(op: Bilinear, alpha: Alpha, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Tensor:
    """``−scale · Σ (1−α)·a·b + α·a'·b'``, without building the terms when α is one number."""
    if isinstance(alpha, float):
        t = "t" + op.terms
        parts = [
            (-op.scale * weight) * torch.einsum(f"{t},{t}->t{op.out}", *pair)
            for weight, pair in ((1 - alpha, first), (alpha, second))
            if weight
        ]
        total = sum(parts[1:], parts[0])
    else:
        total = torch.lerp(first[0] * first[1], second[0] * second[1], alpha)
        if summed := [place + 1 for place, c in enumerate(op.terms) if c not in op.out]:
            total = total.sum(summed)
        total = -op.scale * total
    return total.flatten(2)


def rule(
    op: Bilinear, x: Box, y: Box, x_form: Form, y_form: Form, pairs: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """r-BuFFeT: per term and side α = 1 if the input of the fusing ReLU reaches further up than down, else 0.

    ``min(U1, U2) = U1 − ReLU(U1 − U2)`` and ``max(L1, L2) = L1 + ReLU(L2 − L1)``, and α is the slope under
    the ReLU. With x = x̂ + a, y = ŷ + b, wa = ua − la and wb = ub − lb the ReLU inputs are wa·wb times

        U1 − U2:  a/wa − b/wb + (ua·lb − la·ub) / (wa·wb)
        L2 − L1:  a/wa + b/wb + (la·lb − ua·ub) / (wa·wb)

    Over the box of the factors both ranges are symmetric, always a tie. So a and b are replaced by their
    linear bounds in the input, which move together.

    Args:
        pairs: from forms ``[tasks, groups, i, inputs]`` and ``[tasks, groups, j, inputs]`` to the minimum of
            the sum of every pair over the region; it may be rough, as it only chooses.

    Returns:
        α of the lower and the upper side over the task and term axes. Ties stay at 0.
    """
    shared = [c for c in op.terms if c in op.x and c in op.y]
    own = [[c for c in axes if c not in shared] for axes in (op.x, op.y)]

    def arrange(value: Tensor, axes: str, own: list[str]) -> Tensor:
        """``[tasks, tokens, features, last]`` as ``[tasks, groups, own, last]``."""
        order = [axes.index(c) + 1 for c in (*shared, *own)]
        value = split_axes(op, value, axes).permute(0, *order, -1).flatten(1, len(shared))
        return value if own else value.unsqueeze(2)

    (xl, xh), (yl, yh) = (
        (arrange(box.lower.unsqueeze(-1), axes, free), arrange(box.upper.unsqueeze(-1), axes, free))
        for box, axes, free in ((x, op.x, own[0]), (y, op.y, own[1]))
    )
    wide_x, wide_y = xh - xl, yh - yl
    dtype = x_form.lower.dtype
    a = torch.cat([arrange(v, op.x, own[0]) / wide_x.to(dtype) for v in (x_form.lower, -x_form.upper)], 2)
    b = torch.cat([arrange(v, op.y, own[1]) / wide_y.to(dtype) for v in (y_form.lower, -y_form.upper)], 2)
    # The minima of a + b and of a − b, each with that of its negative.
    (sums, differences), (minus_differences, minus_sums) = (
        half.chunk(2, 3) for half in pairs(a, b).chunk(2, 2)
    )
    yl, yh, wide_y = yl.mT, yh.mT, wide_y.mT
    sizes = {
        c: n
        for axes, v in ((op.x, x), (op.y, y))
        for c, n in zip(axes, op.split(v.lower, axes).shape[1:], strict=True)
    }
    layout = [*shared, *own[0], *own[1]]

    def choose(low: Tensor, minus_high: Tensor, constant: Tensor) -> Tensor:
        middle = low - minus_high + 2 * constant / (wide_x * wide_y)
        alpha = (middle > -TIE * (low + minus_high)).double()  # False where nothing moves: 0/0
        return alpha.reshape(-1, *(sizes[c] for c in layout)).permute(
            0, *(layout.index(c) + 1 for c in op.terms)
        )

    lower = choose(sums, minus_sums, xl * yl - xh * yh)
    upper = choose(differences, minus_differences, xh * yl - xl * yh)
    return lower, upper
