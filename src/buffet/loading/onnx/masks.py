"""Constant masks: a large negative number added to attention scores leaves no weight to a token.

Whatever is added, from −1e9 to −∞, becomes −1e9. That is the same network if no score gets anywhere near it:
with all others at most 1e8 in size, a hidden token has a weight below ``exp(−8e8)`` in either, which no
account of rounding can tell from 0. Scores are bounded for every input where a LayerNorm is in front of
attention, as its output has at most the length √width; elsewhere masks are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.loading.onnx.arrays import UnsupportedError
from buffet.loading.onnx.file import Array
from buffet.network import (
    Add,
    Affine,
    Apply,
    Diagonal,
    First,
    Mean,
    Node,
    Offset,
    Op,
    Rescale,
    Scores,
    Softmax,
)

HIDDEN = -1e9
"""Added to a score, it leaves no weight to the token."""
LARGEST = 1e8
"""Of all scores, and of what else is added to them."""
SHRINKING = ("relu", "tanh", "gelu", "gelu_tanh")
"""Functions with |f(x)| ≤ |x|."""


def is_mask(array: Array) -> bool:
    """Whether a constant hides something, if it is added to scores."""
    return bool((array <= HIDDEN).any())


def hides(node: Node) -> bool:
    return isinstance(node.op, Offset) and bool((node.op.value <= HIDDEN).any())


def check_mask(nodes: Sequence[Node], scores: int, heads: int) -> None:
    """Refuse a mask below a softmax over the node `scores` that is not the same network."""
    node = nodes[scores]
    if not hides(node):
        return
    assert isinstance(node.op, Offset)
    value = node.op.value.unflatten(-1, (heads, -1))
    visible = value > HIDDEN
    if not bool(visible.any(-1).all()):
        raise UnsupportedError("its mask hides all tokens from one of them")
    sizes = largest(nodes, node.inputs[0])
    reached = math.inf if sizes is None else float(sizes.max() + value[visible].abs().max())
    if not reached <= LARGEST:
        raise UnsupportedError(
            "its mask hides tokens, and nothing bounds the scores: only attention behind a LayerNorm may"
        )


def check_readers(nodes: Sequence[Node]) -> None:
    """Refuse masks that anything but a softmax reads."""
    for index, node in enumerate(nodes):
        readers = [other.op for other in nodes if index in other.inputs]
        if hides(node) and not all(isinstance(op, Softmax) for op in readers):
            raise UnsupportedError("a mask of tokens is used for something else than attention weights")


def largest(nodes: Sequence[Node], index: int) -> Float[Tensor, " features"] | None:
    """The largest size that every feature of a node can have, for any token of any input; None: unknown."""
    sizes: list[Tensor | None] = []
    for node in nodes[: index + 1]:
        inputs = [sizes[source] for source in node.inputs]
        known = [size for size in inputs if size is not None]
        normed = _normed(nodes, node)
        if normed is not None:
            sizes.append(torch.full((normed,), math.sqrt(normed), dtype=torch.float64))
        else:
            sizes.append(_grown(node.op, known) if inputs and len(known) == len(inputs) else None)
    return sizes[index]


def _grown(op: Op, inputs: Sequence[Tensor]) -> Tensor | None:
    """The largest sizes of an operation's features, from those of its inputs."""
    x = inputs[0]
    match op:
        case Affine():
            return op.weight.abs() @ x + op.bias.abs()
        case Diagonal():
            return op.weight.abs() * x + op.bias.abs()
        case Offset():
            return (x + op.value.abs()).amax(0)
        case Add():
            return x + inputs[1]
        case First() | Mean():
            return x
        case Apply() if op.function in SHRINKING:
            return x
        case Scores():
            return _products(op, x, inputs[1])
        case _:
            return None


def _products(op: Scores, queries: Tensor, keys: Tensor) -> Tensor:
    """One size for all scores: the largest of any head."""
    q, k = (size.unflatten(-1, (op.heads, -1)) for size in (queries, keys))
    return abs(op.scale) * (q * k).sum(-1).max()[None]


def _normed(nodes: Sequence[Node], node: Node) -> int | None:
    """The width of a LayerNorm of which a node is the end, whose output has ``Σ x² ≤ width``."""
    if not isinstance(node.op, Rescale):
        return None
    centre, inverse = node.inputs
    chain = [nodes[inverse]]
    while len(chain) < 3:
        chain.append(nodes[chain[-1].inputs[0]])
    root, variance, square = chain
    plain = (
        isinstance(root.op, Apply)
        and root.op.function == "rsqrt"
        and isinstance(variance.op, Affine)
        and isinstance(square.op, Apply)
        and square.op.function == "square"
        and square.inputs == (centre,)
    )
    if not plain or not isinstance(variance.op, Affine):
        return None
    weight = variance.op.weight
    exact = weight.shape[0] == 1 and bool(
        (weight == 1 / weight.shape[1]).all() and (variance.op.bias > 0).all()
    )
    return weight.shape[1] if exact else None
