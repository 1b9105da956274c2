"""What people see in a terminal: the coloured sentence, the table, a progress bar."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from buffet.printing import plural, round_down
from buffet.report.answer import CertifyReport, shades, shown
from buffet.report.scale import RAMP, ink

PATIENCE = 2.0
"""Seconds of silence before a progress bar appears."""
VERDICT_STYLES = {"certified": "green", "falsified": "red", "unknown": "yellow"}
BAR_WIDTH = 12


def print_json(value: object) -> None:
    """`value` on stdout: strict JSON in ASCII, so that every reader takes it."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


def plain_table(*columns: str) -> Table:
    """A table without lines."""
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def print_table(table: Table) -> None:
    """A table on stdout; not cut to any width where that is not a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table)


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


def print_report(report: CertifyReport, html: Path | None) -> None:
    """The answer for people; a page that was written is named at the end."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=120)
    console.print()
    for line in _heat_map(report):
        console.print(line)
    if console.is_terminal and not console.no_color:
        console.print(_legend("sentence" if report.picture is None else "image"))
    console.print()
    console.print(_table(report))
    console.print()
    for line in _summary(report):
        console.print(line, soft_wrap=True)
    if html is not None:
        console.print(Text(f"report: {html}"), soft_wrap=True)


def _shade(step: int) -> Style:
    return Style(color=ink(step), bgcolor=RAMP[step])


def _heat_map(report: CertifyReport) -> Iterator[Text]:
    """The sentence; or the image, every patch as the number that ``--words`` calls it by."""
    if report.picture is None:
        yield _shaded(report, {token.index: token.token for token in report.tokens})
        return
    side = report.picture.side
    wide = len(str(side * side))
    for line in range(side):
        first = 1 + line * side  # row 0 is the class token
        yield _shaded(report, {row: f"{row:{wide}}" for row in range(first, first + side)})


def _shaded(report: CertifyReport, names: Mapping[int, str]) -> Text:
    """Rows by these names, those that moved in their colour."""
    steps = shades(report)
    line = Text()
    for row, name in names.items():
        line.append(f" {name} ", _shade(steps[row]) if row in steps else Style(dim=True))
        line.append(" ")
    return line


def _legend(whole: str) -> Text:
    ramp = [Text("  ", Style(bgcolor=colour)) for colour in RAMP]
    return Text.assemble(("fragile ", "dim"), *ramp, (f" robust (relative to this {whole})", "dim"))


def _table(report: CertifyReport) -> Table:
    at_eps = report.query.eps is not None
    table = plain_table()
    table.add_column("#", justify="right", style="dim")
    table.add_column(report.unit, overflow="fold")
    if at_eps:
        table.add_column("verdict")
    for name in ("certified", "attacked", "margin"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    strongest = max(report.strength(task) for task in report.tasks)
    for task in report.tasks:
        cells = shown(task, report.query.eps)
        verdict = [Text(cells.verdict, VERDICT_STYLES[cells.verdict])] if at_eps else []
        bar = "━" * round(BAR_WIDTH * report.strength(task) / strongest) if strongest > 0 else ""
        table.add_row(
            cells.words,
            Text(cells.text),
            *verdict,
            cells.certified,
            cells.attacked,
            cells.margin,
            Text(bar, "dim"),
        )
    return table


def _summary(report: CertifyReport) -> Iterator[Text]:
    labels, query = report.model.labels, report.query
    defended, answer = labels[query.label], labels[report.answer]
    if query.label != report.answer:
        yield Text(
            f"{report.model.name} answers {answer}, not {defended}: there is nothing to certify", "red"
        )
    seconds = report.seconds + (report.attack_seconds or 0.0)
    calls = f"{report.evaluations} {plural(report.evaluations, 'evaluation')}"
    size = "" if query.eps is None else f" ε = {query.eps!r}"
    verdict = "" if query.eps is None else f" {report.verdict} ·"
    yield Text(
        f"{report.model.name} ·{verdict} {defended} (margin {round_down(report.clean_margin)}) ·"
        f" {report.method_name} · {report.norm_name}{size} · {seconds:.2f} s · {calls}"
    )
