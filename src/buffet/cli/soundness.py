"""`buffet soundness`: try to break every method's bounds on random networks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import torch
import typer
from rich.table import Table

from buffet.cli.terminal import print_json, print_table, progress_bar
from buffet.soundness import Tally, campaign

EXAMPLES = ("buffet soundness", "buffet soundness --networks 1000 --points 500 --seed 7 --json")


def soundness(
    networks: Annotated[int, typer.Option(min=1, help="Random networks to draw.")] = 200,
    points: Annotated[int, typer.Option(min=3, help="Sampled points of every region.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first network.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Hold the bounds of every method against sampled and attacked points of random networks.

    The networks cover all operations, norms, poolings and masks, 1 to 4 layers, and extreme weights. Exit
    code 1 if any point breaks a bound.
    """
    torch.set_num_threads(1)
    tallies: Sequence[Tally] = ()
    with progress_bar("checking") as report:
        for so_far in campaign(networks, points, seed):
            tallies = list(so_far.values())
            report(max(t.networks for t in tallies) / networks)
    broken = [v for t in tallies for v in t.violations]
    if json:
        print_json({"seed": seed, "methods": [asdict(t) for t in tallies]})
        raise typer.Exit(1 if broken else 0)
    columns = ("method", "networks", "points", "no bound", "violations")
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for t in tallies:
        counts = (t.networks, t.points, t.no_bound, len(t.violations))
        table.add_row(t.method, *(f"{count:,}" for count in counts))
    print_table(table)
    for v in broken:
        typer.echo(f"VIOLATION {v.method}: bound {v.bound} above a margin of {v.margin} ({v.case})")
    raise typer.Exit(1 if broken else 0)
