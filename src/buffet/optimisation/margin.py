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
from buffet.optimisation.context import Control
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import Best, Gradient, Sheet
from buffet.optimisation.optimiser import Margins, Optimiser, Problem
from buffet.optimisation.starts import initial_parameters
from buffet.optimisation.steps import Learning, StepPlan
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer

Evaluate = Callable[[Sheet], tuple[Float[Tensor, "tasks others"], Gradient]]
"""The margins under the relaxation with these parameters, and how to get their gradient."""


class FinalMargin(Optimiser):
    """α, slopes and tangent points of the margin's own backward pass; boxes stay as they are."""

    margin_only = True
    plan: ClassVar[StepPlan] = StepPlan(first=0.04, other=0.04, near=0.0, faster=8.0, reach=0.6)

    def _improve(self, problem: Problem, bounds: Bounds, control: Control, spent: float) -> Margins:
        bounds = replace(bounds, deadline=None)
        lagrangian = cache(lambda: Lagrangian.of_margins(bounds))  # not needed if everything is known already
        parameters = learn(
            bounds,
            lambda sheet: lagrangian().bound(sheet),
            problem.learning.traced(control.trace is not None),
            self.plan,
            only_alphas=False,
            control=control,
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
    control: Control,
    dtype: torch.dtype = torch.float64,
) -> dict[int, Parameters]:
    """Maximise the smallest margin of every task by Adam on ``softplus(−margin)``, clamped to [0, 1].

    Returns the best parameters found for every task. Their margin has to be evaluated again, without
    gradients.
    """
    root, memory = len(bounds.nodes) - 1, control.memory
    known = memory.shares_of(bounds.region, root, wholes=True, others=True) if memory else None
    if memory:
        learning = learning.shared(plan, known is not None, memory.moved(bounds.region, root))
    if known and not learning.steps:
        return _told(known, root, control)
    if known:
        sheet = Sheet(known, dtype)
    else:
        sheet = started(
            bounds, learning.start, lambda s: evaluate(s)[0], only_alphas=only_alphas, dtype=dtype
        )
    best = Best(sheet.values.detach())
    adam = Adam(sheet, learning.rate)
    for number in range(learning.steps if sheet.values.numel() else 0):
        if control.expired:
            break
        try:
            margins, gradient = evaluate(sheet)
        except OutOfTime:
            break
        margin, other = margins.min(-1, keepdim=True)
        if control.trace:
            control.trace(number, margin.squeeze(-1))
        best.offer(sheet.values.detach(), margin.squeeze(-1))
        if number == learning.steps - 1 or (learning.stop and best.proven):
            break
        # the derivative of softplus(−margin)
        weights = torch.zeros_like(margins).scatter_(-1, other, -torch.sigmoid(-margin))
        adam.descend(gradient(weights), 1 - number / learning.steps if learning.decay else 1.0)
    found = sheet.reading(best.values.double())
    if memory:
        memory.keep(bounds.region, root, found)
    return _told(found, root, control)


def started(
    bounds: Bounds,
    start: str,
    margins: Callable[[Sheet], Tensor],
    *,
    only_alphas: bool,
    dtype: torch.dtype = torch.float64,
) -> Sheet:
    """What learning starts from; for ``best``, what has the largest margins of several, for every task."""
    names = ("zero", "rule", "middle") if start == "best" else (start,)
    with torch.no_grad():
        sheets = [Sheet(initial_parameters(bounds, name, only_alphas=only_alphas), dtype) for name in names]
        if len(sheets) > 1:
            best = Best(sheets[0].values)
            for sheet in sheets:
                best.offer(sheet.values, margins(sheet).amin(-1))
            sheets[0].values.copy_(best.values)
    return sheets[0]


def _told(parameters: dict[int, Parameters], root: int, control: Control) -> dict[int, Parameters]:
    if control.learned is not None:
        control.learned[root] = parameters
    return parameters
