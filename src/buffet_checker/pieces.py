"""Linear pieces: an operation as linear bounds of its output deviation in its input deviations.

A piece is plain float64 numbers, with what it takes to use them rigorously:

    residual    how far the output may be outside of the lines, rounding of the reference values included
    constant    the largest intercept in absolute value
    reach       from magnitudes of the inputs to ``Σ |coefficient|·magnitude`` of every output
    depth       how many products are summed for one coefficient, backwards or forwards
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import TINY, Array, U
from buffet_checker.rows import Form, Rows

Pulled = tuple[tuple[Rows, ...], Array | None]


@dataclass(frozen=True)
class Piece:
    residual: Array

    @property
    def constant(self) -> Array:
        return np.zeros_like(self.residual)

    @property
    def depth(self) -> int:
        return 1

    def settle(self, rows: Rows) -> tuple[Rows, Array | None]:
        """The same form of the output, written so that less is lost; and what that may have cost each row."""
        return rows, None

    def pull(self, rows: Rows) -> Pulled:
        raise NotImplementedError

    def push(self, *forms: Form) -> Form:
        raise NotImplementedError

    def reach(self, *sizes: Array) -> Array:
        raise NotImplementedError


@dataclass(frozen=True)
class AffinePiece(Piece):
    weight: Array

    @property
    def depth(self) -> int:
        return sum(self.weight.shape)

    def pull(self, rows: Rows) -> Pulled:
        return (rows.like(np.matmul(self.weight.T, rows.coefs)),), None

    def push(self, *forms: Form) -> Form:
        return forms[0].through(np.matmul, self.weight, self.weight)

    def reach(self, *sizes: Array) -> Array:
        return sizes[0] @ np.abs(self.weight.T)


@dataclass(frozen=True)
class DiagonalPiece(Piece):
    weight: Array

    def pull(self, rows: Rows) -> Pulled:
        return (rows.like(rows.coefs * self.weight[:, None]),), None

    def push(self, *forms: Form) -> Form:
        weight = self.weight[:, None]
        return forms[0].through(np.multiply, weight, weight)

    def reach(self, *sizes: Array) -> Array:
        return sizes[0] * np.abs(self.weight)


@dataclass(frozen=True)
class CenterPiece(Piece):
    width: int

    @property
    def depth(self) -> int:
        return self.width + 2

    def pull(self, rows: Rows) -> Pulled:
        return (rows.like(rows.coefs - rows.coefs.mean(1, keepdims=True)),), None

    def push(self, *forms: Form) -> Form:
        matrix = np.eye(self.width) - 1 / self.width
        return forms[0].through(np.matmul, matrix, matrix)

    def reach(self, *sizes: Array) -> Array:
        return sizes[0] + sizes[0].mean(-1, keepdims=True)


@dataclass(frozen=True)
class SumPiece(Piece):
    """Addition of one or two values (and of a constant, which deviations do not see)."""

    def pull(self, rows: Rows) -> Pulled:
        return (rows, rows), None

    def push(self, *forms: Form) -> Form:
        if len(forms) == 1:
            return forms[0]
        lower = forms[0].lower + forms[1].lower
        exact = forms[0].exact and forms[1].exact
        return Form(lower, lower if exact else forms[0].upper + forms[1].upper)

    def reach(self, *sizes: Array) -> Array:
        return sizes[0] + sizes[1] if len(sizes) == 2 else sizes[0]


@dataclass(frozen=True)
class PoolPiece(Piece):
    """The first token, or the mean of all tokens."""

    tokens: int
    first: bool

    @property
    def depth(self) -> int:
        return self.tokens

    def pull(self, rows: Rows) -> Pulled:
        if self.first:
            return (rows,), None
        coefs = np.repeat(rows.coefs / self.tokens, self.tokens, 0)
        return (Rows(coefs, rows.groups, diagonal=False),), None

    def push(self, *forms: Form) -> Form:
        form = forms[0]
        sides = (side[:1] if self.first else side.mean(0, keepdims=True) for side in (form.lower, form.upper))
        return Form(*sides)

    def reach(self, *sizes: Array) -> Array:
        return sizes[0][:1] if self.first else sizes[0].mean(0, keepdims=True)


@dataclass(frozen=True)
class LinesPiece(Piece):
    """An elementwise function between two lines."""

    lower_slope: Array
    lower: Array
    upper_slope: Array
    upper: Array

    @property
    def constant(self) -> Array:
        return np.maximum(np.abs(self.lower), np.abs(self.upper))

    def pull(self, rows: Rows) -> Pulled:
        positive, negative = rows.parts()
        low, high = (rows.read(slope)[..., None] for slope in (self.lower_slope, self.upper_slope))
        bias = positive.contract(self.lower) + negative.contract(self.upper)
        return (rows.like(positive.coefs * low + negative.coefs * high),), bias

    def push(self, *forms: Form) -> Form:
        lower, upper = self.lower_slope[..., None], self.upper_slope[..., None]
        return forms[0].through(np.multiply, lower, upper).plus(self.lower, self.upper)

    def reach(self, *sizes: Array) -> Array:
        return sizes[0] * np.maximum(np.abs(self.lower_slope), np.abs(self.upper_slope))


@dataclass(frozen=True)
class SoftmaxPiece(Piece):
    """Attention weights between linear functions of the scores of their query, ``slope[query, head, weight,
    key]``.

    The weights of a query sum to 1, so any constant may be taken off their coefficients: the lower median, or
    away from it by ``(shift − ½)`` of the range of the coefficients. What is left over is the constant times
    ``1 − Σ reference weights``, at most `leak`.
    """

    lower_slope: Array
    upper_slope: Array
    lower: Array
    upper: Array
    shift: Array | None
    leak: Array  # exact and deployed: query, head

    @property
    def constant(self) -> Array:
        return np.maximum(np.abs(self.lower), np.abs(self.upper))

    @property
    def depth(self) -> int:
        return 2 * self.lower_slope.shape[-1]

    def _split(self, value: Array) -> Array:
        return value.reshape(len(value), self.lower_slope.shape[1], -1, *value.shape[2:])

    def settle(self, rows: Rows) -> tuple[Rows, Array | None]:
        coefs = rows.per_group() if rows.diagonal else rows.coefs
        a = self._split(coefs)  # tokens, heads, keys, rows
        middle = (a.shape[2] - 1) // 2
        taken = np.partition(a, middle, 2)[:, :, middle : middle + 1]
        if self.shift is not None:
            extent = a.max(2, keepdims=True) - a.min(2, keepdims=True)
            taken = taken + (rows.read(self.shift)[..., None, None] - 0.5) * extent
        spent = Rows(np.abs(taken[:, :, 0]), rows.groups, rows.diagonal).contract(self.leak)
        return rows.like((a - taken).reshape(coefs.shape)), spent

    def pull(self, rows: Rows) -> Pulled:
        positive, negative = rows.parts()
        low, high = (rows.read(s).swapaxes(2, 3) for s in (self.lower_slope, self.upper_slope))
        x = np.matmul(low, self._split(positive.coefs)) + np.matmul(high, self._split(negative.coefs))
        bias = positive.contract(self.lower) + negative.contract(self.upper)
        return (rows.like(x.reshape(rows.coefs.shape)),), bias

    def push(self, *forms: Form) -> Form:
        def apply(slope: Array, form: Array) -> Array:
            return np.matmul(slope, self._split(form)).reshape(form.shape)

        return forms[0].through(apply, self.lower_slope, self.upper_slope).plus(self.lower, self.upper)

    def reach(self, *sizes: Array) -> Array:
        slope = np.maximum(np.abs(self.lower_slope), np.abs(self.upper_slope))
        return np.matmul(slope, self._split(sizes[0])[..., None])[..., 0].reshape(sizes[0].shape)


@dataclass(frozen=True)
class Terms:
    """The products that an operation sums.

    Terms of scores ``s[i,h,j] = Σ_k q[i,h,k] k[j,h,k]`` and of the mix ``o[i,h,k] = Σ_j p[i,h,j] v[j,h,k]``
    have the axes (i, h, j, k), those of a rescaling ``z[i,g,m] = x[i,g,m] y[i,g]`` the axes (i, g, m).
    """

    kind: str  # scores | mix | rescale
    heads: int

    @property
    def summed(self) -> int | None:
        """The axis of the sum."""
        return {"scores": 3, "mix": 2}.get(self.kind)

    def split(self, value: Array, factor: int) -> Array:
        """A factor over the axes of a term."""
        parts = value.reshape(len(value), self.heads, -1)
        if self.kind == "rescale":
            return parts
        if factor == 1:
            return parts.transpose(1, 0, 2)[None]  # 1, h, j, k
        return parts[:, :, None] if self.kind == "scores" else parts[..., None]

    def total(self, terms: Array) -> Array:
        """The sums as the output has them, tokens × features."""
        return (terms if self.summed is None else terms.sum(self.summed)).reshape(len(terms), -1)


@dataclass(frozen=True)
class PlanesPiece(Piece):
    """Sums of products between two planes per term; coefficients of both factors over the axes of `Terms`."""

    kind: str  # scores | mix | rescale
    x_lower: Array
    x_upper: Array
    y_lower: Array
    y_upper: Array
    lower: Array
    upper: Array

    @property
    def constant(self) -> Array:
        return np.maximum(np.abs(self.lower), np.abs(self.upper))

    @property
    def depth(self) -> int:
        return sum(self.x_lower.shape)

    def _split(self, value: Array) -> Array:
        return value.reshape(len(value), self.x_lower.shape[1], -1, *value.shape[2:])

    def pull(self, rows: Rows) -> Pulled:
        positive, negative = rows.parts()
        a = self._split(positive.coefs), self._split(negative.coefs)
        xs = rows.read(self.x_lower), rows.read(self.x_upper)
        ys = rows.read(self.y_lower), rows.read(self.y_upper)
        x = self._to_x(a[0], xs[0]) + self._to_x(a[1], xs[1])
        bias = positive.contract(self.lower) + negative.contract(self.upper)
        if self.y_lower is self.y_upper:
            y = self._to_y(self._split(rows.coefs), ys[0], rows)
        else:
            y = self._to_y(a[0], ys[0], rows) + self._to_y(a[1], ys[1], rows)
        stays = rows.diagonal and self.kind == "rescale"
        x_rows = rows.like(x.reshape(len(x), -1, x.shape[-1]))
        return (x_rows, Rows(y.reshape(len(y), -1, y.shape[-1]), rows.groups, stays)), bias

    def _to_x(self, a: Array, planes: Array) -> Array:
        if self.kind == "rescale":
            return a * planes[..., None]
        if self.kind == "scores":
            planes = planes.swapaxes(2, 3)
        return np.matmul(np.ascontiguousarray(planes), a)

    def _to_y(self, a: Array, planes: Array, rows: Rows) -> Array:
        """``[tokens of y, heads, features of a head, rows]``."""
        if self.kind == "rescale":
            return (a * planes[..., None]).sum(2)
        a = np.broadcast_to(a, (len(planes), *a.shape[1:]))
        if rows.diagonal:
            # every group reads another token of x, so its rows are rows of their own from here on
            y = np.einsum(f"ih{'j' if self.kind == 'scores' else 'k'}r,ihjk->jhkir", a, planes)
            return y.reshape(*y.shape[:3], -1)
        # a product of matrices over i for every head and every key (scores) or feature (mix)
        order = (1, 2, 3, 0) if self.kind == "scores" else (1, 3, 2, 0)
        y = np.matmul(np.ascontiguousarray(planes.transpose(order)), a.transpose(1, 2, 0, 3))
        return y.transpose(1, 0, 2, 3) if self.kind == "scores" else y.transpose(2, 0, 1, 3)

    def push(self, *forms: Form) -> Form:
        x = forms[0].through(self._from_x, self.x_lower, self.x_upper)
        y = forms[1].through(self._from_y, self.y_lower, self.y_upper)
        return Form(x.lower + y.lower, x.upper + y.upper).plus(self.lower, self.upper)

    def _from_x(self, planes: Array, form: Array) -> Array:
        parts = self._split(form)  # i, h, (k or j), inputs
        if self.kind == "rescale":
            return (planes[..., None] * parts).reshape(form.shape)
        order = planes if self.kind == "scores" else planes.swapaxes(2, 3)
        out = np.matmul(np.ascontiguousarray(order), parts)
        return out.reshape(len(out), -1, form.shape[-1])

    def _from_y(self, planes: Array, form: Array) -> Array:
        if self.kind == "rescale":
            out = planes[..., None] * form[:, :, None]
            return out.reshape(len(out), -1, form.shape[-1])
        parts = self._split(form)  # j, h, k, inputs
        if self.kind == "scores":  # for every h, j: [i, k] @ [k, inputs]
            out = np.matmul(np.ascontiguousarray(planes.transpose(1, 2, 0, 3)), parts.transpose(1, 0, 2, 3))
        else:  # for every h, k: [i, j] @ [j, inputs]
            out = np.matmul(np.ascontiguousarray(planes.transpose(1, 3, 0, 2)), parts.transpose(1, 2, 0, 3))
        out = out.transpose(2, 0, 1, 3)
        return out.reshape(len(out), -1, form.shape[-1])

    def reach(self, *sizes: Array) -> Array:
        x = np.maximum(np.abs(self.x_lower), np.abs(self.x_upper))
        y = np.maximum(np.abs(self.y_lower), np.abs(self.y_upper))
        return (self._from_x(x, sizes[0][..., None]) + self._from_y(y, sizes[1][..., None]))[..., 0]


def planes(
    kind: str,
    heads: int,
    scale: float,
    values: tuple[Array, Array],
    boxes: tuple[tuple[Array, Array], tuple[Array, Array]],
    alphas: tuple[Array, Array],
    residual: Array,
) -> PlanesPiece:
    """The planes that the α of both sides select; valid for every α in [0, 1].

    ``(x̂+a)(ŷ+b) − x̂ŷ = ŷa + x̂b + ab``, and with a ∈ [l, u], b ∈ [m, w] the product ab is at least
    ``(1−α)(ma + lb − lm) + α(wa + ub − uw)``, at most ``(1−α)(wa + lb − lw) + α(ma + ub − um)``.
    """
    layout = Terms(kind, heads)
    x, x_low, x_high = (layout.split(v, 0) for v in (values[0], *boxes[0]))
    y, y_low, y_high = (layout.split(v, 1) for v in (values[1], *boxes[1]))

    def blend(alpha: Array, first: Array, second: Array) -> Array:
        if not alpha.ndim and alpha in (0.0, 1.0):
            return second if alpha else first
        return (1 - alpha) * first + alpha * second

    shape = np.broadcast(x, y).shape

    def total(terms: Array) -> Array:
        return layout.total(np.broadcast_to(terms, shape))

    low, high = alphas
    same = not low.ndim and not high.ndim and low == high
    y_lower = scale * np.broadcast_to(x + blend(low, x_low, x_high), shape)
    y_upper = y_lower if same else scale * np.broadcast_to(x + blend(high, x_low, x_high), shape)
    lower = -scale * total(blend(low, x_low * y_low, x_high * y_high))
    upper = -scale * total(blend(high, x_low * y_high, x_high * y_low))
    # Roundings of the planes' own coefficients and constants, several units each, over the box.
    x_reach, y_reach = (np.maximum(np.abs(a), np.abs(b)) for a, b in ((x_low, x_high), (y_low, y_high)))
    sizes = (np.abs(y) + y_reach) * x_reach + (np.abs(x) + x_reach) * y_reach
    count = 1 if layout.summed is None else shape[layout.summed]
    lost = TINY * total(1 + x_reach + y_reach)  # by coefficients and constants that underflow
    return PlanesPiece(
        residual=residual + (16 + 2 * count) * U * scale * total(sizes) + lost,
        kind=kind,
        x_lower=scale * np.broadcast_to(y + blend(low, y_low, y_high), shape),
        x_upper=scale * np.broadcast_to(y + blend(high, y_high, y_low), shape),
        y_lower=y_lower,
        y_upper=y_upper,
        lower=lower,
        upper=upper,
    )
