"""The smallest margin as a function of ε, by one method: what root finding looks for the root of."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from buffet.engine import batch_size, bound_margins, proven
from buffet.methods import Method
from buffet.optimisation.context import Context
from buffet.optimisation.warm_starts import Starts, WarmStarts
from buffet.query import Query
from buffet.search.policy import POLICY
from buffet.system.parallel import side_by_side


class MarginFunction:
    """How large the smallest margin of some tasks is at some sizes, by one method.

    It remembers what the method learns, so that every evaluation starts from the one before.
    """

    def __init__(self, query: Query, method: Method) -> None:
        self.query, self.ball, self.method, self.warm_starts = query, query.region, method, WarmStarts()
        self.clean_run = method.clean_run(query.model.program64, self.ball.center, query.asked)

    @property
    def fits(self) -> bool:
        """Whether one task stays within the engine's memory."""
        return self.query.engine.holds(self.clean_run, self.method, self.ball)

    @property
    def shares(self) -> bool:
        """Whether tasks share work, so that they are better asked about together."""
        return not self.method.optimiser.learns_boxes or not self.query.engine.parallel(self.method)

    def apart(self) -> MarginFunction:
        """The same, which remembers on its own what it learns from now on."""
        other = copy.copy(self)
        other.warm_starts = self.warm_starts.copy()
        return other

    def plain(self) -> MarginFunction:
        """The same method without learning, in single precision: a first, cheap impression."""
        return MarginFunction(self.query.rough(), self.method.plain())

    def starts_of(self, tasks: Sequence[int]) -> Starts:
        """What was learned of these tasks that is of use to others: how to bound the margin."""
        return self.warm_starts.starts_of(
            self.ball.select(list(tasks)), len(self.clean_run.program.nodes) - 1
        )

    def __call__(self, tasks: Sequence[int], eps: Sequence[float]) -> list[float]:
        """The smallest margin of every task: a number > 0 if and only if it is proven."""
        q = self.query
        part = self.ball.select(list(tasks)).with_eps(torch.tensor(eps, dtype=torch.float64))
        context = Context(self.warm_starts, q.deadline)
        margins = bound_margins(q.model, part, self.method, q.asked, q.engine, self.clean_run, context)
        least = margins.amin(-1)
        return torch.where(proven(margins), least, least.clamp_max(0)).tolist()

    def learn_from(self, tasks: Sequence[int], eps: Sequence[float]) -> list[float]:
        """Learn at the edge of what can be proven, starting from `eps`; about the largest ε proven then."""
        q = self.query
        left = 0.0 if q.deadline is None else q.deadline - time.perf_counter()
        context = Context(self.warm_starts, q.deadline).ahead(POLICY.proof_share * left)
        sizes = torch.tensor(eps, dtype=torch.float64, device=self.ball.center.device)
        ball = self.ball.select(list(tasks))

        def learn(part: Tensor) -> tuple[list[float], Starts]:
            some = ball.select(part)
            found = self.method.follow(
                self.clean_run, some, sizes[part], context, dtype=q.engine.dtype, chunk_bytes=q.engine.rows
            )
            return found.tolist(), self.warm_starts.starts_of(some)

        step = batch_size(self.clean_run, self.method, ball, q.engine)
        if q.engine.parallel(self.method):
            step = min(step, math.ceil(len(tasks) / torch.get_num_threads()))
            parts = side_by_side(learn, torch.arange(len(tasks)).split(step))
        else:
            parts = [learn(part) for part in torch.arange(len(tasks)).split(step)]
        for _, starts in parts:
            self.warm_starts.add(starts)
        return [size for found, _ in parts for size in found]
