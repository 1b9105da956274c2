"""What a computation is told from outside: what it may remember, its deadline, and who watches it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from buffet.optimisation.warm_starts import WarmStarts
from buffet.propagation.substitution import Bounds
from buffet.relaxations.relaxation import Parameters


@dataclass(frozen=True)
class Context:
    """What a computation remembers, when it has to end, and who is told how it goes."""

    warm_starts: WarmStarts | None = None
    deadline: float | None = None  # on the clock of `time.perf_counter`
    trace: Callable[[int, Tensor], None] | None = None  # is told the step and the margins of the tasks
    learned: dict[int, dict[int, Parameters]] | None = None  # takes the parameters learned for every node
    walked: list[Bounds] | None = None  # takes the bounds of every walk

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def ahead(self, seconds: float) -> Context:
        """The same, ending so many seconds earlier."""
        return self if self.deadline is None else replace(self, deadline=self.deadline - seconds)
