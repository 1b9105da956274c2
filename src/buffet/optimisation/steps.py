"""How to learn: the steps, their size, and how a radius search shares them out between its tasks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

MODES = ("none", "final", "all", "tuned")
"""What is learned: nothing; the margin's own relaxation, boxes fixed; every α, end to end; or the margin's
relaxation and those behind the boxes."""


@dataclass(frozen=True)
class Learning:
    """How to learn. The defaults are the paper's."""

    steps: int = 100
    rate: float = 0.05  # of Adam
    start: str = "zero"  # the first α: a key of `PRODUCTS`, ``random``, or ``best`` of the fixed ones
    mode: str = "all"  # of `MODES`; says how steps are shared between tasks
    stop: bool = True  # as soon as every task is proven
    decay: bool = False  # let the rate fall to 0 over the steps

    def shared(self, plan: Plan, known: bool, moved: float) -> Learning:
        """The same for one of many neighbouring tasks, where what was learned for one serves the next.

        Whether a margin is positive must not matter then, so that margins are comparable between ε.
        """
        share = plan.near if moved < plan.reach else plan.other if known else plan.first
        steps = math.ceil(self.steps * share)
        return replace(self, steps=steps, rate=self.rate * plan.faster, stop=False, decay=True)


@dataclass(frozen=True)
class Plan:
    """The share of all steps that a radius search takes for one task, with larger steps."""

    first: float  # for its first word
    other: float  # where shares are known from another word or ε
    near: float  # where they are known from an ε that is near
    faster: float  # by how much larger the steps are
    reach: float  # how far away, relatively, an ε is near: margins are smooth in ε there


RULED = 0.5
"""α that the rule has chosen at one ε are kept for all larger ones, and down to this share of it."""
PLANS: Mapping[str, Plan] = {
    "final": Plan(0.04, 0.04, 0.0, 8.0, 0.6),
    "all": Plan(0.12, 0.12, 0.0, 6.0, 0.4),
    "tuned": Plan(0.6, 0.3, 0.1, 1.0, 0.4),
}
