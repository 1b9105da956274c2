"""Runs searches: which tasks are asked about together, in which order, and who else is asked."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from buffet.engine import Classifier, Engine, batch_size, bound_margins, proven
from buffet.methods import Method
from buffet.optimisation.context import Control
from buffet.optimisation.warm_starts import Lessons, Memory
from buffet.regions import Region
from buffet.search.root_finding import SMALLEST_RADIUS, Bracket, Shape, Strategy, straight
from buffet.system.parallel import side_by_side
from buffet.verification.verify import tree_of_cells

TOLERANCE = 1e-3
"""Of a search, relative, unless something else is asked for."""
CLOSE = 1.0
"""A method whose margin is further below 0 than this share of the clean one is far from a proof."""
PROMISING, CLOSER = 0.85, 0.93
"""A rival whose learning leads to at least this share of what is proven may lead further on its own: on one
layer, and on more, where its search costs more."""
BEATEN = 0.98
"""On more layers, one that then proves less than this share of the task it comes nearest to does not."""
PROOF_SHARE = 0.3
"""What is learned at the edge is left this share of the remaining time to be proven in."""
CUT_AT, RISE, RISES = 1.2, 1.08, 8
"""Cells are expected to prove so much more than the ball; where they do, so much more again, so often."""
AHEAD = 2
"""So many words of a method that learns go ahead."""
CAUTION, CAUTION_OF_RULE = 0.95, 0.85
"""The others start a little below what these suggest: proven margins tell more than failed ones, and what the
rule chooses there proves more."""


@dataclass(frozen=True, eq=False)
class Query:
    model: Classifier
    region: Region
    label: int
    engine: Engine
    deadline: float | None


class Prover:
    """Answers how large the smallest margin is for some tasks at some sizes, by one method."""

    def __init__(self, query: Query, method: Method) -> None:
        self.query, self.method, self.memory = query, method, Memory()
        self.scene = method.scene(query.model.program64, query.region.center, query.label)

    @property
    def fits(self) -> bool:
        """Whether one task stays within the engine's memory."""
        return self.query.engine.holds(self.scene, self.method, self.query.region)

    @property
    def shares(self) -> bool:
        """Whether tasks share work, so that they are better asked about together."""
        return self.method.optimise != "tuned" or not self.query.engine.parallel(self.method)

    def apart(self) -> Prover:
        """The same, which remembers on its own what it learns from now on."""
        other = copy.copy(self)
        other.memory = self.memory.copy()
        return other

    def lessons(self, tasks: Sequence[int]) -> Lessons:
        """What was learned of these tasks that is of use to others: how to bound the margin."""
        return self.memory.lessons(self.query.region.select(list(tasks)), len(self.scene.program.nodes) - 1)

    def __call__(self, tasks: Sequence[int], eps: Sequence[float]) -> list[float]:
        q = self.query
        part = q.region.select(list(tasks)).with_eps(torch.tensor(eps, dtype=torch.float64))
        control = Control(self.memory, q.deadline)
        margins = bound_margins(q.model, part, self.method, q.label, q.engine, self.scene, control)
        # A number ≤ 0, or NaN, for what is not proven.
        least = margins.amin(-1)
        return torch.where(proven(margins), least, least.clamp_max(0)).tolist()

    def learn_from(self, tasks: Sequence[int], eps: Sequence[float]) -> list[float]:
        """Learn at the edge of what can be proven, starting from `eps`; about the largest ε proven then."""
        q = self.query
        left = 0.0 if q.deadline is None else q.deadline - time.perf_counter()
        control = Control(self.memory, q.deadline).ahead(PROOF_SHARE * left)
        sizes = torch.tensor(eps, dtype=torch.float64, device=q.region.center.device)
        region = q.region.select(list(tasks))

        def learn(part: Tensor) -> tuple[list[float], Lessons]:
            some = region.select(part)
            found = self.method.follow(
                self.scene, some, sizes[part], control, dtype=q.engine.dtype, chunk_bytes=q.engine.rows
            )
            return found.tolist(), self.memory.lessons(some)

        step = batch_size(self.scene, self.method, region, q.engine)
        if q.engine.parallel(self.method):
            step = min(step, math.ceil(len(tasks) / torch.get_num_threads()))
            parts = side_by_side(learn, torch.arange(len(tasks)).split(step))
        else:
            parts = [learn(part) for part in torch.arange(len(tasks)).split(step)]
        for _, lessons in parts:
            self.memory.add(lessons)
        return [size for found, _ in parts for size in found]


Begin = Callable[[float, Shape | None, float], Strategy]
"""The search from a first guess, given the shape of the margin function if it is known, up to some ε."""


class Driver:
    """Runs searches and keeps the best bracket of every task."""

    def __init__(
        self,
        begin: Begin,
        tasks: int,
        deadline: float | None,
        report: Callable[[float], None],
        whole: float = 0.95,
    ) -> None:
        """`whole` is the share of the work that is done when all balls are searched; cells are the rest."""
        self.begin, self.deadline, self.report, self.whole = begin, deadline, report, whole
        self.brackets = [Bracket(0.0, 0.0)] * tasks
        self.counts = [0] * tasks
        self.calls = self.ended = 0

    def search(
        self,
        prove: Prover,
        ranges: Sequence[tuple[float, float]],
        place: float,
        begin: Begin | None = None,
        shape: Shape | None = None,
    ) -> Shape | None:
        """Some tasks go ahead, from a `place` (in logarithms) in the range where their radii are expected.

        The others start at the mean of the places found before them, and with the shape of a margin function
        seen there; the last one is returned. On one layer tasks together take little longer than one, and all
        others start at once (all of them, where a `shape` is known already). On more layers every question
        counts: with every answer, twice as many start from better guesses.
        """
        learns = prove.method.optimise == "tuned"
        together = learns or prove.query.model.program64.layers == 1
        size = AHEAD if learns else len(ranges) if together and shape else 1
        below = CAUTION_OF_RULE if prove.method.ruled else CAUTION
        places: list[float] = []
        start = 0
        while start < len(ranges):
            group = range(len(ranges))[start : start + size]
            caution = below if start else 1.0
            guesses = {t: caution * ranges[t][0] ** (1 - place) * ranges[t][1] ** place for t in group}
            self.run(prove, guesses, shape, begin)
            seen = [(self.brackets[t], *ranges[t]) for t in group]
            seen = [(b, low, high) for b, low, high in seen if b.certified > 0 and low < high < math.inf]
            places += [math.log(b.certified / low) / math.log(high / low) for b, low, high in seen if b.curve]
            place = sum(places) / len(places) if places else place
            curves = [(b.curve, b.certified) for b, _, _ in seen if b.curve]
            if learns:  # margins move with more than ε: only what was seen near the root tells something
                shape = straight(curve.steepness() for curve, _ in curves)
            elif curves:
                shape = curves[0][0].shape(curves[0][1])
            start, size = start + size, len(ranges) if together else 2 * size
        return shape

    def improve(self, prove: Prover) -> None:
        """Learn at what is proven, and search on from where that leads."""
        tasks = [task for task, bracket in enumerate(self.brackets) if bracket.certified > 0]
        if not tasks or self.expired:
            return
        before = [self.brackets[task] for task in tasks]
        guesses = prove.learn_from(tasks, [bracket.certified for bracket in before])
        curve = before[0].curve
        shape = curve.shape(before[0].certified) if curve else None
        self.run(prove, dict(zip(tasks, guesses, strict=True)), shape)

    def challenge(
        self,
        query: Query,
        rivals: Sequence[Method],
        clean: float,
        begin: Begin,
        ranges: Sequence[tuple[float, float]],
        place: float,
    ) -> None:
        """Let other methods try a little more than what is proven, and search on where they succeed.

        All are asked about the first task, before they learn anything; those far from proving it are not
        asked about the others. That may be done in single precision: where it is too narrow, bounds are wide.
        On one layer, those that learn end to end may do so: it costs little, and gains a fifth. What they
        learn depends on where they begin, so they search on their own, from a `place` in the same ranges.
        """
        shallow = query.model.program64.layers == 1
        rough = replace(query, engine=replace(query.engine, widen=False))

        def sizes() -> list[float]:
            return [max((1 + 2 * TOLERANCE) * found.certified, SMALLEST_RADIUS) for found in self.brackets]

        def first(rival: Method) -> float:
            prove = Prover(rough, rival.plain())
            return prove([0], sizes()[:1])[0] if prove.fits and not self.expired else math.nan

        # Not at the same time where someone counts the bytes.
        counted = query.engine.memory is not None
        margins = [first(rival) for rival in rivals] if counted else side_by_side(first, rivals)
        for rival, margin in zip(rivals, margins, strict=True):
            learns = rival.optimise == "all"
            if self.expired or not (margin > -CLOSE * clean or (learns and shallow)):
                continue
            if not (prove := Prover(query, rival)).fits:
                continue
            eps = sizes()
            if not learns:
                answers = prove(range(len(eps)), eps)
                self.run(prove, {t: e for t, e in enumerate(eps) if answers[t] > 0}, None, begin)
            elif self._promises(prove, Prover(rough, rival.plain())(range(len(eps)), eps), begin):
                own = Driver(begin, len(eps), self.deadline, lambda share: None)
                own.search(Prover(query, rival.plain()), ranges, place)
                own.improve(Prover(query, rival))
                self.keep(own.findings)

    def _promises(self, prove: Prover, margins: Sequence[float], begin: Begin) -> bool:
        """Whether learning leads near what is proven of the task that a method comes nearest to without.

        If so, that task is searched on from there. On one layer where learning begins matters more than that.
        """
        found = zip(self.brackets, margins, strict=True)
        known = [task for task, (b, m) in enumerate(found) if b.certified > 0 and math.isfinite(m)]
        nearest = max(known, key=lambda task: margins[task], default=None)
        if nearest is None:
            return False
        certified = self.brackets[nearest].certified
        shallow = prove.query.model.program64.layers == 1
        (reached,) = prove.learn_from([nearest], [certified])
        if reached < (PROMISING if shallow else CLOSER) * certified:
            return False
        theirs = in_step(prove, {nearest: begin(reached, None, math.inf)}, self.deadline)
        self.keep(theirs)
        return shallow or theirs.brackets[nearest].certified >= BEATEN * certified

    def branch(self, query: Query, method: Method, largest: float) -> None:
        """Cut the ball of every task into cells, and search on for what all of them prove."""
        tasks = [task for task, bracket in enumerate(self.brackets) if 0 < bracket.certified < largest]
        done = 0.0

        def tell(part: float) -> None:
            nonlocal done
            done += part
            self.report(self.whole + (0.95 - self.whole) * done / len(tasks))

        # Not at the same time where someone counts the bytes.
        if query.engine.parallel(method) and len(tasks) > 1:
            found = side_by_side(
                lambda task: self._by_cells(query, method, largest, task), tasks, lambda _: tell(1.0)
            )
        else:
            found = [self._by_cells(query, method, largest, task, tell) for task in tasks]
        for findings in found:
            self.keep(findings)

    def _by_cells(
        self,
        query: Query,
        method: Method,
        largest: float,
        task: int,
        tell: Callable[[float], None] = lambda part: None,
    ) -> Findings:
        """The worst cell is cut as long as there may be more; where all are proven, more is tried."""
        known = best = self.brackets[task]
        if self.expired:
            return Findings({task: known}, {task: 0})
        sizes = [min(CUT_AT * RISE**k * known.certified, largest) for k in range(RISES)]
        ball = query.region.select([task]).with_eps(sizes[0])
        control = Control(deadline=self.deadline)
        tree = tree_of_cells(query.model, ball, method, query.label, query.engine, control)
        cells = 1

        def go_on() -> bool:
            nonlocal cells
            tell((len(tree.leaves) - cells) / method.cells)
            cells = len(tree.leaves)
            return not self.expired

        def answer(_: Sequence[int], sizes: Sequence[float]) -> list[float]:
            return [known.margin if eps <= known.certified else tree.limit(eps) for eps in sizes]

        for eps in sizes:
            if tree.grow(eps, go_on):
                best = Bracket(eps, tree.margin)
                continue
            shape = straight([known.curve.steepness()]) if known.curve else None
            search = {task: self.begin(eps, shape, eps)}
            found = in_step(answer, search, self.deadline).brackets[task]
            if found.certified > best.certified:
                best = Bracket(found.certified, tree.margin)
            break
        return Findings({task: best}, {task: tree.asked}, tree.asked)

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def run(
        self,
        prove: Prover,
        guesses: Mapping[int, float],
        shape: Shape | None,
        begin: Begin | None = None,
    ) -> None:
        """Search from a guess for every task: in step if the tasks share their work, else side by side."""
        searches = {task: (begin or self.begin)(guess, shape, math.inf) for task, guess in guesses.items()}

        def alone(task: int) -> tuple[Findings, Lessons]:
            own = prove.apart()
            findings = in_step(own, {task: searches[task]}, self.deadline)
            return findings, own.lessons([task])

        def tell(ended: int) -> None:
            if begin is None:  # other searches only lead to this one
                self.ended += ended
                self.report(0.1 + (self.whole - 0.1) * min(1.0, self.ended / len(self.brackets)))

        if prove.shares:
            self.keep(in_step(prove, searches, self.deadline, tell))
            return
        # What one has learned is told when all have ended: none may depend on which came first.
        for findings, lessons in side_by_side(alone, list(searches), lambda part: tell(1)):
            self.keep(findings)
            prove.memory.add(lessons)

    @property
    def findings(self) -> Findings:
        """What all searches have come to."""
        return Findings(dict(enumerate(self.brackets)), dict(enumerate(self.counts)), self.calls)

    def keep(self, found: Findings) -> None:
        for task, bracket in found.brackets.items():
            if bracket.certified >= self.brackets[task].certified:
                self.brackets[task] = bracket
            self.counts[task] += found.counts[task]
        self.calls += found.calls


@dataclass
class Findings:
    """What came of some searches."""

    brackets: dict[int, Bracket]
    counts: dict[int, int]  # questions of every task
    calls: int = 0  # of the prover


def in_step(
    prove: Callable[[Sequence[int], Sequence[float]], list[float]],
    searches: Mapping[int, Strategy],
    deadline: float | None,
    tell: Callable[[int], None] = lambda finished: None,
) -> Findings:
    """Run searches until they end or time does; one call of `prove` answers one question of each.

    Tells how many have ended, whenever some have.
    """
    found = Findings(dict.fromkeys(searches, Bracket(0.0, 0.0)), dict.fromkeys(searches, 0))
    questions: dict[int, float] = {}

    def advance(task: int, answer: float | None) -> None:
        try:
            questions[task] = next(searches[task]) if answer is None else searches[task].send(answer)
        except StopIteration as stop:
            if stop.value.certified >= found.brackets[task].certified:
                found.brackets[task] = stop.value

    for task in searches:
        advance(task, None)
    while questions and not (deadline is not None and time.perf_counter() > deadline):
        asked, eps = list(questions), list(questions.values())
        questions.clear()
        found.calls += 1
        for task, size, answer in zip(asked, eps, prove(asked, eps), strict=True):
            found.counts[task] += 1
            if answer > 0 and size >= found.brackets[task].certified:
                found.brackets[task] = Bracket(size, answer)
            advance(task, answer)
        if len(questions) < len(asked):
            tell(len(asked) - len(questions))
    return found
