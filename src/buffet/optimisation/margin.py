"""o-BuFFeT: the free numbers of the relaxations, learned by gradient on the margin.

Whatever is learned is sound at every step, so the best iterate of every task is kept, and what counts is its
margin computed once more without gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.optimisation.adam import Adam
from buffet.optimisation.context import Control
from buffet.optimisation.flat import Best, Gradient, Sheet
from buffet.optimisation.starts import initial_shares
from buffet.optimisation.steps import PLANS, Learning
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.relaxations.parameters import Relaxer, Shares

Evaluate = Callable[[Sheet], tuple[Float[Tensor, "tasks others"], Gradient]]
"""The margins under the relaxation with these shares, and how to get their gradient."""


def learn(
    bounds: Bounds,
    evaluate: Evaluate,
    learning: Learning,
    *,
    products_only: bool,
    control: Control,
    dtype: torch.dtype = torch.float64,
) -> dict[int, Shares]:
    """Maximise the smallest margin of every task by Adam on ``softplus(−margin)``, shares clamped to [0, 1].

    Returns the best shares found for every task. Their margin has to be evaluated again, without gradients.
    """
    root, memory = len(bounds.nodes) - 1, control.memory
    known = memory.shares_of(bounds.region, root, wholes=True, others=True) if memory else None
    if memory:
        learning = learning.shared(PLANS[learning.mode], known is not None, memory.moved(bounds.region, root))
    if known and not learning.steps:
        return _told(known, root, control)
    if known:
        sheet = Sheet(known, dtype)
    else:
        sheet = started(
            bounds, learning.start, lambda s: evaluate(s)[0], products_only=products_only, dtype=dtype
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
    products_only: bool,
    dtype: torch.dtype = torch.float64,
) -> Sheet:
    """What learning starts from; for ``best``, what has the largest margins of several, for every task."""
    names = ("zero", "rule", "middle") if start == "best" else (start,)
    with torch.no_grad():
        sheets = [Sheet(initial_shares(bounds, name, products_only=products_only), dtype) for name in names]
        if len(sheets) > 1:
            best = Best(sheets[0].values)
            for sheet in sheets:
                best.offer(sheet.values, margins(sheet).amin(-1))
            sheets[0].values.copy_(best.values)
    return sheets[0]


def _told(shares: dict[int, Shares], root: int, control: Control) -> dict[int, Shares]:
    if control.learned is not None:
        control.learned[root] = shares
    return shares


def follow(
    evaluate: Callable[[Relaxer, Tensor], Tensor],
    sheet: Sheet,
    eps: Float[Tensor, "tasks"],
    clean: float,
    learning: Learning,
    control: Control,
) -> tuple[dict[int, Shares], Float[Tensor, "tasks"]]:
    """Learn shares where it matters, at the ε where the margin is about 0, which moves as they are learned.

    Every step takes the gradient of the margins at the present ε and then moves ε towards the root. Where
    that leads far back, the step was too large, as where margins fall like a cliff: the task returns to a
    quarter of the way from the best shares so far, and takes smaller steps from then on.

    Args:
        evaluate: margins under a relaxation at given sizes, differentiable in the shares.
        sheet: the shares to start from, which are changed.
        eps: where to start, about the largest ε proven so far.
        clean: the margin at ε = 0.
    """
    adam, best, pace = Adam(sheet, learning.rate, BETAS), Best(sheet.values), torch.ones_like(eps)
    values = sheet.values.detach()
    for number in range(learning.steps):
        try:
            with torch.enable_grad():
                margin = evaluate(Relaxer(learned=sheet.shares), eps).amin(-1)
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
        adam.descend(sheet.gradient(loss), 1 - number / learning.steps)
        ahead, back = before.lerp(values, pace[:, None]), best.values.lerp(before, WAY_BACK)
        values.copy_(torch.where(lost[:, None], back, ahead))
    return sheet.reading(values), eps


BETAS = 0.6, 0.9
"""Of Adam. In few large steps gradients are soon out of date: with 0.9 and 0.999 they gain less."""
STEEPNESS, LARGEST_RISE, LARGEST_FALL = 10.0, 0.08, 0.05
"""By how much ε moves, relatively, when the margin is as large as the clean one; and the most it may."""
OVERSHOT, WAY_BACK = 0.03, 0.25
"""A step was too large if ε falls by more than this; and how much of it is taken instead."""
