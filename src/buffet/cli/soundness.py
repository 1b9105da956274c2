"""`buffet soundness`: try to break every method's bounds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from buffet.cli.parameters import Json
from buffet.cli.terminal import print_json, print_rows, progress_line

if TYPE_CHECKING:
    from buffet.lab.soundness import CampaignState, Violation

EXAMPLES = (
    "buffet soundness",
    "buffet soundness --networks 1000 --points 500 --seed 7000 --json",
    "buffet soundness --networks 1 --seed 7031 --method backward",
    "buffet soundness --extreme --networks 5000 --points 250",
)


def soundness(
    networks: Annotated[int, typer.Option(min=1, help="Networks to draw, one per seed.")] = 200,
    points: Annotated[int, typer.Option(min=3, help="Sampled points of every region.")] = 500,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first network.")] = 0,
    method: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Try this method only (can be repeated), and all there is to try."),
    ] = None,
    extreme: Annotated[
        bool,
        typer.Option("--extreme", help="Networks at the edges of floating point, against exact values."),
    ] = False,
    json: Json = False,
) -> None:
    """Hold the bounds of every method against points of random networks.

    The networks cover all operations, activations, norms, poolings and masks, 1 to 4 layers, and extreme
    weights; every third is built to have an adversarial point at a known distance. Points are sampled,
    corners, attacked, or all there are. Besides margins, the bounds of every node inside are held against
    its values.

    What is tried with a network depends on its seed alone: a long campaign is split or continued by
    **--seed** and **--networks**, also after an interruption, which reports what was done until then. A
    violation is reported with the command that reproduces it, and in JSON with its point.

    With **--extreme**, the networks are tiny and their numbers are not: huge ones cancel, tiny ones underflow
    and are amplified again. Margins, verdicts and radii are held against values in exact arithmetic, and
    nothing is tolerated. Otherwise points are evaluated in float64, and what breaks a bound by less than
    1e-9 of the largest number upstream is put down to that.

    Exit code 0: nothing broke a bound. 1: something did.
    """
    import torch

    from buffet.lab.soundness import EXTREME, ORDINARY, campaign

    torch.set_num_threads(1)
    progress = campaign(networks, points, seed, method, EXTREME if extreme else ORDINARY)
    raise typer.Exit(_campaign(progress, networks, seed, json))


def _campaign(progress: Iterator[CampaignState], networks: int, seed: int, json: bool) -> int:
    from buffet.lab.soundness import CampaignState

    now = CampaignState(seed, seed)
    try:
        with progress_line() as line:
            for now in progress:
                line(now.networks, networks, f"{_counts(now)}; the next seed is {now.next}")
    except KeyboardInterrupt:
        print(f"interrupted; --seed {now.next} continues", file=sys.stderr)
    if json:
        print_json({**asdict(now), "networks": now.networks, "checks": now.checks})
    else:
        _print(now)
    return 1 if now.violations else 0


def _counts(now: CampaignState) -> str:
    return (
        f"{now.networks:,} networks ({now.planted:,} planted, {now.exhaustive:,} tried exhaustively),"
        f" {now.points:,} points, {now.checks:,} checks, {len(now.violations)} violations"
        + (f", {now.undecided:,} undecided" if now.undecided else "")
    )


def _print(now: CampaignState) -> None:
    counts = [(t.method, t.networks, t.checks, t.no_bound, len(t.violations)) for t in now.tallies.values()]
    columns = ("method", "networks", "checks", "no bound", "violations")
    print_rows(columns, [(method, *(f"{count:,}" for count in row)) for method, *row in counts])
    typer.echo(f"seeds {now.first} to {now.next - 1}: {_counts(now)}")
    for v in now.violations:
        typer.echo(f"VIOLATION {_told(v)}; {v.command}")


def _told(v: Violation) -> str:
    where = f"task {v.task} of seed {v.seed} ({v.case})"
    return f"{v.method}, {v.claim}: {v.value!r} is below {v.bound!r} in {where}"
