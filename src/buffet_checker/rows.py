"""Linear forms of a node's deviation, backwards (`Rows`) and in terms of the input (`Form`, `Local`).

A node's *deviation* is its exact value minus its reference value, which is a float. Everything here is plain
float64; what rounding may have cost is accounted for by whoever uses it (`substitution`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import TINY, Array

Apply = Callable[[Array, Array], Array]


@dataclass(frozen=True)
class Rows:
    """Forms of one node, to be bounded from below, grouped by the token of the node they started from.

    ``diagonal``: group i reads token i only, ``coefs[i, feature, row]`` (first axis 1: the same for all
    groups). Otherwise ``coefs[token, feature, (group, row)]``.
    """

    coefs: Array
    groups: int
    diagonal: bool

    def fit(self, value: Array) -> bool:
        """Whether they can be forms of a node of this value."""
        tokens, features = value.shape
        if self.diagonal:
            return self.groups <= tokens and self.coefs.shape[:2] in ((1, features), (self.groups, features))
        return self.coefs.shape[:2] == (tokens, features)

    def like(self, coefs: Array) -> Rows:
        return Rows(coefs, self.groups, self.diagonal)

    def per_group(self) -> Array:
        return np.broadcast_to(self.coefs, (self.groups, *self.coefs.shape[1:]))

    def read(self, values: Array) -> Array:
        """The tokens of ``values[token, ...]`` that the rows read."""
        return values[: self.groups] if self.diagonal else values

    def parts(self) -> tuple[Rows, Rows]:
        return self.like(np.maximum(self.coefs, 0)), self.like(np.minimum(self.coefs, 0))

    def size(self) -> Rows:
        return self.like(np.abs(self.coefs))

    def __add__(self, other: Rows) -> Rows:
        if self.diagonal == other.diagonal:
            return self.like(self.coefs + other.coefs)
        diagonal, dense = (self, other) if self.diagonal else (other, self)
        total = dense.coefs.reshape(*dense.coefs.shape[:2], self.groups, -1).copy()
        each = np.arange(self.groups)
        total[each, :, each] += diagonal.per_group()
        return dense.like(total.reshape(dense.coefs.shape))

    def contract(self, values: Array) -> Array:
        """``Σ values · coefs`` of every row, ``[..., groups, rows]`` for ``values[..., token, feature]``."""
        lead = values.shape[:-2]
        flat = values.reshape(-1, *values.shape[-2:])
        if not self.diagonal:
            tokens, features, rows = self.coefs.shape
            found = flat.reshape(len(flat), -1) @ self.coefs.reshape(tokens * features, rows)
        elif len(self.coefs) == 1:
            found = flat[:, : self.groups] @ self.coefs[0]
        else:
            found = np.matmul(flat[:, : self.groups].swapaxes(0, 1), self.coefs).swapaxes(0, 1)
        return found.reshape(*lead, self.groups, -1)


@dataclass(frozen=True)
class Form:
    """``lower·(δ, 1) ≤ deviation ≤ upper·(δ, 1)`` for every entry of a node.

    The last column is the constant.
    """

    lower: Array  # tokens, features, inputs + 1
    upper: Array
    wobble: Array | None = None  # tokens, features: how far outside a deployed run may be

    @property
    def exact(self) -> bool:
        return self.upper is self.lower

    def size(self, reach: Array) -> Array:
        """``Σ |coefficient| · reach`` plus the constant: what rounding errors scale with."""
        largest = np.maximum(np.abs(self.lower), np.abs(self.upper))
        return largest[..., :-1] @ reach.reshape(-1) + largest[..., -1] + TINY

    def through(self, apply: Apply, lower: Array, upper: Array) -> Form:
        """The form behind an operation between the linear maps `lower` and `upper`; ``apply(map, form)``."""

        def side(through: Array, own: Array, other: Array) -> Array:
            if own is other or through.min() >= 0:
                return apply(through, own)
            if through.max() <= 0:
                return apply(through, other)
            return apply(np.maximum(through, 0), own) + apply(np.minimum(through, 0), other)

        below = side(lower, self.lower, self.upper)
        same = self.exact and upper is lower
        return Form(below, below if same else side(upper, self.upper, self.lower))

    def plus(self, lower: Array, upper: Array) -> Form:
        below, above = self.lower.copy(), self.upper.copy()
        below[..., -1] += lower
        above[..., -1] += upper
        return Form(below, above)

    def compose(self, rows: Rows) -> Array:
        """``A⁺·lower + A⁻·upper`` of every row, ``[inputs + 1, groups, rows]``."""
        if self.exact:
            return _compose(self.lower, rows)
        positive, negative = rows.parts()
        return _compose(self.lower, positive) + _compose(self.upper, negative)


def _compose(form: Array, rows: Rows) -> Array:
    if rows.diagonal:
        read = rows.read(form).transpose(0, 2, 1)  # groups, inputs, features
        return np.matmul(read, rows.coefs).transpose(1, 0, 2)
    tokens, features, inputs = form.shape
    flat = form.reshape(-1, inputs).T @ rows.coefs.reshape(tokens * features, -1)
    return flat.reshape(inputs, rows.groups, -1)


@dataclass(frozen=True)
class Local:
    """A node behind linear operations on single tokens: ``deviation[d] = matrix·δ_d`` within `error`."""

    matrix: Array  # features, width
    error: Array  # tokens, features
    wobble: Array  # the same for a deployed run, on top

    def compose(self, rows: Rows, moved: Array) -> Array:
        """``[moved, width, groups, rows]``."""
        width = self.matrix.shape[1]
        if not rows.diagonal:
            return np.matmul(self.matrix.T, rows.coefs[moved]).reshape(len(moved), width, rows.groups, -1)
        coefs = rows.per_group()
        form = np.zeros((len(moved), width, rows.groups, coefs.shape[2]))
        for word, token in enumerate(moved):
            if token < rows.groups:
                form[word, :, token] = self.matrix.T @ coefs[token]
        return form

    def form(self, moved: Array, tokens: int) -> Form:
        features, width = self.matrix.shape
        lower = np.zeros((tokens, features, len(moved) * width + 1))
        for word, token in enumerate(moved):
            lower[token, :, word * width : (word + 1) * width] = self.matrix
        upper = lower.copy()
        lower[..., -1], upper[..., -1] = -self.error, self.error
        return Form(lower, upper, self.wobble)
