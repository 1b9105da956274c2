"""Softmax, written as operations that products and elementwise relaxations already know.

`decompose` replaces every softmax by ``exp``, a sum, ``1/·`` and a product (Shi et al. 2020).
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.program import Affine, Apply, Input, Node, Normalise, Offset, Op, Program, Softmax


def decompose(program: Program, x: Float[Tensor, "tokens width"]) -> tuple[Program, list[Tensor]]:
    """The same function with every softmax taken apart, for inputs near `x`, and its values at `x`.

    The scores are shifted by their maximum at `x`, a constant of every query and head: softmax does not
    change and neither do its relaxations, but ``exp`` stays in range.
    """
    nodes: list[Node] = []
    values: list[Tensor] = []
    moved: list[int] = []  # old index → new index

    def add(op: Op, *inputs: int) -> int:
        nodes.append(Node(op, inputs))
        values.append(x if isinstance(op, Input) else op.evaluate(*(values[i] for i in inputs)))
        return len(nodes) - 1

    for node in program.nodes:
        inputs = tuple(moved[i] for i in node.inputs)
        if isinstance(node.op, Softmax):
            heads = node.op.heads
            scores = values[inputs[0]].unflatten(-1, (heads, -1))
            peak = scores.amax(-1, keepdim=True).expand_as(scores).flatten(-2)
            sums = torch.eye(heads, dtype=x.dtype, device=x.device).repeat_interleave(scores.shape[-1], 1)
            e = add(Apply("exp"), add(Offset(-peak), *inputs))
            total = add(Affine(sums, sums.new_zeros(heads)), e)
            moved.append(add(Normalise(heads=heads), e, add(Apply("reciprocal"), total)))
        else:
            moved.append(add(node.op, *inputs))
    return Program(tuple(nodes)), values
