"""How much memory the bounds of a method take, estimated before they are computed.

What is alive at once, and grows with the network, are

* the linear forms of the nodes that keep some, two sides of tokens × features × (inputs + 1) each, and a few
  more of that size while one is pushed through attention;
* a chunk of rows on its way down, in a dozen versions;
* the terms of the products in attention, queries × keys × width: planes and, where they are learned, shares;
* with `optimise` "all", everything that gradients pass through: several versions of every form, and all rows
  at all nodes on their way; with "tuned", the same of the rows that are learned on.

The factors were measured (`tests/unit/test_limits.py` holds the estimate to what a process really takes): it
is above that, and for networks that matter less than about twice as much.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from buffet.methods import Method
from buffet.network import Bilinear
from buffet.optimisation.boxes import Tuning
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import Plan, first_row, plan_of, row_entries, widest_rows

PASSING = 12
"""Versions of a chunk, or of a row that is larger than a chunk, that a backward pass holds."""
PASSING_TOKEN = 8
"""The same where rows end at forms before long."""
PUSHED = 7
"""Versions of the largest form while it is made."""
PLANES, LEARNED = 8, 12
"""Numbers per term of a product: of its planes (float64), and where shares are learned."""
GRAPH, SAVED = 5, 1
"""Versions of every form, and of every row at every node, that gradients pass through."""
TUNED = 8
"""Versions of the sampled rows at every node."""


@dataclass(frozen=True)
class Need:
    """Bytes that a method takes: some however many tasks there are, and some for every task."""

    fixed: int
    each: int

    @property
    def one(self) -> int:
        """What a single task takes."""
        return self.fixed + self.each

    def tasks(self, memory: int) -> int:
        """How many tasks fit together; 0 if not even one does."""
        return max(0, (memory - self.fixed) // self.each)


def need(clean_run: CleanRun, method: Method, moved: int, *, size: int, chunk: int) -> Need:
    """What a method takes for tasks of `moved` words, with numbers of `size` bytes and `chunk` bytes of rows
    at once.
    """
    propagation, program = method.describe(), clean_run.program
    plan = plan_of(program, propagation)
    kept, local = plan.kept, plan.local
    columns = moved * program.input_width + 1

    def forms(nodes: Iterable[int]) -> int:
        """Bytes of the forms of nodes; what is exact has one side."""
        return sum((2 - (i in local)) * math.prod(clean_run.clean[i].shape) * columns * size for i in nodes)

    each = forms(kept) + PUSHED * max((forms([i]) for i in kept - local), default=0)
    each += 8 * sum(math.prod(value.shape) for value in clean_run.clean) * PLANES
    if not propagation.linear:
        return Need(0, each)
    each += 8 * PLANES * _terms(clean_run)
    # With a window, rows pass some of the nodes that keep forms.
    stops = local if propagation.fully_backward else kept | local
    if method.optimiser.learns and not method.optimiser.end_to_end:
        each += LEARNED * size * _terms(clean_run)
    if method.optimiser.end_to_end:
        each += (GRAPH - 1) * forms(kept) + LEARNED * size * _terms(clean_run)
        each += SAVED * 2 * size * _rows(clean_run, plan, stops)
    passing = PASSING if propagation.fully_backward else PASSING_TOKEN
    roots = plan.needed | kept
    if method.optimiser.learns_boxes:
        sampled = (_sampled(clean_run, Tuning(method.steps), first_row(program, i), stops) for i in roots)
        each += TUNED * 2 * size * max(sampled, default=0)
    widest = max((widest_rows(clean_run, first_row(program, i), stops) for i in roots), default=0)
    return Need(passing * chunk, each + passing * 2 * size * widest)


def chunk_within(memory: int, chunk: int) -> int:
    """Bytes of rows at once that leave half of the memory to the rest."""
    return max(1, min(chunk, memory // (2 * PASSING)))


def readable(size: int) -> str:
    """A number of bytes, rounded up, as `--memory` takes it."""
    mega = max(1, math.ceil(size / (1 << 20)))
    return f"{mega} MB" if mega < 10_000 else f"{math.ceil(mega / 102.4) / 10} GB"


def _terms(clean_run: CleanRun) -> int:
    """The terms of all products of attention: queries × keys × width."""
    nodes = clean_run.program.nodes
    return sum(
        math.prod(clean_run.clean[node.inputs[0]].shape[:1] + clean_run.clean[node.inputs[1]].shape)
        for node in nodes
        if isinstance(node.op, Bilinear) and node.op.mixes
    )


def _sampled(clean_run: CleanRun, tuning: Tuning, root: int, stops: frozenset[int]) -> int:
    """The coefficients of the rows of a node that are learned on, at all nodes they pass."""
    return tuning.sample(clean_run, root) * sum(row_entries(clean_run, root, stops))


def _rows(clean_run: CleanRun, plan: Plan, stops: frozenset[int]) -> int:
    """The coefficients of all rows that are substituted, at all nodes they pass."""
    return sum(
        sum(clean_run.clean[n].shape[-1] for n in derivation.nodes)
        * sum(row_entries(clean_run, first_row(clean_run.program, derivation.nodes[0]), stops))
        for derivation in plan.derivations.values()
    )
