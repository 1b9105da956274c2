"""Computed values, and how far the exact ones may be from them: what every operation hands on.

Next to every row of every value there is an *error*: the exact network, in real numbers, has a row within
that distance of the computed one. An operation hands on the errors of what it read, by how much it can
stretch a difference, and adds what its own roundings may come to:

    affine         ‖W(x' − x)‖ ≤ ‖W‖₂ ‖x' − x‖            + n·u·(‖W‖_F ‖x‖ + ‖b‖)
    scores         |q'·k' − q·k| ≤ ‖q‖ e_k + ‖k‖ e_q + e_q e_k   + n·u·‖q‖ ‖k‖
    mixed values   ‖Σ p'v' − Σ p v‖ ≤ e^δ (e^δ − 1) max ‖v‖ + max e_v + …, if no score is off by more than δ

Norms of whole rows, unlike sums of sizes, keep track of what cancels, and they need no product of matrices.
Errors are computed in float64 and rounded up. Absolute constants make up for underflow. What overflows has an
error that is infinite or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding

from buffet.errors import BuffetError
from buffet.network import (
    Add,
    Affine,
    Apply,
    Center,
    Diagonal,
    First,
    Linear,
    Mean,
    Offset,
    Op,
    Rescale,
)
from buffet.network.functions import FUNCTIONS
from buffet.network.norms import UP
from buffet.propagation.rounding import residual

STEEPEST = {"relu": 1.0, "tanh": 1.0, "gelu": 1.13, "gelu_tanh": 1.13}
"""How much functions stretch differences at most; of others, the range over every entry is taken."""


@dataclass(frozen=True, eq=False)
class Computed:
    """A value, and how far the exact one may be from it.

    `error` is by token, ‖exact − value‖₂ of its row, or the same of what every head has of a row (`heads`).
    Squares tell their sum of sizes (`norm` = 1), which is no smaller.
    """

    value: Float[Tensor, "... tokens features"]
    error: Float[Tensor, "... tokens"] | Float[Tensor, "... tokens heads"]
    norm: float = 2.0
    heads: int = 0  # 0: by rows
    least: float = -math.inf  # the exact value is nowhere smaller
    known: Tensor | None = None  # the sizes, where they need not be measured

    @cached_property
    def sizes(self) -> Float[Tensor, "... tokens"] | Float[Tensor, "... tokens heads"]:
        """The Euclidean norm of every row, or of what every head has of it, or a little more."""
        if self.known is not None:
            return self.known
        return row_norm(self.value.unflatten(-1, (self.heads, -1)) if self.heads else self.value)

    @cached_property
    def size(self) -> Float[Tensor, "... tokens"]:
        """The Euclidean norm of every row, or a little more."""
        return root(self.sizes) if self.heads else self.sizes

    @cached_property
    def rows(self) -> Float[Tensor, "... tokens"]:
        """The error of every row in the Euclidean norm."""
        return root(self.error) if self.heads else self.error

    def by_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """The error and the size of what every head has of a row: no more than of the row."""
        if self.heads == heads:
            return self.error, self.sizes
        return self.rows.unsqueeze(-1), row_norm(self.value.unflatten(-1, (heads, -1)))

    def gather(self, index: Int[Tensor, "points tokens"]) -> Computed:
        """Rows of a table as the tokens of points."""
        value, error, sizes = (
            embedding(index, t.flatten(1)) if t.dim() > 1 else t.take(index)
            for t in (self.value, self.error, self.sizes)
        )
        return Computed(value, error, self.norm, self.heads, self.least, sizes)

    def to(self, dtype: torch.dtype) -> Computed:
        """The same in another precision."""
        if dtype == self.value.dtype:
            return self
        near = Computed(self.value.to(dtype), self.error, self.norm, self.heads, self.least)
        lost = unit(dtype) * near.sizes + nothing(dtype)
        return replace(near, error=(self.error + lost) * (1 + UP), known=near.sizes)


def root(parts: Float[Tensor, "... parts"]) -> Tensor:
    """The Euclidean norm of a whole from those of its parts."""
    return torch.linalg.vector_norm(parts, dim=-1) * (1 + UP)


def row_norm(value: Tensor, *, least: bool = False) -> Tensor:
    """The Euclidean norm along the last axis, rounded up (or down to what it is at least), in float64."""
    info, terms = torch.finfo(value.dtype), value.shape[-1]
    found = torch.linalg.vector_norm(value, dim=-1).double()
    share, floor = (terms + 8) * info.eps, terms * math.sqrt(info.tiny)
    return (found * (1 - share) - floor).clamp_min(0) if least else found * (1 + share) + floor


def joined(parts: Sequence[Computed]) -> Computed:
    """A table in one piece."""
    first = parts[0]
    value, error, sizes = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("value", "error", "sizes")
    )
    return Computed(value, error, first.norm, first.heads, first.least, sizes)


def unit(dtype: torch.dtype, terms: int = 0) -> float:
    """How far a sum of products may be off, relative to the sizes of its terms; a rounding is u = eps/2."""
    return (terms + 8) * torch.finfo(dtype).eps / 2 * 1.01


def nothing(dtype: torch.dtype) -> float:
    """More than a row of results may lack because numbers below the smallest normal one were lost.

    At most 2²⁰ terms of up to 2²⁰ entries lack ``tiny`` each.
    """
    return torch.finfo(dtype).tiny * 2.0**30


@singledispatch
def step(op: Op, exact: Op, value: Tensor, *inputs: Computed) -> Computed:
    """The error of a computed `value`; `op` has the weights of the run, `exact` the true ones."""
    raise BuffetError(f"runs with an account of rounding do not know {type(op).__name__}")


def _absolute(op: Affine | Diagonal, x: Computed) -> Tensor:
    """What weights may have lost, absolutely, on the way to single precision."""
    return nothing(x.value.dtype) * x.size


@step.register
def _affine(op: Affine, exact: Affine, value: Tensor, x: Computed) -> Computed:
    stretch = exact.largest_column if x.norm == 1 else exact.spectral_norm
    rounded = unit(value.dtype, op.weight.shape[1]) * (exact.frobenius_norm * x.size + exact.bias_norm)
    return Computed(value, stretch * x.rows + rounded + _absolute(op, x), least=exact.least)


def affine_by_heads(op: Affine, exact: Affine, heads: int, x: Computed) -> Computed:
    """The same for what every head has of a row: of matrices of low rank that is no more than of the row."""
    value = op.evaluate(x.value)
    stretch, sizes, bias = norms_by_heads(exact, heads, x.rows)
    rounded = unit(value.dtype, op.weight.shape[1]) * (sizes * x.size.unsqueeze(-1) + bias)
    error = stretch * x.rows.unsqueeze(-1) + rounded + _absolute(op, x).unsqueeze(-1)
    return Computed(value, error, heads=heads)


def norms_by_heads(exact: Affine, heads: int, like: Tensor) -> tuple[Tensor, ...]:
    """The spectral and the Frobenius norm of every head's part of the weights, and the norm of its bias."""
    parts = exact.parts(heads)
    norms = [(part.spectral_norm, part.frobenius_norm, part.bias_norm) for part in parts]
    return like.new_tensor(norms).unbind(-1)


@step.register
def _diagonal(op: Diagonal, exact: Diagonal, value: Tensor, x: Computed) -> Computed:
    largest = exact.largest_weight
    size = largest * x.size + exact.bias_norm
    lost = unit(value.dtype)
    return Computed(
        value, largest * x.rows + lost * size + _absolute(op, x), known=(1 + lost) * size + _absolute(op, x)
    )


@step.register
def _center(op: Center, exact: Center, value: Tensor, x: Computed) -> Computed:
    lost = unit(value.dtype, value.shape[-1])
    return Computed(value, x.rows + lost * x.size, known=(1 + lost) * x.size + nothing(value.dtype))


@step.register
def _offset(op: Offset, exact: Offset, value: Tensor, x: Computed) -> Computed:
    lost = unit(value.dtype) * (x.size + row_norm(op.value))
    return Computed(value, x.rows + lost)


@step.register
def _first(op: First, exact: First, value: Tensor, x: Computed) -> Computed:
    return Computed(value, x.rows[..., :1], known=x.size[..., :1])


@step.register
def _mean(op: Mean, exact: Mean, value: Tensor, x: Computed) -> Computed:
    rounded = unit(value.dtype, x.value.shape[-2]) * x.size
    return Computed(value, (x.rows + rounded).mean(-1, keepdim=True))


@step.register
def _add(op: Add, exact: Add, value: Tensor, x: Computed, y: Computed) -> Computed:
    size = row_norm(value)
    return Computed(value, x.rows + y.rows + unit(value.dtype) * size, known=size)


@step.register
def _linear(op: Linear, exact: Linear, value: Tensor, x: Computed) -> Computed:
    """Any other linear operation, by the sizes of its coefficients: no entry is off by more than its row."""
    wide = x.value.double()
    error = x.rows.unsqueeze(-1).expand_as(wide)
    grown = exact.largest_deviation((), error + unit(value.dtype) * wide.abs())
    own = residual(exact, value.double(), wide)
    if value.dtype != torch.float64:
        own = own * (torch.finfo(value.dtype).eps / torch.finfo(torch.float64).eps)
    return Computed(value, row_norm(grown + own))


@step.register
def _apply(op: Apply, exact: Apply, value: Tensor, x: Computed) -> Computed:
    function = FUNCTIONS[op.function]
    info = torch.finfo(value.dtype)
    # What is not finite must not be forgotten where a function makes a number of it.
    size = x.size if x.known is None else x.size + 0.0 * row_norm(x.value)
    rows = x.rows + 0.0 * size
    if op.function == "square":
        grown = rows * (2 * size + rows)  # Σ|x'² − x²| ≤ ‖x' − x‖ ‖x' + x‖
        return Computed(value, grown + 2 * info.eps * size * size, norm=1.0, least=0.0)
    if op.function in STEEPEST:  # |f(x)| ≤ |x|
        own = (function.relative + function.condition) * info.eps * size
        known = size * (1 + UP) + own + nothing(value.dtype)
        return Computed(value, STEEPEST[op.function] * rows + own * (1 + UP), known=known)
    near = x.value.double()
    reach = rows.unsqueeze(-1) * (1 + UP) + 2 * torch.finfo(torch.float64).eps * near.abs()
    low, high = function.image(torch.stack([(near - reach).clamp_min(x.least * (1 - UP)), near + reach]))
    wide = value.double()
    off = torch.maximum((high - wide).abs(), (wide - low).abs()) + UP * (high - low)
    return Computed(value, row_norm(off))


@step.register
def _rescale(op: Rescale, exact: Rescale, value: Tensor, x: Computed, y: Computed) -> Computed:
    """``x'y' − xy = (x' − x)y' + x(y' − y)``, y by groups: no entry of it is larger than its row."""
    largest = y.value.abs().amax(-1).double()
    grown = x.rows * (largest + y.rows) + x.size * y.rows
    return Computed(value, op.scale * (grown + unit(value.dtype) * x.size * largest))
