"""o-BuFFeT: every α learned by gradient through the boxes that it changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.optimisation.adam import Adam
from buffet.optimisation.context import Context
from buffet.optimisation.flat import Best, FlatParameters, Gradient
from buffet.optimisation.margin import learn, started
from buffet.optimisation.optimiser import Margins, Optimiser, Problem
from buffet.optimisation.steps import Learning, StepPlan
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.regions import Region
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer

BETAS = 0.6, 0.9
"""Of Adam. In few large steps gradients are soon out of date: with 0.9 and 0.999 they gain less."""
STEEPNESS, LARGEST_RISE, LARGEST_FALL = 10.0, 0.08, 0.05
"""By how much ε moves, relatively, when the margin is as large as the clean one; and the most it may."""
OVERSHOT, WAY_BACK = 0.03, 0.25
"""A step was too large if ε falls by more than this; and how much of it is taken instead."""
EVALUATIONS = 1.5
"""What is learned counts once it was evaluated without gradients: time for so many walks is left for that."""


class EndToEnd(Optimiser):
    """Every α of products, by gradient on the smallest margin through the whole walk."""

    end_to_end = True
    plan: ClassVar[StepPlan] = StepPlan(first=0.12, other=0.12, near=0.0, faster=6.0, reach=0.4)

    def _recall(self, problem: Problem, context: Context) -> Margins | None:
        if context.warm_starts is None:
            return None
        known = context.warm_starts.parameters_of(problem.region, problem.root, within=self.plan.reach)
        return problem.margins_with(known, context.deadline) if known else None

    def _improve(self, problem: Problem, bounds: Bounds, context: Context, spent: float) -> Margins:
        early = context.ahead(EVALUATIONS * spent)

        def evaluate(flat: FlatParameters) -> tuple[Tensor, Gradient]:
            with torch.enable_grad():
                found = problem.margins_with(flat.parameters, early.deadline)
            return found.detach(), lambda weights: flat.gradient(found, weights)

        learning = problem.learning.traced(context.trace is not None)
        parameters = learn(bounds, evaluate, learning, self.plan, only_alphas=True, context=early)
        return problem.margins_with(parameters, context.deadline)

    def follow(
        self, problem: Problem, region: Region, eps: Float[Tensor, "tasks"], context: Context
    ) -> Float[Tensor, "tasks"]:
        """Learn every α at the edge of what can be proven, and keep them in the context's warm starts.

        Returns about the largest ε they prove, from a start at `eps`.
        """
        assert context.warm_starts is not None

        def evaluate(relaxer: Relaxer, eps: Tensor) -> Tensor:
            return problem.over(region.with_eps(eps)).margins(relaxer, context.deadline)

        learning = problem.learning.shared(self.plan, known=False, moved=torch.inf)
        with torch.no_grad():
            try:
                relaxer = Relaxer(problem.product)
                bounds = problem.over(region.with_eps(eps)).walk(relaxer, deadline=context.deadline)
                if problem.root not in bounds.enclosures:
                    return eps
                flat = started(
                    bounds,
                    learning.start,
                    lambda flat: evaluate(Relaxer(learned=flat.parameters), eps),
                    only_alphas=True,
                )
                clean = float(problem.clean_run.clean[problem.root].min())
                parameters, eps = follow_root(evaluate, flat, eps, clean, learning)
            except OutOfTime:
                return eps
            context.warm_starts.keep(region.with_eps(eps), problem.root, parameters)
        return eps


def follow_root(
    evaluate: Callable[[Relaxer, Tensor], Tensor],
    flat: FlatParameters,
    eps: Float[Tensor, "tasks"],
    clean: float,
    learning: Learning,
) -> tuple[dict[int, Parameters], Float[Tensor, "tasks"]]:
    """Learn where it matters, at the ε where the margin is about 0, which moves as parameters are learned.

    Every step takes the gradient of the margins at the present ε and then moves ε towards the root. Where
    that leads far back, the step was too large, as where margins fall like a cliff: the task returns to a
    quarter of the way from the best parameters so far, and takes smaller steps from then on.

    Args:
        evaluate: margins under a relaxation at given sizes, differentiable in the parameters.
        flat: the parameters to start from, which are changed.
        eps: where to start, about the largest ε proven so far.
        clean: the margin at ε = 0.
    """
    adam, best, pace = Adam(flat.values, learning.rate, BETAS), Best(flat.values), torch.ones_like(eps)
    values = flat.values.detach()
    for number in range(learning.steps):
        try:
            with torch.enable_grad():
                margin = evaluate(Relaxer(learned=flat.parameters), eps).amin(-1)
                loss = torch.nn.functional.softplus(-margin).sum()
        except OutOfTime:
            break
        step = (margin.detach() / (STEEPNESS * clean)).clamp(-LARGEST_FALL, LARGEST_RISE)
        eps = eps * (1 + step.nan_to_num(nan=-LARGEST_FALL))
        lost = eps < (1 - OVERSHOT) * best.margin
        best.offer(values, eps)
        eps = torch.where(lost, best.margin, eps)
        pace = torch.where(lost, WAY_BACK * pace, pace)
        before = values.clone()
        adam.descend(flat.gradient(loss), 1 - number / learning.steps)
        ahead, back = before.lerp(values, pace[:, None]), best.values.lerp(before, WAY_BACK)
        values.copy_(torch.where(lost[:, None], back, ahead))
    return flat.reading(values), eps
