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
from dataclasses import dataclass
from functools import cached_property, singledispatch

import torch
from jaxtyping import Float, Int
from torch import Tensor

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
WIDEST_SINGLE = 4096
"""Sums of more terms are left to double precision."""
NUMBERS = 2**18
"""About as many numbers of a value are computed at a time: they stay in a cache."""


@dataclass(frozen=True, eq=False)
class Computed:
    """A value, and how far the exact one may be from it.

    `error` is by token, ‖exact − value‖₂ of its row; for scores and the weights of a softmax it is by token
    and head, the largest difference of a head (`norm` = ∞) or their sum (1). Per token, a bound of the sum
    (1) is one of the Euclidean norm too.
    """

    value: Float[Tensor, "... tokens features"]
    error: Float[Tensor, "... tokens"] | Float[Tensor, "... tokens heads"]
    norm: float = 2.0
    headwise: bool = False
    least: float = -math.inf  # the exact value is nowhere smaller
    tilt: tuple[Tensor, Tensor] | None = None
    """Of the weights of a softmax, by token and head: how far the scores they stand for may be from the exact
    ones, and how far the weights are from those of these scores, relative to themselves."""

    @cached_property
    def size(self) -> Float[Tensor, "... tokens"]:
        """The Euclidean norm of every row, or a little more."""
        return _norm(self.value)

    def sizes(self, heads: int) -> Float[Tensor, "... tokens heads"]:
        """The same of what every head has of a row."""
        return _norm(self.value.unflatten(-1, (heads, -1)))

    @cached_property
    def rows(self) -> Float[Tensor, "... tokens"]:
        """The error of every row in the Euclidean norm."""
        if not self.headwise:
            return self.error
        keys = self.value.shape[-1] // self.error.shape[-1]
        each = self.error * (math.sqrt(keys) if self.norm == math.inf else 1.0)
        return torch.linalg.vector_norm(each, dim=-1) * (1 + UP)

    def by_heads(self, heads: int, norm: float) -> Float[Tensor, "... tokens heads"]:
        """The error of every head in the norm 1 or ∞: at most √keys times the Euclidean one, or that."""
        if self.headwise and self.norm == norm:
            return self.error
        keys = self.value.shape[-1] // heads
        wide = self.rows * (math.sqrt(keys) * (1 + UP) if norm == 1 else 1.0)
        return wide.unsqueeze(-1).expand(*wide.shape, heads)

    def gather(self, index: Int[Tensor, "points tokens"]) -> Computed:
        """Rows of a table as the tokens of points."""
        found = Computed(self.value[index], self.error[index], self.norm, self.headwise, self.least)
        if "size" in vars(self):
            vars(found)["size"] = self.size[index]
        return found


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
        last = {source: i for i, node in enumerate(program.nodes) for source in node.inputs}
        self._done: list[list[int]] = [[] for _ in program.nodes]  # what nobody reads after a node
        for source, reader in last.items():
            self._done[reader].append(source)

    @staticmethod
    def suits_single(program: Program, width: int) -> bool:
        """Whether single precision is as exact as is reckoned with."""
        widest = max([width, *(max(n.op.weight.shape) for n in program.nodes if isinstance(n.op, Affine))])
        return widest <= WIDEST_SINGLE and torch.get_float32_matmul_precision() == "highest"

    def table(self, rows: Float[Tensor, "rows width"]) -> dict[int, Computed]:
        """What depends on single rows only, of all rows that occur; float64 `rows` are what is meant."""
        value = rows.to(self.dtype)
        lost = _unit(self.dtype) * _norm(value) + _nothing(self.dtype)
        error = torch.zeros_like(lost) if self.dtype == rows.dtype else lost
        found = {0: Computed(value, error)}
        for index in sorted(self._shared - {0}):
            found[index] = self._step(index, found)
        return found

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

        for place, node in enumerate(self.program.nodes):
            if place in self._shared:
                continue
            known[place] = self._step(place, {source: read(source) for source in node.inputs})
            for source in self._done[place]:
                known.pop(source, None)
        last = known.get(len(self.program.nodes) - 1) or read(len(self.program.nodes) - 1)
        value, error = last.value[:, 0].double(), last.rows[:, 0]
        return value, error + 0.0 * value.sum(-1)

    def _step(self, place: int, known: dict[int, Computed]) -> Computed:
        node = self.program.nodes[place]
        inputs = [known[source] for source in node.inputs]
        value = node.op.evaluate(*(c.value for c in inputs))
        found = step(node.op, self.exact.nodes[place].op, value, *inputs)
        error = found.error * (1 + UP) + _nothing(self.dtype)
        if not isinstance(node.op, Scores | Softmax):
            # Whatever is not finite must not be forgotten, not even by a function that makes a number of it.
            # Of scores, softmax sees to that.
            error = error + 0.0 * found.size
        done = Computed(value, error, found.norm, found.headwise, found.least, found.tilt)
        if "size" in vars(found):
            vars(done)["size"] = found.size
        return done


def _shared(program: Program) -> set[int]:
    """Nodes each of whose rows depends on one row of the input only, and on all alike."""
    found: set[int] = set()
    for index, node in enumerate(program.nodes):
        alone = isinstance(node.op, Affine | Diagonal | Center | Apply | Add | Rescale)
        if isinstance(node.op, Input) or (alone and found.issuperset(node.inputs)):
            found.add(index)
    return found


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
    dtype = value.dtype
    stretch = exact.largest_column if x.norm == 1 and not x.headwise else exact.spectral_norm
    rounded = _unit(dtype, op.weight.shape[1]) * (exact.frobenius_norm * x.size + frobenius(exact.bias))
    return Computed(value, stretch * x.rows + rounded + _absolute(op, x), least=exact.least)


@step.register
def _diagonal(op: Diagonal, exact: Diagonal, value: Tensor, x: Computed) -> Computed:
    largest = float(exact.weight.abs().max())
    rounded = _unit(value.dtype) * (largest * x.size + frobenius(exact.bias))
    return Computed(value, largest * x.rows + rounded + _absolute(op, x))


@step.register
def _center(op: Center, exact: Center, value: Tensor, x: Computed) -> Computed:
    return Computed(value, x.rows + _unit(value.dtype, value.shape[-1]) * x.size)


@step.register
def _offset(op: Offset, exact: Offset, value: Tensor, x: Computed) -> Computed:
    lost = _unit(value.dtype) * (x.size + _norm(op.value))
    return Computed(value, x.rows + lost)


@step.register
def _first(op: First, exact: First, value: Tensor, x: Computed) -> Computed:
    return Computed(value, x.rows[..., :1])


@step.register
def _mean(op: Mean, exact: Mean, value: Tensor, x: Computed) -> Computed:
    rounded = _unit(value.dtype, x.value.shape[-2]) * x.size
    return Computed(value, (x.rows + rounded).mean(-1, keepdim=True))


@step.register
def _add(op: Add, exact: Add, value: Tensor, x: Computed, y: Computed) -> Computed:
    return Computed(value, x.rows + y.rows + _unit(value.dtype) * (x.size + y.size))


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
    if op.function == "square":
        grown = x.rows * (2 * x.size + x.rows)  # Σ|x'² − x²| ≤ ‖x' − x‖ ‖x' + x‖
        own = 2 * info.eps * x.size * x.size
        return Computed(value, grown + own, norm=1.0, least=0.0)
    if op.function in STEEPEST:
        own = info.eps * function.relative * _norm(value) if function.relative else torch.zeros_like(x.rows)
        return Computed(value, STEEPEST[op.function] * x.rows + own + function.condition * info.eps * x.size)
    near = x.value.double()
    reach = x.rows.unsqueeze(-1) * (1 + UP) + 2 * torch.finfo(torch.float64).eps * near.abs()
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


@step.register
def _scores(op: Scores, exact: Scores, value: Tensor, q: Computed, k: Computed) -> Computed:
    """The largest error of a query's scores, by heads; keys at their largest."""
    terms = q.value.shape[-1] // op.heads
    queries, keys = q.sizes(op.heads), k.sizes(op.heads).amax(-2, keepdim=True)
    own, others = q.rows.unsqueeze(-1), k.rows.amax(-1)[..., None, None]
    grown = queries * others + own * (keys + others)
    error = abs(op.scale) * (grown + _unit(value.dtype, terms) * queries * keys)
    return Computed(value, error, norm=math.inf, headwise=True)


@step.register
def _softmax(op: Softmax, exact: Softmax, value: Tensor, scores: Computed) -> Computed:
    """``p'/p`` is between e^{−2δ} and e^{2δ}; exponents err in units of the scores' largest difference."""
    s = scores.value.unflatten(-1, (op.heads, -1))
    low, high = s.aminmax(dim=-1)
    apart = (high.double() - low.double()) * (1 + UP)
    info = torch.finfo(value.dtype)
    units = s.shape[-1] + EXP_UNITS + 4 * apart.clamp_max(800.0)
    own = units * info.eps + s.shape[-1] * 4 * info.tiny + 0.0 * apart
    delta = scores.by_heads(op.heads, math.inf)
    return Computed(value, torch.expm1(2 * delta) + own, norm=1.0, headwise=True, tilt=(delta, own))


@step.register
def _mix(op: Mix, exact: Mix, value: Tensor, p: Computed, v: Computed) -> Computed:
    """Other weights on the same values, and the same weights on other values, over all heads h.

    Weights of scores that are off by δ or less, ``p'_j = p_j e^{Δ_j} / Σ p e^Δ``, move the mean o by

        ‖Σ_j p'_j (v_j − o)‖  =  ‖Σ_j p_j (e^{Δ_j} − 1)(v_j − o)‖ / Σ p e^Δ
                              ≤  e^δ (e^δ − 1) · √(Σ p_j ‖v_j‖² − ‖o‖²)

    Values that are off by e_j move it by ``√Σ_j (max_h p'_hj) e_j²`` or less, as weights add up to 1.
    """
    if p.tilt is None:
        raise BuffetError("runs with an account of rounding need the weights of a softmax in attention")
    delta, rho = p.tilt
    info, weights = torch.finfo(value.dtype), p.value.unflatten(-1, (op.heads, -1))
    tokens, sizes = weights.shape[-1], v.sizes(op.heads)
    largest = sizes.amax(-2, keepdim=True)
    shares = (sizes / largest).square().to(weights.dtype)
    squares = torch.matmul(weights.transpose(-3, -2), shares.transpose(-2, -1).unsqueeze(-1)).squeeze(-1)
    least = _norm(value.unflatten(-1, (op.heads, -1)), least=True) / abs(op.scale)
    lost = rho + _unit(value.dtype, tokens)
    spread = (squares.transpose(-2, -1).double() - (least / largest).square()).clamp_min(0) + 8 * lost
    moved = delta.exp() * torch.expm1(delta) * spread.sqrt() * largest + rho * largest
    rounded = _unit(value.dtype, tokens) * (1 + rho) * largest
    most = v.rows.amax(-1, keepdim=True)
    shares = (v.rows / most).square().nan_to_num(1.0).to(weights.dtype)  # 0/0: no value is off
    carried = (weights.amax(-2) @ shares.unsqueeze(-1)).squeeze(-1).double()
    carried = (carried * (1 + _unit(value.dtype, 2 * tokens)) + tokens * 4 * info.tiny) * most.square()
    carried = carried * ((1 + rho) * (2 * delta).exp()).amax(-1)
    found = torch.linalg.vector_norm(moved + rounded, dim=-1) + carried.sqrt()
    return Computed(value, abs(op.scale) * found)


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
