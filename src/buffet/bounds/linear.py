"""Linear pieces: what a relaxed operation does to linear bounds, backwards (`pull`) and forwards (`push`).

Everything here lives in *deviation coordinates*: a node's value is its clean value (the network run on the
unmoved rows) plus a deviation, and bounds are bounds of deviations. A linear operation then has no bias, a
row that cannot move has deviation exactly 0, and rounding errors scale with the deviation instead of with
the activations.

`Rows` is a batch of linear forms of one node, to be bounded from *below*; an upper bound is the lower bound
of the negated form, so nothing is written twice. `Form` holds linear bounds of a node in terms of the input
deviation. The row axis (backwards) and the input axis (forwards) are last, so that every contraction is a
matrix product over contiguous memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.program import Add, Affine, Bilinear, Center, Diagonal, Offset, Op, Pool


@dataclass(frozen=True)
class Rows:
    """Linear forms of a node's deviation, rows grouped by the token of the node they started from.

    With ``diagonal`` the rows of group *i* read only token *i* of the node (which may have more tokens than
    there are groups): ``coefs[t, i, f, r]`` is the coefficient of its feature *f* in row *r* of group
    *i*. Otherwise ``coefs[t, n, f, (i, r)]``. The task and token axes may have size 1 where the coefficients
    do not depend on them.
    """

    coefs: Float[Tensor, "tasks tokens features rows"]
    groups: int
    diagonal: bool

    def like(self, coefs: Tensor) -> Rows:
        return Rows(coefs, self.groups, self.diagonal)

    def per_group(self) -> Tensor:
        """The coefficients of diagonal rows with the token axis at its full size, one entry per group."""
        return self.coefs.expand(-1, self.groups, -1, -1)

    def read(self, values: Tensor) -> Tensor:
        """The part of ``values[task, token, ...]`` that the rows read."""
        return values[:, : self.groups] if self.diagonal else values

    def __add__(self, other: Rows) -> Rows:
        if self.diagonal == other.diagonal:
            return self.like(self.coefs + other.coefs)
        diagonal, dense = (self, other) if self.diagonal else (other, self)
        total = dense.coefs.unflatten(3, (self.groups, -1)).clone()
        total.diagonal(dim1=1, dim2=3).add_(diagonal.coefs.permute(0, 2, 3, 1))
        return dense.like(total.flatten(3))

    def contract(self, values: Float[Tensor, "tasks tokens features"]) -> Float[Tensor, "_ groups rows"]:
        """``Σ values · coefs`` of every row."""
        if self.diagonal:
            return (self.read(values).unsqueeze(2) @ self.per_group()).squeeze(2)
        flat = values.flatten(1).unsqueeze(1) @ self.coefs.flatten(1, 2)
        return flat.unflatten(-1, (self.groups, -1)).squeeze(1)


@dataclass(frozen=True)
class Form:
    """Linear bounds ``mid·δ − rad·δ ≤ deviation ≤ mid·δ + rad·δ`` of every entry of a node.

    The last column of `mid` and `rad` is the constant term (δ is extended by a 1). ``rad = None`` means the
    form is exact.
    """

    mid: Float[Tensor, "tasks tokens features inputs"]
    rad: Float[Tensor, "tasks tokens features inputs"] | None = None

    @classmethod
    def between(cls, lower: Tensor, upper: Tensor) -> Form:
        return cls((lower + upper) / 2, (upper - lower) / 2)

    @property
    def lower(self) -> Tensor:
        return self.mid if self.rad is None else self.mid - self.rad

    @property
    def upper(self) -> Tensor:
        return self.mid if self.rad is None else self.mid + self.rad

    def compose(self, rows: Rows) -> tuple[Tensor, Tensor | None]:
        """Lower linear bound ``A·mid − |A|·rad`` of every row: coefficients of the input, and constants."""
        total = _compose(self.mid, rows)
        if self.rad is not None:
            total = total - _compose(self.rad, rows.like(rows.coefs.abs()))
        return total[:, :-1], total[:, -1]


def _compose(form: Tensor, rows: Rows) -> Tensor:
    if rows.diagonal:
        return (rows.read(form).mT @ rows.per_group()).transpose(1, 2)
    return (form.flatten(1, 2).mT @ rows.coefs.flatten(1, 2)).unflatten(-1, (rows.groups, -1))


Pulled = tuple[tuple[Rows, ...], Tensor | None]


class Piece:
    """A (relaxed) operation as linear bounds of its output deviation in its input deviations."""

    def pull(self, rows: Rows) -> Pulled:
        """Forms of the output to forms of the inputs that are never larger, and the constant left over."""
        raise NotImplementedError

    def push(self, *forms: Form) -> Form:
        """Linear bounds of the inputs to linear bounds of the output."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class AffinePiece(Piece):
    weight: Float[Tensor, "out in"]

    def pull(self, rows: Rows) -> Pulled:
        return (rows.like(self.weight.mT @ rows.coefs),), None

    def push(self, *forms: Form) -> Form:
        (x,) = forms
        return Form(self.weight @ x.mid, None if x.rad is None else self.weight.abs() @ x.rad)


@dataclass(frozen=True, eq=False)
class DiagonalPiece(Piece):
    weight: Float[Tensor, "features"]

    def pull(self, rows: Rows) -> Pulled:
        return (rows.like(rows.coefs * self.weight[:, None]),), None

    def push(self, *forms: Form) -> Form:
        (x,) = forms
        w = self.weight[:, None]
        return Form(w * x.mid, None if x.rad is None else w.abs() * x.rad)


@dataclass(frozen=True, eq=False)
class CenterPiece(Piece):
    """``x − mean(x)`` as a rank-one update; the matrix is symmetric, so pull and push agree."""

    def pull(self, rows: Rows) -> Pulled:
        return (rows.like(rows.coefs - rows.coefs.mean(2, keepdim=True)),), None

    def push(self, *forms: Form) -> Form:
        (x,) = forms
        mid = x.mid - x.mid.mean(2, keepdim=True)
        if x.rad is None:
            return Form(mid)
        # |I − 11ᵀ/w| has 1 − 1/w on the diagonal and 1/w elsewhere.
        return Form(mid, x.rad * (1 - 2 / x.rad.shape[2]) + x.rad.mean(2, keepdim=True))


@dataclass(frozen=True, eq=False)
class IdentityPiece(Piece):
    """An operation that moves the value but not the deviation (`Offset`)."""

    def pull(self, rows: Rows) -> Pulled:
        return (rows,), None

    def push(self, *forms: Form) -> Form:
        return forms[0]


@dataclass(frozen=True, eq=False)
class AddPiece(Piece):
    def pull(self, rows: Rows) -> Pulled:
        return (rows, rows), None

    def push(self, *forms: Form) -> Form:
        a, b = forms
        rads = [f.rad for f in forms if f.rad is not None]
        return Form(a.mid + b.mid, sum(rads[1:], rads[0]) if rads else None)


@dataclass(frozen=True, eq=False)
class PoolPiece(Piece):
    """All tokens to one; the result's only token is the one group of its rows.

    Rows of the first token stay diagonal: group 0 reads token 0.
    """

    weights: Float[Tensor, "tokens"]
    first: bool

    def pull(self, rows: Rows) -> Pulled:
        if self.first:
            return (rows,), None
        coefs = rows.coefs * self.weights[:, None, None]
        return (Rows(coefs, rows.groups, diagonal=False),), None

    def push(self, *forms: Form) -> Form:
        (x,) = forms
        parts = (
            None if f is None else torch.einsum("n,tnfd->tfd", self.weights, f)[:, None]
            for f in (x.mid, x.rad)
        )
        return Form(*parts)  # type: ignore[arg-type]


def exact_piece(op: Op, clean: tuple[Tensor, ...], dtype: torch.dtype) -> Piece | None:
    """The piece of a linear operation; None for a nonlinear one, which has to be relaxed."""
    match op:
        case Affine():
            return AffinePiece(op.weight.to(dtype))
        case Diagonal():
            return DiagonalPiece(op.weight.to(dtype))
        case Center():
            return CenterPiece()
        case Offset():
            return IdentityPiece()
        case Add():
            return AddPiece()
        case Pool():
            weights = op.weights(clean[0].shape[0], None, clean[0])
            return PoolPiece(weights.to(dtype), first=op.kind == "first")
    return None


@dataclass(frozen=True, eq=False)
class LinesPiece(Piece):
    """An elementwise function between two lines: ``ls·x + li ≤ f ≤ us·x + ui``."""

    lower_slope: Float[Tensor, "tasks tokens features"]
    lower_intercept: Float[Tensor, "tasks tokens features"]
    upper_slope: Float[Tensor, "tasks tokens features"]
    upper_intercept: Float[Tensor, "tasks tokens features"]

    def pull(self, rows: Rows) -> Pulled:
        # A⁺·lower + A⁻·upper = A·upper + A⁺·(lower − upper)
        positive = rows.like(rows.coefs.clamp_min(0))
        lower, upper = (rows.read(slope).unsqueeze(-1) for slope in (self.lower_slope, self.upper_slope))
        coefs = (rows.coefs * upper).addcmul_(positive.coefs, lower - upper)
        bias = rows.contract(self.upper_intercept)
        bias = bias + positive.contract(self.lower_intercept - self.upper_intercept)
        return (rows.like(coefs),), bias

    def push(self, *forms: Form) -> Form:
        (x,) = forms
        lower = _signed(self.lower_slope.unsqueeze(-1), x, -1)
        upper = _signed(self.upper_slope.unsqueeze(-1), x, 1)
        return Form.between(
            _plus_constant(lower, self.lower_intercept), _plus_constant(upper, self.upper_intercept)
        )


@dataclass(frozen=True, eq=False)
class PlanesPiece(Piece):
    """A sum of products between two planes per term (`products.planes`).

    Per term, ``x_upper·x + y_upper·y`` plus a constant bounds the product from above; the same planes plus
    their `gap` bound it from below (``None``: both planes agree). The coefficients carry all term axes of
    `op`, of size 1 where they do not depend on an axis.
    """

    op: Bilinear
    x_upper: Tensor
    x_gap: Tensor | None
    y_upper: Tensor
    y_gap: Tensor | None
    lower: Float[Tensor, "tasks tokens features"]
    upper: Float[Tensor, "tasks tokens features"]

    def pull(self, rows: Rows) -> Pulled:
        # A⁺·lower + A⁻·upper = A·upper + A⁺·gap
        op = self.op
        positive = rows.like(rows.coefs.clamp_min(0))
        a, a_positive = (_split(op, r.coefs, op.out) for r in (rows, positive))
        stays = not rows.diagonal or "i" in op.y
        to_y = f"t{op.out}r,t{op.terms}->t{op.y if stays else op.y + 'i'}r"

        x = self._to_x(a, rows.read(self.x_upper))
        if self.x_gap is not None:
            x = x.add_(self._to_x(a_positive, rows.read(self.x_gap)))
        y = torch.einsum(to_y, a, rows.read(self.y_upper))
        if self.y_gap is not None:
            y = y.add_(torch.einsum(to_y, a_positive, rows.read(self.y_gap)))
        bias = rows.contract(self.upper) + positive.contract(self.lower - self.upper)
        if not stays:
            y = y.flatten(-2)
        return (
            rows.like(x.flatten(2, -2)),
            Rows(y.flatten(2, -2), rows.groups, rows.diagonal and stays),
        ), bias

    def _to_x(self, coefs: Tensor, planes: Tensor) -> Tensor:
        """``Σ coefs · planes`` over the axis `x` does not have, as one batched matrix product."""
        op = self.op
        if op.out == op.x:
            return coefs * planes.unsqueeze(-1)
        order = (*op.out[:-1], op.x[-1], op.out[-1])
        return planes.permute(0, *(op.terms.index(c) + 1 for c in order)) @ coefs

    def push(self, *forms: Form) -> Form:
        def bound(x_plane: Tensor, y_plane: Tensor, sign: int, constant: Tensor) -> Tensor:
            total = self._combine(x_plane, forms[0], self.op.x, sign)
            total = total + self._combine(y_plane, forms[1], self.op.y, sign)
            return _plus_constant(total.flatten(2, -2), constant)

        x_lower = self.x_upper if self.x_gap is None else self.x_upper + self.x_gap
        y_lower = self.y_upper if self.y_gap is None else self.y_upper + self.y_gap
        return Form.between(
            bound(x_lower, y_lower, -1, self.lower), bound(self.x_upper, self.y_upper, 1, self.upper)
        )

    def _combine(self, planes: Tensor, form: Form, axes: str, sign: int) -> Tensor:
        pattern = f"t{self.op.terms},t{axes}d->t{self.op.out}d"
        total = torch.einsum(pattern, planes, _split(self.op, form.mid, axes))
        if form.rad is None:
            return total
        spread = torch.einsum(pattern, planes.abs(), _split(self.op, form.rad, axes))
        return torch.add(total, spread, alpha=sign)


def _split(op: Bilinear, value: Tensor, axes: str) -> Tensor:
    """View ``[tasks, tokens, features, last]`` with the features split into the axes of `op`."""
    return value.unflatten(2, (op.heads, -1)) if len(axes) == 3 else value


def _signed(slope: Tensor, form: Form, sign: int) -> Tensor:
    total = slope * form.mid
    return total if form.rad is None else torch.addcmul(total, slope.abs(), form.rad, value=sign)


def _plus_constant(form: Tensor, constant: Tensor) -> Tensor:
    return torch.cat([form[..., :-1], form[..., -1:] + constant.unsqueeze(-1)], -1)
