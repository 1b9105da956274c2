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

from buffet.bounds.intervals import Box, as_terms, box_terms
from buffet.bounds.linear import Form, PlanesPiece
from buffet.program import Bilinear

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
) -> PlanesPiece:
    """Bound every term of `op` by the plane its α selects on each side; sound for any α in [0, 1].

    Args:
        clean: the clean values of the two inputs.
        x, y: how far each input may deviate from its clean value.
    """
    x_clean, x_low, x_high = box_terms(op, clean[0], x, op.x)
    y_clean, y_low, y_high = box_terms(op, clean[1], y, op.y)

    def slopes(alpha: Alpha, y_first: Tensor, y_second: Tensor) -> tuple[Tensor, Tensor]:
        return y_clean + _blend(alpha, y_first, y_second), x_clean + _blend(alpha, x_low, x_high)

    x_lower, y_lower = slopes(alpha_lower, y_low, y_high)
    x_upper, y_upper = slopes(alpha_upper, y_high, y_low)
    floats = isinstance(alpha_lower, float) and isinstance(alpha_upper, float)
    same_y = alpha_lower is alpha_upper or (floats and alpha_lower == alpha_upper)
    lower = -_constant(op, alpha_lower, (x_low, y_low), (x_high, y_high))
    upper = -_constant(op, alpha_upper, (x_low, y_high), (x_high, y_low))

    def cast(value: Tensor) -> Tensor:
        return (op.scale * value).to(dtype)

    return PlanesPiece(
        op=op,
        x_lower=cast(x_lower),
        x_upper=cast(x_upper),
        y_lower=(y_stored := cast(y_lower)),
        y_upper=y_stored if same_y else cast(y_upper),
        lower=cast(lower),
        upper=cast(upper),
    )


def _blend(alpha: Alpha, first: Tensor, second: Tensor) -> Tensor:
    if isinstance(alpha, float) and alpha in (0.0, 1.0):
        return second if alpha else first
    return torch.lerp(first, second, alpha)


def _constant(op: Bilinear, alpha: Alpha, first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> Tensor:
    """``Σ (1−α)·a·b + α·a'·b'`` over the summed axes, without building the terms when α is one number."""
    t = "t" + op.terms
    if isinstance(alpha, float):
        parts = [
            weight * torch.einsum(f"{t},{t}->t{op.out}", *pair)
            for weight, pair in ((1 - alpha, first), (alpha, second))
            if weight
        ]
    else:
        pattern = f"{t},{t},{t}->t{op.out}"
        parts = [torch.einsum(pattern, 1 - alpha, *first), torch.einsum(pattern, alpha, *second)]
    return sum(parts[1:], parts[0]).flatten(2)


def rule(
    op: Bilinear,
    x: Box,
    y: Box,
    x_form: Form,
    y_form: Form,
    minimum: Callable[[Tensor, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """r-BuFFeT: per term and side α = 1 if the input of the fusing ReLU reaches further up than down, else 0.

    ``min(U1, U2) = U1 − ReLU(U1 − U2)`` and ``max(L1, L2) = L1 + ReLU(L2 − L1)``, and α is the slope under
    the ReLU. With x = x̂ + a, y = ŷ + b the ReLU inputs are

        U1 − U2 = (ub − lb)·a − (ua − la)·b − la·ub + ua·lb
        L2 − L1 = (ub − lb)·a + (ua − la)·b − ua·ub + la·lb

    Over the box of the factors both ranges are symmetric, always a tie. So a and b are replaced by their
    linear bounds in the input, which move together, and `minimum` takes the extreme values over the region.

    Returns:
        α of the lower and the upper side over the task and term axes. Ties stay at 0.
    """
    x_low, x_high = (as_terms(op, v, op.x) for v in (x.lower, x.upper))
    y_low, y_high = (as_terms(op, v, op.y) for v in (y.lower, y.upper))
    a = [_form_terms(op, v, op.x) for v in (x_form.lower, x_form.upper)]
    b = [_form_terms(op, v, op.y) for v in (y_form.lower, y_form.upper)]
    dtype = x_form.lower.dtype

    def choose(rows: slice, sign: int) -> Tensor:
        """α of some queries; `sign` is that of b in the ReLU input."""
        xl, xh = (v[:, rows] if v.shape[1] > 1 else v for v in (x_low, x_high))
        yl, yh = (v[:, rows] if v.shape[1] > 1 else v for v in (y_low, y_high))
        al, ah = (v[:, rows] if v.shape[1] > 1 else v for v in a)
        bl, bh = (v[:, rows] if v.shape[1] > 1 else v for v in b)
        if sign < 0:
            bl, bh = -bh, -bl
            constant = xh * yl - xl * yh
        else:
            constant = xl * yl - xh * yh
        wide_y, wide_x = (v.to(dtype).unsqueeze(-1) for v in (yh - yl, xh - xl))
        ends = []
        for low_a, low_b, side in ((al, bl, 1), (-ah, -bh, -1)):
            form = (wide_y * low_a + wide_x * low_b).movedim(-1, 1)
            ends.append(side * (minimum(form[:, :-1], form[:, -1]) + side * constant))
        low, high = ends
        return (high + low > TIE * (high - low)).double()

    queries = max(v.shape[1] for v in (x_low, y_low))
    lower, upper = (torch.cat([choose(slice(i, i + 1), sign) for i in range(queries)], 1) for sign in (1, -1))
    return lower, upper


def _form_terms(op: Bilinear, form: Tensor, axes: str) -> Tensor:
    """`as_terms` for forms, whose input axis stays last."""
    return (
        as_terms(op, form.movedim(-1, 1).flatten(0, 1), axes).unflatten(0, (form.shape[0], -1)).movedim(1, -1)
    )
