"""Several computations at the same time, each on one core."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


def side_by_side(work: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """``[work(item) for item in items]`` by as many threads as PyTorch may use, one core each.

    Splitting the items wastes less than splitting every operation, many of which are too small for that.
    """
    threads = torch.get_num_threads()
    if min(threads, len(items)) < 2:
        return [work(item) for item in items]
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(min(threads, len(items))) as pool:
            return list(pool.map(work, items))
    finally:
        torch.set_num_threads(threads)
