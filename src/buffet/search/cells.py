"""Balls that are proven cell by cell: at one ε, and for the largest ε."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

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


def search_by_cells(query: Query, method: Method, schedule: Schedule, largest: float) -> None:
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

    if together:
        results = side_by_side(
            lambda task: _search_task(query, method, schedule, largest, task, share),
            tasks,
            lambda _: tell(1.0),
        )
    else:
        results = [_search_task(query, method, schedule, largest, task, share, tell) for task in tasks]
    for found in results:
        schedule.keep(found)


def _search_task(
    query: Query,
    method: Method,
    schedule: Schedule,
    largest: float,
    task: int,
    share: float,
    tell: Callable[[float], None] = lambda part: None,
) -> Found:
    """The worst cell is cut as long as there may be more; where all are proven, more is tried.

    Cutting takes most of the task's `share` of the time, in seconds; the rest is for what the cells prove.
    """
    known = best = schedule.brackets[task]
    begin = time.perf_counter()
    if schedule.expired:
        return Found({task: known}, {task: 0})
    # Where time is short, every size that is reached counts: small steps from the first.
    first = POLICY.cells_gain if math.isinf(share) else POLICY.cells_rise
    rises = (first * POLICY.cells_rise**k for k in range(POLICY.cells_rises))
    sizes = [min(rise * known.certified, largest) for rise in rises]
    ball = query.region.select([task]).with_eps(sizes[0])
    tree = tree_of_cells(query.model, ball, method, query.asked, query.engine, query.context)
    cells = 1

    def go_on() -> bool:
        nonlocal cells
        tell((len(tree.leaves) - cells) / method.cells)
        cells = len(tree.leaves)
        return not schedule.expired and time.perf_counter() < begin + POLICY.cutting_share * share

    def answer(_: Sequence[int], sizes: Sequence[float]) -> list[float]:
        return [known.margin if eps <= known.certified else tree.limit(eps) for eps in sizes]

    for eps in sizes:
        if tree.grow(eps, go_on):
            best = Bracket(eps, tree.margin)
            continue
        shape = straight([known.curve.steepness()]) if known.curve else None
        finder = {task: schedule.finder(eps, shape, eps)}
        end = None if math.isinf(share) else begin + share
        found = in_lockstep(answer, finder, end).brackets[task]
        if found.certified > best.certified:
            best = Bracket(found.certified, tree.margin)
        break
    return Found({task: best}, {task: tree.asked}, tree.asked)
