"""`buffet vnncomp`: networks in ONNX and properties in VNN-LIB, as the verification competition has them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from buffet.cli.options import within
from buffet.cli.parameters import Json, Method
from buffet.cli.terminal import print_json, progress_line
from buffet.errors import BuffetError
from buffet.printing import counted, duration
from buffet.system.files import check_writable
from buffet.system.interruption import terminated_as_interrupted

if TYPE_CHECKING:
    from buffet.vnncomp.listing import Row

EXAMPLES = (
    "buffet vnncomp model.onnx property.vnnlib --timeout 100",
    "buffet vnncomp instances.csv -o results.csv",
    "buffet vnncomp instances.csv -o results.csv --workers 1",
    "buffet vnncomp model.onnx property.vnnlib --certificate proof.safetensors",
)
TIMEOUT = 100.0


def vnncomp(
    given: Annotated[
        Path, typer.Argument(metavar="MODEL|LIST", help="A network in ONNX, or a list of instances.")
    ],
    spec: Annotated[
        Path | None, typer.Argument(metavar="PROPERTY", help="A VNN-LIB file, plain or gz.")
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time for one instance. Default: 100, or what the list says."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Results of a list. Default: LIST.results.csv."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Instances at the same time. Default: as many as there are cores."),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(metavar="N", help="Threads of each. Default: all cores, shared by the workers."),
    ] = None,
    method: Method = "buffet",
    certificate: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Also write the proof of **unsat**, for **buffet check --model MODEL**, in what is left of"
            " the time. Of a list: a directory, with a file for each.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Answer an instance of the competition VNN-COMP, or a list of them.

    The first line is the answer. **unsat**: proven, no input is unsafe. **sat**: there is one, which follows
    in the competition's format; it was evaluated again in float64 and, if installed, by onnxruntime.
    **timeout** or **unknown**: neither; how far the proof had come follows on stderr, also after Ctrl-C.

    A list has rows of **onnx,vnnlib,timeout**, paths counted from its directory. Results are written row by
    row; the same command continues where it was interrupted. Needs the extra **onnx**.

    Exit code 0: unsat; of a list: every instance was answered. 1: anything else. 2: bad input.
    """
    begin = time.perf_counter()
    from buffet.methods import method_named

    method_named(method)
    if spec is not None:
        for option, value in (("--out", out), ("--workers", workers)):
            if value is not None:
                raise BuffetError(f"{option} goes with a list of instances, not with a single one")
        if certificate is not None:
            check_writable(certificate)
        seconds = TIMEOUT if timeout is None else timeout
        raise typer.Exit(
            _single(
                given,
                spec,
                threads,
                json,
                timeout=seconds,
                method=method,
                begin=begin,
                certificate=certificate,
            )
        )
    raise typer.Exit(
        _list(given, timeout, out, workers, threads, json, method=method, certificates=certificate)
    )


def _single(onnx: Path, spec: Path, threads: int | None, json: bool, **how: Any) -> int:
    from buffet.system.parallel import cores
    from buffet.system.parallel import threads as threaded
    from buffet.vnncomp.instance import answer

    count = cores() if threads is None else within("--threads", threads, 1, 4096)
    with threaded(count), terminated_as_interrupted():
        found = answer(onnx, spec, **how)
    point = found.counterexample
    if json:
        numbers = None if point is None else {"X": point.inputs.tolist(), "Y": point.outputs.tolist()}
        said = {"result": found.result, "seconds": found.seconds, "reason": found.reason}
        noted = {} if found.note is None else {"certificate": found.note}
        print_json({**said, "counterexample": numbers, **noted})
    else:
        typer.echo(found.result)
        if point is not None:
            typer.echo(point.text())
        for note in filter(None, (found.reason, found.note)):
            typer.echo(f"note: {note}", err=True)
    return 0 if found.result == "unsat" else 1


def _list(
    path: Path,
    timeout: float | None,
    out: Path | None,
    workers: int | None,
    threads: int | None,
    json: bool,
    **how: Any,
) -> int:
    from buffet.system.parallel import cores
    from buffet.system.parallel import threads as threaded
    from buffet.vnncomp.listing import read_instances, run_list

    instances = read_instances(path, timeout)
    side = cores() if workers is None else within("--workers", workers, 1, 4096)
    side = min(side, len(instances))
    each = max(1, cores() // side) if threads is None else within("--threads", threads, 1, 4096)
    results = out or path.with_suffix(".results.csv")
    with _progress() as report, threaded(each if side == 1 else 1), terminated_as_interrupted():
        rows = run_list(instances, path.parent, results, workers=side, threads=each, progress=report, **how)
    if json:
        print_json({"results": str(results), **_summary(rows)})
    else:
        _print(rows, results)
    return 1 if any(row.result == "error" for row in rows) else 0


def _summary(rows: list[Row]) -> dict[str, Any]:
    counts = Counter(row.result for row in rows)
    seconds = {name: sum(row.seconds for row in rows if row.result == name) for name in counts}
    return {"instances": len(rows), "counts": dict(counts), "seconds": seconds}


def _print(rows: list[Row], results: Path) -> None:
    for row in rows:
        if row.result == "error":
            typer.echo(f"{row.instance.vnnlib}: {row.reason}", err=True)
    found = _summary(rows)
    typer.echo(f"{results}: {counted(len(rows), 'instance')}")
    for name, count in sorted(found["counts"].items(), key=lambda entry: -entry[1]):
        each = found["seconds"][name] / count
        typer.echo(f"{name:8} {count:5}   {duration(each)} each")


@contextmanager
def _progress() -> Iterator[Callable[[int, int, Counter[str]], None]]:
    """How far a list has come: instances by their answers, and the time that is left."""
    begin = time.monotonic()
    before: int | None = None
    with progress_line() as line:

        def report(done: int, total: int, counts: Counter[str]) -> None:
            nonlocal before
            before = done if before is None else before
            parts = [
                f"{done}/{total} instances",
                *(f"{count} {name}" for name, count in counts.most_common()),
            ]
            if done > before:
                left = (time.monotonic() - begin) / (done - before) * (total - done)
                parts.append(f"{duration(left)} left")
            line(done, total, ", ".join(parts))

        yield report
