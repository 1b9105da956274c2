"""`buffet bench`: what every method costs on this machine."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from buffet.bench import CASES, Measurement, run_cases
from buffet.cli.terminal import print_json, print_table, progress_bar

EXAMPLES = ("buffet bench", "buffet bench --method backward --json")


def bench(
    method: Annotated[str | None, typer.Option("--method", help="Measure only this method.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure CPU time, wall time and memory of one verification, single-threaded.

    CPU time is also given in units of M, one 1024³ float32 matrix product on the same core, so that figures
    of different machines can be compared.
    """
    cases = [case for case in CASES if method in (None, case.method)]
    if not cases:
        raise typer.BadParameter(f"no measurement of '{method}'; there are: {', '.join(_methods())}")
    found: list[Measurement] = []
    with progress_bar("measuring") as report:
        for measurement in run_cases(cases):
            found.append(measurement)
            report(len(found) / len(cases))
    if json:
        print_json([asdict(m) for m in found])
        return
    shape = ("layers", "tokens", "width", "inner", "pooling", "words")
    times = ("CPU ms", "M", "±", "peak MB")
    table = Table("method", *shape, *times, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for m in found:
        sizes = (str(getattr(m.case, name)) for name in shape)
        cost = (f"{1e3 * m.cpu_seconds:.0f}", f"{m.units:.1f}", f"{m.spread:.0%}", f"{m.peak_megabytes:.0f}")
        table.add_row(m.case.method, *sizes, *cost)
    print_table(table)
    unit = 1e3 * found[-1].unit_seconds
    typer.echo(f"\nM: one 1024³ float32 matrix product, {unit:.0f} ms here. ±: spread of the repetitions.")


def _methods() -> list[str]:
    return list(dict.fromkeys(case.method for case in CASES))
