"""The certified radius: the largest ε a method proves, found with few evaluations.

A search strategy is a generator for one task: it yields the next ε to try and is sent the smallest margin
found there (NaN if there is no bound). The driver runs the strategies of all tasks in step, so that one
engine call answers one question of every task. A strategy's `Bracket` only ever moves its lower end to an ε
that was proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from buffet.attack import AttackSettings, attacked_radius
from buffet.bounds.optimise import Memory
from buffet.errors import BuffetError
from buffet.methods import Method, method_named
from buffet.regions import LpBall, Region
from buffet.verify import (
    Classifier,
    Engine,
    bound_margins,
    clean_answer,
    proven,
    without_padding,
)

LARGEST_RADIUS = 1e4
"""Radii are not searched beyond this; a task proven there is reported with this radius."""
GUESS_ATTACK = AttackSettings(steps=10, restarts=1)
FIRST_GUESS = 0.4
"""The first ε tried, as a share of the attacked radius."""
SMALLEST_RADIUS = 1e-9
"""A task not proven here has radius 0."""


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
    window: int | None = None,
    search: str = "secant",
    tolerance: float = 1e-3,
    largest: float = LARGEST_RADIUS,
    attack: bool = True,
    seed: int = 0,
    engine: Engine | None = None,
    progress: Callable[[float], None] | None = None,
) -> Radius:
    """The largest ε that `method` certifies for each task, and the smallest an attack breaks.

    Args:
        region: an `LpBall`; its own size, if any, is ignored.
        mask: False for the padding rows of the sentence.
        propagation, product, softmax, optimise, steps, window: replace these parts of the method.
        search: ``secant`` (safeguarded, relative `tolerance`) or ``bisection`` (doubling from 0.01 and ten
            halvings, as in the BuFFeT paper).
        attack: also look for the upper end of the bracket.
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
    if not (0 < tolerance < 1 and 0 < largest < math.inf):
        raise BuffetError(f"tolerance {tolerance} must lie in (0, 1) and largest {largest} be a finite ε > 0")
    chosen = method_named(
        method,
        propagation=propagation,
        product=product,
        softmax=softmax,
        optimise=optimise,
        steps=steps,
        window=window,
    )
    label, clean = clean_answer(model, region, label)
    report = progress or (lambda share: None)
    start = time.perf_counter()
    attacked = torch.full((region.tasks,), math.inf, dtype=torch.float64)
    if attack or clean < 0:
        attacked = attacked_radius(model.program64, region, label, AttackSettings(seed=seed))
    attack_seconds = time.perf_counter() - start
    report(0.1)

    start = time.perf_counter()
    # Certified radii are some fraction of attacked ones; a short attack will do for a first guess.
    scale = attacked if attack else attacked_radius(model.program64, region, label, GUESS_ATTACK)
    searches = [
        STRATEGIES[search](clean, FIRST_GUESS * guess, tolerance, largest) if clean > 0 else _hopeless()
        for guess in scale.tolist()
    ]

    scene, memory = chosen.scene(model.program64, region.center, label), Memory()

    def evaluate(tasks: list[int], eps: list[float]) -> list[float]:
        part = region.select(tasks).with_eps(torch.tensor(eps, dtype=torch.float64))
        margins = bound_margins(model, part, chosen, label, engine or Engine(), scene, memory)
        return torch.where(proven(margins), margins.amin(-1), _not_proven(margins)).tolist()

    brackets, counts, calls = _drive(searches, evaluate, report)
    tasks = tuple(
        TaskRadius(tuple(words), bracket.certified, broken, bracket.margin, count)
        for words, bracket, broken, count in zip(words, brackets, attacked.tolist(), counts, strict=True)
    )
    return Radius(label, clean, tasks, calls, time.perf_counter() - start, attack_seconds)


def _not_proven(margins: Tensor) -> Tensor:
    """A number ≤ 0, or NaN, for a task that is not proven."""
    return margins.amin(-1).clamp_max(0)


@dataclass(frozen=True)
class Bracket:
    """An ε proven (0 at the start) with its margin, and one that was not (infinity at the start)."""

    certified: float
    margin: float
    failed: float = math.inf
    failed_margin: float = -math.inf

    def after(self, eps: float, margin: float) -> Bracket:
        if margin > 0:
            return Bracket(eps, margin, self.failed, self.failed_margin)
        return Bracket(self.certified, self.margin, eps, margin)


Strategy = Generator[float, float, Bracket]


def _hopeless() -> Strategy:
    """The radius of an input whose label is wrong to begin with."""
    yield from ()
    return Bracket(0.0, 0.0)


def secant(clean: float, guess: float, tolerance: float, largest: float) -> Strategy:
    """Safeguarded root search on the margin as a function of ε.

    The next ε is the root of the parabola through the ends of the bracket and a third point (margins far
    below 0 are compressed first, so that a huge one does not spoil it). When steps do not shrink the bracket
    enough the next one bisects.
    Ends when the bracket's ends agree to `tolerance`, or nothing is proven at `SMALLEST_RADIUS`, or all is at
    `largest`.
    """
    bracket = Bracket(0.0, clean)
    seen = [(0.0, clean)]
    eps = min(max(guess, SMALLEST_RADIUS) if math.isfinite(guess) and guess > 0 else 0.01, largest)
    slow = 0
    while True:
        margin = yield eps
        before = bracket
        bracket = bracket.after(eps, margin)
        if math.isfinite(margin):
            seen.append((eps, margin if margin > -clean else -clean * (1 + math.log(margin / -clean))))
        low, high = bracket.certified, bracket.failed
        closed = high - low <= tolerance * low or math.nextafter(low, math.inf) >= high
        if low >= largest or high <= SMALLEST_RADIUS or closed:
            return bracket
        if math.isinf(high):
            eps = min(_beyond(seen, low), largest)
            continue
        shrunk = math.isfinite(before.failed) and high - low > 0.5 * (before.failed - before.certified)
        slow = slow + 1 if shrunk else 0
        root = _root(seen, low, high)
        if root is None or slow >= 2:
            slow = 0
            # An ε of unknown magnitude is halved geometrically.
            eps = math.sqrt(low * high) if low > 0 else high / 8
            eps = max(eps, low + (high - low) / 1024)
        else:
            # Land just inside the proven side, so that one more step can close the bracket.
            eps = root * (1 - tolerance / 3) if root * (1 - tolerance / 3) > low else low * (1 + tolerance)
            eps = min(max(eps, low * (1 + tolerance * 0.9)), high) if low > 0 else eps
            if eps >= high:
                eps = (low + high) / 2


def _beyond(seen: list[tuple[float, float]], low: float) -> float:
    """Where to look when everything so far is proven: a little past the linear extrapolation to zero."""
    (e0, h0), (e1, h1) = sorted(seen)[-2:]
    root = e1 + (e1 - e0) * h1 / (h0 - h1) if h0 > h1 else math.inf
    return min(max(root, 1.1 * low), 4 * low)


def _root(seen: list[tuple[float, float]], low: float, high: float) -> float | None:
    """The root, strictly inside the bracket, of the parabola through its ends and the nearest other point.

    Margins fall ever faster with ε, which a parabola follows well. None if an end has no finite margin.
    """
    ends = [next((p for p in seen if p[0] == end), None) for end in (low, high)]
    if ends[0] is None or ends[1] is None:
        return None
    (a, fa), (b, fb) = ends[0], ends[1]
    chord = (fb - fa) / (b - a)
    root = a - fa / chord
    others = [p for p in seen if p[0] not in (a, b)]
    if others:
        c, fc = min(others, key=lambda p: abs(p[0] - root))
        bend = ((fc - fb) / (c - b) - chord) / (c - a)
        # fa + (x − a)·(chord + bend·(x − b)) = 0, solved without cancellation
        slope = chord + bend * (a - b)
        under = slope * slope - 4 * bend * fa
        if under >= 0 and slope - math.sqrt(under) < 0:
            root = a - 2 * fa / (slope - math.sqrt(under))
    return root if low < root < high else None


def bisection(clean: float, guess: float, tolerance: float, largest: float, steps: int = 10) -> Strategy:
    """The paper's search: from 0.01 double (or halve) until the bracket closes, then halve it ten times."""
    bracket = Bracket(0.0, clean)
    eps = min(0.01, largest)
    while math.isinf(bracket.failed) or bracket.certified == 0.0:
        margin = yield eps
        bracket = bracket.after(eps, margin)
        if bracket.certified >= largest or bracket.failed <= SMALLEST_RADIUS:
            return bracket
        eps = min(2 * eps, largest) if margin > 0 else eps / 2
    for _ in range(steps):
        eps = (bracket.certified + bracket.failed) / 2
        margin = yield eps
        bracket = bracket.after(eps, margin)
    return bracket


STRATEGIES: Mapping[str, Callable[[float, float, float, float], Strategy]] = {
    "secant": secant,
    "bisection": bisection,
}


def _drive(
    searches: list[Strategy],
    evaluate: Callable[[list[int], list[float]], list[float]],
    report: Callable[[float], None],
) -> tuple[list[Bracket], list[int], int]:
    """Run the strategies in step; `evaluate` answers one question of each unfinished task."""
    results: dict[int, Bracket] = {}
    questions: dict[int, float] = {}
    counts = [0] * len(searches)
    calls = 0

    def advance(task: int, answer: float | None) -> None:
        try:
            questions[task] = next(searches[task]) if answer is None else searches[task].send(answer)
        except StopIteration as stop:
            results[task] = stop.value

    for task in range(len(searches)):
        advance(task, None)
    while questions:
        tasks, eps = list(questions), list(questions.values())
        questions.clear()
        calls += 1
        for task, answer in zip(tasks, evaluate(tasks, eps), strict=True):
            counts[task] += 1
            advance(task, answer)
        report(0.1 + 0.9 * len(results) / len(searches))
    return [results[t] for t in range(len(searches))], counts, calls
