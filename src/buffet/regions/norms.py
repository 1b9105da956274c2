"""Norms, the L1 projection, directed rounding and random unit vectors: the arithmetic of `regions`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def lp_norm(x: Tensor, p: float, dim: int, keepdim: bool = False) -> Tensor:
    """``‖x‖_p`` along an axis without overflow on the way; differentiable.

    For p ≤ 2 a norm so small that all its powers underflow may come out as 0: `underflow` bounds what is
    lost. (For a large p that would be no small loss: ``0.4¹⁰¹`` is below the range of float32.)
    """
    norm = _plain_norm(x, p, dim)
    if p not in (1.0, math.inf):
        # Powers in the middle of the number range are safe as they are; redo the others scaled.
        limit = _safe(x, p, dim)
        if _all_between(norm, 1 / limit, limit):
            return norm if keepdim else norm.squeeze(dim)
        odd = ~((norm > 1 / limit) & (norm < limit)) & ((norm != 0) | (p > 2))
        if bool(odd.any()):
            scale = x.detach().abs().amax(dim, keepdim=True)
            scale = torch.where((scale > 0) & odd, scale, 1)
            norm = scale * _plain_norm(x / scale, p, dim)
    return norm if keepdim else norm.squeeze(dim)


def _plain_norm(x: Tensor, p: float, dim: int) -> Tensor:
    """``‖x‖_p``, from sums: PyTorch's own norm is ten times slower along any axis but the last."""
    if p == 1:
        return x.abs().sum(dim, keepdim=True)
    if math.isinf(p):
        return x.abs().amax(dim, keepdim=True)
    if p == 2:
        square = x.square().sum(dim, keepdim=True)
        if square.requires_grad:
            square = torch.where(square == 0, 0.0, square)  # no gradient at 0, where √ has an infinite one
        return square.sqrt()
    return torch.linalg.vector_norm(x, p, dim=dim, keepdim=True)


def _all_between(x: Tensor, low: float, high: float) -> bool:
    """Whether all of `x` lies strictly inside; NaN does not."""
    return not x.numel() or (x.min().item() > low and x.max().item() < high)


def largest_norm(x: Tensor, p: float, dim: int) -> Tensor:
    """``‖x‖_p`` along an axis, which is kept, with what underflow may have lost added; differentiable."""
    norm = _plain_norm(x, p, dim)
    if p in (1.0, math.inf):
        return norm
    if p > 2 or not (norm.numel() and norm.max().item() < _safe(x, p, dim)):
        norm = lp_norm(x, p, dim, keepdim=True)
    return norm + underflow(x.dtype, p, x.shape[dim])


def _safe(x: Tensor, p: float, dim: int) -> float:
    """Norms below this, and above its inverse, have powers in the middle of the number range."""
    return torch.finfo(x.dtype).max ** (0.5 / p) / x.shape[dim]


def underflow(dtype: torch.dtype, p: float, size: int) -> float:
    """What a computed norm ``‖x‖_p`` of `size` entries may lack because powers of them underflowed."""
    return (size * torch.finfo(dtype).tiny) ** (1 / p) if 1 < p <= 2 else 0.0


def steepest(form: Tensor, q: float) -> Tensor:
    """Where a form is largest, and ``‖form‖_q``, in the unit ball of the dual norm."""
    p = 1.0 if math.isinf(q) else math.inf if q == 1 else q / (q - 1)
    if math.isinf(q):
        corner = torch.nn.functional.one_hot(form.abs().argmax(-1), form.shape[-1])
        return corner * form.sign()
    direction = form if q == 2 else form.sign() * form.abs() ** (q - 1)
    return torch.nn.functional.normalize(direction, p, -1, torch.finfo(form.dtype).tiny)


def difference(a: Tensor, b: Tensor, *, up: bool) -> Tensor:
    """``a − b`` in float64, rounded up (or down); exact where it is a number."""
    found = a - b
    back = found - a  # what was lost, exactly (Knuth)
    lost = (a - (found - back)) - (b + back)
    wrong = lost > 0 if up else lost < 0
    beyond = torch.nextafter(found, torch.full_like(found, math.inf if up else -math.inf))
    return torch.where(wrong, beyond, found)


def rounded(x: Tensor, dtype: torch.dtype, *, up: bool) -> Tensor:
    """Float64 numbers in another precision, rounded up (or down)."""
    y = x.to(dtype)
    wrong = y.double() < x if up else y.double() > x
    return torch.where(wrong, torch.nextafter(y, torch.full_like(y, math.inf if up else -math.inf)), y)


def project_l1(delta: Tensor, eps: Tensor) -> Tensor:
    """The nearest point of the L1 ball: ``sign(δ)(|δ| − θ)⁺`` with θ such that the norm is ε (by sorting)."""
    size = delta.double().abs()
    ordered = size.sort(-1, descending=True).values
    theta = (ordered.cumsum(-1) - eps) / torch.arange(1, size.shape[-1] + 1, device=size.device)
    count = (ordered > theta).sum(-1, keepdim=True).clamp(min=1)
    return ((size - theta.gather(-1, count - 1)).clamp(min=0) * delta.sign()).to(delta.dtype)


def random_signs(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Numbers −1 or 1 in float64."""
    return 2.0 * torch.randint(2, tuple(shape), generator=generator).double() - 1


def unit_directions(shape: Sequence[int], p: float, generator: torch.Generator) -> Tensor:
    """Dense vectors with ``‖x‖_p = 1`` along the last axis; for p = 1 and 2 uniform on the sphere."""
    uniform = torch.rand(tuple(shape), generator=generator, dtype=torch.float64)
    if p == 1:
        vector = torch.log1p(-uniform) * random_signs(shape, generator)
    elif math.isinf(p):
        vector = 2 * uniform - 1
    else:
        vector = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    norm = lp_norm(vector, p, -1, keepdim=True)
    return vector / torch.where(norm > 0, norm, 1)


def unit_vertices(shape: Sequence[int], p: float, generator: torch.Generator) -> Tensor:
    """Vectors ``±e_i`` for p = 1, sign corners for p = ∞, alternately both in between; ``‖x‖_p = 1``."""
    signs = random_signs(shape, generator)
    hot = torch.randint(shape[-1], tuple(shape[:-1]), generator=generator)
    spikes = torch.nn.functional.one_hot(hot, shape[-1]) * signs
    corners = signs / lp_norm(signs, p, -1, keepdim=True)
    if p == 1 or math.isinf(p):
        return spikes if p == 1 else corners
    even = torch.arange(shape[0]).remainder(2).reshape(-1, *[1] * (len(shape) - 1)) == 0
    return torch.where(even, spikes, corners)
