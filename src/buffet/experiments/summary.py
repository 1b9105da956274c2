"""How methods compare: certified radius and time against a reference method, radius against the attack."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from buffet.errors import BuffetError
from buffet.experiments.rows import Row

GOOD, FAIR = 0.8, 0.5
"""Shares of the attacked radius that count as nearly, and as half, explained."""


@dataclass(frozen=True)
class Line:
    """One method on the tasks of one model and norm. None where there is nothing to compare.

    Ratios to the reference are over the tasks both answered; those of radii, where the reference's is
    above 0. The bracket is certified / attacked, over the tasks with an attacked radius.
    """

    model: str
    norm: str
    method: str
    reference: str
    tasks: int  # answered
    failed: int
    compared: int  # with a reference radius above 0
    mean_ratio: float | None
    median_ratio: float | None
    worst_ratio: float | None
    bracketed: int  # with an attacked radius
    mean_bracket: float | None
    good_share: float | None  # of the bracketed, certified / attacked ≥ GOOD
    fair_share: float | None
    seconds: float
    seconds_ratio: float | None


Task = tuple[str, tuple[int, ...]]


def summarise(rows: Iterable[Row], reference: str = "baseline") -> list[Line]:
    """One line per model, norm and method, of the rows that searched a radius; in the order of the rows."""
    groups: dict[tuple[str, str, str], dict[str, dict[Task, Row]]] = {}
    for row in rows:
        if row.what == "radius":
            methods = groups.setdefault((row.model, row.model_digest, row.norm), {})
            methods.setdefault(row.method, {})[row.sentence, row.words] = row
    if not groups:
        raise BuffetError("there are no rows with a radius to summarise: what = 'radius' makes them")
    known = dict.fromkeys(chain.from_iterable(groups.values()))
    if reference not in known:
        raise BuffetError(f"no rows of the reference method {reference!r}; there are: {', '.join(known)}")
    return [
        _line(model, norm, method, reference, tasks, methods.get(reference, {}))
        for (model, _, norm), methods in groups.items()
        for method, tasks in methods.items()
    ]


def _line(
    model: str, norm: str, method: str, reference: str, tasks: dict[Task, Row], against: dict[Task, Row]
) -> Line:
    answered = {task: row for task, row in tasks.items() if row.ok}
    both = [(row, against[task]) for task, row in answered.items() if task in against and against[task].ok]
    ratios = [_of(r.certified) / _of(other.certified) for r, other in both if _of(other.certified) > 0]
    brackets = [_of(r.certified) / _of(r.attacked) for r in answered.values() if _of(r.attacked) > 0]
    ours, theirs = (sum(_of(pair[side].task_seconds) for pair in both) for side in (0, 1))
    return Line(
        model=model,
        norm=norm,
        method=method,
        reference=reference,
        tasks=len(answered),
        failed=len(tasks) - len(answered),
        compared=len(ratios),
        mean_ratio=_if_any(statistics.fmean, ratios),
        median_ratio=_if_any(statistics.median, ratios),
        worst_ratio=_if_any(min, ratios),
        bracketed=len(brackets),
        mean_bracket=_if_any(statistics.fmean, brackets),
        good_share=_if_any(lambda values: _share(values, GOOD), brackets),
        fair_share=_if_any(lambda values: _share(values, FAIR), brackets),
        seconds=sum(_of(row.task_seconds) for row in answered.values()),
        seconds_ratio=ours / theirs if theirs > 0 else None,
    )


def _of(value: float | None) -> float:
    return 0.0 if value is None else value


def _if_any(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return function(values) if values else None


def _share(values: Sequence[float], least: float) -> float:
    return sum(value >= least for value in values) / len(values)


HEADER = (
    "model",
    "norm",
    "method",
    "tasks",
    "failed",
    "mean ×",
    "median ×",
    "worst ×",
    "cert./att.",
    f"≥ {GOOD}",
    f"≥ {FAIR}",
    "seconds",
    "time ×",
)
"""What the cells of a line are; × are ratios to the reference."""


def cells(line: Line) -> tuple[str, ...]:
    """A line as people read it; what speaks for a method is rounded down."""
    return (
        line.model,
        f"L{line.norm}".replace("inf", "∞"),
        line.method,
        str(line.tasks),
        str(line.failed),
        *(_floor(value, 3) for value in (line.mean_ratio, line.median_ratio, line.worst_ratio)),
        _floor(line.mean_bracket, 3),
        *(
            "–" if share is None else f"{math.floor(100 * share)} %"
            for share in (line.good_share, line.fair_share)
        ),
        f"{line.seconds:.1f}",
        "–" if line.seconds_ratio is None else f"{line.seconds_ratio:.2f}",
    )


def _floor(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def markdown(lines: Sequence[Line]) -> str:
    """The lines as a table of Markdown."""
    rule = ["---"] * 3 + ["---:"] * (len(HEADER) - 3)
    return "".join(f"| {' | '.join(row)} |\n" for row in (HEADER, rule, *map(cells, lines)))
