"""Everything free in the margin's own backward pass, learned by gradient over fixed boxes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.optimisation.adam import Adam
from buffet.optimisation.context import Context
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import Best, FlatParameters, Gradient
from buffet.optimisation.optimiser import Margins, Optimiser, Problem
from buffet.optimisation.starts import initial_parameters
from buffet.optimisation.steps import Learning, StepPlan
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer

Evaluate = Callable[[FlatParameters], tuple[Float[Tensor, "tasks others"], Gradient]]
"""The margins under the relaxation with these parameters, and how to get their gradient."""


class FinalMargin(Optimiser):
    """α, slopes and tangent points of the margin's own backward pass; boxes stay as they are."""

    margin_only = True
    plan: ClassVar[StepPlan] = StepPlan(first=0.04, other=0.04, near=0.0, faster=8.0, reach=0.6)

    def _improve(self, problem: Problem, bounds: Bounds, context: Context, spent: float) -> Margins:
        bounds = replace(bounds, deadline=None)
        lagrangian = cache(lambda: Lagrangian.of_margins(bounds))  # not needed if everything is known already
        parameters = learn(
            bounds,
            lambda flat: lagrangian().bound(flat),
            problem.learning.traced(context.trace is not None),
            self.plan,
            only_alphas=False,
            context=context,
            dtype=torch.float32,
        )
        with torch.inference_mode():
            exact = bounds.relaxed(Relaxer(learned=parameters), torch.float64)
            return bounds.clean[-1] + exact.margin(exact.locals)


def learn(
    bounds: Bounds,
    evaluate: Evaluate,
    learning: Learning,
    plan: StepPlan,
    *,
    only_alphas: bool,
    context: Context,
    dtype: torch.dtype = torch.float64,
) -> dict[int, Parameters]:
    """Maximise the smallest margin of every task by Adam on ``softplus(−margin)``, clamped to [0, 1].

    Returns the best parameters found for every task. Their margin has to be evaluated again, without
    gradients.
    """
    root, warm_starts = len(bounds.nodes) - 1, context.warm_starts
    known = warm_starts.parameters_of(bounds.region, root, parents=True, others=True) if warm_starts else None
    if warm_starts:
        learning = learning.shared(plan, known is not None, warm_starts.moved(bounds.region, root))
    if known and not learning.steps:
        return _told(known, root, context)
    if known:
        flat = FlatParameters(known, dtype)
    else:
        flat = started(bounds, learning.start, lambda s: evaluate(s)[0], only_alphas=only_alphas, dtype=dtype)
    best = Best(flat.values.detach())
    adam = Adam(flat.values, learning.rate)
    for number in range(learning.steps if flat.values.numel() else 0):
        if context.expired:
            break
        try:
            margins, gradient = evaluate(flat)
        except OutOfTime:
            break
        margin, other = (v[:, None] for v in bounds.clean_run.deciding(margins))
        if context.trace:
            context.trace(number, margin.squeeze(-1))
        best.offer(flat.values.detach(), margin.squeeze(-1))
        if number == learning.steps - 1 or (learning.stop and best.proven):
            break
        # the derivative of softplus(−margin)
        weights = torch.zeros_like(margins).scatter_(-1, other, -torch.sigmoid(-margin))
        adam.descend(gradient(weights), 1 - number / learning.steps if learning.decay else 1.0)
    found = flat.reading(best.values.double())
    if warm_starts:
        warm_starts.keep(bounds.region, root, found)
    return _told(found, root, context)


def started(
    bounds: Bounds,
    start: str,
    margins: Callable[[FlatParameters], Tensor],
    *,
    only_alphas: bool,
    dtype: torch.dtype = torch.float64,
) -> FlatParameters:
    """What learning starts from; for ``best``, what has the largest margins of several, for every task."""
    names = ("zero", "rule", "middle") if start == "best" else (start,)
    with torch.no_grad():
        flats = [
            FlatParameters(initial_parameters(bounds, name, only_alphas=only_alphas), dtype) for name in names
        ]
        if len(flats) > 1 and flats[0].values.numel():
            best = Best(flats[0].values)
            for flat in flats:
                best.offer(flat.values, bounds.clean_run.deciding(margins(flat))[0])
            flats[0].values.copy_(best.values)
    return flats[0]


def _told(parameters: dict[int, Parameters], root: int, context: Context) -> dict[int, Parameters]:
    if context.learned is not None:
        context.learned[root] = parameters
    return parameters
