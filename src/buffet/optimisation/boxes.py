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
from buffet.optimisation.context import Control
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import Best, Sheet
from buffet.optimisation.margin import FinalMargin
from buffet.optimisation.optimiser import Problem
from buffet.optimisation.starts import initial_parameters
from buffet.optimisation.steps import StepPlan
from buffet.propagation.clean_run import Scene
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

    def _tighten(self, problem: Problem, control: Control) -> Tighten:
        return Tuning(problem.learning.steps, control=control)


@dataclass(frozen=True)
class Tuning:
    """Boxes from relaxations tuned to them: groups of nodes get their own shares, learned on a few rows.

    All rows of a group use the same shares, so a random sample of them stands for all. A group starts from
    what the groups before it have learned; shares of another word would be a much worse start.
    """

    steps: int = 30  # for the margin; every group takes a fifth, in a network of one layer a quarter
    near: float = 0.15  # within this relative distance of the ε they were learned at, shares are kept
    rate: float = 0.15  # of Adam
    control: Control = field(default_factory=Control)
    carried: dict[int, Parameters] = field(default_factory=dict)  # what groups have learned, for the next one

    def each(self, program: Program) -> int:
        """The steps of every group. Half as many again would prove one percent more and take a fifth longer.

        One layer has few groups, and none of them rows that pass through another.
        """
        return math.ceil(self.steps / (5 if program.layers > 1 else 4))

    def sample(self, scene: Scene, root: int) -> int:
        """How many features of every token are learned on: the more tokens, the fewer."""
        rows = (12 if scene.program.layers > 1 else 24) * self.each(scene.program)
        return max(2, rows // (1 + len(scene.clean[root])))

    def __call__(self, bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        root, units = bounds.units(nodes)
        memory, target = self.control.memory, nodes[0]
        follows = not learns(bounds.nodes[target])
        # A part of a ball can be bounded just as well with what was learned for the whole.
        known = None
        if memory and not follows:
            known = memory.shares_of(bounds.region, target, self.near, wholes=True)
        shares = known or initial_parameters(bounds, "zero", only_alphas=False, upto=root, known=self.carried)
        if not shares or root in stops:
            return bounds.boxes_of(nodes, stops)
        steps = 0 if follows or known else self.each(bounds.scene.program)
        sheet = Sheet(shares, bounds.dtype)
        values = sheet.values.detach()
        if steps:
            rows = self._rows(bounds, root, units)
            values = self._learn(Lagrangian.over(bounds, root, rows), sheet, steps)
        learned = sheet.reading(values.double())
        self.carried.update(learned)
        if memory and steps:
            memory.keep(bounds.region, target, learned)
        if self.control.learned is not None:
            self.control.learned[target] = learned
        tuned = bounds.relaxed(Relaxer(learned=learned), bounds.dtype, upto=root)
        return tuned.boxes_of(nodes, tuned.locals)

    def _learn(self, lagrangian: Lagrangian, sheet: Sheet, steps: int) -> Float[Tensor, "tasks numbers"]:
        """The values of a sheet after some steps up the mean of the rows."""
        adam, best = Adam(sheet, self.rate), Best(sheet.values)
        found = best.values
        for _ in range(steps):
            if self.control.expired:
                break
            lower, gradient = lagrangian.bound(sheet)
            better = best.offer(sheet.values.detach(), lower.mean(1))
            adam.descend(gradient(torch.full_like(lower, -1 / lower.shape[1])))
            # A step from the best so far is likely to be better still; one from elsewhere has lost its way.
            found = torch.where(better[:, None], sheet.values.detach(), best.values)
        return found

    def _rows(self, bounds: Bounds, root: int, units: Tensor) -> Float[Tensor, "tokens features rows"]:
        """Some units and their negatives, of every token."""
        tokens, generator = len(bounds.clean[root]), torch.Generator().manual_seed(root)
        some = torch.randperm(units.shape[1], generator=generator)[: self.sample(bounds.scene, root)]
        each = units[:, some.to(units.device)]
        eye = torch.eye(tokens, dtype=units.dtype, device=units.device)
        return torch.einsum("np,fu->nfpu", eye, torch.cat([each, -each], 1)).flatten(2)


def learns(node: Node) -> bool:
    """Whether a node has shares of its own: scores and weights take what others before them have learned."""
    return not isinstance(node.op, Scores | Softmax)
