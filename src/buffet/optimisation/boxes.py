"""What is free in the relaxations behind the boxes, learned for groups of nodes on a few of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Stop
from buffet.bounds.intervals import Box
from buffet.network import Node, Program, Scores, Softmax
from buffet.optimisation.adam import Adam
from buffet.optimisation.context import Context
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import Best, FlatParameters
from buffet.optimisation.margin import FinalMargin
from buffet.optimisation.optimiser import Problem
from buffet.optimisation.starts import initial_parameters
from buffet.optimisation.steps import StepPlan
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import Tighten
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer


class TunedBoxes(FinalMargin):
    """As `FinalMargin`, and before it what is free behind every box."""

    learns_boxes, margin_only = True, False
    plan = StepPlan(first=0.6, other=0.3, near=0.1, faster=1.0, reach=0.4)

    def _no_gradients(self) -> AbstractContextManager[object]:
        return torch.no_grad()  # gradients are only ever taken from tensors made outside inference mode

    def _tighten(self, problem: Problem, context: Context) -> Tighten:
        return Tuning(problem.learning.steps, context=context)


@dataclass(frozen=True)
class Tuning:
    """Boxes from relaxations tuned to them: groups of nodes get their own parameters, learned on a few rows.

    All rows of a group use the same parameters, so a random sample of them stands for all. A group starts
    from what the groups before it have learned; parameters of another word would be a much worse start.
    """

    steps: int = 30  # for the margin; every group takes a fifth, in a network of one layer a quarter
    near: float = 0.15  # within this relative distance of the ε they were learned at, parameters are kept
    rate: float = 0.15  # of Adam
    context: Context = field(default_factory=Context)
    carried: dict[int, Parameters] = field(default_factory=dict)  # what groups have learned, for the next one

    def each(self, program: Program) -> int:
        """The steps of every group. Half as many again would prove one percent more and take a fifth longer.

        One layer has few groups, and none of them rows that pass through another.
        """
        return math.ceil(self.steps / (5 if program.layers > 1 else 4))

    def sample(self, clean_run: CleanRun, root: int) -> int:
        """How many features of every token are learned on: the more tokens, the fewer."""
        rows = (12 if clean_run.program.layers > 1 else 24) * self.each(clean_run.program)
        return max(2, rows // (1 + len(clean_run.clean[root])))

    def __call__(self, bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        root, units = bounds.units(nodes)
        warm_starts, target = self.context.warm_starts, nodes[0]
        follows = not learns(bounds.nodes[target])
        # A part of a ball can be bounded just as well with what was learned for the whole.
        known = None
        if warm_starts and not follows:
            known = warm_starts.parameters_of(bounds.region, target, self.near, parents=True)
        parameters = known or initial_parameters(
            bounds, "zero", only_alphas=False, upto=root, known=self.carried
        )
        if not parameters or root in stops:
            return bounds.boxes_of(nodes, stops)
        steps = 0 if follows or known else self.each(bounds.clean_run.program)
        flat = FlatParameters(parameters, bounds.dtype)
        values = flat.values.detach()
        if steps:
            rows = self._rows(bounds, root, units)
            values = self._learn(Lagrangian.over(bounds, root, rows), flat, steps)
        learned = flat.reading(values.double())
        self.carried.update(learned)
        if warm_starts and steps:
            warm_starts.keep(bounds.region, target, learned)
        if self.context.learned is not None:
            self.context.learned[target] = learned
        tuned = bounds.relaxed(Relaxer(learned=learned), bounds.dtype, upto=root)
        return tuned.boxes_of(nodes, tuned.locals)

    def _learn(
        self, lagrangian: Lagrangian, flat: FlatParameters, steps: int
    ) -> Float[Tensor, "tasks numbers"]:
        """The parameters after some steps up the mean of the rows."""
        adam, best = Adam(flat.values, self.rate), Best(flat.values)
        found = best.values
        for _ in range(steps):
            if self.context.expired:
                break
            lower, gradient = lagrangian.bound(flat)
            better = best.offer(flat.values.detach(), lower.mean(1))
            adam.descend(gradient(torch.full_like(lower, -1 / lower.shape[1])))
            # A step from the best so far is likely to be better still; one from elsewhere has lost its way.
            found = torch.where(better[:, None], flat.values.detach(), best.values)
        return found

    def _rows(self, bounds: Bounds, root: int, units: Tensor) -> Float[Tensor, "tokens features rows"]:
        """Some units and their negatives, of every token."""
        tokens, generator = len(bounds.clean[root]), torch.Generator().manual_seed(root)
        some = torch.randperm(units.shape[1], generator=generator)[: self.sample(bounds.clean_run, root)]
        each = units[:, some.to(units.device)]
        eye = torch.eye(tokens, dtype=units.dtype, device=units.device)
        return torch.einsum("np,fu->nfpu", eye, torch.cat([each, -each], 1)).flatten(2)


def learns(node: Node) -> bool:
    """Whether a node learns for itself: scores and weights take what others before them have learned."""
    return not isinstance(node.op, Scores | Softmax)
