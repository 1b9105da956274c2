"""`buffet summary`: how the methods of a sweep compare."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from buffet.cli.parameters import Json
from buffet.cli.terminal import plain_table, print_json, print_table

EXAMPLES = ("buffet summary rows.ndjson", "buffet summary rows.ndjson --reference lse")


def summary(
    rows: Annotated[Path, typer.Argument(metavar="ROWS", help="What **buffet sweep** wrote.")],
    reference: Annotated[
        str, typer.Option(metavar="METHOD", help="The method the others are compared with.")
    ] = "baseline",
    json: Json = False,
) -> None:
    """Compare the methods of a sweep: one line per model, norm and method.

    **mean ×**, **median ×**, **worst ×**: certified radius divided by the reference's, over the tasks both
    answered. **cert./att.**: mean of certified divided by attacked radius, and the share of tasks in which
    it is at least 0.8 and 0.5. **time ×**: seconds divided by the reference's, over the same tasks.
    """
    from buffet.experiments.rows import read_rows
    from buffet.experiments.summary import HEADER, cells, summarise

    lines = summarise(read_rows(rows), reference)
    if json:
        print_json([asdict(line) for line in lines])
    else:
        table = plain_table()
        for place, name in enumerate(HEADER):
            table.add_column(name, justify="left" if place < 3 else "right", no_wrap=True)
        for line in lines:
            # A method's title has brackets, which rich would read as markup.
            table.add_row(*map(Text, cells(line)))
        print_table(table)
