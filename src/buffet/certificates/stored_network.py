"""A network that is not one of a checkpoint, as a certificate stores it: operation by operation."""

from __future__ import annotations

import torch
from torch import Tensor

from buffet.certificates.proof import Tensors
from buffet.errors import BuffetError
from buffet.loading import OnnxModel
from buffet.network import Affine, Apply, Bilinear, Diagonal, Node, Offset, Softmax
from buffet_checker.programs import KEYS

Facts = dict[str, object]


def stored(model: OnnxModel) -> tuple[Facts, Tensors]:
    """The operations of a model, and its weights to the last bit."""
    steps: list[Facts] = []
    tensors: Tensors = {"network.layout": shortest(model.layout.double())}
    for number, node in enumerate(model.program64.nodes[1:], 1):
        steps.append(_facts(node))
        op = node.op
        if isinstance(op, Affine | Diagonal):
            tensors[f"network.{number}.weight"] = shortest(op.weight)
        if isinstance(op, Affine | Diagonal | Offset):
            bias = op.value if isinstance(op, Offset) else op.bias
            tensors[f"network.{number}.bias"] = shortest(bias)
    return {"steps": steps}, tensors


def shortest(value: Tensor) -> Tensor:
    """In float32, where that holds every number."""
    short = value.float()
    return short if torch.equal(short.double(), value) else value


def _facts(node: Node) -> Facts:
    op, kind = node.op, type(node.op).__name__.lower()
    if kind not in KEYS or (isinstance(op, Bilinear) and not op.scale > 0):
        raise BuffetError(
            f"certificate: the checker knows no operation '{kind}', or none with a negative factor"
        )
    facts: Facts = {"kind": kind, "inputs": list(node.inputs)}
    if isinstance(op, Apply):
        facts["function"] = op.function
    if isinstance(op, Softmax | Bilinear):
        facts["heads"] = op.heads
    if isinstance(op, Bilinear):
        facts["scale"] = op.scale
    return facts
