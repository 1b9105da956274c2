"""Several computations at the same time, each on one core."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context, parent_process
from typing import Any, TypeVar

import torch

from buffet.errors import BuffetError

T = TypeVar("T")
R = TypeVar("R")


def cores() -> int:
    """The cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let PyTorch split its operations over this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(
    work: Callable[[T], R], items: Sequence[T], done: Callable[[R], None] | None = None
) -> list[R]:
    """``[work(item) for item in items]`` by as many processes as PyTorch may use threads, one core each.

    Splitting the items wastes less than splitting every operation, many of which are too small for that; and
    processes do not wait for each other's interpreter, as threads do. They begin as copies of this one: what
    `work` changes is lost, and only what it returns comes back. Where processes cannot be copied safely, the
    work is done by threads. `done` is told every result, in the order of the items.
    """
    workers = min(torch.get_num_threads(), len(items))
    found = []
    for result in _results(work, items, workers):
        found.append(result)
        if done:
            done(result)
    return found


def _results(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    if workers < 2:
        return map(work, items)
    return _by_processes(work, items, workers) if _copies() else _by_threads(work, items, workers)


def _copies() -> bool:
    """Whether a copy of this process can compute: not where there are GPUs, nor in a process of a pool."""
    return sys.platform == "linux" and parent_process() is None and not torch.cuda.is_available()


def _by_threads(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    with threads(1), ThreadPoolExecutor(workers) as pool:
        yield from pool.map(work, items)


_inherited: tuple[Callable[[Any], Any], Sequence[Any]] | None = None
"""The work at hand, which processes find where they were copied: functions need not be sent."""


def _by_processes(work: Callable[[T], R], items: Sequence[T], workers: int) -> Iterator[R]:
    global _inherited
    _inherited = work, items
    try:
        with ProcessPoolExecutor(
            workers, get_context("fork"), initializer=torch.set_num_threads, initargs=(1,)
        ) as pool:
            yield from map(pickle.loads, pool.map(_answer, range(len(items))))
    except BrokenProcessPool:
        raise BuffetError(
            "a process that worked on some of the tasks was killed, perhaps because memory ran out:"
            " take fewer --threads"
        ) from None
    finally:
        _inherited = None


def _answer(place: int) -> bytes:
    """The result for one item, in bytes: as tensors they would be shared, a file for each of them."""
    assert _inherited is not None
    work, items = _inherited
    return pickle.dumps(work(items[place]), pickle.HIGHEST_PROTOCOL)
