"""`buffet bench`: what every method costs on this machine, and what became of that since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from buffet.cli.options import DEVICE_HELP, parse_memory
from buffet.cli.terminal import print_json, print_table, progress_bar
from buffet.errors import BuffetError
from buffet.system.files import write_atomically

if TYPE_CHECKING:
    from buffet.lab.bench.cases import BenchCase, Named
    from buffet.lab.bench.comparison import Change
    from buffet.lab.bench.running import Limits, Row
    from buffet.lab.peers import Rivalry

EXAMPLES = (
    "buffet bench",
    "buffet bench --methods baseline,backward --json > before.json",
    "buffet bench --methods baseline,backward --against before.json --fail-above 1.2",
    "buffet bench --layers 12 --tokens 16 --width 128 --methods baseline,backward,backward/2 --limit 600",
    "buffet bench --full --out out/bench",
    "buffet bench --peer auto_LiRPA",
    "buffet bench --estimate --layers 12 --tokens 64 --width 768",
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
    full: Annotated[bool, typer.Option("--full", help="The whole grid. It takes hours.")] = False,
    limit: Annotated[float, typer.Option(metavar="SECONDS", help="CPU time for one case.")] = 60.0,
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory for one case.")] = "8GB",
    device: Annotated[str, typer.Option(metavar="NAME", help=DEVICE_HELP)] = "cpu",
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also write bench.json, growth.svg and growth.png there."),
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare with what --json or --out wrote before.")
    ] = None,
    fail_above: Annotated[
        float | None,
        typer.Option(metavar="RATIO", help="With --against: exit code 1 if a case takes more, beyond noise."),
    ] = None,
    peer: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Also run another verifier on the same networks: **auto_LiRPA**, if it is installed, or "
            "**zonotope** (as DeepT-Fast, comes with buffet).",
        ),
    ] = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Measure nothing but M: say what the cost model expects.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")] = False,
) -> None:
    """Measure CPU time, wall time, memory and the achieved share of the matmul rate of one verification.

    Every case is a random encoder, single-threaded, in a process of its own; a case that does not fit its
    limits becomes a row that says so. CPU time is also given in units of **M**, one 1024³ float32 matrix
    product on the same core, so that figures of different machines can be compared.

    By default: a group of fixed cases (8 tokens, width 64, feed-forward 128; and a wide one), every method at
    3 layers, 16 tokens, width 128, and one axis at a time varied around that for some methods. With sizes
    given: all their combinations, for every method. Methods that learn take 10 steps.

    Exit code 0: done. 1: slower than **--fail-above** allows. 2: bad input, or no such peer.
    """
    from buffet.lab.bench.cases import NAMED, selection
    from buffet.lab.bench.comparison import compare
    from buffet.lab.bench.growth import curves, draw
    from buffet.lab.bench.running import Limits, document, run_cases
    from buffet.system.devices import device_named

    if fail_above is not None and not (against and 0 < fail_above < math.inf):
        raise BuffetError("--fail-above: give a ratio above 0, and --against with it")
    if peer is not None and (out or against):
        raise BuffetError("--peer: prints a comparison of its own; leave --out and --against out")
    old = _read(against) if against else None
    sizes = _numbers("--layers", layers), _numbers("--tokens", tokens), _numbers("--width", width)
    chosen = [name.strip() for name in methods.split(",")] if methods else []
    grid = selection(*sizes, chosen, words, full=full)
    named = [] if any(sizes) or words > 1 else [n for n in NAMED if not chosen or n.case.method in chosen]
    cases = list(dict.fromkeys([*(n.case for n in named), *grid]))
    limits = Limits(limit, parse_memory(memory))
    device_named(device)
    if estimated:
        _estimate(cases, device, json)
        return
    if peer is not None:
        _peer(peer, cases, limits, device, json)
        return
    rows: list[Row] = []
    with progress_bar("measuring") as report:
        for row in run_cases(cases, limits, device):
            rows.append(row)
            report(len(rows) / len(cases))
            if out:  # an interruption leaves what was measured by then
                _write(out, document(rows, device))
    if out and (lines := curves(rows)):
        for name, picture in draw(lines).items():
            write_atomically(out / name, picture)
    if json:
        print_json(document(rows, device))
    elif old is None:
        _print(rows, named)
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


def _read(path: Path) -> list[Row]:
    from buffet.lab.bench.running import read_document

    try:
        return read_document(path.read_text(), str(path))
    except UnicodeDecodeError:
        raise BuffetError(f"{path}: no measurements; give a file that 'buffet bench --json' wrote") from None


def _write(folder: Path, found: dict[str, object]) -> None:
    import json

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "bench.json", json.dumps(found, indent=2, allow_nan=False) + "\n")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))


def _sizes(case: BenchCase) -> tuple[str, ...]:
    return case.name, *(str(getattr(case, size)) for size in SIZES)


def _print(rows: Sequence[Row], named: Sequence[Named]) -> None:
    from buffet.lab.bench.growth import AXES, QUANTITIES, curves

    references = {n.case: n for n in named}
    costs = ("CPU ms", "wall ms", "M", "best", "±", "peak MB", "GFLOP", "of rate")
    fixed = [row for row in rows if row.case in references]
    if fixed:
        table = _table("method", *SIZES, *costs, "auto_LiRPA 0.7.1", "less by")
        for row in fixed:
            table.add_row(*_sizes(row.case), *_costs(row), *_reference(row, references[row.case]))
        print_table(table)
        typer.echo()
    others = [row for row in rows if row.case not in references]
    if others:
        table = _table("method", *SIZES, *costs)
        for row in others:
            table.add_row(*_sizes(row.case), *_costs(row))
        print_table(table)
        typer.echo()
    if lines := curves(rows):
        table = _table("growth", *(f"{axis}: {quantity}" for axis in AXES for quantity in QUANTITIES))
        for method in dict.fromkeys(line.method for line in lines):
            by_axis = {line.axis: line for line in lines if line.method == method}
            table.add_row(
                method,
                *(
                    f"^{by_axis[axis].exponent(quantity):.2f}" if axis in by_axis else ""
                    for axis in AXES
                    for quantity in QUANTITIES
                ),
            )
        print_table(table)
        typer.echo()
    units = [1e3 * row.measurement.unit_seconds for row in rows if row.measurement]
    if units:
        typer.echo(
            f"M: one 1024³ float32 matrix product, {min(units):.0f} to {max(units):.0f} ms here. ±: between"
            " the quartiles of the repetitions. of rate: share of the rate of M."
        )


def _costs(row: Row) -> tuple[str, ...]:
    m = row.measurement
    if m is None:
        return (row.reason or "",)
    return (
        f"{1e3 * m.cpu_seconds:.0f}",
        f"{1e3 * m.wall_seconds:.0f}",
        f"{m.units:.1f}",
        f"{m.best:.1f}",
        f"{m.spread:.0%}",
        f"{m.peak_megabytes:.0f}",
        f"{m.flops / 1e9:.2f}",
        f"{m.fraction:.0%}",
    )


def _reference(row: Row, known: Named) -> tuple[str, ...]:
    if known.units is None or row.measurement is None:
        return ()
    text = f"{known.units:g} M" + (f", {known.megabytes:g} MB" if known.megabytes else "")
    return text, f"{known.units / row.measurement.units:.0f} ×"


def _print_changes(changes: Sequence[Change], notes: Sequence[str]) -> None:
    table = _table("method", *SIZES, "M before", "M now", "ratio", "noise", "memory", "")
    for change in sorted(changes, key=lambda c: -c.ratio):
        verdict = "" if not change.real else "slower" if change.ratio > 1 else "faster"
        table.add_row(
            *_sizes(change.case),
            f"{change.old.units:.1f}",
            f"{change.new.units:.1f}",
            f"{change.ratio:.2f}",
            f"±{change.noise:.0%}",
            f"{change.memory:.2f}",
            verdict,
        )
    print_table(table)
    for note in notes:
        typer.echo(note)
    if not changes:
        typer.echo("no case is in both: nothing to compare")
        return
    mean = math.exp(sum(math.log(c.ratio) for c in changes) / len(changes))
    typer.echo(f"\n{len(changes)} cases, ratio {mean:.2f} on average; M cancels what the machine does.")


def _peer(name: str, cases: Sequence[BenchCase], limits: Limits, device: str, json: bool) -> None:
    from buffet.lab.peers import peer_named, run_rivals

    peer = peer_named(name)
    found: list[Rivalry] = []
    mine = [case for case in cases if peer.method_for(case)]
    if not mine:
        raise BuffetError(f"--peer: {name} has nothing like the methods chosen; add backward")
    with progress_bar("measuring") as report:
        for rivalry in run_rivals(mine, name, limits, device):
            found.append(rivalry)
            report(len(found) / len(mine))
    if json:
        print_json([rivalry.as_dict() for rivalry in found])
        return
    table = _table(
        "method", *SIZES, name, "M", "its M", "time", "MB", "its MB", "memory", "bound", "its bound"
    )
    for r in found:
        table.add_row(*_sizes(r.case), *r.cells())
    print_table(table)
    typer.echo(
        "\ntime, memory: how many times more it needs. bound: lower bound of the margin, larger is tighter."
    )


def _estimate(cases: Sequence[BenchCase], device: str, json: bool) -> None:
    from buffet.lab.bench.costs import Machine, estimate

    machine = Machine.here(device)
    found = [(case, expected) for case in cases if (expected := estimate(case))]
    if not found:
        raise BuffetError(
            "--estimate: the cost model knows baseline, lse, backward (also windowed) and buffet"
        )
    if json:
        print_json(
            [{"case": case.__dict__, **e.__dict__, "seconds": machine.seconds(e)} for case, e in found]
        )
        return
    table = _table("method", *SIZES, "GFLOP", "GB moved", "M", "seconds", "peak MB")
    for case, e in found:
        seconds = machine.seconds(e)
        table.add_row(
            *_sizes(case),
            f"{e.flops / 1e9:.2f}",
            f"{e.moved_bytes / 1e9:.2f}",
            f"{seconds / machine.unit_seconds:.1f}",
            f"{seconds:.2f}",
            f"{e.peak_bytes / 1e6:.0f}",
        )
    print_table(table)
    typer.echo(
        f"\nHere: {machine.flop_rate / 1e9:.0f} GFLOP/s in products, {machine.byte_rate / 1e9:.1f} GB/s"
        " elsewhere. docs/scaling.md says how the model is made."
    )
