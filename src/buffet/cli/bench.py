"""`buffet bench`: what every method costs on this machine, and what became of that since."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from buffet.cli.options import parse_memory
from buffet.cli.parameters import Device, Json
from buffet.cli.terminal import print_json, print_rows, progress_bar
from buffet.errors import BuffetError

if TYPE_CHECKING:
    from buffet.lab.bench.cases import BenchCase
    from buffet.lab.bench.comparison import Change
    from buffet.lab.bench.running import BenchRow

EXAMPLES = (
    "buffet bench",
    "buffet bench --methods baseline,backward --json > before.json",
    "buffet bench --methods baseline,backward --against before.json --fail-above 1.2",
    "buffet bench --layers 12 --tokens 16 --width 128 --methods baseline,backward,backward/2 --limit 600",
    "buffet bench --layers 1,3,6 --tokens 8,16,32 --width 128 --json > bench.json",
)
SIZES = ("layers", "tokens", "width", "inner", "pooling", "words")


def bench(
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Only these, separated by commas; **backward/2** has a window of 2 layers."
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Only these, such as **1,3**.")
    ] = None,
    tokens: Annotated[str | None, typer.Option(metavar="NUMBERS", help="Only these.")] = None,
    width: Annotated[str | None, typer.Option(metavar="NUMBERS", help="Only these.")] = None,
    words: Annotated[int, typer.Option(metavar="N", help="Words that move, each a task of the batch.")] = 1,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="CPU time for one case.")] = 60.0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for one case.")] = "8GB",
    device: Device = "cpu",
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with what --json printed before.")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="With --against: exit code 1 if a case takes more, beyond noise."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure CPU time, wall time, memory and the achieved share of the matmul rate of one verification.

    Every case is a random encoder, single-threaded, in a process of its own; a case that does not fit its
    limits becomes a row that says so. CPU time is also given in units of **M**, one 1024³ float32 matrix
    product on the same core, so that figures of different machines can be compared.

    By default: a group of fixed cases (8 tokens, width 64, feed-forward 128; and a wide one), and every
    method at 3 layers, 16 tokens, width 128. With sizes given: all their combinations, for every method.
    Methods that learn take 10 steps.

    Exit code 0: done. 1: slower than **--fail-above** allows. 2: bad input.
    """
    from buffet.lab.bench.cases import selection
    from buffet.lab.bench.comparison import compare
    from buffet.lab.bench.running import BenchLimits, document, run_cases
    from buffet.system.devices import device_named

    if fail_above is not None and not (against and 0 < fail_above < math.inf):
        raise BuffetError("--fail-above: give a ratio above 0, and --against with it")
    old = _read(against) if against else None
    sizes = _numbers("--layers", layers), _numbers("--tokens", tokens), _numbers("--width", width)
    chosen = [name.strip() for name in methods.split(",")] if methods else []
    cases = list(dict.fromkeys(selection(*sizes, chosen, words)))
    limits = BenchLimits(limit, parse_memory(memory))
    device_named(device)
    rows: list[BenchRow] = []
    try:
        rows.extend(_watched(run_cases(cases, limits, device), len(cases)))
    except KeyboardInterrupt:
        typer.echo(f"interrupted after {len(rows)} of {len(cases)} cases", err=True)
    if json:
        print_json(document(rows, device))
    elif old is None:
        _print(rows)
    if old is not None:
        changes, notes = compare(old, rows)
        if not json:
            _print_changes(changes, notes)
        if fail_above is not None and any(c.real and c.ratio > fail_above for c in changes):
            raise typer.Exit(1)


def _numbers(option: str, text: str | None) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")] if text is not None else []
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise BuffetError(f"{option}: got {text!r}; give whole numbers separated by commas, such as 8,16")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _read(path: Path) -> list[BenchRow]:
    from buffet.lab.bench.running import read_document

    try:
        return read_document(path.read_text(), str(path))
    except UnicodeDecodeError:
        raise BuffetError(f"{path}: no measurements; give a file that 'buffet bench --json' wrote") from None


def _sizes(case: BenchCase) -> tuple[str, ...]:
    return case.name, *(str(getattr(case, size)) for size in SIZES)


Cells = Mapping[str, Callable[[Any], str]]
"""The columns of a table, and what a row has in them."""
COSTS: Cells = {
    "CPU ms": lambda m: f"{1e3 * m.cpu_seconds:.0f}",
    "wall ms": lambda m: f"{1e3 * m.wall_seconds:.0f}",
    "M": lambda m: f"{m.units:.1f}",
    "best": lambda m: f"{m.best:.1f}",
    "±": lambda m: f"{m.spread:.0%}",
    "peak MB": lambda m: f"{m.peak_megabytes:.0f}",
    "GFLOP": lambda m: f"{m.flops / 1e9:.2f}",
    "of rate": lambda m: f"{m.fraction:.0%}",
}
CHANGES: Cells = {
    "M before": lambda c: f"{c.old.units:.1f}",
    "M now": lambda c: f"{c.new.units:.1f}",
    "ratio": lambda c: f"{c.ratio:.2f}",
    "noise": lambda c: f"±{c.noise:.0%}",
    "memory": lambda c: f"{c.memory:.2f}",
    "": lambda c: "" if not c.real else "slower" if c.ratio > 1 else "faster",
}


def _cells(columns: Cells, found: Any) -> list[str]:
    return [cell(found) for cell in columns.values()]


def _print(rows: Sequence[BenchRow]) -> None:
    def cells(row: BenchRow) -> list[str]:
        found = [row.reason or ""] if row.measurement is None else _cells(COSTS, row.measurement)
        return [*_sizes(row.case), *found]

    print_rows(("method", *SIZES, *COSTS), map(cells, rows))
    if units := [1e3 * row.measurement.unit_seconds for row in rows if row.measurement]:
        typer.echo(
            f"\nM: one 1024³ float32 matrix product, {min(units):.0f} to {max(units):.0f} ms here. ±: between"
            " the quartiles of the repetitions. of rate: share of the rate of M."
        )


def _print_changes(changes: Sequence[Change], notes: Sequence[str]) -> None:
    ordered = sorted(changes, key=lambda c: -c.ratio)
    print_rows(("method", *SIZES, *CHANGES), [(*_sizes(c.case), *_cells(CHANGES, c)) for c in ordered])
    for note in notes:
        typer.echo(note)
    if not changes:
        typer.echo("no case is in both: nothing to compare")
        return
    mean = math.exp(sum(math.log(c.ratio) for c in changes) / len(changes))
    typer.echo(f"\n{len(changes)} cases, ratio {mean:.2f} on average; M cancels what the machine does.")


T = TypeVar("T")


def _watched(work: Iterable[T], total: int) -> Iterator[T]:
    """Everything, with a progress bar."""
    with progress_bar("measuring") as report:
        for done, one in enumerate(work, 1):
            report(done / total)
            yield one
