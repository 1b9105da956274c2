"""The certified radius: the largest ε a method proves, found with few evaluations."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.attack import AttackSettings, attacked_radius
from buffet.engine import Classifier, Engine
from buffet.errors import BuffetError
from buffet.methods import Method, method_named
from buffet.query import Query, deadline_of, question, without_padding
from buffet.regions import Region
from buffet.results import Radius, Subject, TaskRadius
from buffet.search.cells import search_by_cells
from buffet.search.margin_function import MarginFunction
from buffet.search.policy import POLICY
from buffet.search.portfolio import challenge
from buffet.search.root_finding import ROOT_FINDERS, RootFinder, Shape, hopeless
from buffet.search.schedule import NewFinder, Range, Schedule
from buffet.system.precision import full_precision

LARGEST_RADIUS = 1e4
"""Radii are not searched beyond this; a task proven there is reported with this radius."""


@full_precision()
def radius(
    model: Classifier,
    region: Region,
    method: str | Method = "buffet",
    *,
    label: int | None = None,
    mask: Bool[Tensor, "tokens"] | None = None,
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
        method: a name in `buffet.METHODS`, or what `buffet.method` makes of one.
        label: the class to defend; by default the one the model gives the unmoved rows.
        mask: False for the padding rows of the sentence.
        search: ``secant`` (safeguarded) or ``bisection`` (doubling from 0.01 and ten halvings, as in the
            BuFFeT paper).
        tolerance: of the secant search, relative; by default 0.001, or 0.02 where the method learns its
            boxes (0.005 on one layer), which moves its margins by about that.
        largest: the search ends here.
        attack: also look for the upper end of the bracket.
        attacked: that upper end of every task, if it is known already.
        budget: seconds after which the best of what is proven by then is returned; attacks take a quarter
            of them at most. An interruption (Ctrl-C) ends it too, once something is proven.
        progress: called with the finished share of the work, 0 to 1.

    Example:
        >>> import buffet
        >>> model = buffet.load()
        >>> region = buffet.LpBall(model.embed("a gripping , moving film"), words=[2])
        >>> buffet.radius(model, region, buffet.method("lse", cells=4)).certified  # doctest: +SKIP
    """
    if not region.resizable:
        raise BuffetError(f"a {type(region).__name__} has no size to search over: use verify, or an LpBall")
    ball = without_padding(region, mask)
    chosen = method_named(method)
    asked, clean = question(model, ball, label)
    goal = Goal.of(model, chosen, clean, search, tolerance, largest)
    begin, report = time.perf_counter(), progress or (lambda share: None)
    margin = MarginFunction(Query(model, ball, asked, engine or Engine(), deadline_of(budget)), chosen)
    margin.query.engine.check(margin.clean_run, chosen, ball)
    attack_end = None if budget is None else begin + POLICY.attack_share * budget
    settings = AttackSettings(seed=seed) if attack or clean < 0 else None
    broken = _attacked(margin, settings, attack_end) if attacked is None else _given(attacked, ball)
    attack_seconds = time.perf_counter() - begin
    report(0.1)
    begin, expected = time.perf_counter(), broken
    if not bool(broken.isfinite().all()):
        expected = torch.where(broken.isfinite(), broken, _attacked(margin, POLICY.guess_attack, attack_end))
    whole = 0.95 if chosen.cells == 1 and budget is None else 0.3
    schedule = Schedule(goal.finder(goal.tolerance), ball.tasks, margin.query.deadline, report, whole)
    interrupted = False
    try:
        _search(margin, goal, schedule, expected.tolist(), broken.tolist())
    except KeyboardInterrupt:
        interrupted = budget is not None and any(size > 0 for size in schedule.certified)
        if not interrupted:
            raise
    found = zip(region.moved.tolist(), schedule.brackets, broken.tolist(), schedule.counts, strict=True)
    tasks = tuple(
        TaskRadius(tuple(words), bracket.certified, size, bracket.margin, count)
        for words, bracket, size, count in found
    )
    report(1.0)
    seconds = time.perf_counter() - begin
    about = replace(Subject.of(model, region, chosen), sizes=None)
    return Radius(asked.label, clean, tasks, schedule.calls, seconds, attack_seconds, about, interrupted)


@dataclass(frozen=True)
class Goal:
    """How radii are searched: by which root finder, how accurately and how far."""

    search: str
    clean: float
    tolerance: float  # of the method's own search, relative
    fine: float  # of searches by methods whose margins depend on ε alone
    largest: float

    @classmethod
    def of(
        cls,
        model: Classifier,
        method: Method,
        clean: float,
        search: str,
        tolerance: float | None,
        largest: float,
    ) -> Goal:
        """With the tolerance that suits the method, unless one is given."""
        if search not in ROOT_FINDERS:
            raise BuffetError(f"unknown search '{search}'; choose one of: {', '.join(ROOT_FINDERS)}")
        fine = own = POLICY.tolerance if tolerance is None else tolerance
        if tolerance is None and method.optimiser.learns_boxes:
            deep = model.program64.layers > 1
            own = POLICY.tolerance_learned if deep else POLICY.tolerance_learned_shallow
        if not (0 < own < 1 and 0 < largest < math.inf):
            raise BuffetError(f"tolerance {own} must lie in (0, 1) and largest {largest} be a finite ε > 0")
        return cls(search, clean, own, fine, largest)

    def finder(self, tolerance: float) -> NewFinder:
        """Root finders of this accuracy."""

        def new(guess: float, shape: Shape | None, most: float) -> RootFinder:
            if not self.clean > 0:
                return hopeless()
            return ROOT_FINDERS[self.search](self.clean, guess, tolerance, min(self.largest, most), shape)

        return new


def _attacked(
    margin: MarginFunction, settings: AttackSettings | None, deadline: float | None
) -> Float[Tensor, "tasks"]:
    """The smallest ε of every task that an attack breaks; infinity without one."""
    query, ball = margin.query, margin.ball
    if settings is None:
        return torch.full((ball.tasks,), math.inf, dtype=torch.float64, device=ball.center.device)
    return attacked_radius(query.model.program64, ball, query.asked, settings, deadline=deadline)


def _given(attacked: Sequence[float], ball: Region) -> Float[Tensor, "tasks"]:
    given = torch.as_tensor(attacked, dtype=torch.float64, device=ball.center.device)
    if given.ndim > 1 or (given.ndim and len(given) != ball.tasks):
        raise BuffetError(f"attacked has shape {tuple(given.shape)}; give one radius per task ({ball.tasks})")
    return given.expand(ball.tasks)


def _search(
    margin: MarginFunction,
    goal: Goal,
    schedule: Schedule,
    expected: Sequence[float],
    attacked: Sequence[float],
) -> None:
    """A quick method first, then the method itself, its rivals, and cells.

    The quick one has an answer should time run out, and good guesses for what follows.
    """
    query, method, optimiser = margin.query, margin.method, margin.method.optimiser
    quick, *rivals = method.challengers(query.model.program64) or (None,)
    quick = method.plain() if optimiser.end_to_end or optimiser.margin_only else quick
    least = _least_share(query)
    wide = [(least * size, size) for size in expected]
    start = Start(wide, POLICY.place_first)
    if quick and (helper := MarginFunction(query, quick)).fits:
        # If time cannot run out, one rough answer of the quick method will do before boxes are learned. The
        # other tasks are then asked of it as of any rival.
        rough = optimiser.learns_boxes and query.deadline is None
        rivals = [quick, *rivals] if rough and len(wide) > 1 else rivals
        start = _started(helper, margin, goal, schedule, wide)
    if optimiser.end_to_end:
        schedule.improve(margin)
    else:
        schedule.search(margin, start.ranges, start.place, shape=start.shape)
    if goal.clean > 0:
        challenge(schedule, query, rivals, goal.clean, goal.finder(goal.fine), wide)
    in_time = query.deadline is not None and query.region.moved.shape[1] <= POLICY.cut_rows
    if method.cells > 1:
        search_by_cells(query, method, schedule, goal.largest, attacked)
    elif in_time and method.rivals and not schedule.expired:  # time is left to cut
        search_by_cells(query, replace(method, cells=POLICY.cells_in_time), schedule, goal.largest, attacked)


def _least_share(query: Query) -> float:
    """Of the attacked radius, what is expected to be certified at least."""
    return POLICY.least_share * math.exp(-POLICY.share_lost_per_layer * query.model.program64.layers)


@dataclass(frozen=True)
class Start:
    """Where a search begins: a place (in logarithms) in the range of every task, and the shape there."""

    ranges: Sequence[Range]
    place: float
    shape: Shape | None = None


def _started(
    quick: MarginFunction, margin: MarginFunction, goal: Goal, schedule: Schedule, wide: Sequence[Range]
) -> Start:
    """Where the search by a method begins once a quick one was asked."""
    optimiser = margin.method.optimiser
    asked, accuracy = wide, goal.tolerance
    if optimiser.margin_only:  # over the same boxes: one task tells where all are
        asked, accuracy = wide[:1], max(POLICY.tolerance_plain, goal.tolerance)
    elif optimiser.learns_boxes and quick.query.deadline is None:
        asked, accuracy = wide[:1], POLICY.tolerance_rough
    elif optimiser.learns_boxes:
        accuracy = POLICY.tolerance
    shape = schedule.search(quick, asked, POLICY.place_first, goal.finder(accuracy))
    tried = zip(schedule.certified[: len(asked)], asked, strict=True)
    shares = [certified / high if high > 0 else 0.0 for certified, (_, high) in tried]
    shares += shares[:1] * (len(wide) - len(asked))
    least = _least_share(margin.query)
    ranges = [((share or least) * high, high) for share, (_, high) in zip(shares, wide, strict=True)]
    if not optimiser.margin_only:
        return Start(ranges, POLICY.place_beyond_quick)
    way = -math.log(shares[0] or least)
    place = min(math.log(POLICY.gain_of_final) / way, 0.5) if way > 0 else 0.5
    return Start(ranges, place, shape)
