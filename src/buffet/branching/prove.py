"""Margins of a task that no bound proves as a whole, by cutting its region."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.branching.stems import Effort, Ground, Trunk
from buffet.methods import Method
from buffet.optimisation.context import Context
from buffet.optimisation.optimiser import Problem
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import margins
from buffet.relaxations.relaxation import Parameters


@dataclass(frozen=True, eq=False)
class Walked:
    """What a method found and learned about a task before it is cut."""

    problem: Problem
    bounds: Bounds
    learned: dict[int, dict[int, Parameters]]

    @staticmethod
    def by(method: Method, problem: Problem, context: Context) -> Walked | None:
        """Ask a method about a task; None where it has no bounds."""
        told = replace(context, learned={}, walked=[])
        method.optimiser.bound(problem, told)
        return Walked.told(problem, told)

    @staticmethod
    def told(problem: Problem, context: Context) -> Walked | None:
        """What a method has told while it was asked."""
        if not context.walked or context.learned is None:
            return None
        bounds = context.walked[-1]
        return Walked(problem, bounds, context.learned) if problem.root in bounds.enclosures else None


def can_cut(method: Method) -> bool:
    """Whether a method's walk leaves bounds that leaves can share: margins are substituted to the input."""
    propagation = method.describe()
    return propagation.fully_backward and propagation.window is None and method.optimiser.learns


@dataclass(frozen=True)
class Unfinished:
    """How far a tree had come when it was given up."""

    cases: int  # of what is asked
    proven: int  # of these
    share: float  # of the tree of the case that was cut last, where each side of a cut counts half
    lower: float  # about the smallest bound among its open parts
    leaves: int  # that are proven

    def __str__(self) -> str:
        lower = f"about {self.lower:.3g}" if math.isfinite(self.lower) else "not known"
        share = f"{math.floor(100 * self.share)} % of the tree of the next"
        return f"{self.proven} of {self.cases} cases proven, {share} (smallest open bound {lower})"


@dataclass
class Cutting:
    """The margins of all cases of a task that cuts prove; −inf where they do not, or not yet."""

    walked: Walked
    found: Float[Tensor, " cases"] | None = None
    unfinished: Unfinished | None = None

    def grow(self, effort: Effort) -> bool:
        """Cut until all cases are proven, or the effort is spent. Whether they are.

        Of a case that is not proven as a whole the row that comes nearest is cut. Whatever ends it early,
        what is proven by then is kept.
        """
        problem, bounds = self.walked.problem, self.walked.bounds
        asked = problem.clean_run.asked
        with torch.no_grad():
            rows = margins(bounds, problem.propagation)[0]
        if not bool(rows.isfinite().all()):
            return False
        cases: Sequence[Sequence[int]] = asked.cases if asked else [(r,) for r in range(len(rows))]
        found = self.found = torch.stack([rows[list(case)].max() for case in cases])
        ground = Ground(bounds, problem.propagation, problem.product, self.walked.learned)
        eye = torch.eye(len(rows), dtype=torch.float64, device=rows.device)
        known = self.walked.learned.get(problem.root, {})
        for number in sorted((found <= 0).nonzero()[:, 0].tolist(), key=lambda c: float(found[c])):
            row = max(cases[number], key=lambda r: float(rows[r]))
            trunk = Trunk(ground, eye[row], known)
            done = False
            try:
                done = trunk.grow(effort)
            finally:
                if not done:
                    leaves = sum(len(grown.leaves) for grown in trunk.proven)
                    proven, lower = int((found > 0).sum()), max(trunk.lower, float(found[number]))
                    self.unfinished = Unfinished(len(found), proven, trunk.share, lower, leaves)
            if not done:
                return False
            found[number] = trunk.margin
        return True
