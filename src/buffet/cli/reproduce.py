"""`buffet reproduce`: the paper's evaluation in one command."""

from __future__ import annotations

import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from buffet.cli.options import parse_norm, within
from buffet.errors import BuffetError

if TYPE_CHECKING:
    from buffet.lab.reproduce import Scale, Stage

EXAMPLES = (
    "buffet reproduce --data path/to/data --out results",
    "buffet reproduce --data path/to/data --out results --models path/to/models --workers 1",
    "buffet reproduce --data path/to/data --out results --draw-only",
    "buffet reproduce --data path/to/data --out paper --scale paper",
)
SAY_EVERY = 15.0
"""Seconds between two lines of progress."""


def reproduce(
    data: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folders **sst2** and **yelp**, as **buffet train** reads them."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where everything is written, and continued.")],
    scale: Annotated[
        str, typer.Option(metavar="NAME", help="How much: **small**, or **paper** for all of it.")
    ] = "small",
    models: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Trained models, called like their presets, to use as they are."),
    ] = None,
    norm: Annotated[str, typer.Option(metavar="P", help="The norm of the balls: 1, 2 or inf.")] = "2",
    workers: Annotated[
        int | None, typer.Option(metavar="N", help="Processes. Default: as many as there are cores.")
    ] = None,
    draw_only: Annotated[
        bool, typer.Option("--draw-only", help="Do no further work; draw what there is so far.")
    ] = False,
) -> None:
    """Train the models, certify the tasks, and draw every figure and table of the evaluation.

    Into DIR go **models**, **rows.ndjson** (for **buffet summary**), **margins**, then **figures** (SVG,
    PNG, CSV), **tables** (Markdown, LaTeX, CSV) and **index.md**, which shows them all with what is needed
    to repeat them.

    The scale **small** trains five models of width 128; it is meant for half an hour on 2 cores. The scale
    **paper** trains the 10 models of the paper and asks 140 tasks of each: days on one machine.

    It can be interrupted at any moment, in any way: the same command continues.
    """
    from buffet.experiments.workers import LocalFleet
    from buffet.lab import reproduce as evaluation

    chosen = _scale(scale, norm)
    if workers is not None:
        within("--workers", workers, 1, 4096)
    if models is not None and not models.is_dir():
        raise BuffetError(f"--models: {models}: no such directory; leave it out to train the models")
    place = evaluation.Workspace(data, _prepared(out), models)
    fleet = LocalFleet(workers, 1)
    page = evaluation.reproduce(
        place, chosen, fleet, command=_command(chosen), draw_only=draw_only, report=_Log()
    )
    typer.echo(f"{page}: {len(chosen.subjects)} models, figures and tables beside it")


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
    return shlex.join(words + ([] if scale.norm == 2 else ["--norm", f"{scale.norm:g}"]))


class _Log:
    """Says on stderr where the evaluation is: at every beginning and end, and now and then."""

    def __init__(self) -> None:
        self.start = self.last = time.monotonic()
        self.stage = ""

    def __call__(self, stage: Stage) -> None:
        now = time.monotonic()
        if stage.name != self.stage or stage.done == stage.total or now - self.last >= SAY_EVERY:
            self.stage, self.last = stage.name, now
            minutes, seconds = divmod(int(now - self.start), 60)
            text = f"{minutes:3}:{seconds:02}  {stage.name}: {stage.done} of {stage.total}"
            print(text, file=sys.stderr, flush=True)
