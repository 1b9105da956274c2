"""`buffet sweep`: whole experiments, which can be interrupted at any moment."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from buffet.cli.options import DEVICE_HELP, within
from buffet.cli.terminal import print_json
from buffet.errors import BuffetError
from buffet.printing import duration

if TYPE_CHECKING:
    from buffet.experiments import Outcome, SweepConfig, SweepProgress
    from buffet.experiments.config import Running
    from buffet.experiments.workers import Fleet

EXAMPLES = (
    "buffet sweep sweep.toml",
    "buffet sweep sweep.toml --dry-run",
    "buffet sweep sweep.toml --workers 4 --limit 600 --out rows.ndjson",
    "buffet sweep sweep.toml --backend ray --address auto",
    "buffet summary rows.ndjson",
    "buffet report rows.ndjson -o report.html",
)
BACKENDS = ("local", "ray")
LOG_EVERY = 30.0
"""Seconds between lines of progress where there is no terminal."""


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, as above.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file of rows. Default: **out** of the file, or CONFIG.ndjson."
        ),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes. Default: as many as there are cores.")
    ] = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads of each. Default: 1.")] = None,
    limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time for the words of one sentence, by one method."),
    ] = None,
    backend: Annotated[
        str,
        typer.Option(metavar="NAME", help="Who works: **local** processes, or **ray** for many machines."),
    ] = "local",
    address: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="A Ray cluster to join. Default: one of its own, here."),
    ] = None,
    gpus: Annotated[
        float | None,
        typer.Option(metavar="N", help="GPUs that Ray gives each worker; use them with --device cuda."),
    ] = None,
    device: Annotated[str | None, typer.Option(metavar="NAME", help=DEVICE_HELP)] = None,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Try tasks again whose row says failed or timeout.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many tasks there are.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON and nothing else.")] = False,
) -> None:
    """Answer every task of a configuration: one row of JSON per model, sentence, norm, method and word.

    A small configuration; paths are counted from its directory:

        models = ["sst2-small", "path/to/checkpoint"]
        methods = ["baseline", { name = "backward", window = 2 }]
        norms = [1, 2, "inf"]
        [sentences]
        file = "dev.tsv"    # sentence, tab, label; or: texts = ["good film"]
        count = 10          # chosen with the seed, correctly classified
        max_words = 20
        [words]
        count = 5           # per sentence; default "all"
        together = 1        # words that move at the same time

    Also: **seed**, **attack** = false, **sentences.min_words**, **sentences.correct** = false,
    **radius.search**, **radius.tolerance**; to verify instead of searching radii, **what** = "verify" and
    **verify.eps** = [0.1] or **verify.shares** = [0.5, 0.9] of the radius of **verify.of** = "baseline";
    **run.workers**, **threads**, **limit**, **retries**, **memory** (bytes that a
    worker's bounds may take; what takes more becomes a row that says so), **device**.

    It can be interrupted at any moment, in any way: the same command continues, with nothing lost and
    nothing done twice. A task that fails or runs out of time becomes a row that says why.

    Exit code 0: all tasks have an answer. 1: some failed. 2: bad input.
    """
    from buffet import experiments
    from buffet.experiments.plan import make_plan

    chosen = _with_options(
        experiments.read_sweep(config),
        workers=workers,
        threads=threads,
        limit=limit,
        gpus=gpus,
        device=device,
    )
    _check_backend(backend, address, chosen.run)
    rows = out or chosen.out or config.with_suffix(".ndjson")
    if dry_run:
        plan = make_plan(chosen)
        found = {"tasks": plan.tasks, "batches": len(plan.units), "rows": str(rows), "notes": plan.notes}
        print_json(found) if json else typer.echo(f"{plan.tasks} tasks in {len(plan.units)} batches → {rows}")
        return
    with _fleet(backend, address, chosen.run) as fleet, _progress() as report:
        outcome = experiments.sweep(chosen, rows, fleet, retry_failed=retry_failed, progress=report)
    if json:
        print_json({**asdict(outcome), "rows": str(outcome.rows), "reasons": dict(outcome.reasons)})
    else:
        _print(outcome)
    raise typer.Exit(1 if outcome.failed else 0)


def _check_backend(backend: str, address: str | None, running: Running) -> None:
    from buffet.system.devices import device_named

    if backend == "local" or running.device == "cpu":
        device_named(running.device)  # workers elsewhere may have what is missing here
    if backend not in BACKENDS:
        raise BuffetError(f"--backend: unknown backend {backend!r}; choose one of: {', '.join(BACKENDS)}")
    if backend == "local" and (address is not None or running.gpus):
        raise BuffetError("--address and --gpus go with --backend ray")


def _fleet(backend: str, address: str | None, running: Running) -> AbstractContextManager[Fleet[Any]]:
    from buffet.experiments.cluster import ray_fleet
    from buffet.experiments.workers import LocalFleet

    if backend == "ray":
        return ray_fleet(address, running.workers, running.threads, running.gpus)
    return nullcontext(LocalFleet(running.workers, running.threads))


def _with_options(config: SweepConfig, **given: int | float | str | None) -> SweepConfig:
    """The configuration with what the command line says about running it."""
    for option in ("workers", "threads"):
        if (value := given[option]) is not None:
            within(f"--{option}", int(value), 1, 4096)
    if (limit := given["limit"]) is not None and not 0 < float(limit) < math.inf:
        raise BuffetError(f"--limit: got {float(limit):g}; give a number of seconds above 0")
    if (gpus := given["gpus"]) is not None and not 0 <= float(gpus) <= 64:
        raise BuffetError(f"--gpus: got {float(gpus):g}; give a number from 0 to 64")
    update = {name: value for name, value in given.items() if value is not None}
    return config.model_copy(update={"run": config.run.model_copy(update=update)})


def _print(outcome: Outcome) -> None:
    for note in outcome.notes:
        typer.echo(f"note: {note}", err=True)
    for reason, count in outcome.reasons[:10]:
        typer.echo(f"{count} rows: {reason}", err=True)
    typer.echo(
        f"{outcome.rows}: {outcome.tasks} tasks, {outcome.written} rows written now, {outcome.failed} failed,"
        f" {outcome.seconds:.1f} s"
    )


@contextmanager
def _progress() -> Iterator[Callable[[SweepProgress], None]]:
    """A live line on stderr; where stderr is not a terminal, a plain line now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Log()
        return
    columns = (BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("sweep", total=None, text="planning")
        yield lambda now: bar.update(task, total=now.total, completed=now.before + now.done, text=_text(now))


class _Log:
    """Prints progress at most every `LOG_EVERY` seconds."""

    def __init__(self) -> None:
        self.last = time.monotonic()

    def __call__(self, now: SweepProgress) -> None:
        if time.monotonic() - self.last >= LOG_EVERY:
            self.last = time.monotonic()
            print(_text(now), file=sys.stderr, flush=True)


def _text(now: SweepProgress) -> str:
    left = "" if math.isinf(now.left) else f", {duration(now.left)} left"
    return f"{now.before + now.done}/{now.total} rows, {now.rate:.2f}/s{left}, {now.failed} failed"
