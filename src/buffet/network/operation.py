"""What an operation of a network is. Each says once what it does; what bounds need to know follows from that.

Every value is a matrix of *tokens × features* (after pooling there is one token), with any number of batch
axes in front. Features of a head-wise value are laid out head by head, so a score matrix is the value
``[query token, (head, key token)]``.

A *linear* operation gives its coefficients and how they act on columns, ``[..., tokens, features, columns]``.
From these follow interval arithmetic, backward and forward substitution, the passes of learning and the
account of rounding. A nonlinear one is replaced by a relaxation of its own (`relaxations`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

Value = Float[Tensor, "... _ _"]
"""``[..., tokens, features]``."""
Columns = Float[Tensor, "... _ _ _"]
"""``[..., tokens, features, columns]``."""


@dataclass(frozen=True, eq=False)
class Op:
    """An operation of the graph; `evaluate` is its exact meaning."""

    linear: ClassVar[bool] = False
    sums: ClassVar[bool] = (
        False  # whether an entry of the output is a sum of products, which rounding changes
    )
    mixes: ClassVar[bool] = False  # whether a token of the output reads several tokens of an input
    exact_box: ClassVar[bool] = False  # whether interval arithmetic says all there is to say of its range

    def evaluate(self, *inputs: Tensor, mask: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    def followed(self, inputs: tuple[int, ...]) -> tuple[int, ...]:
        """The inputs that linear bounds of the output are written in."""
        return inputs

    def reads(self, place: int, wanted: int, tokens: int) -> int:
        """How many of the first tokens of an input the first `wanted` ones of the output depend on."""
        return wanted

    def largest(self, *values: Tensor) -> Tensor:
        """The sum of the sizes of all terms of the output: what its rounding is relative to."""
        return self.map(torch.abs).evaluate(*(value.abs() for value in values))

    def largest_deviation(self, clean: Sequence[Value], *inputs: Value) -> Value:
        """How far the output of an operation that sums may deviate, where its inputs deviate by no more.

        Nothing cancels in it.
        """
        raise NotImplementedError(type(self).__name__)

    def map(self, change: Callable[[Tensor], Tensor]) -> Op:
        """The same operation with its weights changed."""
        changed = {
            f.name: change(value)
            for f in fields(self)
            if isinstance(value := getattr(self, f.name), Tensor) and value.is_floating_point()
        }
        return replace(self, **changed) if changed else self

    def to(self, target: torch.dtype | torch.device) -> Op:
        """The same operation with its weights in another precision, or on another device."""
        return self.map(lambda weight: weight.to(target))


@dataclass(frozen=True, eq=False)
class Input(Op):
    """The embedding rows, before the embedding LayerNorm."""

    linear: ClassVar[bool] = True
    exact_box: ClassVar[bool] = True


@dataclass(frozen=True, eq=False)
class Linear(Op):
    """``y = P x`` plus a constant, of one value.

    `coefficients` are the entries of P that are not 0 by design, in whatever layout. Given these, `act`
    multiplies columns by P, and `act_transposed` by its transpose. Unless the operation is `increasing`, both
    must be linear in the coefficients: with the positive parts of them, they multiply by P⁺.
    """

    linear: ClassVar[bool] = True
    sums: ClassVar[bool] = True
    increasing: ClassVar[bool] = False  # whether no coefficient is ever negative

    @property
    def floor(self) -> float:
        """No entry of the output falls below it, whatever the bounds of the input say."""
        return -math.inf

    def coefficients(self, x: Value) -> Tensor:
        """The coefficients for inputs of the shape of `x`, in its precision."""
        raise NotImplementedError

    def act(self, coefs: Tensor, x: Columns) -> Columns:
        raise NotImplementedError

    def act_transposed(self, coefs: Tensor, x: Columns) -> Columns:
        raise NotImplementedError

    def forth(self, coefs: Tensor, x: Columns) -> Columns:
        """The same as `act`, with coefficients as they are: there may be a quicker way."""
        return self.act(coefs, x)

    def largest_deviation(self, clean: Sequence[Tensor], *inputs: Tensor) -> Tensor:
        coefs = self.coefficients(inputs[0]).abs()
        return self.act(coefs, inputs[0].unsqueeze(-1)).squeeze(-1)

    @property
    def per_token(self) -> bool:
        """Whether every token of the output reads the same token of the input, and all do so alike."""
        return not self.mixes
