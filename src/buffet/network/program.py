"""The network as a small immutable graph of operations (`ops`), from embedding rows to logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.network.operation import Input, Op
from buffet.network.ops import Affine, Apply, Center, Diagonal, Mix, Rescale, Scores, Softmax
from buffet.printing import counted


@dataclass(frozen=True)
class Node:
    """An operation and the earlier nodes it reads."""

    op: Op
    inputs: tuple[int, ...] = ()

    @property
    def is_input(self) -> bool:
        """Whether it reads nothing: the embedding rows."""
        return not self.inputs

    @property
    def followed(self) -> tuple[int, ...]:
        """The nodes that linear bounds of this one are written in."""
        return self.op.followed(self.inputs)


@dataclass(frozen=True, repr=False)
class Program:
    """Nodes in topological order; node 0 is the `Input`, the last node the result (one token)."""

    nodes: tuple[Node, ...]

    def __repr__(self) -> str:
        weighted = any(isinstance(node.op, Affine | Diagonal) for node in self.nodes)
        width = f", input width {self.input_width}" if weighted else ""
        nodes, layers = counted(len(self.nodes), "node"), counted(self.layers, "layer")
        return f"Program({nodes}, {layers}{width})"

    def values(
        self, x: Float[Tensor, "*batch tokens width"], mask: Bool[Tensor, "*batch tokens"] | None = None
    ) -> list[Tensor]:
        """The value of every node for the rows `x`; padding rows are False in `mask`."""
        values: list[Tensor] = []
        for node in self.nodes:
            if isinstance(node.op, Input):
                values.append(x)
            else:
                values.append(node.op.evaluate(*(values[i] for i in node.inputs), mask=mask))
        return values

    def evaluate(
        self, x: Float[Tensor, "*batch tokens width"], mask: Bool[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "*batch classes"]:
        """The logits for the rows `x`, in the precision of the weights."""
        return self.values(x, mask)[-1].squeeze(-2)

    @property
    def input_width(self) -> int:
        """The width of the rows the program reads."""
        for node in self.nodes:
            if isinstance(node.op, Affine | Diagonal):
                return node.op.weight.shape[-1]
        raise ValueError("a program without weights has no width")

    @property
    def layers(self) -> int:
        """The number of attention layers."""
        return sum(isinstance(node.op, Mix) for node in self.nodes)

    def to(self, target: torch.dtype | torch.device) -> Program:
        """The same program with weights in another precision, or on another device."""
        return Program(tuple(replace(n, op=n.op.to(target)) for n in self.nodes))

    def margins(self, label: int) -> Program:
        """The same program ending in ``logit[label] − logit[other]``, one feature per other class.

        The differences are taken in the classifier's weights, so that no bound sees the two logits apart.
        """
        *body, last = self.nodes
        assert isinstance(last.op, Affine)
        others = [c for c in range(last.op.weight.shape[0]) if c != label]
        weight, bias = (v[label] - v[others] for v in (last.op.weight, last.op.bias))
        return Program((*body, Node(Affine(weight, bias), last.inputs)))


class Builder:
    """Writes a `Program` node by node; every method returns the index of the node it added."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self.input = self.add(Input())

    def add(self, op: Op, *inputs: int) -> int:
        self._nodes.append(Node(op, inputs))
        return len(self._nodes) - 1

    def build(self) -> Program:
        return Program(tuple(self._nodes))

    def affine(self, x: int, weight: Tensor, bias: Tensor) -> int:
        return self.add(Affine(weight, bias), x)

    def layer_norm(self, x: int, weight: Tensor, bias: Tensor, *, eps: float | None) -> int:
        """LayerNorm; ``eps=None`` leaves the variance out (``w ⊙ (x − mean x) + b``)."""
        y = self.add(Center(), x)
        if eps is not None:
            width = weight.shape[0]
            square = self.add(Apply("square"), y)
            mean = weight.new_full((1, width), 1 / width)
            variance = self.add(Affine(mean, weight.new_full((1,), eps), least=eps), square)
            inverse = self.add(Apply("rsqrt"), variance)
            y = self.add(Rescale(heads=1), y, inverse)
        return self.add(Diagonal(weight, bias), y)

    def attention(
        self, queries: int, tokens: int, heads: int, projections: Sequence[tuple[Tensor, Tensor]]
    ) -> int:
        """Multi-head attention of the rows `queries` over the rows `tokens`, before the output projection.

        `projections` are the weight and bias of query, key and value.
        """
        q, k, v = (self.affine(x, *p) for x, p in zip((queries, tokens, tokens), projections, strict=True))
        scale = 1 / math.sqrt(projections[0][0].shape[0] // heads)
        scores = self.add(Scores(heads=heads, scale=scale), q, k)
        return self.add(Mix(heads=heads), self.add(Softmax(heads), scores), v)
