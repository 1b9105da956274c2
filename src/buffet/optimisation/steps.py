"""How to learn: the steps, their size, and how a radius search parameters them out between its tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Learning:
    """How to learn. The defaults are the paper's."""

    steps: int = 100
    rate: float = 0.05  # of Adam
    start: str = "zero"  # the first α: a key of `ALPHAS`, or ``best`` of the fixed ones
    stop: bool = True  # as soon as every task is proven
    decay: bool = False  # let the rate fall to 0 over the steps

    def traced(self, yes: bool) -> Learning:
        """The same; all steps are taken if they are traced."""
        return replace(self, stop=not yes)

    def shared(self, plan: StepPlan, known: bool, moved: float) -> Learning:
        """The same for one of many neighbouring tasks, where what was learned for one serves the next.

        Whether a margin is positive must not matter then, so that margins are comparable between ε.
        """
        share = plan.near if moved < plan.reach else plan.other if known else plan.first
        steps = math.ceil(self.steps * share)
        return replace(self, steps=steps, rate=self.rate * plan.faster, stop=False, decay=True)


@dataclass(frozen=True)
class StepPlan:
    """The share of all steps that a radius search takes for one task, with larger steps."""

    first: float  # for its first word
    other: float  # where parameters are known from another word or ε
    near: float  # where they are known from an ε that is near
    faster: float  # by how much larger the steps are
    reach: float  # how far away, relatively, an ε is near: margins are smooth in ε there
