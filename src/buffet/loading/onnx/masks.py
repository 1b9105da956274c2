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
    Affine,
    Apply,
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


def check_mask(nodes: Sequence[Node], sizes: Sequence[tuple[int, int]], scores: int, heads: int) -> None:
    """Refuse a mask below a softmax over the node `scores` that is not the same network.

    Args:
        sizes: the tokens and features of every node.
    """
    node = nodes[scores]
    if not hides(node):
        return
    assert isinstance(node.op, Offset)
    value = node.op.value.unflatten(-1, (heads, -1))
    visible = value > HIDDEN
    if not bool(visible.any(-1).all()):
        raise UnsupportedError("its mask hides all tokens from one of them")
    found = largest(nodes, sizes, node.inputs[0])
    reached = math.inf if found is None else float(found.max() + value[visible].abs().max())
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


def largest(
    nodes: Sequence[Node], sizes: Sequence[tuple[int, int]], index: int
) -> Float[Tensor, "tokens features"] | None:
    """The largest size that every entry of a node can have, for any input; None: unknown."""
    found: list[Tensor | None] = []
    for number, node in enumerate(nodes[: index + 1]):
        inputs = [found[source] for source in node.inputs]
        known = [entries for entries in inputs if entries is not None]
        normed = _normed(nodes, node)
        if normed is not None:
            found.append(torch.full(sizes[number], math.sqrt(normed), dtype=torch.float64))
        else:
            found.append(_grown(node.op, known) if inputs and len(known) == len(inputs) else None)
    return found[index]


def _grown(op: Op, inputs: Sequence[Tensor]) -> Tensor | None:
    """The largest sizes of an operation's entries, from those of its inputs."""
    if isinstance(op, Apply):
        return inputs[0] if op.function in SHRINKING else None
    return op.largest(*inputs).abs() if op.linear or isinstance(op, Scores) else None


def _normed(nodes: Sequence[Node], node: Node) -> int | None:
    """The width of a LayerNorm of which a node is the end, whose output has ``Σ x² ≤ width``."""
    if not isinstance(node.op, Rescale):
        return None
    centre, inverse = node.inputs
    chain = [nodes[inverse]]
    while len(chain) < 3:
        chain.append(nodes[chain[-1].inputs[0]])
    root, variance, square = chain
    match root.op, variance.op, square.op:
        case Apply("rsqrt"), Affine(weight=weight, bias=bias), Apply("square") if square.inputs == (centre,):
            width = weight.shape[1]
            mean = len(weight) == 1 and bool((weight == 1 / width).all() and (bias > 0).all())
            return width if mean else None
    return None
