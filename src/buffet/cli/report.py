"""`buffet report`: one page about a sweep."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from buffet.errors import BuffetError
from buffet.system.files import check_writable, write_atomically

EXAMPLES = (
    "buffet report rows.ndjson",
    "buffet report rows.ndjson -o report.html --reference lse",
    "buffet report monday.ndjson tuesday.ndjson -o both.html",
)


def report(
    rows: Annotated[
        list[Path],
        typer.Argument(
            metavar="ROWS...", help="What **buffet sweep** wrote; several files are taken as one."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="The page. Default: the first ROWS with .html."),
    ] = None,
    reference: Annotated[
        str | None,
        typer.Option(
            metavar="METHOD",
            help="The method the others are compared with. Default: **baseline**, or else the first.",
        ),
    ] = None,
) -> None:
    """Make one page of the rows of a sweep: what was proven, on what, how strong, at what cost.

    The page is one file that loads nothing: open it in a browser, mail it, keep it with the rows. It has the
    summary, radius and time by method, every method against the reference, the brackets between what is
    proven and what was attacked, every sentence with its words coloured by certified radius, the weakest,
    slowest and failed tasks, and what is needed to get the same numbers again. Everything can be filtered by
    model, norm, method and sentence; tables sort by any column. A sweep may still be running meanwhile.

    Certified numbers are rounded down, attacked ones up.
    """
    from buffet.report.sweep import read_sources, sweep_page

    target = out or rows[0].with_suffix(".html")
    check_writable(target)
    if any(target.resolve() == source.resolve() for source in rows):
        raise BuffetError(f"{target}: the page would replace the rows it is made of; name another with --out")
    found, sources = read_sources(rows)
    write_atomically(target, sweep_page(found, sources, reference))
    typer.echo(f"{target}: {len(found)} rows, {target.stat().st_size / 1024:.0f} kB")
