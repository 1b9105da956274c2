"""A network as a numbered list of operations, and its reference values.

Values are matrices of tokens × features; features of a head-wise value are laid out head by head. Nodes are
numbered in the order in which a `Builder` adds them, and the certificate's ``graph`` says how softmax is
written:

    plain         softmax
    decomposed    exp(s − ŝ_max), its sum, the reciprocal of that, and their product; ŝ_max is the largest
                  score of a query and head in the reference run
    differences   softmax, preceded by the differences s_k − s_j (j < k) of the scores of each query and head
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffet_checker.balls import Array, Ball
from buffet_checker.functions import FUNCTIONS
from buffet_checker.pieces import Terms

GRAPHS = ("plain", "decomposed", "differences")


@dataclass(frozen=True)
class Node:
    """An operation and the earlier nodes it reads; `name` says where in the network it is."""

    kind: str
    inputs: tuple[int, ...]
    name: str
    weight: Array = field(default_factory=lambda: np.zeros(0))  # of affine and diagonal nodes
    bias: Array = field(default_factory=lambda: np.zeros(0))  # of these and of offsets
    function: str = ""
    heads: int = 1
    scale: float = 1.0
    least: float = -math.inf  # no entry is ever below this
    sizes: tuple[Array, Array] | None = None  # of weight and bias as deployed, where these are differences

    @property
    def terms(self) -> Terms:
        """How the products that it sums are laid out."""
        return Terms("rescale" if self.kind == "normalise" else self.kind, self.heads)


class Builder:
    """Adds nodes, and keeps the reference value of each: the float64 run on the unmoved rows."""

    def __init__(self, rows: Array, graph: str) -> None:
        self.graph = graph
        self.nodes: list[Node] = [Node("input", (), "input")]
        self.values: list[Array] = [rows]

    def add(self, kind: str, name: str, *inputs: int, **fields: Any) -> int:
        node = Node(kind, inputs, name, **fields)
        self.nodes.append(node)
        self.values.append(evaluate(node, [self.values[i] for i in inputs]))
        return len(self.nodes) - 1

    def softmax(self, scores: int, heads: int, name: str) -> int:
        value = self.values[scores].reshape(len(self.values[scores]), heads, -1)
        keys = value.shape[2]
        if self.graph == "decomposed":
            peak = np.broadcast_to(value.max(-1, keepdims=True), value.shape).reshape(len(value), -1)
            sums = np.kron(np.eye(heads), np.ones(keys))
            shifted = self.add("offset", f"{name} scores, shifted", scores, bias=-peak)
            e = self.add("apply", f"{name} exp", shifted, function="exp")
            total = self.add("affine", f"{name} sum", e, weight=sums, bias=np.zeros(heads))
            inverse = self.add("apply", f"{name} reciprocal", total, function="reciprocal")
            return self.add("normalise", f"{name} weights", e, inverse, heads=heads)
        if self.graph == "differences" and keys > 1:
            first, second = np.triu_indices(keys, 1)
            eye = np.eye(keys)
            matrix = np.kron(np.eye(heads), eye[second] - eye[first])
            bias = np.zeros(len(matrix))
            apart = self.add("affine", f"{name} differences", scores, weight=matrix, bias=bias)
            return self.add("softmax", f"{name} weights", scores, apart, heads=heads)
        return self.add("softmax", f"{name} weights", scores, heads=heads)


def evaluate(node: Node, inputs: list[Array]) -> Array:
    """The value of an operation, in float64; `intervals.residual` bounds how far it is from the exact one."""
    x = inputs[0]
    match node.kind:
        case "affine":
            return x @ node.weight.T + node.bias
        case "diagonal":
            return x * node.weight + node.bias
        case "center":
            return x - x.mean(-1, keepdims=True)
        case "add":
            return x + inputs[1]
        case "offset":
            return x + node.bias
        case "first":
            return x[:1]
        case "mean":
            return x.mean(0, keepdims=True)
        case "apply":
            return FUNCTIONS[node.function].value(Ball.exact(x)).mid
        case "softmax":
            s = x.reshape(len(x), node.heads, -1)
            e = np.exp(s - s.max(-1, keepdims=True))
            return (e / e.sum(-1, keepdims=True)).reshape(x.shape)
        case "scores":
            q, k = (v.reshape(len(v), node.heads, -1) for v in inputs)
            mixed = np.matmul(q.transpose(1, 0, 2), k.transpose(1, 2, 0))
            return node.scale * mixed.transpose(1, 0, 2).reshape(len(q), -1)
        case "mix":
            p, v = (value.reshape(len(value), node.heads, -1) for value in inputs)
            mixed = np.matmul(p.transpose(1, 0, 2), v.transpose(1, 0, 2))
            return node.scale * mixed.transpose(1, 0, 2).reshape(len(p), -1)
        case _:
            parts = x.reshape(len(x), node.heads, -1)
            return node.scale * (parts * inputs[1][:, :, None]).reshape(x.shape)
