"""How methods compare: certified radius and time against a reference method, radius against the attack."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from buffet.errors import BuffetError
from buffet.experiments.rows import Row

GOOD, FAIR = 0.8, 0.5
"""Shares of the attacked radius that count as nearly, and as half, explained."""
TaskId = tuple[str, str, str, tuple[int, ...]]


def task_id(row: Row) -> TaskId:
    """What a row is about, whichever method answered: model, norm, sentence and the words that move."""
    return row.model_digest, row.norm, row.sentence, row.words


@dataclass(frozen=True)
class Spread:
    """Some ratios, and the numbers that describe them; None where there are no ratios."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def median(self) -> float | None:
        return statistics.median(self.values) if self.values else None

    @property
    def worst(self) -> float | None:
        return min(self.values, default=None)

    def share(self, least: float) -> float | None:
        """The share of them that is at least this large."""
        return sum(value >= least for value in self.values) / len(self.values) if self.values else None


@dataclass(frozen=True)
class MethodSummary:
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


def summarise(rows: Iterable[Row], reference: str = "baseline") -> list[MethodSummary]:
    """One line per model, norm and method, in the order of the rows."""
    groups: dict[tuple[str, str, str], dict[str, dict[TaskId, Row]]] = {}
    for row in rows:
        methods = groups.setdefault((row.model, row.model_digest, row.norm), {})
        methods.setdefault(row.method, {})[task_id(row)] = row
    if not groups:
        raise BuffetError("there are no rows to summarise")
    known_method(reference, dict.fromkeys(chain.from_iterable(groups.values())))
    return [
        _summary(list(tasks.values()), methods.get(reference, {}), reference)
        for methods in groups.values()
        for tasks in methods.values()
    ]


def known_method(reference: str, known: Iterable[str]) -> str:
    """The method that others are compared with, which must have rows."""
    if reference not in known:
        raise BuffetError(f"no rows of the reference method {reference!r}; there are: {', '.join(known)}")
    return reference


def ratios(rows: Iterable[Row], against: dict[TaskId, Row]) -> Spread:
    """Certified radii as multiples of those of the reference on the same task, where these are above 0."""
    both = ((row, against[task_id(row)]) for row in rows if row.ok and task_id(row) in against)
    radii = [(_of(row.certified), _of(other.certified)) for row, other in both if other.ok]
    return Spread(tuple(ours / theirs for ours, theirs in radii if theirs > 0))


def _summary(rows: Sequence[Row], against: dict[TaskId, Row], reference: str) -> MethodSummary:
    answered = [row for row in rows if row.ok]
    both = [row for row in answered if (other := against.get(task_id(row))) is not None and other.ok]
    theirs = sum(_of(against[task_id(row)].task_seconds) for row in both)
    compared = ratios(answered, against)
    brackets = Spread(tuple(_of(r.certified) / r.attacked for r in answered if r.attacked))
    return MethodSummary(
        model=rows[0].model,
        norm=rows[0].norm,
        method=rows[0].method,
        reference=reference,
        tasks=len(answered),
        failed=len(rows) - len(answered),
        compared=len(compared.values),
        mean_ratio=compared.mean,
        median_ratio=compared.median,
        worst_ratio=compared.worst,
        bracketed=len(brackets.values),
        mean_bracket=brackets.mean,
        good_share=brackets.share(GOOD),
        fair_share=brackets.share(FAIR),
        seconds=sum(_of(row.task_seconds) for row in answered),
        seconds_ratio=sum(_of(row.task_seconds) for row in both) / theirs if theirs > 0 else None,
    )


def _of(value: float | None) -> float:
    return 0.0 if value is None else value


HEADER = (
    *("model", "norm", "method", "tasks", "failed", "mean ×", "median ×", "worst ×", "cert./att."),
    *(f"≥ {GOOD}", f"≥ {FAIR}", "seconds", "time ×"),
)
"""What the cells of a line are; × are ratios to the reference."""


def cells(line: MethodSummary) -> tuple[str, ...]:
    """A line as people read it; what speaks for a method is rounded down."""
    ratio = (line.mean_ratio, line.median_ratio, line.worst_ratio, line.mean_bracket)
    return (
        line.model,
        f"L{line.norm}".replace("inf", "∞"),
        line.method,
        str(line.tasks),
        str(line.failed),
        *("–" if value is None else f"{math.floor(value * 1000) / 1000:.3f}" for value in ratio),
        *("–" if s is None else f"{math.floor(100 * s)} %" for s in (line.good_share, line.fair_share)),
        f"{line.seconds:.1f}",
        "–" if line.seconds_ratio is None else f"{line.seconds_ratio:.2f}",
    )
