"""The answer of `buffet certify` in a terminal: the coloured sentence, the table, a line that sums it up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.style import Style
from rich.table import Table
from rich.text import Text

from buffet.cli.terminal import console_of, plain_table
from buffet.printing import plural, round_down
from buffet.report.answer import CertifyReport, shades, shown
from buffet.report.scale import RAMP, ink

VERDICT_STYLES = {"certified": "green", "falsified": "red", "unknown": "yellow"}
BAR_WIDTH = 12


def print_report(report: CertifyReport, html: Path | None) -> None:
    """The answer for people; a page that was written is named at the end."""
    console = console_of(120)
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
    near = any(task.nearest for task in report.tasks)
    if near:
        table.add_column("nearest words", no_wrap=True, overflow="ellipsis")
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
            *([Text(cells.nearest, "dim")] if near else []),
        )
    return table


def _summary(report: CertifyReport) -> Iterator[Text]:
    labels, query = report.model.labels, report.query
    defended, answer = labels[query.label], labels[report.answer]
    if query.label != report.answer:
        yield Text(
            f"{report.model.name} answers {answer}, not {defended}: there is nothing to certify", "red"
        )
    if any(task.nearest for task in report.tasks):
        held = sum(task.held for task in report.tasks)
        yield Text(
            f"certified balls hold {held or 'no'} other {plural(held, 'word')} of the vocabulary", "dim"
        )
    seconds = report.seconds + (report.attack_seconds or 0.0)
    calls = f"{report.evaluations} {plural(report.evaluations, 'evaluation')}"
    size = "" if query.eps is None else f" ε = {query.eps!r}"
    verdict = "" if query.eps is None else f" {report.verdict} ·"
    yield Text(
        f"{report.model.name} ·{verdict} {defended} (margin {round_down(report.clean_margin)}) ·"
        f" {report.method_name} · {report.norm_name}{size} · {seconds:.2f} s · {calls}"
    )
