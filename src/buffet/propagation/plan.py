"""What a walk over the graph will do, node by node: it depends on the network and the propagation alone.

The walk itself (`walk`), the derivations that a certificate lists, and estimates of memory follow one plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from buffet.network import Affine, Program
from buffet.network.structure import attention_nodes, layers_between, local_nodes, passages
from buffet.propagation.clean_run import CleanRun

Keeps = Callable[[Program], frozenset[int]]


def no_nodes(program: Program) -> frozenset[int]:
    return frozenset()


def all_nodes(program: Program) -> frozenset[int]:
    return frozenset(range(1, len(program.nodes)))


@dataclass(frozen=True)
class Propagation:
    """Which nodes keep linear forms of the input, and how margins are finished."""

    keeps: Keeps = no_nodes
    linear: bool = True  # False: boxes only
    everywhere: bool = False  # whether interval arithmetic is done for every node
    to_input: bool = False  # whether margins are substituted down to the input, past forms that are kept
    window: int | None = None  # keep one form per layer, used this many attention layers further up
    apart: bool = False  # whether every kept form counts alone: what rows read of it is a number at once

    @property
    def fully_backward(self) -> bool:
        """Whether no node keeps forms, unless for a window."""
        return self.linear and self.keeps is no_nodes

    def kept(self, program: Program) -> frozenset[int]:
        """The nodes that keep linear forms of the input."""
        return self.keeps(program) if self.window is None else passages(program)


PROPAGATIONS: Mapping[str, Propagation] = {
    "interval": Propagation(linear=False, everywhere=True),
    "forward": Propagation(all_nodes, everywhere=True),
    "baf": Propagation(attention_nodes),
    "baf-published": Propagation(attention_nodes, apart=True),
    "baf+backward": Propagation(attention_nodes, to_input=True),
    "backward": Propagation(to_input=True),
}


@dataclass(frozen=True)
class Derivation:
    """How linear bounds of some nodes are found: pushed from the forms of what one node reads, or substituted
    backwards, for several nodes that are read together, down to `stops` and to exact forms.
    """

    nodes: tuple[int, ...]
    pushed: bool
    stops: frozenset[int]  # nodes whose kept forms end the substitution
    keep: bool  # whether the forms are kept


@dataclass(frozen=True)
class Plan:
    """What is done at every node."""

    boxed: frozenset[int]  # nodes that get boxes by interval arithmetic
    needed: frozenset[int]  # nodes whose boxes are tightened by linear bounds
    kept: frozenset[int]
    local: frozenset[int]  # nodes with exact forms
    derivations: Mapping[int, Derivation]  # by the node at which they are made, in order
    margin: Derivation


def plan_of(program: Program, propagation: Propagation) -> Plan:
    """The plan of a walk."""
    local, kept = local_nodes(program), propagation.kept(program)
    boxed = frozenset(range(len(program.nodes))) if propagation.everywhere else boxed_nodes(program)
    if propagation.apart:  # boxes of nodes that keep forms are those of the forms
        boxed -= kept | {len(program.nodes) - 1}
    needed = needed_boxes(program, boxed)
    groups = together(program, needed | kept)
    derivations: dict[int, Derivation] = {}
    done: set[int] = set()
    forms: set[int] = set()

    def stops_below(root: int) -> frozenset[int]:
        if propagation.window is None:
            return frozenset(forms)
        far = [i for i in forms if layers_between(program, i, root) >= propagation.window]
        return frozenset([max(far)] if far else []) | (forms & local)

    for index, node in enumerate(program.nodes if propagation.linear else ()):
        if index in done or index not in needed | kept:
            continue
        keep = index in kept
        if index in local or (keep and local | forms >= {*node.inputs}):
            derivations[index] = Derivation((index,), True, frozenset(), keep)
        else:
            derivations[index] = Derivation(groups[index], False, stops_below(index), keep)
        done |= {*derivations[index].nodes}
        forms |= {*derivations[index].nodes} if keep else set()
    root = len(program.nodes) - 1
    margin = Derivation((root,), False, frozenset() if propagation.to_input else stops_below(root), False)
    return Plan(boxed, needed, kept, local, derivations, margin)


def needed_boxes(program: Program, boxed: frozenset[int] | None = None) -> frozenset[int]:
    """Nodes read by a nonlinearity whose boxes linear bounds can tighten.

    The box of an elementwise function of a bounded node is already exact, if interval arithmetic gives it one
    (`boxed`; None: all nodes).
    """
    read = {i for n in program.nodes if not n.op.linear for i in n.inputs}
    exact = {i for i in read if program.nodes[i].op.exact_box and (boxed is None or i in boxed)}
    return frozenset(read - exact)


def boxed_nodes(program: Program) -> frozenset[int]:
    """Nodes whose interval arithmetic is of use: margins, what nonlinearities read, and what those read."""
    read = {i for n in program.nodes if not n.op.linear for i in n.inputs}
    read.add(len(program.nodes) - 1)
    return frozenset(read | {i for index in read for i in program.nodes[index].inputs})


def first_row(program: Program, index: int) -> int:
    """Where unit rows of a node start: those of an affine one are rows of the node it reads."""
    node = program.nodes[index]
    return node.inputs[0] if isinstance(node.op, Affine) else index


def together(program: Program, nodes: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """For each of the nodes, those that are substituted in one go: affine maps of the same value."""
    groups: dict[int, list[int]] = {}
    for n in sorted(nodes):
        start = first_row(program, n)
        key = -n if start == n else start
        groups.setdefault(key, []).append(n)
    return {n: tuple(group) for group in groups.values() for n in group}


def widest_rows(clean_run: CleanRun, root: int, stops: Collection[int]) -> int:
    """Coefficients that one feature of `root` (at all its tokens) has at the widest node on the way down."""
    return max(row_entries(clean_run, root, stops))


def row_entries(clean_run: CleanRun, root: int, stops: Collection[int]) -> Iterator[int]:
    """Coefficients that one feature of `root` (at all its tokens) has at every node on the way down.

    Rows read only their own token until they pass through attention; from there on every token.
    """
    groups = clean_run.clean[root].shape[0]
    pending = {root: False}
    for index in range(root, -1, -1):
        if index not in pending:
            continue
        dense = pending.pop(index)
        tokens, features = clean_run.clean[index].shape
        yield (tokens if dense else 1) * features * groups
        if index not in stops:
            node = clean_run.program.nodes[index]
            for source in node.followed:
                pending[source] = pending.get(source, False) or dense or node.op.mixes
