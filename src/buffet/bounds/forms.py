"""Linear forms: of a node, on their way down (`Rows`), and of the input deviation (`Form`, `Local`).

Everything here lives in *deviation coordinates*: a node's value is its clean value (the network run on the
unmoved rows) plus a deviation, and bounds are bounds of deviations. A linear operation then has no bias, a
row that cannot move has deviation exactly 0, and rounding errors scale with the deviation instead of with
the activations.

`Rows` is a batch of linear forms of one node, to be bounded from *below*; an upper bound is the lower bound
of the negated form, so nothing is written twice. `Form` holds linear bounds of a node in terms of the input
deviation, `Local` an exact form of it. The row axis (backwards) and the input axis (forwards) are last, so
that every contraction is a matrix product over contiguous memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.bounds.fused import add_swapped, add_to_last, by_sign


@dataclass(frozen=True)
class Rows:
    """Linear forms of a node's deviation, rows grouped by the token of the node they started from.

    With ``diagonal`` the rows of group *i* read only token *i* of the node (which may have more tokens than
    there are groups): ``coefs[t, i, f, r]`` is the coefficient of its feature *f* in row *r* of group
    *i*. Otherwise ``coefs[t, n, f, (i, r)]``. The task and token axes may have size 1 where the coefficients
    do not depend on them. With `moved` the token axis holds the moved tokens of every task only, in their
    order: of no use but to compose them with forms that are 0 elsewhere.
    """

    coefs: Float[Tensor, "tasks tokens features rows"]
    groups: int
    diagonal: bool
    moved: bool = False

    def like(self, coefs: Tensor) -> Rows:
        return Rows(coefs, self.groups, self.diagonal, self.moved)

    def per_group(self) -> Tensor:
        """The coefficients of diagonal rows with the token axis at its full size, one entry per group."""
        return self.coefs.expand(-1, self.groups, -1, -1)

    def read(self, values: Tensor) -> Tensor:
        """The part of ``values[task, token, ...]`` that the rows read."""
        return values[:, : self.groups] if self.diagonal and self.groups < values.shape[1] else values

    def parts(self) -> tuple[Rows, Rows]:
        """The positive and the negative coefficients.

        They are kept apart: ``A·upper + A⁺·(lower − upper)`` would be one pass shorter, and wrong in the last
        digits of `lower` when `upper` is much larger.
        """
        positive, negative = by_sign(self.coefs)
        return self.like(positive), self.like(negative)

    def __add__(self, other: Rows) -> Rows:
        assert self.moved == other.moved
        if self.diagonal == other.diagonal:
            return self.like(self.coefs + other.coefs)
        diagonal, dense = (self, other) if self.diagonal else (other, self)
        total = dense.coefs.unflatten(3, (self.groups, -1)).clone()
        total.diagonal(dim1=1, dim2=3).add_(diagonal.coefs.permute(0, 2, 3, 1))
        return dense.like(total.flatten(3))

    def contract(self, values: Float[Tensor, "tasks tokens features"]) -> Float[Tensor, "_ groups rows"]:
        """``Σ values · coefs`` of every row."""
        if self.diagonal and self.coefs.shape[:2] == (1, 1):
            return self.read(values) @ self.coefs[0, 0]
        if self.diagonal:
            return (self.read(values).unsqueeze(2) @ self.per_group()).squeeze(2)
        flat = values.flatten(1).unsqueeze(1) @ self.coefs.flatten(1, 2)
        return flat.unflatten(-1, (self.groups, -1)).squeeze(1)


Composed = tuple[Float[Tensor, "tasks groups rows inputs"], Float[Tensor, "tasks groups rows"] | None]
"""Rows in terms of the input deviation: coefficients and constants (None: 0). Whoever gets it owns it."""


@dataclass(frozen=True)
class Form:
    """Linear bounds ``lower·δ ≤ deviation ≤ upper·δ`` of every entry of a node, stacked; one, if it is exact.

    The last column is the constant term (δ is extended by a 1).
    """

    sides: Float[Tensor, "sides tasks tokens features inputs"]

    @classmethod
    def exactly(cls, form: Float[Tensor, "tasks tokens features inputs"]) -> Form:
        return cls(form.unsqueeze(0))

    @classmethod
    def between(cls, lower: Tensor, upper: Tensor) -> Form:
        return cls(torch.stack([lower, upper]))

    @cached_property
    def _each(self) -> tuple[Tensor, ...]:
        # Taken apart once: the gradient of every other view would be as large as both sides.
        return self.sides.unbind()

    @property
    def lower(self) -> Float[Tensor, "tasks tokens features inputs"]:
        return self._each[0]

    @property
    def upper(self) -> Float[Tensor, "tasks tokens features inputs"]:
        return self._each[-1]

    @property
    def exact(self) -> bool:
        return len(self.sides) == 1

    @property
    def still(self) -> bool:
        """Whether nothing moves."""
        return not bool(self.sides.any())

    def compose(self, rows: Rows) -> Composed:
        """Lower linear bounds ``A⁺·lower + A⁻·upper`` of the rows."""
        if self.exact:
            total = _product(self.lower, rows)
        else:
            positive, negative = rows.parts()
            total = _product(self.lower, positive).add_(_product(self.upper, negative))
        if not rows.diagonal:
            total = total.unflatten(-1, (rows.groups, -1)).permute(0, 2, 3, 1)
        # "Unsafe" means that either may be changed in place: nobody else has the total.
        coefs, constant = total.unsafe_split_with_sizes([total.shape[-1] - 1, 1], -1)
        return coefs, constant.squeeze(-1)

    def through(self, apply: Callable[[Tensor, Tensor], Tensor], maps: Tensor) -> Form:
        """The form behind an operation between two linear maps, stacked (or one); ``apply(maps, sides)``.

        The lower bound takes this form's lower bound where the map is positive, its upper one elsewhere.
        """
        if self.exact or maps.min().item() >= 0:  # as for exp, and sums of weights
            return Form(apply(maps, self.sides))
        if maps.max().item() <= 0:  # as for 1/x
            return Form(apply(maps, self.sides.flip(0)))
        own = apply(maps.clamp_min(0), self.sides)
        other = apply(maps.clamp_max(0).flip(0), self.sides)
        return Form(add_swapped(own, other))

    def plus(self, constants: Float[Tensor, "2 tasks tokens features"]) -> Form:
        """The form, made for the occasion and changed in place, with constants added to its two sides."""
        sides = self.sides.repeat(2, 1, 1, 1, 1) if self.exact else self.sides
        return Form(add_to_last(sides, constants))

    def __add__(self, other: Form) -> Form:
        return Form(self.sides + other.sides)


def _product(form: Tensor, rows: Rows) -> Tensor:
    """Rows of a form: ``[tasks, groups, rows, inputs]`` if diagonal, else ``[tasks, inputs, rows]``."""
    form = rows.read(form).to(rows.coefs.dtype)
    if rows.diagonal:
        return rows.coefs.mT @ form
    return form.flatten(1, 2).mT @ rows.coefs.flatten(1, 2)


@dataclass(frozen=True)
class Local:
    """The exact form of a node behind per-token linear operations only: ``deviation[d] = matrix · δ_d``.

    The product of the operations is taken in float64 and rounded once: its sums may cancel (a LayerNorm takes
    off what all features share), and an allowance relative to the result would not cover that.
    """

    matrix: Float[Tensor, "features width"]
    moved: Int[Tensor, "tasks moved"]
    unrounded: Float[Tensor, "features width"]  # float64

    def compose(self, rows: Rows) -> Composed:
        """The rows as exact forms of δ; there is no constant."""
        tasks, moved = self.moved.shape
        width = self.matrix.shape[1]
        task = torch.arange(tasks, device=self.moved.device)[:, None]
        coefs = rows.coefs.expand(tasks, *rows.coefs.shape[1:])
        if rows.moved:
            form = (self.matrix.mT @ coefs).unflatten(-1, (rows.groups, -1))
        elif rows.diagonal:
            # Word d of a task is read by group d only, if there is one.
            group = self.moved.clamp_max(rows.groups - 1)
            read = self.matrix.mT @ rows.like(coefs).per_group()[task, group]
            read = torch.where((group == self.moved)[..., None, None], read, 0.0)
            form = read.new_zeros(tasks, rows.groups, read.shape[3], moved, width)
            word = torch.arange(moved, device=self.moved.device)
            form[task, group, :, word] = read.mT
            return form.flatten(3), None
        else:
            form = (self.matrix.mT @ coefs[task, self.moved]).unflatten(-1, (rows.groups, -1))
        return form.flatten(1, 2).permute(0, 2, 3, 1), None

    def units(self) -> Float[Tensor, "tasks inputs moved rows"]:
        """Forms of every feature at every moved token, and of their negatives."""
        tasks, moved = self.moved.shape
        sides = torch.cat([self.matrix, -self.matrix]).mT  # inputs, rows
        each = torch.eye(moved, dtype=sides.dtype, device=sides.device)[:, None, :, None] * sides[:, None]
        return each.flatten(0, 1).expand(tasks, -1, -1, -1)

    def form(self, tokens: int) -> Form:
        """The same as a form of every token, zero where nothing moves."""
        tasks, moved = self.moved.shape
        features, width = self.matrix.shape
        full = self.matrix.new_zeros(tasks, tokens, features, moved * width + 1)
        task = torch.arange(tasks, device=self.moved.device)
        for word in range(moved):
            full[task, self.moved[:, word], :, word * width : (word + 1) * width] = self.matrix
        return Form.exactly(full)

    def of_moved(self) -> Form:
        """The same as a form of the moved tokens only, in their order."""
        words = torch.arange(self.moved.shape[1], device=self.moved.device)
        return replace(self, moved=words.expand_as(self.moved)).form(len(words))


Stop = Local | Form
"""What is known of a node in terms of the input: substitution goes no further there."""
