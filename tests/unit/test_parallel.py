"""Work that is shared out to processes: same answers in the same order, errors come through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from buffet import attack
from buffet.cli import main
from buffet.errors import BuffetError
from buffet.experiments.workers import Done, LocalFleet, Ready
from buffet.system import parallel
from buffet.system.allocator import keep_freed_memory
from buffet.system.parallel import side_by_side
from random_encoders import ball, encoder

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are copied on Linux only")


@pytest.fixture(autouse=True)
def two_threads():
    with parallel.threads(2):
        yield


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


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "5000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_threads_do_not_spin_for_long_unless_the_user_says_how_to_wait(given, spins):
    """The command line says so, before PyTorch is loaded; the library leaves that to whoever uses it."""
    code = (
        "import builtins, os, sys\n"
        "load, seen = builtins.__import__, []\n"
        "def watch(name, *rest):\n"
        "    if name == 'torch' and not seen: seen.append(os.environ.get('GOMP_SPINCOUNT'))\n"
        "    return load(name, *rest)\n"
        "builtins.__import__ = watch\n"
        "{}\n"
        "print(seen[0])"
    )
    others = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}

    def seen(uses: str) -> str:
        command = [sys.executable, "-c", code.format(uses)]
        done = subprocess.run(command, env=others | given, capture_output=True, text=True, check=True)
        return done.stdout.split()[-1]

    assert seen("from buffet.cli import main; main(['models'])") == spins
    assert seen("import buffet; buffet.load") == given.get("GOMP_SPINCOUNT", "None")


@linux
def test_workers_keep_freed_memory_and_spin_as_briefly_as_the_command_line_that_started_them(monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    main(["--version"])
    fleet = LocalFleet(1, 1)
    worker = fleet.hire()
    try:
        assert isinstance(fleet.hear([worker], 60.0)[0][1], Ready)
        fleet.send(worker, Look())
        assert fleet.hear([worker], 60.0) == [(worker, Done(("5000", 1)))]
    finally:
        fleet.dismiss(worker)


@dataclass(frozen=True)
class Look:
    """A job that says how its process waits, and whether it asked for freed memory to be kept."""

    def run(self) -> tuple[str | None, int]:
        return os.environ.get("GOMP_SPINCOUNT"), keep_freed_memory.cache_info().currsize


@pytest.mark.parametrize(("split", "expected"), [(2**17, 1), (1, 2)])
def test_small_operations_of_an_attack_are_not_split(monkeypatch, split, expected):
    seen = set()
    gradient = attack._Target.gradient

    def watched(*arguments):
        seen.add(torch.get_num_threads())
        return gradient(*arguments)

    monkeypatch.setattr(attack._Target, "gradient", watched)
    monkeypatch.setattr(attack, "SPLIT_NUMBERS", split)
    attack.attacked_radius(encoder(0).program64, ball(0, 0.1), 0)
    attack.attack(encoder(0).program64, ball(0, 0.1), 0)
    assert seen == {expected}
    assert torch.get_num_threads() == 2
