"""The certified radius: the largest ε a method proves, found with few evaluations.

A search strategy is a generator for one task: it yields the next ε to try and is sent the smallest margin
found there (NaN if there is no bound). The driver runs the strategies of all tasks in step, so that one
engine call answers one question of every task. A strategy's `Bracket` only ever moves its lower end to an ε
that was proven.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from jaxtyping import Bool
from torch import Tensor

from buffet.attack import AttackSettings, attacked_radius
from buffet.bounds.optimise import Control, Memory
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
    scene, control = chosen.scene(model.program64, region.center, label), Control(Memory())

    def evaluate(tasks: list[int], eps: list[float]) -> list[float]:
        part = region.select(tasks).with_eps(torch.tensor(eps, dtype=torch.float64))
        margins = bound_margins(model, part, chosen, label, engine or Engine(), scene, control)
        return torch.where(proven(margins), margins.amin(-1), _not_proven(margins)).tolist()

    def begin(guess: float, shape: Shape | None) -> Strategy:
        return STRATEGIES[search](clean, guess, tolerance, largest, shape) if clean > 0 else _hopeless()

    brackets, counts, calls = _drive(begin, scale.tolist(), evaluate, report)
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
    """An ε proven (0 at the start) with its margin, and one that was not (infinity: none was tried)."""

    certified: float
    margin: float
    failed: float = math.inf
    curve: Curve | None = None  # the margins seen on the way

    def after(self, eps: float, margin: float) -> Bracket:
        return replace(self, certified=eps, margin=margin) if margin > 0 else replace(self, failed=eps)


Strategy = Generator[float, float, Bracket]


def _hopeless() -> Strategy:
    """The radius of an input whose label is wrong to begin with."""
    yield from ()
    return Bracket(0.0, 0.0)


def secant(
    clean: float, guess: float, tolerance: float, largest: float, shape: Shape | None = None
) -> Strategy:
    """Safeguarded root search on the margin as a function of ε.

    In logarithms of ε and of the deficit ``(clean − margin) / clean`` margin functions are smooth, rising and
    alike for all words of a sentence: the root is where the deficit is 1. The next ε is found by inverse
    interpolation there, or from the `shape` that another search has seen; when steps do not shrink the
    bracket enough the next one halves it.
    Ends when the bracket's ends agree to `tolerance`, or the proven end is that close to where its margin,
    falling on as it did, reaches 0; or nothing is proven at `SMALLEST_RADIUS`, or all is at `largest`.
    """
    bracket = Bracket(0.0, clean)
    curve = Curve(clean)
    eps = min(max(guess, SMALLEST_RADIUS) if math.isfinite(guess) and guess > 0 else 0.01, largest)
    slow = rises = 0
    while True:
        margin = yield eps
        before = bracket
        curve = curve.after(eps, margin)
        bracket = replace(bracket.after(eps, margin), curve=curve)
        low, high = bracket.certified, bracket.failed
        closed = high - low <= tolerance * low or math.nextafter(low, math.inf) >= high
        if low >= largest or high <= SMALLEST_RADIUS or closed or curve.beyond(low) <= low * (1 + tolerance):
            return bracket
        root = curve.root(low, high, shape)
        if math.isinf(high):
            # A little past the expected root, and ever further when that was not enough.
            eps = min(max(1.02 * root, (1 + 0.05 * 4**rises) * low), 4 * low, largest)
            rises += 1
            continue
        shrunk = math.isfinite(before.failed) and high - low > 0.5 * (before.failed - before.certified)
        slow = slow + 1 if shrunk else 0
        if not low < root < high or slow >= 2:
            slow = 0
            # An ε of unknown magnitude is halved geometrically.
            eps = max(math.sqrt(low * high) if low > 0 else high / 8, low + (high - low) / 1024)
        else:
            # Land just inside the proven side, and not on an end.
            eps = max(root * (1 - tolerance / 2), low * (1 + 0.9 * tolerance), low + (high - low) / 1024)
            eps = eps if eps < high else (low + high) / 2


Shape = Callable[[float], float]
"""From the logarithm of a deficit to that of ε, relative to the root."""
STEEPNESS = 5.0
"""The deficit grows about like this power of ε, where nothing better is known."""


@dataclass(frozen=True)
class Curve:
    """What was seen of a margin function: finite margins by ε, from the clean one at 0."""

    clean: float
    seen: tuple[tuple[float, float], ...] = ()

    def after(self, eps: float, margin: float) -> Curve:
        if not math.isfinite(margin):
            return self
        return Curve(self.clean, tuple(sorted([*self.seen, (eps, margin)])))

    def beyond(self, eps: float) -> float:
        """Where the margin seen at `eps` reaches 0 if it goes on falling as it fell before."""
        places = [e for e, _ in self.seen]
        if eps not in places:
            return math.inf
        here = places.index(eps)
        margin = self.seen[here][1]
        e, before = self.seen[here - 1] if here else (0.0, self.clean)
        return eps + margin * (eps - e) / (before - margin) if before > margin else math.inf

    def logarithms(self) -> list[tuple[float, float]]:
        """``(log ε, log deficit)`` of all that was seen."""
        return [(math.log(e), math.log(max((self.clean - m) / self.clean, 1e-9))) for e, m in self.seen]

    def root(self, low: float, high: float, shape: Shape | None) -> float:
        """Where the margin is expected to be 0, given the proven and the failed end; NaN if unknown."""
        points = self.logarithms()
        below = [p for p in points if p[0] <= math.log(low)] if low > 0 else []
        above = [p for p in points if p[0] >= math.log(high)] if math.isfinite(high) else []
        if not points:
            return math.nan
        if not below or not above:
            nearest = below[::-1] or above
            x, y = nearest[0]
            if shape:
                return math.exp(x - shape(y))
            power = STEEPNESS
            if len(nearest) > 1:
                power = max(1.0, (y - nearest[1][1]) / (x - nearest[1][0]))
            return math.exp(x - max(y / power, -2.0))
        (xa, ya), (xb, yb) = below[-1], above[0]
        if not ya < yb:
            return math.nan
        linear = xa - ya * (xb - xa) / (yb - ya)
        others = [p for p in points if p[0] not in (xa, xb) and not ya <= p[1] <= yb]
        if others:
            xc, yc = min(others, key=lambda p: abs(p[1]))
            # the parabola x(y) through three points, at y = 0
            bend = ((xc - xb) / (yc - yb) - (xb - xa) / (yb - ya)) / (yc - ya)
            curved = linear + bend * ya * yb
            if xa < curved < xb:
                return math.exp(curved)
        return math.exp(linear)

    def shape(self, root: float) -> Shape | None:
        """How ε relative to the root depends on the deficit, from what was seen; straight beyond it."""
        points = sorted({y: x - math.log(root) for x, y in self.logarithms()}.items())
        if len(points) < 2 or any(a[1] >= b[1] for a, b in pairwise(points)):
            return None

        def offset(y: float) -> float:
            for (ya, xa), (yb, xb) in pairwise(points):
                if ya <= y <= yb:
                    return xa + (xb - xa) * (y - ya) / (yb - ya)
            ya, xa = points[0] if y < points[0][0] else points[-1]
            return xa + (y - ya) / STEEPNESS

        return offset


def bisection(
    clean: float, guess: float, tolerance: float, largest: float, shape: Shape | None = None, steps: int = 10
) -> Strategy:
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


STRATEGIES: Mapping[str, Callable[[float, float, float, float, Shape | None], Strategy]] = {
    "secant": secant,
    "bisection": bisection,
}


def _drive(
    begin: Callable[[float, Shape | None], Strategy],
    scales: Sequence[float],
    evaluate: Callable[[list[int], list[float]], list[float]],
    report: Callable[[float], None],
) -> tuple[list[Bracket], list[int], int]:
    """Run a search for every task; `evaluate` answers one question of each unfinished one.

    One task goes ahead, and the others start from the share of their scale, and the shape of the margin
    function, that it has found.
    """
    results: dict[int, Bracket] = {}
    counts = [0] * len(scales)
    calls = 0

    def run(tasks: Sequence[int], share: float, shape: Shape | None) -> None:
        nonlocal calls
        searches = {task: begin(share * scales[task], shape) for task in tasks}
        questions: dict[int, float] = {}

        def advance(task: int, answer: float | None) -> None:
            try:
                questions[task] = next(searches[task]) if answer is None else searches[task].send(answer)
            except StopIteration as stop:
                results[task] = stop.value

        for task in tasks:
            advance(task, None)
        while questions:
            asked, eps = list(questions), list(questions.values())
            questions.clear()
            calls += 1
            for task, answer in zip(asked, evaluate(asked, eps), strict=True):
                counts[task] += 1
                advance(task, answer)
            report(0.1 + 0.9 * len(results) / len(scales))

    run([0], FIRST_GUESS, None)
    found, share, shape = results[0], FIRST_GUESS, None
    if found.certified > 0 and math.isfinite(scales[0]) and found.curve:
        share, shape = found.certified / scales[0], found.curve.shape(found.certified)
    run(range(1, len(scales)), share, shape)
    return [results[t] for t in range(len(scales))], counts, calls
