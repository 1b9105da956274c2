"""Margins of a task that no bound proves as a whole, by cutting its region."""

from __future__ import annotations

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


def proven_by_cuts(walked: Walked, effort: Effort) -> Float[Tensor, " cases"] | None:
    """Margins of all cases of a task, all positive; None where some case is not proven.

    Of a case that is not proven as a whole the row that comes nearest is cut.
    """
    problem, bounds = walked.problem, walked.bounds
    asked = problem.clean_run.asked
    with torch.no_grad():
        rows = margins(bounds, problem.propagation)[0]
    if not bool(rows.isfinite().all()):
        return None
    cases: Sequence[Sequence[int]] = asked.cases if asked else [(r,) for r in range(len(rows))]
    found = torch.stack([rows[list(case)].max() for case in cases])
    ground = Ground(bounds, problem.propagation, problem.product, walked.learned)
    eye = torch.eye(len(rows), dtype=torch.float64, device=rows.device)
    known = walked.learned.get(problem.root, {})
    for number in sorted((found <= 0).nonzero()[:, 0].tolist(), key=lambda c: float(found[c])):
        row = max(cases[number], key=lambda r: float(rows[r]))
        trunk = Trunk(ground, eye[row], known)
        if not trunk.grow(effort):
            return None
        found[number] = trunk.margin
    return found
