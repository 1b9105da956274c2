"""The median of a few numbers, many times over.

PyTorch's median takes some fifty times as long as a pass over the numbers. A sorting network compares whole
slices instead: Batcher's odd-even merge sort, without the comparisons that the median does not depend on.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

MANY = 1 << 15
"""Fewer numbers are not worth the many small operations."""


def lower_median(values: Tensor, dim: int) -> Tensor:
    """``values.median(dim, keepdim=True).values``: of an even number of entries the lower one."""
    if values.numel() < MANY:
        return values.median(dim, keepdim=True).values
    if values.requires_grad:
        # The gradient is that of one entry, and not of all comparisons.
        fixed = values.detach()
        place = (fixed == lower_median(fixed, dim)).to(torch.uint8).argmax(dim, keepdim=True)
        return values.gather(dim, place)
    slices = list(values.unbind(dim))
    for first, second, least, largest in _comparisons(len(slices)):
        a, b = slices[first], slices[second]
        if least:
            slices[first] = torch.minimum(a, b)
        if largest:
            slices[second] = torch.maximum(a, b)
    return slices[_middle(len(slices))].unsqueeze(dim)


def _middle(count: int) -> int:
    return (count - 1) // 2


@cache
def _comparisons(count: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """(first, second, whether the smaller one is needed, whether the larger one is) in order."""
    wanted = {_middle(count)}
    kept = []
    for first, second in reversed(_sorting_network(count)):
        if first in wanted or second in wanted:
            kept.append((first, second, first in wanted, second in wanted))
            wanted |= {first, second}
    return tuple(reversed(kept))


def _sorting_network(count: int) -> list[tuple[int, int]]:
    """Pairs of places; exchanging what is out of order at one pair after the other sorts any numbers."""
    pairs = []
    sorted_runs = 1
    while sorted_runs < count:
        apart = sorted_runs
        while apart:
            for start in range(apart % sorted_runs, count - apart, 2 * apart):
                for first in range(start, min(start + apart, count - apart)):
                    if first // (2 * sorted_runs) == (first + apart) // (2 * sorted_runs):
                        pairs.append((first, first + apart))
            apart //= 2
        sorted_runs *= 2
    return pairs
