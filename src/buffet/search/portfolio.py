"""Who else is asked besides a method: its portfolio, the cheapest first.

No method is the best on every network. A method may name others, its rivals: `verify` asks them one after the
other until a task is proven (`Ladder`), a radius search lets them try a little more than what is proven
(`challenge`). Neither spends time on a rival that is too far from a proof to win.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from buffet.methods import Method
from buffet.network import Program
from buffet.query import Query
from buffet.search.margin_function import MarginFunction
from buffet.search.policy import POLICY
from buffet.search.schedule import NewFinder, Range, Schedule, in_lockstep
from buffet.system.parallel import side_by_side


@dataclass(frozen=True)
class Ladder:
    """The methods that may prove a task, from the cheapest to the most expensive.

    A method without rivals is asked on its own, exactly as it is.
    """

    quick: tuple[Method, ...]  # rivals that do not learn and keep forms: they cost like a few evaluations
    plain: tuple[Method, ...]  # the method without learning, and rivals that substitute backward everywhere
    method: Method
    slow: tuple[Method, ...]  # rivals that learn

    @classmethod
    def of(cls, method: Method, program: Program) -> Ladder:
        rivals = method.challengers(program)
        fixed = [rival for rival in rivals if not rival.learns]
        quick = tuple(rival for rival in fixed if not rival.describe().fully_backward)
        plain = tuple(rival for rival in fixed if rival.describe().fully_backward)
        if rivals and method.learns:
            plain = (method.plain(), *plain)
        return cls(quick, plain, method, tuple(rival for rival in rivals if rival.learns))

    def __iter__(self) -> Iterator[Method]:
        yield from (*self.quick, *self.plain, self.method, *self.slow)


def challenge(
    schedule: Schedule,
    query: Query,
    rivals: Sequence[Method],
    clean: float,
    finder: NewFinder,
    ranges: Sequence[Range],
) -> None:
    """Let rivals try a little more than what is proven, and search on where they succeed.

    Those that do not learn are asked about the first task; if they are far from proving it they are not asked
    about the others. That may be done in single precision: where it is too narrow, bounds are wide. What the
    others learn depends on where they begin, so they search on their own, in the same ranges.
    """

    def sizes() -> list[float]:
        return [max((1 + 2 * POLICY.tolerance) * size, POLICY.smallest) for size in schedule.certified]

    def first(rival: Method) -> float:
        margin = MarginFunction(query.rough(), rival)
        return margin([0], sizes()[:1])[0] if margin.fits and not schedule.expired else math.nan

    fixed = [rival for rival in rivals if not rival.learns]
    # Not at the same time where someone counts the bytes.
    counted = query.engine.memory is not None
    margins = [first(rival) for rival in fixed] if counted else side_by_side(first, fixed)
    far = [rival for rival, least in zip(fixed, margins, strict=True) if not least > -POLICY.close * clean]
    for rival in rivals:
        if schedule.expired or rival in far or not (margin := MarginFunction(query, rival)).fits:
            continue
        eps = sizes()
        if not rival.learns:
            answers = margin(range(len(eps)), eps)
            schedule.run(margin, {t: e for t, e in enumerate(eps) if answers[t] > 0}, None, finder)
        elif _promises(schedule, margin, margin.plain()(range(len(eps)), eps), finder):
            own = Schedule(finder, len(eps), schedule.deadline)
            own.search(MarginFunction(query, rival.plain()), ranges, POLICY.place_first)
            own.improve(MarginFunction(query, rival))
            schedule.keep(own.found)


def _promises(
    schedule: Schedule, margin: MarginFunction, margins: Sequence[float], finder: NewFinder
) -> bool:
    """Whether learning leads near what is proven of the task that a rival comes nearest to without.

    If so, that task is searched on from there.
    """
    answers = enumerate(zip(schedule.certified, margins, strict=True))
    known = [task for task, (certified, m) in answers if certified > 0 and math.isfinite(m)]
    nearest = max(known, key=lambda task: margins[task], default=None)
    if nearest is None:
        return False
    certified = schedule.certified[nearest]
    (reached,) = margin.learn_from([nearest], [certified])
    if reached < POLICY.promising * certified:
        return False
    schedule.keep(in_lockstep(margin, {nearest: finder(reached, None, math.inf)}, schedule.deadline))
    return True
