"""Workers on many machines: actors of Ray (extra ``ray``).

Every machine needs the same version of buffet, and the models at the same paths; a worker refuses a model
that is not the one the plan was made for.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from buffet.errors import BuffetError, one_line
from buffet.experiments.workers import Died, Done, Failed, Job, News, Ready, execute
from buffet.system.allocator import keep_freed_memory
from buffet.system.products import quick_products

CONNECT_SECONDS = 5.0


class Member:
    """The actor: a process somewhere in the cluster."""

    def __init__(self, threads: int) -> None:
        keep_freed_memory()
        quick_products()
        torch.set_num_threads(threads)

    def ready(self) -> Ready:
        return Ready(os.getpid())

    def run(self, job: Job) -> Done | Failed:
        return execute(job)


@dataclass(frozen=True, eq=False)
class RayWorker:
    """A handle of a `Member`."""

    actor: Any


class RayFleet:
    """As many actors as the cluster has room for; that may change while they work."""

    def __init__(self, ray: Any, workers: int | None, threads: int, gpus: float = 0.0) -> None:
        self._ray, self._workers, self._threads, self._gpus = ray, workers, threads, gpus
        self._calls: dict[RayWorker, Any] = {}  # what each worker was asked last

    def size(self) -> int:
        resources = self._ray.cluster_resources()
        room = resources.get("CPU", 0) // self._threads
        if self._gpus:
            room = min(room, resources.get("GPU", 0) // self._gpus)
        return max(1, min(int(room), self._workers or int(room)))

    def hire(self) -> RayWorker:
        options = {"num_cpus": self._threads, "num_gpus": self._gpus, "max_restarts": 0}
        worker = RayWorker(self._ray.remote(**options)(Member).remote(self._threads))
        self._calls[worker] = worker.actor.ready.remote()
        return worker

    def send(self, worker: RayWorker, job: Job) -> None:
        self._calls[worker] = worker.actor.run.remote(job)

    def hear(self, workers: Sequence[RayWorker], timeout: float) -> list[tuple[RayWorker, News]]:
        calls = {call: worker for worker, call in self._calls.items()}
        if not calls:
            time.sleep(timeout)
            return []
        self._ray.wait(list(calls), num_returns=1, timeout=timeout)
        finished, _ = self._ray.wait(list(calls), num_returns=len(calls), timeout=0)
        return [(calls[call], self._news(calls[call])) for call in finished]

    def _news(self, worker: RayWorker) -> News:
        try:
            news: News = self._ray.get(self._calls.pop(worker))
            return news
        except self._ray.exceptions.RayError as error:
            return Died(one_line(error))

    def dismiss(self, worker: RayWorker) -> None:
        self._calls.pop(worker, None)
        self._ray.kill(worker.actor)


@contextmanager
def ray_fleet(
    address: str | None, workers: int | None = None, threads: int = 1, gpus: float = 0.0
) -> Iterator[RayFleet]:
    """Workers in the cluster at `address` (``auto``: the one of this machine), or in one of their own."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    try:
        import ray
    except ImportError:
        raise BuffetError("the backend ray needs Ray: pip install 'buffet[ray]'") from None
    try:
        _check_reachable(address)
        dashboard = None if address else False
        ray.init(address, include_dashboard=dashboard, logging_level=logging.ERROR, log_to_driver=False)
    except (OSError, ValueError, RuntimeError) as error:
        where, reason = address or "this machine", one_line(error, 200)
        raise BuffetError(f"no Ray cluster at {where}: {reason}") from None
    try:
        yield RayFleet(ray, workers, threads, gpus)
    except ray.exceptions.RayError as error:
        reason = one_line(error, 200)
        raise BuffetError(f"the Ray cluster is lost: {reason}; the same command continues") from None
    finally:
        ray.shutdown()


def _check_reachable(address: str | None) -> None:
    """Ray itself would try for many minutes."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdigit() and "/" not in host:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
