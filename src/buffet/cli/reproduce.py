"""`buffet reproduce`: the paper's evaluation in one command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buffet.cli.options import parse_norm, within
from buffet.cli.parameters import Workers
from buffet.cli.terminal import progress_line
from buffet.errors import BuffetError

if TYPE_CHECKING:
    from buffet.lab.reproduce import Scale, Stage

EXAMPLES = (
    "buffet reproduce --data path/to/data --out results",
    "buffet reproduce --data path/to/data --out results --models path/to/models --workers 1",
    "buffet reproduce --data path/to/data --out paper --scale paper --hours 12",
    "buffet reproduce --data path/to/data --out results --hours 0   # draw what is there",
    "buffet reproduce --draw-from docs/results --out docs/results",
)


def reproduce(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is written, and continued.")],
    data: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folders **sst2** and **yelp**, as **buffet train** reads them."),
    ] = None,
    scale: Annotated[
        str, typer.Option(metavar="NAME", help="How much: **small**, or **paper** for all of it.")
    ] = "small",
    models: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Trained models, called like their presets, to use as they are."),
    ] = None,
    trained_only: Annotated[
        bool, typer.Option("--trained-only", help="Train nothing: leave models out that are not there yet.")
    ] = False,
    hours: Annotated[
        float | None,
        typer.Option(
            metavar="H",
            help="Begin no work after so long, and draw what there is; the same command resumes later.",
        ),
    ] = None,
    norm: Annotated[str, typer.Option(metavar="P", help="The norm of the balls: 1, 2 or inf.")] = "1",
    workers: Workers = None,
    draw_from: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Draw everything anew from the file **rows-SCALE.ndjson** there."),
    ] = None,
) -> None:
    """Train the models, certify the tasks, and draw every figure and table of the paper's evaluation.

    Into DIR go **models**, **rows.ndjson** (for **buffet summary**), **margins**, then **figures**,
    **index.md**, which shows them and all tables with what is needed to repeat them, **claims.md**, which
    holds the paper's claims against them, and **rows-SCALE.ndjson**, from which all of these are drawn and
    which names no sentence.

    The scale **small** trains five models of width 128; it is meant for an hour on 2 cores. The scale
    **paper** trains the 10 models of the paper and asks 140 tasks of each: days on one machine.

    Tasks are done in a random order that is fixed, all models advancing alike, so whatever is done when
    **--hours** are over is a fair sample. What was begun by then is finished.

    It can be interrupted at any moment, in any way: the same command continues.
    """
    from buffet.experiments.workers import LocalFleet
    from buffet.lab import reproduce as evaluation

    if draw_from is not None:
        records = evaluation.Records.read(draw_from)
        typer.echo(f"{evaluation.draw(records, _prepared(out))}: drawn from {records.name}")
        return
    if data is None:
        raise BuffetError("--data: give the directory with the folders sst2 and yelp")
    chosen = _scale(scale, norm)
    if workers is not None:
        within("--workers", workers, 1, 4096)
    if hours is not None and not 0 <= hours < 1e6:
        raise BuffetError(f"--hours: got {hours:g}; give a number, 0 or more")
    if models is not None and not models.is_dir():
        raise BuffetError(f"--models: {models}: no such directory; leave it out to train the models")
    place = evaluation.Workspace(data, _prepared(out), models)
    with _shown() as report:
        page = evaluation.reproduce(
            place,
            chosen,
            LocalFleet(workers, 1),
            command=_command(chosen),
            trained_only=trained_only,
            hours=hours,
            report=report,
        )
    typer.echo(f"{page}: figures and tables beside it")


def _scale(name: str, norm: str) -> Scale:
    from buffet.lab.reproduce import SCALES

    if name not in SCALES:
        raise BuffetError(f"--scale: unknown scale {name!r}; choose one of: {', '.join(SCALES)}")
    return replace(SCALES[name], norm=parse_norm(norm))


def _prepared(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuffetError(f"--out: {out}: cannot be made: {error.strerror}") from None
    return out


def _command(scale: Scale) -> str:
    """The command that gives these results anywhere, without the paths of this machine."""
    words = ["buffet", "reproduce", "--data", "DATA", "--out", "RESULTS", "--scale", scale.name]
    return shlex.join(words + ([] if scale.norm == 1 else ["--norm", f"{scale.norm:g}"]))


@contextmanager
def _shown() -> Iterator[Callable[[Stage], None]]:
    """Where the evaluation is: every stage is named on stderr as it begins."""
    name = ""
    with progress_line() as line:

        def report(stage: Stage) -> None:
            nonlocal name
            if stage.name != name:
                name = stage.name
                typer.echo(f"{name}: {stage.done} of {stage.total}", err=True)
            line(stage.done, stage.total, f"{name}: {stage.done} of {stage.total}")

        yield report
