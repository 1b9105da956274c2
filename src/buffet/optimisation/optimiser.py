"""What an optimiser is: how the parameters of a method's relaxations are learned, if they are.

Whatever is learned is sound at every step, so an optimiser only ever has to keep what is best. The margins it
returns are computed without gradients from the parameters it has found.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.optimisation.context import Context
from buffet.optimisation.steps import Learning
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import Propagation
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.propagation.walk import Tighten, bound_nodes, margins
from buffet.regions import Region
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer

Margins = Float[Tensor, "tasks others"]


@dataclass(frozen=True)
class Problem:
    """Margins of the tasks of a region that are to be bounded, and everything but how to learn."""

    clean_run: CleanRun
    region: Region
    propagation: Propagation
    product: str  # how α is chosen where it is not learned
    learning: Learning
    dtype: torch.dtype = torch.float32
    chunk_bytes: int = 8 << 20

    @property
    def root(self) -> int:
        return len(self.clean_run.program.nodes) - 1

    def over(self, region: Region) -> Problem:
        """The same over another region of the same sentence."""
        return replace(self, region=region)

    def walk(self, relaxer: Relaxer, *, deadline: float | None, tighten: Tighten = Bounds.boxes_of) -> Bounds:
        return bound_nodes(
            self.clean_run,
            self.region,
            relaxer,
            self.propagation,
            dtype=self.dtype,
            chunk_bytes=self.chunk_bytes,
            tighten=tighten,
            deadline=deadline,
        )

    def margins(self, relaxer: Relaxer, deadline: float | None) -> Margins:
        """The margins under one relaxation, end to end."""
        return margins(self.walk(relaxer, deadline=deadline), self.propagation)

    def margins_with(self, parameters: Mapping[int, Parameters], deadline: float | None) -> Margins:
        return self.margins(Relaxer(learned=parameters), deadline)

    def nothing(self) -> Margins:
        """No bounds at all."""
        clean = self.clean_run.clean[self.root]
        return clean.new_full((self.region.tasks, clean.shape[-1]), torch.nan)


class Optimiser(ABC):
    """How parameters are learned; without state. A new one is a subclass and its entry in `OPTIMISERS`."""

    learns: ClassVar[bool] = True
    learns_boxes: ClassVar[bool] = False  # whether boxes are learned too, for every task on its own
    margin_only: ClassVar[bool] = False  # whether nothing but the margin's own bounds is learned
    end_to_end: ClassVar[bool] = False  # whether gradients pass through the boxes that parameters change

    def bound(self, problem: Problem, context: Context) -> Margins:
        """Lower bounds of the margins over the region; NaN where there is none.

        What is learned is kept in the context's warm starts, and taken up again by later calls for the same
        words. With a trace, all steps are taken whether or not the tasks are proven.
        """
        begin = time.perf_counter()
        try:
            with self._no_gradients():
                if (known := self._recall(problem, context)) is not None:
                    return known
                relaxer, tighten = Relaxer(problem.product), self._tighten(problem, context)
                bounds = problem.walk(relaxer, deadline=context.deadline, tighten=tighten)
                found = margins(bounds, problem.propagation)
        except OutOfTime:
            return problem.nothing()
        if context.walked is not None:
            context.walked.append(bounds)
        learns = self.learns and problem.propagation.linear
        if not learns or self._settled(problem, bounds, found, context):
            return found
        try:
            with torch.no_grad():
                better = self._improve(problem, bounds, context, time.perf_counter() - begin)
        except OutOfTime:
            return found
        ours, theirs = (problem.clean_run.deciding(m)[0] for m in (found, better))
        return torch.where((theirs > ours)[:, None], better, found)

    def _no_gradients(self) -> AbstractContextManager[object]:
        return torch.inference_mode()

    def _recall(self, problem: Problem, context: Context) -> Margins | None:
        """The margins, where what was found for the same words before is as good as finding it again."""
        return None

    def _tighten(self, problem: Problem, context: Context) -> Tighten:
        """How boxes are made from linear forms that are not kept."""
        return Bounds.boxes_of

    def _settled(self, problem: Problem, bounds: Bounds, found: Margins, context: Context) -> bool:
        """Whether there is nothing to learn, or nothing to learn from as the walk has ended early."""
        margin, _ = problem.clean_run.deciding(found)
        proven = (margin > 0) & (context.warm_starts is None)
        settled = bool((proven | margin.isnan()).all()) and not context.trace
        return settled or context.expired or problem.root not in bounds.enclosures

    @abstractmethod
    def _improve(self, problem: Problem, bounds: Bounds, context: Context, spent: float) -> Margins:
        """Margins with learned parameters; `bounds` took so many seconds without them."""


class NotLearned(Optimiser):
    """Parameters are the usual ones, or what a rule chooses."""

    learns = False

    def _improve(self, problem: Problem, bounds: Bounds, context: Context, spent: float) -> Margins:
        raise AssertionError("nothing is learned")


class RuleKept(NotLearned):
    """α by the rule, kept from one ε to the next.

    In a radius search margins are smooth then, instead of jumping wherever the rule changes its mind. What it
    chooses a little below the radius proves more than what it chooses there.
    """

    DOWN_TO: ClassVar[float] = 0.5  # α chosen at one ε are kept for all larger ones, and down to this share

    def _recall(self, problem: Problem, context: Context) -> Margins | None:
        warm_starts, region, root = context.warm_starts, problem.region, problem.root
        if warm_starts is None:
            return None
        asked = warm_starts.lacking(region, root, self.DOWN_TO)
        known = sorted({*range(region.tasks)} - {*asked})
        parts: list[Tensor] = []
        if asked:
            some, chosen = region.select(asked), dict[int, Parameters]()
            relaxer = Relaxer(problem.product, chosen=chosen)
            parts.append(problem.over(some).margins(relaxer, context.deadline))
            warm_starts.keep(some, root, chosen)
        if known:
            some = region.select(known)
            kept = warm_starts.parameters_of(some, root) or {}
            parts.append(problem.over(some).margins_with(kept, context.deadline))
        return torch.cat(parts)[torch.tensor([*asked, *known]).argsort()]
