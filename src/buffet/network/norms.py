"""Upper bounds of the norms of matrices that hold for the matrices themselves, whatever was rounded."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

UP = 2.0**-20
"""More than sums of up to 2³⁰ terms of one sign lose in float64, relative to themselves."""
WIDEST = 1024
"""Of larger matrices no singular values are computed."""


def frobenius(matrix: Float[Tensor, "*shape"]) -> float:
    """``√Σ wᵢⱼ²`` or a little more; squares that underflow are made up for."""
    floor = torch.finfo(torch.float64).tiny ** 0.5 * max(1, matrix.numel())
    return float(torch.linalg.vector_norm(matrix.double())) * (1 + UP) + floor


def spectral(matrix: Float[Tensor, "out in"]) -> float:
    """The largest singular value, or a little more.

    Whatever the computed factors of ``W ≈ U S V`` are worth, ``‖W‖ ≤ ‖U‖ ‖S‖ ‖V‖ + ‖W − U S V‖_F``, and
    ``‖U‖² ≤ 1 + ‖UᵀU − I‖_F``; what the sums on the right lose is at most n roundings of their terms' sizes.
    """
    wide = matrix.double()
    whole = frobenius(wide)
    if min(wide.shape) > WIDEST or not torch.isfinite(wide).all():
        return whole
    try:
        u, s, v = torch.linalg.svd(wide, full_matrices=False)
    except RuntimeError:  # it did not converge
        return whole
    largest = float(s.max()) * (1 + UP)
    lost = (sum(wide.shape) + 8) * torch.finfo(torch.float64).eps
    rest = frobenius(wide - (u * s) @ v) + lost * (whole + frobenius(u) * frobenius(v) * largest)
    sides = [1 + frobenius(f - torch.eye(len(s)).to(f)) + lost * len(s) for f in (u.mT @ u, v @ v.mT)]
    bound = ((sides[0] * sides[1]) ** 0.5 * largest + rest) * (1 + UP)
    return bound if bound < whole else whole  # NaN: the factors are worth nothing


def largest_column(matrix: Float[Tensor, "out in"]) -> float:
    """The largest ``√Σᵢ wᵢⱼ²``, or a little more: how far a change of 1 in L1 goes."""
    return max(frobenius(column) for column in matrix.double().unbind(-1))
