"""`buffet sweep`: whole experiments, which can be interrupted at any moment."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buffet.cli.options import within
from buffet.cli.parameters import DEVICE, GPUS, Address, Backend, Json, RetryFailed, Workers
from buffet.cli.running import (
    check_backend,
    chosen_fleet,
    shown_progress,
)
from buffet.cli.terminal import print_json
from buffet.errors import BuffetError

if TYPE_CHECKING:
    from buffet.experiments import Outcome, SweepConfig

EXAMPLES = (
    "buffet sweep sweep.toml",
    "buffet sweep sweep.toml --dry-run",
    "buffet sweep sweep.toml --workers 4 --limit 600 --out rows.ndjson",
    "buffet sweep sweep.toml --backend ray --address auto",
    "buffet summary rows.ndjson",
    "buffet report rows.ndjson -o report.html",
)


def sweep(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file, as above.")],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The file of rows. Default: **out** of the file, or CONFIG.ndjson."
        ),
    ] = None,
    workers: Workers = None,
    threads: Annotated[int | None, typer.Option(metavar="N", help="Threads of each. Default: 1.")] = None,
    limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time for the words of one sentence, by one method."),
    ] = None,
    backend: Backend = "local",
    address: Address = None,
    gpus: Annotated[float | None, GPUS] = None,
    device: Annotated[str | None, DEVICE] = None,
    retry_failed: RetryFailed = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many tasks there are.")] = False,
    json: Json = False,
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
    **radius.search**, **radius.tolerance**, **run.workers**, **threads**, **limit**, **retries**, **memory**
    (bytes that a worker's bounds may take; what takes more becomes a row that says so), **device**.

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
    check_backend(backend, address, chosen.run)
    rows = out or chosen.out or config.with_suffix(".ndjson")
    if dry_run:
        plan = make_plan(chosen)
        found = {"tasks": plan.tasks, "batches": len(plan.units), "rows": str(rows), "notes": plan.notes}
        print_json(found) if json else typer.echo(f"{plan.tasks} tasks in {len(plan.units)} batches → {rows}")
        return
    with chosen_fleet(backend, address, chosen.run) as fleet, shown_progress() as report:
        outcome = experiments.sweep(chosen, rows, fleet, retry_failed=retry_failed, progress=report)
    if json:
        print_json({**asdict(outcome), "rows": str(outcome.rows), "reasons": dict(outcome.reasons)})
    else:
        _print(outcome)
    raise typer.Exit(1 if outcome.failed else 0)


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
