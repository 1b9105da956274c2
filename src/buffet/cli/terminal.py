"""What every command prints with: JSON, tables, a progress bar."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

PATIENCE = 2.0
"""Seconds of silence before a progress bar appears."""
LOG_EVERY = 30.0
"""Seconds between lines of progress where there is no terminal."""


def print_json(value: object) -> None:
    """`value` on stdout: strict JSON in ASCII, so that every reader takes it."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def console_of(width: int) -> Console:
    """Where answers are printed: a terminal, or lines of this width."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=width)


def plain_table(*columns: str) -> Table:
    """A table without lines."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def print_table(table: Table) -> None:
    """A table on stdout; hardly cut where that is not a terminal."""
    console_of(200).print(table)


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain table of texts on stdout."""
    table = plain_table(*columns)
    for row in rows:
        table.add_row(*row)
    print_table(table)


@contextmanager
def progress_bar(what: str) -> Iterator[Callable[[float], None]]:
    """A bar on stderr for work that takes longer than `PATIENCE`; gone when the work is done."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
    progress = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
    task = progress.add_task(what, total=1.0)
    timer = threading.Timer(PATIENCE, progress.start)
    timer.daemon = True
    timer.start()
    try:
        yield lambda share: progress.update(task, completed=share)
    finally:
        timer.cancel()
        timer.join()
        progress.stop()


@contextmanager
def progress_line(first: str = "") -> Iterator[Callable[[int, int, str], None]]:
    """A bar with a text on stderr, for long work: call it with what is done, the total, and the text.

    Where stderr is not a terminal, the text is printed as a line of its own every `LOG_EVERY` seconds.
    """
    console, last = Console(stderr=True), time.monotonic()

    def log(done: int, total: int, text: str) -> None:
        nonlocal last
        if time.monotonic() - last >= LOG_EVERY:
            last = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield log
        return
    columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None, text=first)
        yield lambda done, total, text: bar.update(task, total=total, completed=done, text=text)
