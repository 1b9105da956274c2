"""Long work on the command line: who does it, and how far it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from buffet.cli.terminal import progress_line
from buffet.errors import BuffetError
from buffet.printing import duration

if TYPE_CHECKING:
    from buffet.experiments import SweepProgress
    from buffet.experiments.config import Running
    from buffet.experiments.workers import Fleet

BACKENDS = ("local", "ray")


def check_backend(backend: str, address: str | None, running: Running) -> None:
    from buffet.system.devices import device_named

    if backend == "local" or running.device == "cpu":
        device_named(running.device)  # workers elsewhere may have what is missing here
    if backend not in BACKENDS:
        raise BuffetError(f"--backend: unknown backend {backend!r}; choose one of: {', '.join(BACKENDS)}")
    if backend == "local" and (address is not None or running.gpus):
        raise BuffetError("--address and --gpus go with --backend ray")


def chosen_fleet(backend: str, address: str | None, running: Running) -> AbstractContextManager[Fleet[Any]]:
    from buffet.experiments.cluster import ray_fleet
    from buffet.experiments.workers import LocalFleet

    if backend == "ray":
        return ray_fleet(address, running.workers, running.threads, running.gpus)
    return nullcontext(LocalFleet(running.workers, running.threads))


@contextmanager
def shown_progress() -> Iterator[Callable[[SweepProgress], None]]:
    """How far a sweep or an evaluation has come."""
    with progress_line("planning") as line:
        yield lambda now: line(now.before + now.done, now.total, _text(now))


def _text(now: SweepProgress) -> str:
    left = "" if math.isinf(now.left) else f", {duration(now.left)} left"
    return f"{now.before + now.done}/{now.total} rows, {now.rate:.2f}/s{left}, {now.failed} failed"
