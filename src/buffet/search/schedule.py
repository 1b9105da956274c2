"""Runs root finders: which words are asked about together, and in which order."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from buffet.optimisation.warm_starts import Starts
from buffet.search.margin_function import MarginFunction
from buffet.search.policy import POLICY
from buffet.search.root_finding import Bracket, RootFinder, Shape, straight
from buffet.system.parallel import side_by_side

NewFinder = Callable[[float, Shape | None, float], RootFinder]
"""A root finder from a first guess, given the shape of the margin function if it is known, up to some ε."""
Range = tuple[float, float]
"""Where the radius of a task is expected."""


@dataclass
class Found:
    """What came of some searches: the bracket and the number of evaluations of every task."""

    brackets: dict[int, Bracket]
    counts: dict[int, int]
    calls: int = 0  # of a margin function, each for all tasks that were asked about together
    interrupted: bool = False  # by whoever asked


def in_lockstep(
    margin: Callable[[Sequence[int], Sequence[float]], list[float]],
    finders: Mapping[int, RootFinder],
    deadline: float | None,
    tell: Callable[[int], None] = lambda finished: None,
) -> Found:
    """Run root finders until they end or time does; one call of `margin` answers one question of each.

    Tells how many have ended, whenever some have.
    """
    found = Found(dict.fromkeys(finders, Bracket(0.0, 0.0)), dict.fromkeys(finders, 0))
    questions: dict[int, float] = {}

    def advance(task: int, answer: float | None) -> None:
        try:
            questions[task] = next(finders[task]) if answer is None else finders[task].send(answer)
        except StopIteration as stop:
            if stop.value.certified >= found.brackets[task].certified:
                found.brackets[task] = stop.value

    for task in finders:
        advance(task, None)
    while questions and not (deadline is not None and time.perf_counter() > deadline):
        asked, eps = list(questions), list(questions.values())
        questions.clear()
        found.calls += 1
        try:
            answers = margin(asked, eps)
        except KeyboardInterrupt:
            found.interrupted = True
            break
        for task, size, answer in zip(asked, eps, answers, strict=True):
            found.counts[task] += 1
            if answer > 0 and size >= found.brackets[task].certified:
                found.brackets[task] = Bracket(size, answer)
            advance(task, answer)
        if len(questions) < len(asked):
            tell(len(asked) - len(questions))
    return found


class Schedule:
    """Runs the searches of all tasks and keeps the best bracket of each."""

    def __init__(
        self,
        finder: NewFinder,
        tasks: int,
        deadline: float | None,
        report: Callable[[float], None] = lambda share: None,
        whole: float = 0.95,
    ) -> None:
        """`whole` is the share of the work that is done when all balls are searched; cells are the rest."""
        self.finder, self.deadline, self.report, self.whole = finder, deadline, report, whole
        self.brackets = [Bracket(0.0, 0.0)] * tasks
        self.counts = [0] * tasks
        self.calls = self.ended = 0

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    @property
    def certified(self) -> list[float]:
        """What is proven of every task."""
        return [bracket.certified for bracket in self.brackets]

    def search(
        self,
        margin: MarginFunction,
        ranges: Sequence[Range],
        place: float,
        finder: NewFinder | None = None,
        shape: Shape | None = None,
    ) -> Shape | None:
        """Some tasks go ahead, from a `place` (in logarithms) in the range where their radii are expected.

        The others start at the mean of the places found before them, and with the shape of a margin function
        seen there; the last one is returned. On one layer tasks together take little longer than one, and all
        others start at once (all of them, where a `shape` is known already). On more layers every question
        counts: with every answer, twice as many start from better guesses.
        """
        apart = margin.method.optimiser.learns_boxes
        together = apart or not margin.query.deep
        size = POLICY.leaders if apart else len(ranges) if together and shape else 1
        below = POLICY.caution_ruled if margin.method.ruled else POLICY.caution
        places: list[float] = []
        start = 0
        while start < len(ranges):
            group = range(len(ranges))[start : start + size]
            caution = below if start else 1.0
            guesses = {t: caution * ranges[t][0] ** (1 - place) * ranges[t][1] ** place for t in group}
            self.run(margin, guesses, shape, finder)
            seen = [(self.brackets[t], *ranges[t]) for t in group]
            seen = [(b, low, high) for b, low, high in seen if b.certified > 0 and low < high < math.inf]
            places += [math.log(b.certified / low) / math.log(high / low) for b, low, high in seen if b.curve]
            place = sum(places) / len(places) if places else place
            curves = [(b.curve, b.certified) for b, _, _ in seen if b.curve]
            if apart:  # margins move with more than ε: only what was seen near the root tells something
                shape = straight(curve.steepness() for curve, _ in curves)
            elif curves:
                shape = curves[0][0].shape(curves[0][1])
            start, size = start + size, len(ranges) if together else 2 * size
        return shape

    def improve(self, margin: MarginFunction) -> None:
        """Learn at what is proven, and search on from where that leads."""
        tasks = [task for task, certified in enumerate(self.certified) if certified > 0]
        if not tasks or self.expired:
            return
        before = [self.brackets[task] for task in tasks]
        guesses = margin.learn_from(tasks, [bracket.certified for bracket in before])
        curve = before[0].curve
        shape = curve.shape(before[0].certified) if curve else None
        self.run(margin, dict(zip(tasks, guesses, strict=True)), shape)

    def run(
        self,
        margin: MarginFunction,
        guesses: Mapping[int, float],
        shape: Shape | None,
        finder: NewFinder | None = None,
    ) -> None:
        """Search from a guess for every task: in lockstep if tasks share their work, else side by side."""
        finders = {task: (finder or self.finder)(guess, shape, math.inf) for task, guess in guesses.items()}

        def alone(task: int) -> tuple[Found, Starts]:
            own = margin.apart()
            return in_lockstep(own, {task: finders[task]}, self.deadline), own.starts_of([task])

        def tell(ended: int) -> None:
            if finder is None:  # other searches only lead to this one
                self.ended += ended
                self.report(0.1 + (self.whole - 0.1) * min(1.0, self.ended / len(self.brackets)))

        if margin.shares:
            self.keep(in_lockstep(margin, finders, self.deadline, tell))
            return
        # What one has learned is told when all have ended: none may depend on which came first.
        for found, starts in side_by_side(alone, list(finders), lambda part: tell(1)):
            self.keep(found)
            margin.warm_starts.add(starts)

    @property
    def found(self) -> Found:
        """What all searches have come to."""
        return Found(dict(enumerate(self.brackets)), dict(enumerate(self.counts)), self.calls)

    def keep(self, found: Found) -> None:
        """Take over what is better than what is known, and count the work; an interruption goes on."""
        for task, bracket in found.brackets.items():
            if bracket.certified >= self.brackets[task].certified:
                self.brackets[task] = bracket
            self.counts[task] += found.counts[task]
        self.calls += found.calls
        if found.interrupted:
            raise KeyboardInterrupt
