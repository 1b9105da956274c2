"""What a sweep says in a sentence and a few numbers; what speaks for a method is rounded down."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from buffet.experiments.rows import Row
from buffet.experiments.summary import FAIR, GOOD, Spread, TaskId, ratios, task_id
from buffet.printing import duration, norm_name, plural, round_down


@dataclass(frozen=True)
class BestKnown:
    """All that is known about one task: a proof by any method holds, and so does any attack."""

    certified: float
    attacked: float | None

    @property
    def share(self) -> float | None:
        """How much of the attacked radius is proven."""
        return self.certified / self.attacked if self.attacked else None


@dataclass(frozen=True)
class Tile:
    """One number of the headline."""

    value: str
    meaning: str


@dataclass(frozen=True)
class Headline:
    """The sentence on top of the page, and the numbers below it."""

    title: str
    sentence: str
    tiles: tuple[Tile, ...]
    contradictions: int  # proofs beyond an attack: there must be none


def headline(rows: Sequence[Row], reference: str) -> Headline:
    """The headline of some rows."""
    best = best_of(rows)
    proven = sum(task.certified > 0 for task in best.values())
    shares = Spread(tuple(task.share for task in best.values() if task.share is not None))
    models = _listed(list(dict.fromkeys(row.model for row in rows)), "models")
    norms = _listed([norm_name(norm) for norm in sorted({row.norm for row in rows}, key=float)], "norms")
    sentences = len({(row.model_digest, row.sentence) for row in rows})
    moving = {len(row.words) for row in rows}
    who = "one word at a time" if moving == {1} else f"up to {max(moving)} words at a time"
    sentence = (
        f"For {proven:,} of {len(best):,} tasks in {sentences:,} {plural(sentences, 'sentence')}"
        f" ({who}, {norms}) it is proven that no move within the"
        f" certified radius changes the answer of {models}"
    )
    if shares.mean is not None:
        sentence += (
            "; on average that radius is at least"
            f" {_floor(shares.mean)} of the smallest move found to change it"
        )
    return Headline(
        title=models,
        sentence=sentence + ".",
        tiles=(
            Tile(f"{proven:,} of {len(best):,}", "tasks have a proven radius"),
            *_bracket_tiles(shares),
            *_strongest_tile(rows, reference),
            Tile(duration(sum(row.task_seconds or 0.0 for row in rows)), _effort(rows)),
        ),
        contradictions=sum(bool(t.attacked is not None and t.certified > t.attacked) for t in best.values()),
    )


def best_of(rows: Iterable[Row]) -> dict[TaskId, BestKnown]:
    """The largest proven and the smallest attacked radius of every task; what failed proves nothing."""
    found: dict[TaskId, BestKnown] = {}
    for row in rows:
        old = found.get(task_id(row), BestKnown(0.0, None))
        attacked = [a for a in (old.attacked, row.attacked) if a is not None]
        certified = row.certified if row.ok and row.certified is not None else 0.0
        found[task_id(row)] = BestKnown(max(old.certified, certified), min(attacked, default=None))
    return found


def _bracket_tiles(shares: Spread) -> tuple[Tile, ...]:
    fair, good = shares.share(FAIR), shares.share(GOOD)
    if shares.mean is None or fair is None or good is None:
        return ()
    return (
        Tile(_floor(shares.mean), "of the attacked radius is proven, on average"),
        Tile(
            _percent(fair),
            f"of tasks: at least {FAIR} of the attacked radius ({_percent(good)}: at least {GOOD})",
        ),
    )


def _strongest_tile(rows: Sequence[Row], reference: str) -> tuple[Tile, ...]:
    against = {task_id(row): row for row in rows if row.method == reference}
    methods = dict.fromkeys(row.method for row in rows if row.method != reference)
    found = ((ratios((row for row in rows if row.method == name), against), name) for name in methods)
    compared = [(spread.mean, spread, name) for spread, name in found if spread.mean is not None]
    if not compared:
        return ()
    mean, spread, strongest = max(compared, key=lambda entry: entry[0])
    count = len(spread.values)
    return (
        Tile(
            f"{_floor(mean)} ×",
            f"{strongest} against {reference}, mean radius over {count:,} {plural(count, 'task')}"
            f" (worst {_floor(min(spread.values))} ×)",
        ),
    )


def _effort(rows: Sequence[Row]) -> str:
    failed = sum(not row.ok for row in rows)
    text = f"of proofs for {len(rows) - failed:,} {plural(len(rows) - failed, 'answer')}"
    return f"{text}; {failed:,} failed" if failed else text


def _floor(value: float) -> str:
    return f"{math.floor(value * 100) / 100:.2f}" if value >= 0.01 else round_down(value, 2)


def _percent(share: float) -> str:
    return f"{math.floor(100 * share)}\N{NO-BREAK SPACE}%"


def _listed(names: Sequence[str], kind: str) -> str:
    """a, b and c; more than a few are counted."""
    if len(names) > 3:
        return f"{len(names)} {kind}"
    return " and ".join([*([", ".join(names[:-1])] if names[1:] else []), names[-1]])
