"""The operations of a network (`operation` says what one is)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.network.functions import FUNCTIONS
from buffet.network.norms import frobenius, largest_column, spectral
from buffet.network.operation import Columns, Linear, Op


@dataclass(frozen=True, eq=False)
class Affine(Linear):
    """Per token, ``y = W x + b``; no entry falls below `least`, whatever the bounds of x say."""

    weight: Float[Tensor, "out in"]
    bias: Float[Tensor, "out"]
    least: float = -math.inf

    @property
    def floor(self) -> float:
        return self.least

    @cached_property
    def spectral_norm(self) -> float:
        """No difference of inputs is stretched by more, in the Euclidean norm."""
        return spectral(self.weight)

    @cached_property
    def frobenius_norm(self) -> float:
        return frobenius(self.weight)

    @cached_property
    def bias_norm(self) -> float:
        return frobenius(self.bias)

    @cached_property
    def largest_column(self) -> float:
        """No difference of inputs is stretched by more, from the L1 to the Euclidean norm."""
        return largest_column(self.weight)

    @cached_property
    def _parts(self) -> dict[int, tuple[Affine, ...]]:
        return {}

    def parts(self, count: int) -> tuple[Affine, ...]:
        """Its `count` equal parts by features of the output, such as heads."""
        if count not in self._parts:
            rows = zip(self.weight.chunk(count), self.bias.chunk(count), strict=True)
            self._parts[count] = tuple(Affine(weight, bias) for weight, bias in rows)
        return self._parts[count]

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(inputs[0], self.weight, self.bias)

    def coefficients(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype)

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return matrix_product(coefs, x)

    def act_transposed(self, coefs: Tensor, x: Tensor) -> Tensor:
        return matrix_product(coefs.mT, x)


@dataclass(frozen=True, eq=False)
class Diagonal(Linear):
    """Per token, ``y = w ⊙ x + b``: the trainable part of a LayerNorm."""

    weight: Float[Tensor, "features"]
    bias: Float[Tensor, "features"]

    @cached_property
    def largest_weight(self) -> float:
        return float(self.weight.abs().max())

    @cached_property
    def bias_norm(self) -> float:
        return frobenius(self.bias)

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return torch.addcmul(self.bias, inputs[0], self.weight)

    def coefficients(self, x: Tensor) -> Tensor:
        return self.weight.to(x.dtype)[:, None]

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return x * coefs

    act_transposed = act


@dataclass(frozen=True, eq=False)
class Center(Linear):
    """Per token, ``y = x − mean(x)``: a LayerNorm without variance, before its `Diagonal`."""

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] - inputs[0].mean(-1, keepdim=True)

    def largest(self, *values: Tensor) -> Tensor:
        return values[0].abs() + values[0].abs().mean(-1, keepdim=True)

    def coefficients(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        return torch.eye(width, dtype=x.dtype, device=x.device) - 1 / width

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return matrix_product(coefs, x)

    def forth(self, coefs: Tensor, x: Tensor) -> Tensor:
        return torch.sub(x, x.sum(-2, keepdim=True), alpha=1 / x.shape[-2])

    act_transposed = forth  # the matrix is symmetric

    def largest_deviation(self, clean: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        return inputs[0] + inputs[0].mean(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Offset(Linear):
    """``y = x + value`` with a constant for every token and feature of one particular input."""

    increasing: ClassVar[bool] = True
    value: Float[Tensor, "tokens features"]

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] + self.value

    def coefficients(self, x: Tensor) -> Tensor:
        return x.new_ones(())

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return x

    act_transposed = act


@dataclass(frozen=True, eq=False)
class First(Linear):
    """The first token alone, which classifiers read.

    Rows of the one token that is left read the same token of the input.
    """

    increasing: ClassVar[bool] = True

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0][..., :1, :]

    def reads(self, place: int, wanted: int, tokens: int) -> int:
        return 1

    def coefficients(self, x: Tensor) -> Tensor:
        return x.new_ones(())

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return x[..., :1, :, :]

    def act_transposed(self, coefs: Tensor, x: Tensor) -> Tensor:
        return x

    @property
    def per_token(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class Mean(Linear):
    """The mean of all tokens that are not masked."""

    mixes: ClassVar[bool] = True
    increasing: ClassVar[bool] = True

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        x = inputs[0]
        if mask is None:
            return self.coefficients(x) @ x
        return (mask.to(x.dtype) / mask.sum(-1, keepdim=True))[..., None, :] @ x

    def reads(self, place: int, wanted: int, tokens: int) -> int:
        return tokens

    def coefficients(self, x: Tensor) -> Tensor:
        return x.new_full((1, x.shape[-2]), 1 / x.shape[-2])

    def act(self, coefs: Tensor, x: Tensor) -> Tensor:
        return (coefs @ x.flatten(-2)).unflatten(-1, x.shape[-2:])

    def act_transposed(self, coefs: Tensor, x: Tensor) -> Tensor:
        return coefs.mT.unsqueeze(-1) * x


@dataclass(frozen=True, eq=False)
class Add(Op):
    """The residual connection."""

    linear: ClassVar[bool] = True
    sums: ClassVar[bool] = True

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return inputs[0] + inputs[1]

    def largest_deviation(self, clean: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        return inputs[0] + inputs[1]


@dataclass(frozen=True, eq=False)
class Apply(Op):
    """A function of one variable, element by element: a name in `functions.FUNCTIONS`."""

    exact_box: ClassVar[bool] = True
    function: str

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        return FUNCTIONS[self.function].value(inputs[0])


@dataclass(frozen=True, eq=False)
class Bilinear(Op):
    """A sum of products ``z = scale · Σ x·y`` of two values, described by an index pattern.

    `x`, `y`, `out` name the axes of the three values after their features are split into heads or groups, and
    `terms` those of a single product. The first letter of `x` and `out` is their token axis ``i``.
    """

    sums: ClassVar[bool] = True
    heads: int = 1
    scale: float = 1.0
    x: ClassVar[str]
    y: ClassVar[str]
    out: ClassVar[str]
    terms: ClassVar[str]

    def reads(self, place: int, wanted: int, tokens: int) -> int:
        return tokens if place == 1 and "i" not in self.y else wanted

    def largest_deviation(self, clean: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        """``(x + a)(y + b) − x·y = y·a + (x + a)·b``, of sizes only."""
        a, b = inputs
        x, y = (value.abs() for value in clean)
        return self.evaluate(x + a, b) + self.evaluate(a, y)

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

    mixes: ClassVar[bool] = True
    x, y, out, terms = "ihk", "jhk", "ihj", "ihjk"


@dataclass(frozen=True, eq=False)
class Mix(Bilinear):
    """Attention output ``o[i,h,k] = Σ_j p[i,h,j] v[j,h,k]``."""

    mixes: ClassVar[bool] = True
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

    def followed(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """The scores: what is known of their differences only makes the lines better."""
        return inputs[:1]

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        scores = inputs[0].unflatten(-1, (self.heads, -1))
        if mask is not None:
            scores = scores.masked_fill(~mask[..., None, None, :], -math.inf)
        return scores.softmax(-1).flatten(-2)


def matrix_product(matrix: Float[Tensor, "... out in"], x: Columns) -> Columns:
    """A matrix times the features of every token: of all tokens together, where features lie side by side."""
    if x.shape[-1] == 1:
        return (x.squeeze(-1) @ matrix.mT).unsqueeze(-1)
    return (x.mT @ matrix.mT).mT if x.stride(-2) == 1 else matrix @ x
