"""The network as a small immutable graph of operations, from embedding rows to logits.

Every value in the graph is a matrix of *tokens × features* (after pooling there is one token), with any
number of batch axes in front. Features of a head-wise value are laid out head by head, so a score matrix
is the value ``[query token, (head, key token)]``. An operation knows only how to evaluate itself; what it
does to bounds is written elsewhere (`intervals`, `pieces`, `relaxations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.bounds.functions import FUNCTIONS

Value = Float[Tensor, "*batch tokens features"]
Mask = Bool[Tensor, "*batch tokens"]


@dataclass(frozen=True, eq=False)
class Op:
    """An operation of the graph; `evaluate` is its exact meaning."""

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def map(self, change: Callable[[Tensor], Tensor]) -> Op:
        """The same operation with its weights changed."""
        changed = {
            f.name: change(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and value.is_floating_point()
        }
        return replace(self, **changed) if changed else self

    def to(self, target: torch.dtype | torch.device) -> Op:
        """The same operation with its weights in another precision, or on another device."""
        return self.map(lambda weight: weight.to(target))


@dataclass(frozen=True, eq=False)
class Input(Op):
    """The embedding rows, before the embedding LayerNorm."""


@dataclass(frozen=True, eq=False)
class Affine(Op):
    """Per token, ``y = W x + b``; no entry falls below `least`, whatever the bounds of x say."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, "out"]
    least: float = -math.inf

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(inputs[0], self.weight, self.bias)


@dataclass(frozen=True, eq=False)
class Diagonal(Op):
    """Per token, ``y = w ⊙ x + b``: the trainable part of a LayerNorm."""

    weight: Float[Tensor, "features"]
    bias: Float[Tensor, "features"]

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] * self.weight + self.bias


@dataclass(frozen=True, eq=False)
class Center(Op):
    """Per token, ``y = x − mean(x)``: a LayerNorm without variance, before its `Diagonal`."""

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] - inputs[0].mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Add(Op):
    """The residual connection."""

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] + inputs[1]


@dataclass(frozen=True, eq=False)
class Offset(Op):
    """``y = x + value`` with a constant for every token and feature of one particular input."""

    value: Float[Tensor, "tokens features"]

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] + self.value


@dataclass(frozen=True, eq=False)
class Apply(Op):
    """A function of one variable, element by element: a name in `functions.FUNCTIONS`."""

    function: str

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return FUNCTIONS[self.function].value(inputs[0])


@dataclass(frozen=True, eq=False)
class Bilinear(Op):
    """A sum of products ``z = scale · Σ x·y`` of two values, described by an index pattern.

    `x`, `y`, `out` name the axes of the three values after their features are split into heads or groups, and
    `terms` those of a single product. The first letter of `x` and `out` is their token axis ``i``.
    """

    heads: int = 1
    scale: float = 1.0
    x: ClassVar[str]
    y: ClassVar[str]
    out: ClassVar[str]
    terms: ClassVar[str]

    def split(self, value: Tensor, axes: str) -> Tensor:
        """View ``[..., token, features]`` as ``[..., token, head, ...]`` according to `axes`."""
        return value.unflatten(-1, (self.heads, -1)) if len(axes) == 3 else value

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        x, y = self.split(inputs[0], self.x), self.split(inputs[1], self.y)
        z = torch.einsum(f"...{self.x},...{self.y}->...{self.out}", x, y)
        return self.scale * z.flatten(-2)


@dataclass(frozen=True, eq=False)
class Scores(Bilinear):
    """Attention scores ``s[i,h,j] = scale · Σ_k q[i,h,k] k[j,h,k]``."""

    x, y, out, terms = "ihk", "jhk", "ihj", "ihjk"


@dataclass(frozen=True, eq=False)
class Mix(Bilinear):
    """Attention output ``o[i,h,k] = Σ_j p[i,h,j] v[j,h,k]``."""

    x, y, out, terms = "ihj", "jhk", "ihk", "ihjk"


@dataclass(frozen=True, eq=False)
class Rescale(Bilinear):
    """A group of features times one number: ``z[i,g,m] = x[i,g,m] · y[i,g]`` (LayerNorm: one group)."""

    x, y, out, terms = "igm", "ig", "igm", "igm"


@dataclass(frozen=True, eq=False)
class Normalise(Rescale):
    """The last step of a decomposed softmax: ``p = exp(s) · (1 / Σ exp(s))``; every group sums to 1."""


@dataclass(frozen=True, eq=False)
class Softmax(Op):
    """Softmax over the key tokens of every head; masked keys get weight 0."""

    heads: int

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = inputs[0].unflatten(-1, (self.heads, -1))
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None, None, :], -math.inf)
        return scores.softmax(-1).flatten(-2)


@dataclass(frozen=True, eq=False)
class Pool(Op):
    """All tokens to one: the first row (``first``) or the mean of the unmasked rows (``mean``)."""

    kind: str

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        weights = self.weights(inputs[0].shape[-2], mask, inputs[0])
        if self.kind == "first":
            return inputs[0][..., :1, :]
        return weights[..., None, :] @ inputs[0]

    def weights(self, tokens: int, mask: Tensor | None, like: Tensor) -> Tensor:
        """The weight of every token; they sum to 1."""
        if self.kind == "first":
            return torch.eye(1, tokens, dtype=like.dtype, device=like.device)[0]
        if mask is None:
            return torch.full((tokens,), 1 / tokens, dtype=like.dtype, device=like.device)
        return mask.to(like.dtype) / mask.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Node:
    """An operation and the earlier nodes it reads."""

    op: Op
    inputs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Program:
    """Nodes in topological order; node 0 is the `Input`, the last node the result (one token)."""

    nodes: tuple[Node, ...]

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
