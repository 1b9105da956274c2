"""Balls that are proven cell by cell: at one ε, and for the largest ε."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from buffet.engine import Classifier, Engine, bound_margins
from buffet.methods import Method
from buffet.optimisation.context import Context
from buffet.optimisation.warm_starts import WarmStarts
from buffet.properties import Property
from buffet.query import Query
from buffet.regions import Region
from buffet.search.branching import Tree
from buffet.search.policy import POLICY
from buffet.search.root_finding import Bracket, straight
from buffet.search.schedule import Found, Schedule, in_lockstep
from buffet.system.parallel import side_by_side


def tree_of_proofs(
    model: Classifier, region: Region, method: Method, goal: Property | int, engine: Engine, context: Context
) -> Tree | None:
    """Parts of the region of one task, all of them proven, if they are found.

    What is cut at a larger ε is cut more finely where it matters: it may prove what the first parts do not.
    """
    eps = 0.0 if region.eps is None else float(region.eps[0])
    for size in (eps, POLICY.cells_further * eps) if region.resizable else (eps,):
        if context.expired:
            return None
        whole = region.with_eps(size) if region.resizable else region
        tree = tree_of_cells(model, whole, method, goal, engine, context)
        tree.grow(size, lambda: not context.expired)
        if tree.limit(eps) > 0:
            return tree
    return None


def tree_of_cells(
    model: Classifier, region: Region, method: Method, goal: Property | int, engine: Engine, context: Context
) -> Tree:
    """Parts of the region of one task that a method is asked about.

    What it learns for the whole serves them all: to learn for each would gain nothing more. So it learns a
    little longer, if there is memory.
    """
    clean_run = method.clean_run(model.program64, region.center, goal)
    warm_starts = context.warm_starts or WarmStarts()
    if method.optimiser.learns:
        patient = replace(method, steps=POLICY.cells_patience * method.steps)
        learner = patient if engine.holds(clean_run, patient, region) else method
        bound_margins(
            model, region, learner, goal, engine, clean_run, replace(context, warm_starts=warm_starts)
        )

    def ask(part: Region) -> Tensor:
        own = replace(context, warm_starts=warm_starts.copy())  # no part depends on which came first
        return bound_margins(model, part, method, goal, engine, clean_run, own)[0]

    return Tree(model.program64, region, ask, method.cells, engine.parallel(method))


def search_by_cells(
    query: Query, method: Method, schedule: Schedule, largest: float, attacked: Sequence[float]
) -> None:
    """Cut the ball of every task into cells, and search on for what all of them prove.

    Where time is limited, every task has the same share of it.
    """
    tasks = [task for task, certified in enumerate(schedule.certified) if 0 < certified < largest]
    # Not at the same time where someone counts the bytes.
    together = query.engine.parallel(method) and len(tasks) > 1
    share = math.inf
    if tasks and schedule.deadline is not None:
        workers = min(torch.get_num_threads(), len(tasks)) if together else 1
        share = (schedule.deadline - time.perf_counter()) * workers / len(tasks)
    done = 0.0

    def tell(part: float) -> None:
        nonlocal done
        done += part
        schedule.report(schedule.whole + (0.95 - schedule.whole) * done / len(tasks))

    def search(task: int, tell: Callable[[float], None]) -> Found:
        """Cells of one task."""
        if schedule.expired:
            return Found({task: schedule.brackets[task]}, {task: 0})
        one = CellSearch(query, method, schedule, task, largest, attacked[task])
        return one.with_so_many(tell) if math.isinf(share) else one.in_time(time.perf_counter() + share)

    if together:
        nothing: Callable[[float], None] = lambda part: None  # noqa: E731

        def ended(found: Found) -> None:
            tell(1.0)
            schedule.keep(found)

        side_by_side(lambda task: search(task, nothing), tasks, ended)
        return
    for task in tasks:
        schedule.keep(search(task, tell))
        tell(0.0 if math.isinf(share) else 1.0)


@dataclass(frozen=True, eq=False)
class CellSearch:
    """The search for the largest ε at which all cells of the ball of one task are proven."""

    query: Query
    method: Method
    schedule: Schedule
    task: int
    largest: float  # ε that may be tried
    attacked: float  # where an attack succeeds

    @property
    def known(self) -> Bracket:
        """What is proven of the whole ball."""
        return self.schedule.brackets[self.task]

    def with_so_many(self, tell: Callable[[float], None]) -> Found:
        """The worst cell is cut as long as there may be more; where all are proven, more is tried."""
        known = best = self.known
        rises = (POLICY.cells_gain * POLICY.cells_rise**k for k in range(POLICY.cells_rises))
        sizes = [min(rise * known.certified, self.largest) for rise in rises]
        tree, cells = self._tree(sizes[0]), 1

        def go_on() -> bool:
            nonlocal cells
            tell((len(tree.leaves) - cells) / self.method.cells)
            cells = len(tree.leaves)
            return True

        def answer(_: Sequence[int], sizes: Sequence[float]) -> list[float]:
            return [known.margin if eps <= known.certified else tree.limit(eps) for eps in sizes]

        for eps in sizes:
            if tree.grow(eps, go_on):
                best = Bracket(eps, tree.margin)
                continue
            shape = straight([known.curve.steepness()]) if known.curve else None
            finder = {self.task: self.schedule.finder(eps, shape, eps)}
            found = in_lockstep(answer, finder, None).brackets[self.task]
            if found.certified > best.certified:
                best = Bracket(found.certified, tree.margin)
            break
        return self._found(best, tree)

    def in_time(self, end: float) -> Found:
        """A little more than what is proven is tried, again and again until the time is up.

        Nothing is tried beyond the middle between that and what an attack breaks. Every attempt may take a
        share of the time that is left. Where it fails, less is tried next, by the same cells: they are finer
        by then.
        """
        best, rise = self.known, POLICY.cells_rise
        tree = None
        try:
            while (now := time.perf_counter()) < end and not self.schedule.expired:
                eps = min(rise * best.certified, math.sqrt(best.certified * self.attacked), self.largest)
                if not eps > (1 + POLICY.tolerance) * best.certified:
                    break
                stop = now + POLICY.attempt_share * (end - now)
                tree = tree or self._tree(eps)
                if tree.grow(eps, _until(stop)):
                    best = Bracket(eps, tree.margin)
                else:
                    rise = math.sqrt(rise)
        except KeyboardInterrupt:
            return replace(self._found(best, tree), interrupted=True)
        return self._found(best, tree)

    def _tree(self, eps: float) -> Tree:
        ball, query = self.query.region.select([self.task]).with_eps(eps), self.query
        return tree_of_cells(query.model, ball, self.method, query.asked, query.engine, query.context)

    def _found(self, best: Bracket, tree: Tree | None) -> Found:
        asked = tree.asked if tree else 0
        return Found({self.task: best}, {self.task: asked}, asked)


def _until(end: float) -> Callable[[], bool]:
    return lambda: time.perf_counter() < end
