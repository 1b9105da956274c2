"""Rows over fixed boxes as functions of the parameters, and their gradient, by one pass back and one forth.

A row is a linear function of some node, such as a margin. A lower bound of it is the value of a linear
program: the smallest one of the network in which every operation lies between its lines. Its multipliers λ
are the coefficients of a backward substitution, whose signs select a line at every entry; the network of
these lines, run on the input that minimises the form at the end, has values v, and the row of them is the
bound. By the envelope theorem neither moves to first order, so

    d bound / d share = Σ λ · d line(v) / d share

over the lines that were selected, with no graph in between. It all is in single precision and without any
allowance for rounding: it serves to choose parameters, whose bound is then computed by `bounds.substitution`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.optimisation.dual_lines import Curve, Lines
from buffet.optimisation.flat import FlatParameters, Gradient
from buffet.propagation.substitution import Bounds
from buffet.regions import Region
from buffet.relaxations.dual_passes import (
    DualPass,
    LinesDual,
    LocalDual,
    State,
    linear_dual,
)
from buffet.relaxations.relaxation import Parameters, Site
from buffet.relaxations.table import relaxation_of

MOVED = -1
"""Stands for the moved rows of the input among the nodes."""


@dataclass(frozen=True)
class Step:
    """A node of the walk: its dual pass, the nodes it reads, and how many of their tokens (None: all)."""

    index: int
    dual: DualPass
    sources: tuple[int, ...]
    cuts: tuple[int | None, ...]


Pull = Callable[[Step, Tensor], tuple[tuple[Tensor, ...], State]]
"""From the multipliers of what a step makes to those of what it reads, and what its dual knows then."""


@dataclass(frozen=True, eq=False)
class Lagrangian:
    """Lower bounds of rows as functions of the parameters of the nonlinear nodes before them."""

    region: Region
    rows: Float[Tensor, "tokens features rows"]  # what they read of the last node
    clean: Float[Tensor, "rows"]  # their values at the unmoved input
    tokens: Mapping[int, int]  # how many tokens of a node they depend on
    steps: tuple[Step, ...]  # in the order of the nodes
    lines: Lines | None  # that are free
    check_time: Callable[[], None]  # raises `OutOfTime` after a deadline

    @staticmethod
    def of_margins(bounds: Bounds, dtype: torch.dtype = torch.float32) -> Lagrangian:
        """That of the margins over the boxes of `bounds`."""
        root = len(bounds.nodes) - 1
        eye = torch.eye(bounds.clean[root].shape[-1], dtype=dtype, device=bounds.clean[root].device)
        return Lagrangian.over(bounds, root, eye[None])

    @staticmethod
    def over(bounds: Bounds, root: int, rows: Float[Tensor, "tokens features rows"]) -> Lagrangian:
        """That of rows of the node `root`, of its first tokens, over the boxes of `bounds`."""
        dtype = rows.dtype
        tokens = tokens_read(bounds, root, len(rows))
        steps: list[Step] = []
        curves: list[Curve] = []
        for index in sorted(tokens):
            if local := bounds.locals.get(index):
                steps.append(Step(index, LocalDual.over(local, tokens[index], dtype), (MOVED,), (None,)))
                continue
            node, sources = bounds.nodes[index], bounds.nodes[index].followed
            if node.op.linear:
                dual = linear_dual(node.op, bounds.clean[sources[0]], dtype)
            else:
                dual = relaxation_of(node.op).dual_pass(Site(bounds, index), tokens[index], dtype)
            if isinstance(dual, LinesDual):
                curves.append(dual.curve)
            read = [node.op.reads(place, tokens[index], tokens[i]) for place, i in enumerate(sources)]
            cuts = [None if n == tokens[i] else n for i, n in zip(sources, read, strict=True)]
            steps.append(Step(index, dual, sources, tuple(cuts)))
        clean = (rows * bounds.clean[root][: len(rows), :, None]).sum((0, 1))
        lines = Lines.over(curves)
        return Lagrangian(bounds.region, rows, clean, tokens, tuple(steps), lines, bounds.check_time)

    def bound(self, flat: FlatParameters) -> tuple[Float[Tensor, "tasks rows"], Gradient]:
        """Lower bounds of the rows, up to rounding, and how to get their gradient."""
        values, dtype = flat.values.detach(), self.rows.dtype
        with torch.inference_mode():
            parameters = flat.current if values.dtype == dtype else flat.reading(values.to(dtype))
            lower, states = self._passes(self.read(parameters))

        def gradient(weights: Tensor) -> Tensor:
            total = torch.zeros_like(values)
            with torch.inference_mode():
                found = self.read(flat.reading(total))
                weighted = weights.to(dtype)[:, None, None]
                for step in self.steps:
                    if step.index in found:
                        for key, part in step.dual.gradient(states[step.index], weighted).items():
                            share = found[step.index][key]  # of size 1 along an axis that all share it on
                            share.copy_(part.sum_to_size(share.shape))
            return total

        return lower.clone(), gradient

    def read(self, parameters: Mapping[int, Parameters]) -> dict[int, Parameters]:
        """The parameters that the rows depend on, of the tokens that they read."""
        return {
            i: {key: share if share.shape[1] == n else share[:, :n] for key, share in parameters[i].items()}
            for i, n in self.tokens.items()
            if i in parameters
        }

    def _passes(self, parameters: Mapping[int, Parameters]) -> tuple[Tensor, dict[int, State]]:
        """The bounds, and what every dual knows afterwards."""
        lines = self.lines(parameters, self.rows.dtype) if self.lines else {}

        def pull(step: Step, reached: Tensor) -> tuple[tuple[Tensor, ...], State]:
            i = step.index
            given = lines.get(i, {}) if isinstance(step.dual, LinesDual) else parameters.get(i, {})
            return step.dual.pull(reached, given)

        rows = self.rows.expand(self.region.tasks, *self.rows.shape)
        value, states = self.back_and_forth(rows, pull)
        return self.clean + (self.rows * value).sum((1, 2)), states

    def back_and_forth(
        self, rows: Tensor, pull: Pull, seen: Callable[[int, Tensor], None] = lambda index, read: None
    ) -> tuple[Tensor, dict[int, State]]:
        """Pull rows to the input, and push the point where they are least back through the network.

        Returns the value of the last node there, and what every dual knows afterwards; `seen` is told what
        every node reads there.
        """
        states: dict[int, State] = {}
        pending = {self.steps[-1].index: rows}
        for step in reversed(self.steps):
            self.check_time()
            found, states[step.index] = pull(step, pending.pop(step.index))
            for source, part in zip(step.sources, found, strict=True):
                pending[source] = plus(pending[source], part) if source in pending else part
        form = pending.pop(MOVED)
        values = {MOVED: self.region.lowest(form.movedim(-1, 0)).movedim(0, -1)}
        for step in self.steps:
            self.check_time()
            sources = zip(step.sources, step.cuts, strict=True)
            read = [values[i] if n is None else values[i][:, :n] for i, n in sources]
            seen(step.index, read[0])
            values[step.index], states[step.index] = step.dual.push(states[step.index], *read)
        return values[step.index], states


def tokens_read(bounds: Bounds, root: int, wanted: int) -> dict[int, int]:
    """The nodes that the first tokens of one depend on, up to those of exact form, and how many of theirs."""
    nodes = bounds.nodes
    read = {root: wanted}
    for index in range(root, 0, -1):
        if index in read and index not in bounds.locals:
            for place, source in enumerate(nodes[index].followed):
                count = nodes[index].op.reads(place, read[index], bounds.clean[source].shape[0])
                read[source] = max(read.get(source, 0), count)
    return read


def plus(a: Tensor, b: Tensor) -> Tensor:
    """The sum of multipliers, those of further tokens being 0."""
    if a.shape[1] == b.shape[1]:
        return a + b
    wide, narrow = (a, b) if a.shape[1] > b.shape[1] else (b, a)
    total = wide.clone()
    total[:, : narrow.shape[1]] += narrow
    return total
