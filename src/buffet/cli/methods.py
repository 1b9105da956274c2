"""`buffet methods`: the named ways to compute bounds."""

from __future__ import annotations

from dataclasses import asdict

import typer

from buffet.cli.parameters import Json
from buffet.cli.terminal import plain_table, print_json, print_table
from buffet.compositions import COMPOSITIONS


def methods(
    json: Json = False,
) -> None:
    """List the methods that --method takes, from the loosest and fastest on."""
    if json:
        print_json({name: asdict(method) for name, method in COMPOSITIONS.items()})
        return
    parts = ("propagation", "product", "softmax", "optimise")
    table = plain_table("method", *parts, "what it does")
    for name, method in COMPOSITIONS.items():
        table.add_row(name, *(getattr(method, part) for part in parts), method.summary)
    print_table(table)
    typer.echo(
        "\nAny part can be replaced: --propagation, --product, --softmax, --optimise (see certify --help)."
    )
