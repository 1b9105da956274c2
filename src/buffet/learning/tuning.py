"""What is free in the relaxations behind the boxes, learned for groups of nodes on a few of their rows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from buffet.bounds.choices import Relaxer, Shares
from buffet.bounds.forms import Stop
from buffet.bounds.intervals import Box
from buffet.bounds.scene import Scene
from buffet.bounds.substitution import Bounds
from buffet.learning.adam import Adam
from buffet.learning.control import Control
from buffet.learning.sheet import Best, Sheet
from buffet.learning.starts import initial_shares
from buffet.program import Node, Program, Scores, Softmax


@dataclass(frozen=True)
class Tuning:
    """Boxes from relaxations tuned to them: groups of nodes get their own shares, learned on a few rows.

    All rows of a group use the same shares, so a random sample of them stands for all. A group starts from
    what the groups before it have learned; shares of another word would be a much worse start.
    """

    steps: int = 30  # for the margin; every group takes a tenth, in a network of one layer a quarter
    near: float = 0.15  # within this relative distance of the ε they were learned at, shares are kept
    rate: float = 0.15  # of Adam
    control: Control = field(default_factory=Control)
    carried: dict[int, Shares] = field(default_factory=dict)  # what groups have learned, for the next one

    def each(self, program: Program) -> int:
        """The steps of every group. A fourth would prove one percent more and take a fifth longer.

        One layer has few groups, and none of them rows that pass through another.
        """
        return math.ceil(self.steps / (10 if program.layers > 1 else 4))

    def sample(self, scene: Scene, root: int) -> int:
        """How many features of a node are learned on: the more steps, the more rows."""
        return max(2, 6 * self.each(scene.program) // len(scene.clean[root]))

    def __call__(self, bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        root, _ = next(iter(bounds.unit_rows(nodes, stops)))
        memory, target = self.control.memory, nodes[0]
        follows = not learns(bounds.nodes[target])
        # A part of a ball can be bounded just as well with what was learned for the whole.
        known = None
        if memory and not follows:
            known = memory.shares_of(bounds.region, target, self.near, wholes=True)
        shares = known or initial_shares(bounds, "zero", products_only=False, upto=root, known=self.carried)
        if not shares or root in stops:
            return bounds.boxes_of(nodes, stops)
        features = sum(bounds.clean[n].shape[-1] for n in nodes)
        generator = torch.Generator().manual_seed(root)
        sample = torch.randperm(features, generator=generator)[: self.sample(bounds.scene, root)]
        steps = 0 if follows or known else self.each(bounds.scene.program)
        sheet = Sheet(shares)
        adam, best = Adam(sheet, self.rate), Best(sheet.values)
        found = best.values
        for _ in range(steps):
            if self.control.expired:
                break
            with torch.enable_grad():
                tuned = bounds.relaxed(Relaxer(learned=sheet.shares), bounds.dtype, upto=root)
                lower = [
                    tuned.concretise(*tuned.substitute(start, rows, tuned.locals))
                    for start, rows in tuned.unit_rows(nodes, tuned.locals, sample)
                ]
                mean = torch.cat(lower, -1).mean((1, 2))
                loss = -mean.sum()
            better = best.offer(sheet.values.detach(), mean.detach())
            adam.descend(sheet.gradient(loss))
            # A step from the best so far is likely to be better still; one from elsewhere has lost its way.
            found = torch.where(better[:, None], sheet.values.detach(), best.values)
        learned = sheet.reading(found)
        self.carried.update(learned)
        if memory and steps:
            memory.keep(bounds.region, target, learned)
        if self.control.learned is not None:
            self.control.learned[target] = learned
        tuned = bounds.relaxed(Relaxer(learned=learned), bounds.dtype, upto=root)
        return tuned.boxes_of(nodes, tuned.locals)


def learns(node: Node) -> bool:
    """Whether a node has shares of its own: scores and weights take what others before them have learned."""
    return not isinstance(node.op, Scores | Softmax)
