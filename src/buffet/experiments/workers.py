"""Hands jobs to workers. A worker is a process that does one job at a time, and may die at any moment.

`dispatch` knows when to hire, retry and give up; a `Fleet` knows how workers are started, reached and
killed: `LocalFleet` as processes of this machine, `buffet.experiments.cluster` as actors of Ray.
"""

from __future__ import annotations

import heapq
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Protocol, TypeVar, runtime_checkable

import torch

from buffet.errors import BuffetError, one_line
from buffet.system.allocator import keep_freed_memory
from buffet.system.parallel import cores

FAILED_STARTS = 3
"""How many workers may die one after the other before they are ready; after that, dispatching gives up."""
PATIENCE = 1.0
"""Seconds between two checks of how many workers there may be."""


@runtime_checkable
class Job(Protocol):
    """Something to do, in any process: it can be pickled, and so can its answer."""

    def run(self) -> object:
        """The answer; the same in every process."""


@dataclass(frozen=True)
class Ready:
    """A worker has started and waits for its first job."""

    process: int  # its id, on its machine


@dataclass(frozen=True)
class Done:
    """A job was answered."""

    answer: object


@dataclass(frozen=True)
class Failed:
    """A job cannot be answered; trying again would not help."""

    reason: str
    status: str = "failed"  # or "timeout"


@dataclass(frozen=True)
class Died:
    """A worker is gone, and with it whatever it was doing."""

    reason: str


News = Ready | Done | Failed | Died


W = TypeVar("W", bound=Hashable)
"""What a fleet calls a worker."""


@runtime_checkable
class Fleet(Protocol[W]):
    """How workers are started, reached and killed."""

    def size(self) -> int:
        """How many workers there may be now."""

    def hire(self) -> W:
        """Start a worker; it will report that it is ready."""

    def send(self, worker: W, job: Job) -> None:
        """Give a job to a worker that has nothing to do."""

    def hear(self, workers: Sequence[W], timeout: float) -> list[tuple[W, News]]:
        """What the workers report, as soon as one does, or nothing after `timeout` seconds."""

    def dismiss(self, worker: W) -> None:
        """End a worker at once, dead or alive."""


@dataclass(order=True)
class Ticket:
    """A job in the queue; small numbers go first."""

    number: int
    job: Job = field(compare=False)
    tries: int = field(default=0, compare=False)


@dataclass
class _State:
    """What a worker is doing: starting (no deadline, no ticket), idle (ready, no ticket) or busy."""

    ready: bool = False
    ticket: Ticket | None = None
    deadline: float = float("inf")


def dispatch(
    fleet: Fleet[W],
    queue: list[Ticket],
    settle: Callable[[Ticket, Done | Failed], None],
    *,
    limit: float | None = None,
    retries: int = 2,
    until: float = math.inf,
) -> None:
    """Do the jobs of the queue, a heap, to which `settle` may push more; returns when all are settled.

    Every ticket is settled exactly once. A job that takes longer than `limit` seconds fails and its worker
    is killed; one whose worker died is tried again `retries` times. After `until`, on the clock of
    `time.monotonic`, no job is begun: those that were are finished, however long they take, as quick ones
    would else be more likely to be among the answers.
    """
    states: dict[W, _State] = {}
    failed_starts = 0
    try:
        while True:
            late = time.monotonic() >= until
            if not late:
                _assign(fleet, queue, states, limit)
            if (late or not queue) and not any(state.ticket for state in states.values()):
                return
            nearest = min(state.deadline for state in states.values()) - time.monotonic()
            for worker, news in fleet.hear(list(states), max(0.0, min(nearest, PATIENCE))):
                state = states[worker]
                if isinstance(news, Died):
                    fleet.dismiss(worker)
                    del states[worker]
                    failed_starts = 0 if state.ready else failed_starts + 1
                    if failed_starts > FAILED_STARTS:
                        raise BuffetError(f"workers die before they are ready: {news.reason}")
                    if state.ticket:
                        _try_again(queue, state.ticket, news, retries, settle)
                elif isinstance(news, Ready):
                    state.ready, failed_starts = True, 0
                elif state.ticket:
                    ticket, states[worker] = state.ticket, _State(ready=True)
                    settle(ticket, news)
            _enforce(fleet, states, limit, settle)
    finally:
        for worker in states:
            fleet.dismiss(worker)


def _assign(fleet: Fleet[W], queue: list[Ticket], states: dict[W, _State], limit: float | None) -> None:
    """Give work to idle workers, and hire new ones for the rest."""
    for worker, state in states.items():
        if queue and state.ready and state.ticket is None:
            state.ticket = heapq.heappop(queue)
            state.deadline = time.monotonic() + limit if limit else float("inf")
            fleet.send(worker, state.ticket.job)
    starting = sum(not state.ready for state in states.values())
    for _ in range(min(fleet.size() - len(states), len(queue) - starting)):
        states[fleet.hire()] = _State()


def _try_again(
    queue: list[Ticket],
    ticket: Ticket,
    news: Died,
    retries: int,
    settle: Callable[[Ticket, Done | Failed], None],
) -> None:
    if ticket.tries >= retries:
        settle(ticket, Failed(f"its worker died {ticket.tries + 1} times: {news.reason}"))
    else:
        heapq.heappush(queue, Ticket(ticket.number, ticket.job, ticket.tries + 1))


def _enforce(
    fleet: Fleet[W],
    states: dict[W, _State],
    limit: float | None,
    settle: Callable[[Ticket, Done | Failed], None],
) -> None:
    """Kill whoever works longer than the limit."""
    now = time.monotonic()
    for worker, state in [entry for entry in states.items() if entry[1].deadline <= now]:
        fleet.dismiss(worker)
        del states[worker]
        assert state.ticket is not None
        settle(state.ticket, Failed(f"not done within the time limit of {limit:g} s", "timeout"))


def execute(job: Job) -> Done | Failed:
    """Answer a job; whatever goes wrong is a reason in one line."""
    try:
        return Done(job.run())
    except BuffetError as error:
        return Failed(str(error))
    except Exception as error:
        return Failed(one_line(f"{type(error).__name__}: {error}", 500))


@dataclass(frozen=True, eq=False)
class LocalWorker:
    """A process and the line to it."""

    process: BaseProcess
    line: Connection


class LocalFleet:
    """Processes of this machine, each with its own number of threads."""

    def __init__(self, workers: int | None, threads: int) -> None:
        self._threads = threads
        self._size = workers or max(1, cores() // threads)

    def size(self) -> int:
        return self._size

    def hire(self) -> LocalWorker:
        # A fresh interpreter: forking one that has used threads is not safe.
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, self._threads), daemon=True)
        process.start()
        theirs.close()  # so that its death closes the line
        return LocalWorker(process, ours)

    def send(self, worker: LocalWorker, job: Job) -> None:
        with suppress(OSError):  # it is dead, and `hear` will say so
            worker.line.send(job)

    def hear(self, workers: Sequence[LocalWorker], timeout: float) -> list[tuple[LocalWorker, News]]:
        lines = {worker.line: worker for worker in workers}
        return [(lines[line], _receive(lines[line])) for line in wait(list(lines), timeout)]  # type: ignore[index]

    def dismiss(self, worker: LocalWorker) -> None:
        worker.process.kill()
        worker.process.join()
        worker.line.close()


class ThisProcess:
    """One worker, which is this process: it does a job as soon as it is given, and nobody can kill it."""

    def __init__(self) -> None:
        self.news: list[tuple[str, News]] = []

    def size(self) -> int:
        return 1

    def hire(self) -> str:
        self.news.append(("this process", Ready(os.getpid())))
        return "this process"

    def send(self, worker: str, job: Job) -> None:
        self.news.append((worker, execute(job)))

    def hear(self, workers: Sequence[str], timeout: float) -> list[tuple[str, News]]:
        news, self.news = self.news, []
        return news

    def dismiss(self, worker: str) -> None:
        pass


def _receive(worker: LocalWorker) -> News:
    try:
        news = worker.line.recv()
        assert isinstance(news, Ready | Done | Failed)
        return news
    except Exception:  # a message cut short can fail to unpickle in any way
        worker.process.join(5)
        code = worker.process.exitcode
        if code is not None and code < 0:
            return Died(f"killed by {signal.Signals(-code).name}, as happens when memory runs out")
        return Died(f"ended with code {code}")


def serve(line: Connection, threads: int) -> None:
    """What a local worker does: one job after the other, until the other end of the line is closed."""
    # The driver decides what an interrupt means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, daemon=True).start()
    keep_freed_memory()
    torch.set_num_threads(threads)
    try:
        line.send(Ready(os.getpid()))
        while True:
            line.send(execute(line.recv()))
    except (EOFError, OSError):
        return


def _die_with_parent() -> None:
    """A driver that is killed cannot kill its workers: they notice and stop in the middle of their work."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
