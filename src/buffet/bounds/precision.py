"""How well floating point carries the sums over a network: measured where nothing moves yet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.functions import FUNCTIONS
from buffet.bounds.medians import lower_median
from buffet.program import (
    Add,
    Affine,
    Apply,
    Bilinear,
    Center,
    Diagonal,
    Offset,
    Op,
    Pool,
    Program,
    Softmax,
)

Gradient = Float[Tensor, "_ _ _"]
SIGNS = 2
"""So many combinations of features of a node, at one token: one may cancel by chance."""
VAGUE = 1e-6
"""Clean values that rounding may change by such a share tell nothing of the network in real arithmetic."""


@dataclass(frozen=True)
class Precision:
    """What floating point loses of a network's values and of linear forms over it, where nothing moves."""

    loss: float  # of linear forms in single precision, relative to their size: about 1e-7 if all is well
    doubt: float  # by how much margins of the clean run, in double precision, may err; NaN: too much


def measure(program: Program, clean: Sequence[Float[Tensor, "_ _"]]) -> Precision:
    """Where large numbers cancel, rounding errors are as large as these are, however small the result.

    So random combinations of what functions and softmax read, and of the margins, are differentiated in both
    precisions, by every node down to the input. There the results are compared: all is lost (1) where single
    precision overflows. On the way, the derivatives tell what the rounding of every clean value does to these
    combinations. A clean run is nothing to start from if a share of `VAGUE` may be rounding in what functions
    and softmax read, or a whole margin.
    """
    roots = sorted({i for n in program.nodes if isinstance(n.op, Apply | Softmax) for i in n.inputs} - {0})
    probes = _probes([*roots, len(program.nodes) - 1], clean)
    errors, loss = clean[0].new_zeros(len(probes)), 1.0
    passes = (_gradients(program, clean, probes, dtype) for dtype in (torch.float64, torch.float32))
    for (index, exact), (_, rounded) in zip(*passes, strict=True):
        if index:
            node = program.nodes[index]
            own = rounding(node.op, clean[index], *(clean[i] for i in node.inputs))
            errors[: len(exact)] += exact.abs().flatten(1) @ own.flatten()
        else:
            loss = _difference(exact, rounded)
    last = errors[:SIGNS].amax()
    scale = torch.stack([1 + clean[root].abs().amax() for root, _ in probes])
    clear = (errors < VAGUE * scale)[SIGNS:].all() & (last < clean[-1].abs().amin())
    return Precision(loss, float(last) if clear else math.nan)


def _difference(exact: Gradient, rounded: Gradient) -> float:
    """The largest at any token, relative to the gradients there; at most 1."""
    size, error = (v.abs().unflatten(0, (-1, SIGNS)).amax((1, 3)) for v in (exact, exact - rounded.double()))
    return min(1.0, float(torch.where(size > 0, error / size, error).nan_to_num(1.0).amax()))


def _probes(roots: Sequence[int], clean: Sequence[Tensor]) -> list[tuple[int, Float[Tensor, "_ _"]]]:
    """Nodes, the last first, each with signs for the features of one of its tokens."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for root in reversed(roots):
        tokens, features = clean[root].shape
        token = int(torch.randint(tokens, (), generator=generator))
        probe = clean[root].new_zeros(SIGNS, tokens, features)
        probe[:, token] = torch.randint(2, (SIGNS, features), generator=generator).to(probe) * 2 - 1
        found += [(root, one) for one in probe]
    return found


def _gradients(
    program: Program,
    clean: Sequence[Float[Tensor, "_ _"]],
    probes: Sequence[tuple[int, Float[Tensor, "_ _"]]],
    dtype: torch.dtype,
) -> Iterator[tuple[int, Gradient]]:
    """Those of the probes by every node, from the last to the input, at the clean values."""
    pending: dict[int, Gradient] = {}
    for index in range(len(program.nodes) - 1, -1, -1):
        own = [probe for root, probe in probes if root == index]
        if own:
            _add(pending, index, sum(root > index for root, _ in probes), torch.stack(own).to(dtype))
        if index not in pending:
            continue
        node, gradient = program.nodes[index], pending.pop(index)
        yield index, gradient
        parts = pull(node.op.to(dtype), gradient, *(clean[i] for i in node.inputs)) if index else ()
        for source, part in zip(node.inputs, parts, strict=False):
            _add(pending, source, 0, part)


def _add(pending: dict[int, Gradient], index: int, start: int, part: Gradient) -> None:
    """Add gradients of the probes from `start` on to those that have come to a node already."""
    known = pending.get(index)
    if known is None and not start:
        pending[index] = part
        return
    known = part[:0] if known is None else known
    total = part.new_zeros(max(len(known), start + len(part)), *part.shape[1:])
    total[: len(known)] = known
    total[start : start + len(part)] += part
    pending[index] = total


def rounding(op: Op, result: Tensor, *values: Tensor) -> Float[Tensor, "_ _"]:
    """How far the result of an operation may be from the exact one of the values it read, all in float64.

    A sum of n terms, in whatever order, errs by at most n roundings of the sum of their sizes.
    """
    terms = 4 + max(n for value in values for n in value.shape)
    match op:
        case Apply():
            return FUNCTIONS[op.function].rounding(values[0], result)
        case Softmax():
            scores = values[0].unflatten(-1, (op.heads, -1))
            sizes = result * (1 + scores.amax(-1, keepdim=True) - scores).flatten(-2)
        case Center():
            sizes = values[0].abs() + values[0].abs().mean(-1, keepdim=True)
        case _:
            sizes = op.map(torch.abs).evaluate(*(value.abs() for value in values))
    return terms * torch.finfo(sizes.dtype).eps * sizes


@singledispatch
def pull(op: Op, gradient: Gradient, *values: Tensor) -> tuple[Gradient, ...]:
    """From gradients by a node to gradients by what it reads, whose clean values are given in float64.

    As in the engine, slopes are computed precisely and rounded; sums are taken in the precision of the rows.
    """
    raise NotImplementedError(type(op).__name__)


@pull.register
def _affine(op: Affine, gradient: Gradient, x: Tensor) -> tuple[Gradient, ...]:
    return (gradient @ op.weight,)


@pull.register
def _diagonal(op: Diagonal, gradient: Gradient, x: Tensor) -> tuple[Gradient, ...]:
    return (gradient * op.weight,)


@pull.register
def _center(op: Center, gradient: Gradient, x: Tensor) -> tuple[Gradient, ...]:
    return (gradient - gradient.mean(-1, keepdim=True),)


@pull.register
def _add_op(op: Add, gradient: Gradient, x: Tensor, y: Tensor) -> tuple[Gradient, ...]:
    return gradient, gradient


@pull.register
def _offset(op: Offset, gradient: Gradient, x: Tensor) -> tuple[Gradient, ...]:
    return (gradient,)


@pull.register
def _pool(op: Pool, gradient: Gradient, x: Tensor) -> tuple[Gradient, ...]:
    return (op.weights(len(x), None, gradient)[:, None] * gradient,)


@pull.register
def _apply(op: Apply, gradient: Gradient, x: Tensor) -> tuple[Gradient, ...]:
    # What is off here may be on elsewhere.
    at = x.abs() if op.function in ("relu", "gelu", "gelu_tanh") else x
    return (gradient * FUNCTIONS[op.function].derivative(at).to(gradient),)


@pull.register
def _softmax(op: Softmax, gradient: Gradient, scores: Tensor, *apart: Tensor) -> tuple[Gradient, ...]:
    weights = scores.unflatten(-1, (op.heads, -1)).softmax(-1)
    slopes = torch.diag_embed(weights) - weights.unsqueeze(-1) * weights.unsqueeze(-2)
    part = gradient.unflatten(-1, (op.heads, -1))
    shifted = part - lower_median(part, -1)
    return (torch.einsum("pihj,ihjk->pihk", shifted, slopes.to(part)).flatten(-2),)


@pull.register
def _bilinear(op: Bilinear, gradient: Gradient, *values: Tensor) -> tuple[Gradient, ...]:
    x, y = (op.split(v.to(gradient), axes) for v, axes in zip(values, (op.x, op.y), strict=True))
    z = op.scale * op.split(gradient, op.out)
    parts = torch.einsum(f"p{op.out},{op.y}->p{op.x}", z, y), torch.einsum(f"p{op.out},{op.x}->p{op.y}", z, x)
    return tuple(part.reshape(len(part), *value.shape) for part, value in zip(parts, values, strict=True))
