"""The certified radius: the largest ε a method proves, found with few evaluations.

The driver runs the search strategies of all tasks in step, so that one engine call answers one question of
every task.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from buffet.attack import AttackSettings, attacked_radius
from buffet.bounds.optimise import Control, Memory
from buffet.errors import BuffetError
from buffet.methods import Method, method_named
from buffet.regions import LpBall, Region
from buffet.strategies import SMALLEST_RADIUS, STRATEGIES, Bracket, Shape, Strategy, hopeless
from buffet.verify import (
    Classifier,
    Engine,
    batch_size,
    bound_margins,
    checked_budget,
    clean_answer,
    proven,
    without_padding,
)

TOLERANCE, LEARNED_TOLERANCE = 1e-3, 2e-2
LARGEST_RADIUS = 1e4
"""Radii are not searched beyond this; a task proven there is reported with this radius."""
CLOSE = 0.5
"""A method whose margin is further below 0 than this share of the clean one is far from a proof."""
ATTACK_SHARE = 0.25
"""The most of a budget that attacks may take before the search begins."""
PROOF_SHARE = 0.3
"""What is learned at the edge is left this share of the remaining time to be proven in."""
GUESS_ATTACK = AttackSettings(steps=10, restarts=1)
SMALL_SHARE = 0.16
"""Radii are expected between this share of the attacked one and that itself."""
MIDDLE, BEYOND_QUICK = 0.5, 0.4
"""How far on the way (in logarithms) from there, or from what a quick method proves, to the attacked one."""
ROUGH = 0.05
"""The tolerance of searches that only lead to others."""
CAUTION = 0.95
"""Other words start a little below what the first ones suggest: proven margins tell more than failed ones."""


@dataclass(frozen=True)
class TaskRadius:
    """The bracket around the true radius of one task."""

    words: tuple[int, ...]
    certified: float  # proven: no smaller move changes the answer
    attacked: float  # a move of this size was seen to change it (inf: none found)
    margin: float  # lower bound of the margin at `certified`; if that is 0, the clean margin or 0
    evaluations: int  # engine evaluations of this task


@dataclass(frozen=True)
class Radius:
    """The radii of all tasks; `certified` and `attacked` bracket the smallest true one."""

    label: int
    clean_margin: float  # negative: the model does not give this label even to the unmoved rows
    tasks: tuple[TaskRadius, ...]
    evaluations: int  # calls of the engine, each for all unfinished tasks at once
    seconds: float  # spent on proofs
    attack_seconds: float

    @property
    def certified(self) -> float:
        """An ε proven for every task."""
        return min(t.certified for t in self.tasks)

    @property
    def attacked(self) -> float:
        """The smallest ε at which some task was attacked successfully."""
        return min(t.attacked for t in self.tasks)


def radius(
    model: Classifier,
    region: Region,
    method: str | Method = "baseline",
    *,
    label: int | None = None,
    mask: Bool[Tensor, "tokens"] | None = None,
    propagation: str | None = None,
    product: str | None = None,
    softmax: str | None = None,
    optimise: str | None = None,
    steps: int | None = None,
    rate: float | None = None,
    start: str | None = None,
    window: int | None = None,
    search: str = "secant",
    tolerance: float | None = None,
    largest: float = LARGEST_RADIUS,
    attack: bool = True,
    attacked: Sequence[float] | None = None,
    budget: float | None = None,
    seed: int = 0,
    engine: Engine | None = None,
    progress: Callable[[float], None] | None = None,
) -> Radius:
    """The largest ε that `method` certifies for each task, and the smallest an attack breaks.

    Args:
        region: an `LpBall`; its own size, if any, is ignored.
        mask: False for the padding rows of the sentence.
        propagation, product, softmax, optimise, steps, rate, start, window: replace parts of the method.
        search: ``secant`` (safeguarded) or ``bisection`` (doubling from 0.01 and ten halvings, as in the
            BuFFeT paper).
        tolerance: of the secant search, relative; by default 0.001, or 0.02 where the method learns its
            boxes, which moves its margins by about that.
        attack: also look for the upper end of the bracket.
        attacked: that upper end of every task, if it is known already.
        budget: seconds after which the best of what is proven by then is returned; attacks take a quarter
            of them at most.
        progress: called with the finished share of the work, 0 to 1.
    """
    if not isinstance(region, LpBall):
        raise BuffetError(f"a {type(region).__name__} has no size to search over: use verify, or an LpBall")
    words = region.moved.tolist()
    if mask is not None:
        region = without_padding(region, mask)
        assert isinstance(region, LpBall)
    if search not in STRATEGIES:
        raise BuffetError(f"unknown search '{search}'; choose one of: {', '.join(STRATEGIES)}")
    chosen = method_named(
        method,
        propagation=propagation,
        product=product,
        softmax=softmax,
        optimise=optimise,
        steps=steps,
        rate=rate,
        start=start,
        window=window,
    )
    if tolerance is None:
        tolerance = LEARNED_TOLERANCE if chosen.optimise == "tuned" else TOLERANCE
    if not (0 < tolerance < 1 and 0 < largest < math.inf):
        raise BuffetError(f"tolerance {tolerance} must lie in (0, 1) and largest {largest} be a finite ε > 0")
    label, clean = clean_answer(model, region, label)
    report = progress or (lambda share: None)
    begin = time.perf_counter()
    deadline = begin + checked_budget(budget) if budget is not None else None
    attack_end = None if budget is None else begin + ATTACK_SHARE * budget
    query = _Query(model, region, label, engine or Engine(), deadline)
    prover = _Prover(query, chosen)
    query.engine.check(prover.scene, chosen, region)
    if attacked is not None:
        given = torch.as_tensor(attacked, dtype=torch.float64, device=region.center.device)
        broken = given.expand(region.tasks)
    elif attack or clean < 0:
        settings = AttackSettings(seed=seed)
        broken = attacked_radius(model.program64, region, label, settings, deadline=attack_end)
    else:
        broken = torch.full((region.tasks,), math.inf, dtype=torch.float64, device=region.center.device)
    attack_seconds = time.perf_counter() - begin
    report(0.1)

    begin = time.perf_counter()
    # Certified radii are some fraction of attacked ones; a short attack will do for a first guess.
    scale = broken
    if not bool(broken.isfinite().all()):
        guessed = attacked_radius(model.program64, region, label, GUESS_ATTACK, deadline=attack_end)
        scale = torch.where(broken.isfinite(), broken, guessed)

    def search_to(tolerance: float) -> Begin:
        def begin(guess: float, shape: Shape | None) -> Strategy:
            return STRATEGIES[search](clean, guess, tolerance, largest, shape) if clean > 0 else hopeless()

        return begin

    driver = _Driver(search_to(tolerance), region.tasks, deadline, report)
    quick, *rivals = chosen.challengers() or (None,)
    # Quick methods have an answer should time run out, and good guesses for what follows.
    quick = chosen.plain() if chosen.optimise == "all" else quick
    ranges = [(SMALL_SHARE * size, size) for size in scale.tolist()]
    place = MIDDLE
    if quick and (helper := _Prover(query, quick)).fits:
        asked, accuracy = ranges, tolerance
        if chosen.optimise == "tuned":
            # What is learned afterwards is much more: if time cannot run out, one rough answer will do. The
            # other tasks are then asked of the quick method as of any rival.
            asked, accuracy = (ranges[:1], ROUGH) if deadline is None else (ranges, TOLERANCE)
            rivals = rivals if len(asked) == len(ranges) else [quick, *rivals]
        driver.search(helper, asked, place, search_to(accuracy))
        place = BEYOND_QUICK
        tried = zip(driver.brackets[: len(asked)], asked, strict=True)
        found = [b.certified / high if high > 0 else 0.0 for b, (_, high) in tried]
        found += found[:1] * (len(ranges) - len(asked))
        ranges = [((f or SMALL_SHARE) * high, high) for f, (_, high) in zip(found, ranges, strict=True)]
    if chosen.optimise == "all":
        driver.improve(prover)
    else:
        driver.search(prover, ranges, place)
    for rival in rivals if clean > 0 else ():
        if driver.expired:
            break
        if (challenger := _Prover(query, rival)).fits:
            driver.challenge(challenger, 1 + 2 * TOLERANCE, clean)
    tasks = tuple(
        TaskRadius(tuple(words), bracket.certified, broken, bracket.margin, count)
        for words, bracket, broken, count in zip(
            words, driver.brackets, broken.tolist(), driver.counts, strict=True
        )
    )
    report(1.0)
    return Radius(label, clean, tasks, driver.calls, time.perf_counter() - begin, attack_seconds)


@dataclass(frozen=True, eq=False)
class _Query:
    model: Classifier
    region: LpBall
    label: int
    engine: Engine
    deadline: float | None


class _Prover:
    """Answers how large the smallest margin is for some tasks at some sizes, by one method."""

    def __init__(self, query: _Query, method: Method) -> None:
        self.query, self.method, self.memory = query, method, Memory()
        self.scene = method.scene(query.model.program64, query.region.center, query.label)

    @property
    def fits(self) -> bool:
        """Whether one task stays within the engine's memory."""
        return self.query.engine.holds(self.scene, self.method, self.query.region)

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
        region, found = q.region.select(list(tasks)), []
        step = batch_size(self.scene, self.method, region, q.engine)
        for part in torch.arange(len(tasks)).split(step):
            found += self.method.follow(
                self.scene,
                region.select(part),
                sizes[part],
                control,
                dtype=q.engine.dtype,
                chunk_bytes=q.engine.rows,
            ).tolist()
        return found


Begin = Callable[[float, Shape | None], Strategy]
"""The search from a first guess, given the shape of the margin function if it is known."""


class _Driver:
    """Runs searches in step and keeps the best bracket of every task."""

    def __init__(
        self,
        begin: Begin,
        tasks: int,
        deadline: float | None,
        report: Callable[[float], None],
    ) -> None:
        self.begin, self.deadline, self.report = begin, deadline, report
        self.brackets = [Bracket(0.0, 0.0)] * tasks
        self.counts = [0] * tasks
        self.calls = self.done = 0

    def search(
        self,
        prove: _Prover,
        ranges: Sequence[tuple[float, float]],
        place: float,
        begin: Begin | None = None,
    ) -> None:
        """Some tasks go ahead, from a `place` (in logarithms) in the range where their radii are expected.

        Others start at the mean of the places these found, and with the shape of the first margin function.
        One goes ahead where tasks share their work; else ever more, as a good start saves the more.
        """
        shape: Shape | None = None
        places: list[float] = []
        done = 0
        learns = prove.method.optimise == "tuned"
        while done < len(ranges):
            group = range(len(ranges))[done : (2 * done + 1 if learns or not done else None)]
            caution = CAUTION if done else 1.0
            guesses = {}
            for task in group:
                low, high = ranges[task]
                guesses[task] = caution * low ** (1 - place) * high**place
            self.run(prove, guesses, shape, begin)
            for task in group:
                found, (low, high) = self.brackets[task], ranges[task]
                if found.certified > 0 and low < high < math.inf and found.curve:
                    places.append(math.log(found.certified / low) / math.log(high / low))
                    # Margins of a method that learns move with more than ε.
                    shape = shape or (None if learns else found.curve.shape(found.certified))
            place = sum(places) / len(places) if places else place
            done = group.stop

    def improve(self, prove: _Prover) -> None:
        """Learn at what is proven, and search on from where that leads; again one task goes ahead."""
        gain = 1.0
        tasks = [task for task, bracket in enumerate(self.brackets) if bracket.certified > 0]
        for group in (tasks[:1], tasks[1:]):
            if not group or self.expired:
                return
            before = {task: self.brackets[task] for task in group}
            guesses = prove.learn_from(group, [gain * b.certified for b in before.values()])
            shapes = [b.curve.shape(b.certified) if b.curve else None for b in before.values()]
            self.run(prove, dict(zip(group, guesses, strict=True)), shapes[0])
            gain = max(gain, self.brackets[group[0]].certified / before[group[0]].certified)

    def challenge(self, prove: _Prover, factor: float, clean: float) -> None:
        """Let another method try a little more than what is proven, and search on where it succeeds.

        The first task goes ahead; where a method is far from proving it, the other tasks are not tried, and
        where it is that before it learns, it need not learn.
        """
        tasks = range(len(self.brackets))
        if prove.method.optimise == "all":
            plain = _Prover(prove.query, prove.method.plain())
            if not plain([0], [max(self.brackets[0].certified, SMALLEST_RADIUS)])[0] > -clean:
                return
        for group in (tasks[:1], tasks[1:]):
            if not group or self.expired:
                return
            eps = [max(factor * self.brackets[task].certified, SMALLEST_RADIUS) for task in group]
            answers = prove(group, eps)
            better = {t: e for t, e, m in zip(group, eps, answers, strict=True) if m > 0}
            self.run(prove, better, None)
            if not answers[0] > -CLOSE * clean:
                return

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def run(
        self,
        prove: _Prover,
        guesses: Mapping[int, float],
        shape: Shape | None,
        begin: Begin | None = None,
    ) -> None:
        """Search from a guess for every task; one call of `prove` answers one question of each."""
        searches = {task: (begin or self.begin)(guess, shape) for task, guess in guesses.items()}
        questions: dict[int, float] = {}

        def advance(task: int, answer: float | None) -> None:
            try:
                questions[task] = next(searches[task]) if answer is None else searches[task].send(answer)
            except StopIteration as stop:
                self.keep(task, stop.value)

        for task in searches:
            advance(task, None)
        while questions and not self.expired:
            asked, eps = list(questions), list(questions.values())
            questions.clear()
            self.calls += 1
            for task, size, answer in zip(asked, eps, prove(asked, eps), strict=True):
                self.counts[task] += 1
                if answer > 0:
                    self.keep(task, Bracket(size, answer))
                advance(task, answer)
            self.done = max(self.done, sum(b.certified > 0 for b in self.brackets) - len(questions))
            self.report(0.1 + 0.85 * self.done / len(self.brackets))

    def keep(self, task: int, bracket: Bracket) -> None:
        if bracket.certified >= self.brackets[task].certified:
            self.brackets[task] = bracket
