"""The network on many concrete inputs at once, with a bound on how far rounding took every result.

Next to every row of every value there is an *error*: the exact network, in real numbers, has a row within
that distance of the computed one. An operation hands on the errors of what it read, by how much it can
stretch a difference, and adds what its own roundings may come to:

    affine         ‖W(x' − x)‖ ≤ ‖W‖₂ ‖x' − x‖            + n·u·(‖W‖_F ‖x‖ + ‖b‖)
    scores         |q'·k' − q·k| ≤ ‖q‖ e_k + ‖k‖ e_q + e_q e_k   + n·u·‖q‖ ‖k‖
    softmax        Σ|p' − p| ≤ e^{2δ} − 1, if no score is off by more than δ
    mixed values   ‖Σ p'v' − Σ p v‖ ≤ ‖v‖ Σ|p' − p| + √(Σ p e_v²) + …

Norms of whole rows, unlike sums of sizes, keep track of what cancels, and they need no product of matrices: a
run with errors takes little more time than one without. Errors are computed in float64 and rounded up. In
single precision they are larger, but that decides nearly all inputs, and twice as fast.

Absolute constants make up for underflow. What overflows has an error that is infinite or NaN, and proves
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, singledispatch

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from buffet.errors import BuffetError
from buffet.network import (
    Add,
    Affine,
    Apply,
    Center,
    Diagonal,
    First,
    Input,
    Linear,
    Mean,
    Mix,
    Offset,
    Op,
    Program,
    Rescale,
    Scores,
    Softmax,
)
from buffet.network.functions import FUNCTIONS
from buffet.network.norms import UP, frobenius
from buffet.propagation.rounding import residual

STEEPEST = {"relu": 1.0, "tanh": 1.0, "gelu": 1.13, "gelu_tanh": 1.13}
"""How much functions stretch differences at most; of others, the range over every entry is taken."""
EXP_UNITS = 64
"""Units in the last place by which the exponentials inside a softmax may be off: PyTorch allows itself 20
in single precision."""
BLOCK = 256
"""Of every so many keys, or more, the weights are brought into line with those of the others once more."""
TABLE_ROWS = 2**13
"""Rows that are looked at together, on their own."""
WIDEST_SINGLE = 4096
"""Sums of more terms are left to double precision."""
NUMBERS = 2**19
"""About as many numbers of a value are computed at a time: they stay in a cache."""


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
        return _norm(self.value.unflatten(-1, (self.heads, -1)) if self.heads else self.value)

    @cached_property
    def size(self) -> Float[Tensor, "... tokens"]:
        """The Euclidean norm of every row, or a little more."""
        return _root(self.sizes) if self.heads else self.sizes

    @cached_property
    def rows(self) -> Float[Tensor, "... tokens"]:
        """The error of every row in the Euclidean norm."""
        return _root(self.error) if self.heads else self.error

    def by_heads(self, heads: int) -> tuple[Tensor, Tensor]:
        """The error and the size of what every head has of a row: no more than of the row."""
        if self.heads == heads:
            return self.error, self.sizes
        return self.rows.unsqueeze(-1), _norm(self.value.unflatten(-1, (heads, -1)))

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
        lost = _unit(dtype) * near.sizes + _nothing(dtype)
        return replace(near, error=(self.error + lost) * (1 + UP), known=near.sizes)


def _root(parts: Float[Tensor, "... parts"]) -> Tensor:
    """The Euclidean norm of a whole from those of its parts."""
    return torch.linalg.vector_norm(parts, dim=-1) * (1 + UP)


def _norm(value: Tensor, *, least: bool = False) -> Tensor:
    """The Euclidean norm along the last axis, rounded up (or down to what it is at least), in float64."""
    info, terms = torch.finfo(value.dtype), value.shape[-1]
    found = torch.linalg.vector_norm(value, dim=-1).double()
    share, floor = (terms + 8) * info.eps, terms * math.sqrt(info.tiny)
    return (found * (1 - share) - floor).clamp_min(0) if least else found * (1 + share) + floor


class RigorousRun:
    """A program (float64) that ends in margins, to be run on many inputs in one precision."""

    def __init__(self, program: Program, dtype: torch.dtype) -> None:
        self.exact = program
        self.dtype = dtype
        self.program = program if dtype == torch.float64 else program.to(dtype)
        self._shared = _shared(program)
        self._attention = _attentions(program)
        self._heads = {
            source: scores.heads for sources, scores in self._attention.values() for source in sources
        }
        skipped = {i for i, node in enumerate(program.nodes) if isinstance(node.op, Scores | Softmax)}
        self._order = [i for i in range(len(program.nodes)) if i not in self._shared | skipped]
        last = {source: place for place in self._order for source in self._inputs(place)}
        self._done: list[list[int]] = [[] for _ in program.nodes]  # what nobody reads after a node
        for source, reader in last.items():
            self._done[reader].append(source)

    @staticmethod
    def suits_single(program: Program, width: int) -> bool:
        """Whether single precision is as exact as is reckoned with."""
        widest = max([width, *(max(n.op.weight.shape) for n in program.nodes if isinstance(n.op, Affine))])
        return widest <= WIDEST_SINGLE and torch.get_float32_matmul_precision() == "highest"

    def table(self, rows: Float[Tensor, "rows width"]) -> dict[int, Computed]:
        """What depends on single rows only, of all rows that occur; float64 `rows` are what is meant.

        Done once for all points, it is done in double precision: what is lost first grows most.
        """
        read = {source for place in self._order for source in self._inputs(place)}
        read.add(len(self.program.nodes) - 1)
        parts: dict[int, list[Computed]] = {place: [] for place in sorted(read & self._shared)}
        for some in rows.split(TABLE_ROWS):
            found = {0: Computed(some, torch.zeros_like(some[:, 0]))}
            for place in sorted(self._shared - {0}):
                found[place] = self._step(self.exact, place, found)
            for place, kept in parts.items():
                kept.append(found[place].to(self.dtype))
        return {place: _joined(kept) for place, kept in parts.items()}

    def margins(
        self, table: dict[int, Computed], index: Int[Tensor, "points tokens"]
    ) -> tuple[Float[Tensor, "points others"], Float[Tensor, " points"]]:
        """The margins at points whose tokens are rows of the table, and how far each may be off (float64).

        Where they are not finite, nothing is known: the error is NaN or infinite.
        """
        known: dict[int, Computed] = {}

        def read(source: int) -> Computed:
            if source not in known:
                known[source] = table[source].gather(index)
            return known[source]

        for place in self._order:
            inputs = {source: read(source) for source in self._inputs(place)}
            known[place] = self._step(self.program, place, inputs)
            for source in self._done[place]:
                known.pop(source, None)
        last = read(len(self.program.nodes) - 1)
        value, error = last.value[:, 0].double(), last.rows[:, 0]
        return value, error + 0.0 * value.sum(-1)

    def _inputs(self, place: int) -> tuple[int, ...]:
        """What a node reads; the mixed values of an attention its queries, keys and values."""
        found = self._attention.get(place)
        return found[0] if found else self.program.nodes[place].inputs

    def _step(self, program: Program, place: int, known: dict[int, Computed]) -> Computed:
        """The value of a node, and what it may be off."""
        op, exact = program.nodes[place].op, self.exact.nodes[place].op
        inputs = [known[source] for source in self._inputs(place)]
        if place in self._attention:
            assert isinstance(op, Mix)
            found = attention(op, self._attention[place][1], *inputs)
        elif isinstance(op, Affine) and isinstance(exact, Affine) and place in self._heads:
            found = affine_by_heads(op, exact, self._heads[place], *inputs)
        else:
            found = step(op, exact, op.evaluate(*(c.value for c in inputs)), *inputs)
        return replace(found, error=found.error * (1 + UP) + _nothing(found.value.dtype))


def _shared(program: Program) -> set[int]:
    """Nodes each of whose rows depends on one row of the input only, and on all alike."""
    found: set[int] = set()
    for index, node in enumerate(program.nodes):
        alone = isinstance(node.op, Affine | Diagonal | Center | Apply | Add | Rescale)
        if isinstance(node.op, Input) or (alone and found.issuperset(node.inputs)):
            found.add(index)
    return found


def _attentions(program: Program) -> dict[int, tuple[tuple[int, ...], Scores]]:
    """Where values are mixed by the softmax of scores: the queries, keys and values, and the scores."""
    found: dict[int, tuple[tuple[int, ...], Scores]] = {}
    for place, node in enumerate(program.nodes):
        if isinstance(node.op, Mix):
            weights, values = node.inputs
            softmax = program.nodes[weights]
            scores = program.nodes[softmax.inputs[0]] if isinstance(softmax.op, Softmax) else softmax
            if not isinstance(scores.op, Scores) or scores.op.heads != node.op.heads:
                raise BuffetError("runs with an account of rounding need the softmax of scores in attention")
            found[place] = (*scores.inputs, values), scores.op
    return found


def _joined(parts: Sequence[Computed]) -> Computed:
    """A table in one piece."""
    first = parts[0]
    value, error, sizes = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("value", "error", "sizes")
    )
    return Computed(value, error, first.norm, first.heads, first.least, sizes)


def _unit(dtype: torch.dtype, terms: int = 0) -> float:
    """How far a sum of products may be off, relative to the sizes of its terms; a rounding is u = eps/2."""
    return (terms + 8) * torch.finfo(dtype).eps / 2 * 1.01


def _nothing(dtype: torch.dtype) -> float:
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
    return _nothing(x.value.dtype) * x.size


@step.register
def _affine(op: Affine, exact: Affine, value: Tensor, x: Computed) -> Computed:
    stretch = exact.largest_column if x.norm == 1 else exact.spectral_norm
    rounded = _unit(value.dtype, op.weight.shape[1]) * (exact.frobenius_norm * x.size + frobenius(exact.bias))
    return Computed(value, stretch * x.rows + rounded + _absolute(op, x), least=exact.least)


def affine_by_heads(op: Affine, exact: Affine, heads: int, x: Computed) -> Computed:
    """The same for what every head has of a row: of matrices of low rank that is no more than of the row."""
    value, parts = op.evaluate(x.value), exact.parts(heads)
    norms = [(part.spectral_norm, part.frobenius_norm, frobenius(part.bias)) for part in parts]
    stretch, sizes, bias = x.rows.new_tensor(norms).unbind(-1)
    rounded = _unit(value.dtype, op.weight.shape[1]) * (sizes * x.size.unsqueeze(-1) + bias)
    error = stretch * x.rows.unsqueeze(-1) + rounded + _absolute(op, x).unsqueeze(-1)
    return Computed(value, error, heads=heads)


@step.register
def _diagonal(op: Diagonal, exact: Diagonal, value: Tensor, x: Computed) -> Computed:
    largest = float(exact.weight.abs().max())
    size = largest * x.size + frobenius(exact.bias)
    unit = _unit(value.dtype)
    return Computed(
        value, largest * x.rows + unit * size + _absolute(op, x), known=(1 + unit) * size + _absolute(op, x)
    )


@step.register
def _center(op: Center, exact: Center, value: Tensor, x: Computed) -> Computed:
    unit = _unit(value.dtype, value.shape[-1])
    return Computed(value, x.rows + unit * x.size, known=(1 + unit) * x.size + _nothing(value.dtype))


@step.register
def _offset(op: Offset, exact: Offset, value: Tensor, x: Computed) -> Computed:
    lost = _unit(value.dtype) * (x.size + _norm(op.value))
    return Computed(value, x.rows + lost)


@step.register
def _first(op: First, exact: First, value: Tensor, x: Computed) -> Computed:
    return Computed(value, x.rows[..., :1], known=x.size[..., :1])


@step.register
def _mean(op: Mean, exact: Mean, value: Tensor, x: Computed) -> Computed:
    rounded = _unit(value.dtype, x.value.shape[-2]) * x.size
    return Computed(value, (x.rows + rounded).mean(-1, keepdim=True))


@step.register
def _add(op: Add, exact: Add, value: Tensor, x: Computed, y: Computed) -> Computed:
    size = _norm(value)
    return Computed(value, x.rows + y.rows + _unit(value.dtype) * size, known=size)


@step.register
def _linear(op: Linear, exact: Linear, value: Tensor, x: Computed) -> Computed:
    """Any other linear operation, by the sizes of its coefficients: no entry is off by more than its row."""
    wide = x.value.double()
    error = x.rows.unsqueeze(-1).expand_as(wide)
    grown = exact.largest_deviation((), error + _unit(value.dtype) * wide.abs())
    own = residual(exact, value.double(), wide)
    if value.dtype != torch.float64:
        own = own * (torch.finfo(value.dtype).eps / torch.finfo(torch.float64).eps)
    return Computed(value, _norm(grown + own))


@step.register
def _apply(op: Apply, exact: Apply, value: Tensor, x: Computed) -> Computed:
    function = FUNCTIONS[op.function]
    info = torch.finfo(value.dtype)
    # What is not finite must not be forgotten where a function makes a number of it.
    size = x.size if x.known is None else x.size + 0.0 * _norm(x.value)
    rows = x.rows + 0.0 * size
    if op.function == "square":
        grown = rows * (2 * size + rows)  # Σ|x'² − x²| ≤ ‖x' − x‖ ‖x' + x‖
        return Computed(value, grown + 2 * info.eps * size * size, norm=1.0, least=0.0)
    if op.function in STEEPEST:  # |f(x)| ≤ |x|
        own = (function.relative + function.condition) * info.eps * size
        known = size * (1 + UP) + own + _nothing(value.dtype)
        return Computed(value, STEEPEST[op.function] * rows + own * (1 + UP), known=known)
    near = x.value.double()
    reach = rows.unsqueeze(-1) * (1 + UP) + 2 * torch.finfo(torch.float64).eps * near.abs()
    low, high = function.image(torch.stack([(near - reach).clamp_min(x.least * (1 - UP)), near + reach]))
    wide = value.double()
    off = torch.maximum((high - wide).abs(), (wide - low).abs()) + UP * (high - low)
    return Computed(value, _norm(off))


@step.register
def _rescale(op: Rescale, exact: Rescale, value: Tensor, x: Computed, y: Computed) -> Computed:
    """``x'y' − xy = (x' − x)y' + x(y' − y)``, y by groups: no entry of it is larger than its row."""
    largest = y.value.abs().amax(-1).double()
    grown = x.rows * (largest + y.rows) + x.size * y.rows
    return Computed(value, op.scale * (grown + _unit(value.dtype) * x.size * largest))


def attention(op: Mix, scores: Scores, q: Computed, k: Computed, v: Computed) -> Computed:
    """Values mixed by the softmax of scores; of keys and values, for every head the largest size and error.

    A score is off by δ or less: by what queries and keys are, and their product's rounding. Weights of such
    scores, ``p'_j = p_j e^{Δ_j} / Σ p e^Δ`` with ``|Δ_j| ≤ δ``, move the mean ``o = Σ p_j v_j`` by

        ‖Σ_j p'_j (v_j − o)‖  =  ‖Σ_j p_j (e^{Δ_j} − 1)(v_j − o)‖ / Σ p e^Δ
                              ≤  e^δ (e^δ − 1) · √(Σ p_j ‖v_j‖² − ‖o‖²)  ≤  e^δ (e^δ − 1) · max_j ‖v_j‖

    Other values move it by no more than the one that is off most, as weights add up to 1. Computed weights
    are off by ρ, relative to themselves: exponents err in units of the scores' largest difference.
    """
    heads = op.heads
    value = _mixed(scores.scale, *(c.value.unflatten(-1, (heads, -1)) for c in (q, k, v)))
    dtype, keys, terms = value.dtype, k.value.shape[-2], q.value.shape[-1] // heads
    info, scale = torch.finfo(dtype), abs(scores.scale)
    own, queries = q.by_heads(heads)
    (others, size), (carried, largest) = (
        [part.amax(-2, keepdim=True) for part in c.by_heads(heads)] for c in (k, v)
    )
    product = queries * size
    delta = scale * (queries * others + own * (size + others) + _unit(dtype, terms) * product)
    delta = delta * (1 + UP) + _nothing(dtype)
    apart = 2 * scale * product
    units = keys + EXP_UNITS * (1 + keys // BLOCK) + 4 * apart.clamp_max(800.0)
    rho = units * info.eps + keys * 4 * info.tiny + 0.0 * apart
    moved = (delta.exp() * torch.expm1(delta) + rho + _unit(dtype, keys) * (1 + rho)) * largest
    known = (1 + rho + _unit(dtype, keys)) * largest
    error, known = abs(op.scale) * _root(moved + carried), abs(op.scale) * _root(known)
    return Computed(value if op.scale == 1 else op.scale * value, error, known=known + _nothing(dtype))


def _mixed(
    scale: float, *parts: Float[Tensor, "points _ heads _"]
) -> Float[Tensor, "points queries features"]:
    q, k, v = (part.transpose(-3, -2) for part in parts)
    return scaled_dot_product_attention(q, k, v, scale=scale).transpose(-3, -2).flatten(-2)


def batch_size(program: Program, tokens: int, width: int) -> int:
    """How many points are run at a time."""
    widest = max([width, *(len(n.op.weight) for n in program.nodes if isinstance(n.op, Affine))])
    heads = max([1, *(n.op.heads for n in program.nodes if isinstance(n.op, Scores))])
    return max(1, NUMBERS // (tokens * max(widest, heads * tokens)))


def multiplications(program: Program, tokens: int) -> int:
    """About how many numbers are multiplied in a run: what its time goes with."""
    lengths: list[int] = []
    widths: list[int] = []
    total = 0
    for node in program.nodes:
        length = tokens if node.is_input else lengths[node.inputs[0]]
        width = 0 if node.is_input else widths[node.inputs[0]]
        if isinstance(node.op, First | Mean):
            length = 1
        elif isinstance(node.op, Affine):
            width = node.op.weight.shape[0]
            total += length * node.op.weight.numel()
        elif isinstance(node.op, Scores):
            total += length * tokens * width
            width = tokens * node.op.heads
        elif isinstance(node.op, Mix):
            width = widths[node.inputs[1]]
            total += length * tokens * width
        lengths.append(length)
        widths.append(width)
    return total
