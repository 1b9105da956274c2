"""Work that is shared out to processes: same answers in the same order, errors come through."""

from __future__ import annotations

import os
import signal
import sys

import pytest
import torch

from buffet import parallel
from buffet.errors import BuffetError
from buffet.parallel import side_by_side

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def total(size: int) -> tuple[torch.Tensor, int, int]:
    """A sum with its gradient, who computed it, and with how many threads."""
    x = torch.arange(float(size), requires_grad=True)
    x.square().sum().backward()
    assert x.grad is not None
    return x.grad, os.getpid(), torch.get_num_threads()


@pytest.mark.parametrize("copies", [pytest.param(True, marks=linux), False])
def test_answers_come_in_order_from_one_core_each(copies, monkeypatch):
    monkeypatch.setattr(parallel, "_copies", lambda: copies)
    total(3)  # gradients were taken here before
    found = side_by_side(total, [5, 1, 4, 2])
    for size, (gradient, who, threads) in zip([5, 1, 4, 2], found, strict=True):
        assert torch.equal(gradient, 2 * torch.arange(float(size)))
        assert (who != os.getpid()) == copies
        assert threads == 1
    assert torch.get_num_threads() == 2


def test_one_item_or_one_thread_stays_here():
    assert side_by_side(total, [3])[0][1:] == (os.getpid(), 2)
    torch.set_num_threads(1)
    assert {who for _, who, _ in side_by_side(total, [3, 4])} == {os.getpid()}


def fail(item: int) -> int:
    if item == 1:
        raise BuffetError("no such thing")
    return item


@pytest.mark.parametrize("copies", [pytest.param(True, marks=linux), False])
def test_errors_come_through(copies, monkeypatch):
    monkeypatch.setattr(parallel, "_copies", lambda: copies)
    with pytest.raises(BuffetError, match="no such thing"):
        side_by_side(fail, [0, 1, 2])
    assert side_by_side(fail, [0, 2]) == [0, 2]


@linux
def test_a_killed_process_is_one_line():
    def die(item: int) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return item

    with pytest.raises(BuffetError, match="was killed"):
        side_by_side(die, [0, 1])


def nested(item: int) -> int:
    return sum(side_by_side(fail, [item, item]))


@linux
def test_a_process_of_a_pool_has_no_processes_of_its_own():
    assert side_by_side(nested, [2, 3]) == [4, 6]


@pytest.mark.parametrize("threads", [1, 2])
def test_results_are_told_one_by_one_in_the_order_of_the_items(threads):
    torch.set_num_threads(threads)
    told: list[int] = []
    assert side_by_side(fail, [3, 0, 2], told.append) == told == [3, 0, 2]
