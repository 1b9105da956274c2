"""A program as a plain PyTorch module, in operations that every tracer knows."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from buffet.errors import BuffetError
from buffet.network import (
    Add,
    Affine,
    Apply,
    Center,
    Diagonal,
    First,
    Input,
    Mean,
    Mix,
    Op,
    Program,
    Scores,
    Softmax,
)

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "gelu": nn.functional.gelu}


class PlainNetwork(nn.Module):
    """From the move δ of one word, ``[1, width]``, to what the program computes, ``[1, outputs]``."""

    def __init__(self, program: Program, rows: Float[Tensor, "tokens width"], word: int) -> None:
        super().__init__()
        self.program, self.word = program, word
        tokens, width = rows.shape
        # All rows as one affine function of δ: tracers know that better than writing to one row.
        place = torch.zeros(tokens, width, width, dtype=rows.dtype, device=rows.device)
        place[word] = torch.eye(width)
        self.place = nn.Parameter(place.flatten(0, 1), requires_grad=False)
        self.rows = nn.Parameter(rows.flatten(), requires_grad=False)
        self.weights = nn.ParameterDict()
        for index, node in enumerate(program.nodes):
            if isinstance(node.op, Affine | Diagonal):
                for name in ("weight", "bias"):
                    value = getattr(node.op, name).detach().clone()
                    self.weights[f"{name}{index}"] = nn.Parameter(value, requires_grad=False)

    def forward(self, delta: Float[Tensor, "1 width"]) -> Float[Tensor, "1 outputs"]:
        moved = nn.functional.linear(delta, self.place, self.rows)
        values = [moved.view(1, -1, delta.shape[1])]
        for index, node in enumerate(self.program.nodes[1:], start=1):
            values.append(self._compute(index, node.op, *(values[i] for i in node.inputs)))
        return values[-1].flatten(1)

    def _compute(self, index: int, op: Op, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        match op:
            case Affine():
                return nn.functional.linear(x, self.weights[f"weight{index}"], self.weights[f"bias{index}"])
            case Diagonal():
                return x * self.weights[f"weight{index}"] + self.weights[f"bias{index}"]
            case Center():
                return x - x.mean(-1, keepdim=True)
            case Add():
                return x + inputs[1]
            case Apply() if op.function in ACTIVATIONS:
                return ACTIVATIONS[op.function](x)
            case Scores():
                query, key = (_heads(value, op.heads) for value in inputs)
                return op.scale * torch.matmul(query, key.transpose(-1, -2))  # batch, heads, queries, keys
            case Softmax():
                return torch.softmax(x, -1)
            case Mix():
                mixed = torch.matmul(x, _heads(inputs[1], op.heads)).permute(0, 2, 1, 3)
                return mixed.reshape(1, mixed.shape[1], -1)
            case First():
                return x[:, :1]
            case Mean():
                return x.mean(1, keepdim=True)
            case Input():
                raise AssertionError("a program has one input")
        raise BuffetError(f"{type(op).__name__} has no plain form: it is not compared with other verifiers")


def _heads(value: Tensor, heads: int) -> Tensor:
    """``[1, tokens, features]`` as ``[1, heads, tokens, features of a head]``."""
    return value.reshape(1, value.shape[1], heads, -1).permute(0, 2, 1, 3)
