"""Long work on the command line: who does it, and how far it is."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from buffet.errors import BuffetError
from buffet.printing import duration

if TYPE_CHECKING:
    from buffet.experiments import SweepProgress
    from buffet.experiments.config import Running
    from buffet.experiments.workers import Fleet

BACKENDS = ("local", "ray")
BACKEND_HELP = "Who works: **local** processes, or **ray** for many machines."
ADDRESS_HELP = "A Ray cluster to join. Default: one of its own, here."
GPUS_HELP = "GPUs that Ray gives each worker; use them with --device cuda."
LOG_EVERY = 30.0
"""Seconds between lines of progress where there is no terminal."""


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
    """A live line on stderr; where stderr is not a terminal, a plain line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Log()
        return
    columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, text="planning")
        yield lambda now: bar.update(task, total=now.total, completed=now.before + now.done, text=_text(now))


class _Log:
    """Prints progress at most every `LOG_EVERY` seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, now: SweepProgress) -> None:
        if time.monotonic() - self.last >= LOG_EVERY:
            self.last = time.monotonic()
            print(_text(now), file=sys.stderr, flush=True)


def _text(now: SweepProgress) -> str:
    left = "" if math.isinf(now.left) else f", {duration(now.left)} left"
    return f"{now.before + now.done}/{now.total} rows, {now.rate:.2f}/s{left}, {now.failed} failed"
