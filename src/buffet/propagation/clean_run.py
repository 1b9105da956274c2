"""A network on one sentence: all that bounds need to know of it before anything moves."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from buffet.network import Affine, Input, Linear, Program
from buffet.propagation.rounding import residual, roundings
from buffet.relaxations.linear import Piece, exact_piece


@dataclass(frozen=True)
class Scene:
    """A program that ends in margins, with its clean run on one sentence (both float64)."""

    program: Program
    clean: list[Tensor]
    _exact: dict[torch.dtype, list[Piece | None]] = field(default_factory=dict)

    @cached_property
    def residuals(self) -> list[Tensor]:
        """How far every clean value may be from the exact operation on the clean values it was made of."""
        with torch.inference_mode(False), torch.no_grad():  # it outlives the call
            return [
                residual(n.op, value, *(self.clean[i] for i in n.inputs))
                for n, value in zip(self.program.nodes, self.clean, strict=True)
            ]

    def rounding(self, dtype: torch.dtype) -> float:
        """How far sums may be off in a precision, relative to the sizes of their terms."""
        return roundings(self.program, self.clean, dtype)

    def exact(self, dtype: torch.dtype) -> list[Piece | None]:
        """The piece of every linear operation, made once per precision; None for the nonlinear ones."""
        if dtype not in self._exact:
            # The pieces outlive the call: ordinary tensors, even if this call needs no gradients.
            with torch.inference_mode(False):
                self._exact[dtype] = [
                    exact_piece(n.op, tuple(self.clean[i] for i in n.inputs), dtype)
                    for n in self.program.nodes
                ]
        return self._exact[dtype]


def local_nodes(program: Program) -> frozenset[int]:
    """Nodes behind linear operations on single tokens only: their forms are exact."""
    local: set[int] = set()
    for index, node in enumerate(program.nodes):
        alone = isinstance(node.op, Linear) and node.op.per_token
        if isinstance(node.op, Input) or (alone and node.inputs[0] in local):
            local.add(index)
    return frozenset(local)


def widest_rows(scene: Scene, root: int, stops: Collection[int]) -> int:
    """Coefficients that one feature of `root` (at all its tokens) has at the widest node on the way down."""
    return max(row_entries(scene, root, stops))


def row_entries(scene: Scene, root: int, stops: Collection[int]) -> Iterator[int]:
    """Coefficients that one feature of `root` (at all its tokens) has at every node on the way down.

    Rows read only their own token until they pass through attention; from there on every token.
    """
    groups = scene.clean[root].shape[0]
    pending = {root: False}
    for index in range(root, -1, -1):
        if index not in pending:
            continue
        dense = pending.pop(index)
        tokens, features = scene.clean[index].shape
        yield (tokens if dense else 1) * features * groups
        if index not in stops:
            node = scene.program.nodes[index]
            for source in node.followed:
                pending[source] = pending.get(source, False) or dense or node.op.mixes


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
