"""Operations on large tensors that pass over memory as often as they must, and so do their gradients.

A step of learning end to end takes as long as its passes over memory. Each operation here could be written
with a few of PyTorch's; their gradients would fill, copy and add tensors that are mostly 0.

Those that change a tensor in place own it: nobody may have used it before, or use anything but the result
afterwards. PyTorch is not told that it was changed, as it would then copy the gradient of what it is a view
of.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd import Function


def by_sign(x: Tensor) -> tuple[Tensor, Tensor]:
    """The positive and the negative numbers, with 0 for the others."""
    return _BySign.apply(x)


class _BySign(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.clamp_min(0), x.clamp_max(0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        positive, negative = gradients
        return torch.where(x > 0, positive, negative)


def add_to_last(
    x: Float[Tensor, "*rows columns"], constants: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows columns"]:
    """Add constants to the last column, in place."""
    return _AddToLast.apply(x, constants)


class _AddToLast(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, constants: Tensor) -> Tensor:
        x[..., -1].add_(constants)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, gradient[..., -1]


def add_swapped(x: Float[Tensor, "2 *rest"], other: Float[Tensor, "2 *rest"]) -> Float[Tensor, "2 *rest"]:
    """Add the second half of another tensor to the first, in place, and the first to the second."""
    return _AddSwapped.apply(x, other)


class _AddSwapped(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor) -> Tensor:
        x[0].add_(other[1])
        x[1].add_(other[0])
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,) = gradients
        return gradient, gradient.flip(0)


def assembled(
    chunks: Sequence[tuple[Float[Tensor, "tasks inputs tokens _"], Float[Tensor, "tasks tokens _"]]],
    sizes: Sequence[int],
) -> tuple[Float[Tensor, "2 tasks tokens features inputs1"], ...]:
    """Lower and upper forms of some nodes, with their numbers of features, from chunks of their rows.

    A chunk has lower forms (coefficients and constants) of some features, and then of their negatives.
    """
    return _Assembled.apply(tuple(sizes), *(part for chunk in chunks for part in chunk))


class _Assembled(Function):
    @staticmethod
    def forward(ctx: Any, sizes: tuple[int, ...], *parts: Tensor) -> tuple[Tensor, ...]:
        tasks, inputs, tokens, _ = parts[0].shape
        ctx.sizes, ctx.rows = sizes, [coefs.shape[3] for coefs in parts[::2]]
        found = tuple(parts[0].new_empty(2, tasks, tokens, size, inputs + 1) for size in sizes)
        for chunk, node, own, there in _pieces(ctx.rows, sizes):
            coefs, constants = parts[2 * chunk].permute(0, 2, 3, 1), parts[2 * chunk + 1]
            for side, rows in enumerate(own):
                target = found[node][side, :, :, there]
                _put(target[..., :-1], coefs[:, :, rows], side)
                _put(target[..., -1], constants[:, :, rows], side)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        _, tasks, tokens, _, columns = gradients[0].shape
        found = [gradients[0].new_empty(tasks, tokens, rows, columns) for rows in ctx.rows]
        for chunk, node, own, there in _pieces(ctx.rows, ctx.sizes):
            for side, rows in enumerate(own):
                _put(found[chunk][:, :, rows], gradients[node][side, :, :, there], side)
        parts = [part for whole in found for part in (whole[..., :-1].permute(0, 3, 1, 2), whole[..., -1])]
        return None, *parts


def _put(target: Tensor, source: Tensor, negative: int) -> None:
    if negative:
        torch.neg(source, out=target)
    else:
        target.copy_(source)


def _pieces(
    rows: Sequence[int], sizes: Sequence[int]
) -> Iterator[tuple[int, int, tuple[slice, slice], slice]]:
    """Chunks and nodes that share features: which, the two places in the chunk, and that in the node."""
    start = 0
    for chunk, count in enumerate(rows):
        half, first = count // 2, 0
        for node, size in enumerate(sizes):
            low, high = max(start, first), min(start + half, first + size)
            if low < high:
                own = slice(low - start, high - start), slice(half + low - start, half + high - start)
                yield chunk, node, own, slice(low - first, high - first)
            first += size
        start += half
