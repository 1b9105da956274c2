"""The network on many concrete inputs at once, with a bound on how far rounding took every result.

`computed` says how far values may be off. A run with errors takes little more time than one without. In
single precision they are larger, but that decides nearly all inputs, and twice as fast. What overflows proves
nothing.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.errors import BuffetError
from buffet.network import (
    Add,
    Affine,
    Apply,
    Center,
    Diagonal,
    First,
    Input,
    Mean,
    Mix,
    Program,
    Rescale,
    Scores,
    Softmax,
)
from buffet.network.norms import UP
from buffet.propagation.attended import attention, attention_of_few
from buffet.propagation.computed import Computed, affine_by_heads, joined, nothing, step

WIDEST_SINGLE = 4096
"""Sums of more terms are left to double precision."""
NUMBERS = 2**19
"""About as many numbers of a value are computed at a time: they stay in a cache."""
TABLE_ROWS = 2**13
"""Rows that are looked at together, on their own."""


class RigorousRun:
    """A program (float64) that ends in margins, to be run on many inputs in one precision."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.exact = program
        self.dtype = dtype
        self.program = program if dtype == torch.float64 else program.to(dtype)
        self._shared = _shared(program)
        self._attention = _attentions(program)
        self._heads = {
            source: scores.heads for sources, scores in self._attention.values() for source in sources
        }
        skipped = {i for i, node in enumerate(program.nodes) if isinstance(node.op, Scores | Softmax)}
        self._order = [i for i in range(len(program.nodes)) if i not in self._shared | skipped]
        last = {source: place for place in self._order for source in self._inputs(place)}
        self._done: list[list[int]] = [[] for _ in program.nodes]  # what nobody reads after a node
        for source, reader in last.items():
            self._done[reader].append(source)

    @staticmethod
    def suits_single(program: Program, width: int) -> bool:
        """Whether single precision is as exact as is reckoned with."""
        widest = max([width, *(max(n.op.weight.shape) for n in program.nodes if isinstance(n.op, Affine))])
        return widest <= WIDEST_SINGLE

    def table(self, rows: Float[Tensor, "rows width"]) -> dict[int, Computed]:
        """What depends on single rows only, of all rows that occur; float64 `rows` are what is meant.

        Done once for all points, it is done in double precision: what is lost first grows most.
        """
        read = {source for place in self._order for source in self._inputs(place)}
        read.add(len(self.program.nodes) - 1)
        parts: dict[int, list[Computed]] = {place: [] for place in sorted(read & self._shared)}
        for some in rows.split(TABLE_ROWS):
            found = {0: Computed(some, torch.zeros_like(some[:, 0]))}
            for place in sorted(self._shared - {0}):
                found[place] = self._step(self.exact, place, found)
            for place, kept in parts.items():
                kept.append(found[place].to(self.dtype))
        return {place: joined(kept) for place, kept in parts.items()}

    def margins(
        self, table: dict[int, Computed], index: Int[Tensor, "points tokens"]
    ) -> tuple[Float[Tensor, "points others"], Float[Tensor, " points"]]:
        """The margins at points whose tokens are rows of the table, and how far each may be off (float64).

        Where they are not finite, nothing is known: the error is NaN or infinite.
        """
        known: dict[int, Computed] = {}

        def read(source: int) -> Computed:
            if source not in known:
                known[source] = table[source].gather(index)
            return known[source]

        for place in self._order:
            found = self._few_moving(place, table, index)
            if found is None:
                inputs = {source: read(source) for source in self._inputs(place)}
                found = self._step(self.program, place, inputs)
            known[place] = found
            for source in self._done[place]:
                known.pop(source, None)
        last = read(len(self.program.nodes) - 1)
        value, error = last.value[:, 0].double(), last.rows[:, 0]
        return value, error + 0.0 * value.sum(-1)

    def _inputs(self, place: int) -> tuple[int, ...]:
        """What a node reads; the mixed values of an attention its queries, keys and values."""
        found = self._attention.get(place)
        return found[0] if found else self.exact.nodes[place].inputs

    def _few_moving(
        self, place: int, table: dict[int, Computed], index: Int[Tensor, "points tokens"]
    ) -> Computed | None:
        """The attention of rows of the table, if that is what a node is and few of its tokens move."""
        if place not in self._attention or not self._shared.issuperset(self._inputs(place)):
            return None
        op = self.program.nodes[place].op
        assert isinstance(op, Mix)
        read = tuple(table[source] for source in self._inputs(place))
        found = attention_of_few(op, self._attention[place][1], read, index)
        return None if found is None else _handed_on(found)

    def _step(self, program: Program, place: int, known: dict[int, Computed]) -> Computed:
        """The value of a node, and what it may be off."""
        op, exact = program.nodes[place].op, self.exact.nodes[place].op
        inputs = [known[source] for source in self._inputs(place)]
        if place in self._attention:
            assert isinstance(op, Mix)
            found = attention(op, self._attention[place][1], *inputs)
        elif isinstance(op, Affine) and isinstance(exact, Affine) and place in self._heads:
            found = affine_by_heads(op, exact, self._heads[place], *inputs)
        else:
            found = step(op, exact, op.evaluate(*(c.value for c in inputs)), *inputs)
        return _handed_on(found)


def _handed_on(found: Computed) -> Computed:
    """With an error that makes up for how it was computed, and for underflow."""
    return replace(found, error=found.error * (1 + UP) + nothing(found.value.dtype))


def _shared(program: Program) -> set[int]:
    """Nodes each of whose rows depends on one row of the input only, and on all alike."""
    found: set[int] = set()
    for index, node in enumerate(program.nodes):
        alone = isinstance(node.op, Affine | Diagonal | Center | Apply | Add | Rescale)
        if isinstance(node.op, Input) or (alone and found.issuperset(node.inputs)):
            found.add(index)
    return found


def _attentions(program: Program) -> dict[int, tuple[tuple[int, ...], Scores]]:
    """Where values are mixed by the softmax of scores: the queries, keys and values, and the scores."""
    found: dict[int, tuple[tuple[int, ...], Scores]] = {}
    for place, node in enumerate(program.nodes):
        if isinstance(node.op, Mix):
            weights, values = node.inputs
            softmax = program.nodes[weights]
            scores = program.nodes[softmax.inputs[0]] if isinstance(softmax.op, Softmax) else softmax
            if not isinstance(scores.op, Scores) or scores.op.heads != node.op.heads:
                raise BuffetError("runs with an account of rounding need the softmax of scores in attention")
            found[place] = (*scores.inputs, values), scores.op
        elif isinstance(node.op, Softmax) != any(
            isinstance(program.nodes[source].op, Scores) for source in node.inputs
        ) or any(isinstance(program.nodes[source].op, Softmax) for source in node.inputs):
            raise BuffetError("runs with an account of rounding know scores and weights in attention only")
    return found


def batch_size(program: Program, tokens: int, width: int) -> int:
    """How many points are run at a time."""
    widest = max([width, *(len(n.op.weight) for n in program.nodes if isinstance(n.op, Affine))])
    heads = max([1, *(n.op.heads for n in program.nodes if isinstance(n.op, Scores))])
    return max(1, NUMBERS // (tokens * max(widest, heads * tokens)))


def multiplications(program: Program, tokens: int) -> int:
    """About how many numbers are multiplied in a run: what its time goes with."""
    lengths: list[int] = []
    widths: list[int] = []
    total = 0
    for node in program.nodes:
        length = tokens if node.is_input else lengths[node.inputs[0]]
        width = 0 if node.is_input else widths[node.inputs[0]]
        if isinstance(node.op, First | Mean):
            length = 1
        elif isinstance(node.op, Affine):
            width = node.op.weight.shape[0]
            total += length * node.op.weight.numel()
        elif isinstance(node.op, Scores):
            total += length * tokens * width
            width = tokens * node.op.heads
        elif isinstance(node.op, Mix):
            width = widths[node.inputs[1]]
            total += length * tokens * width
        lengths.append(length)
        widths.append(width)
    return total
