"""Attention weights times values that move linearly: the features of a head bounded as a whole.

With weights ``x̂ + a``, a ∈ [l, u], m = (l + u)/2 and r no less than |a − m|, and values that deviate by
``b_k = V_k δ`` up to an error: ``Σ_k c_k a b_k = m Σ_k c_k b_k + (a − m) (c·V) δ``, of which the second part
is at most ``r·ε‖c·V‖`` in size, plus r times ``Σ_k |c_k|`` of the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import TINY, Array, U, gamma
from buffet_checker.intervals import Box, magnitude
from buffet_checker.pieces import PlanesPiece, Pulled
from buffet_checker.regions import Ball
from buffet_checker.rows import Form, Local, Rows

_MORE = 1 + 1e-9
"""More than the relative error of any sum of non-negative terms made here (up to 10⁶ terms)."""


@dataclass(frozen=True)
class WholePiece(PlanesPiece):
    """A mixture of planes and of a bound of all features of a head as a whole."""

    ball: Ball
    matrix: Array  # heads, features of a head, width: V
    far: Array  # tokens, heads: r of all moved keys together
    spread: Array  # tokens, features: ``r·ε‖V_k‖``, what is left of a single feature
    size: Array  # keys, features: no deviation of a value is larger
    wobble: Array  # keys, features: how far from V δ those of a deployed run may be

    @property
    def constant(self) -> Array:
        return super().constant + self.spread

    def pull(self, rows: Rows) -> Pulled:
        parts, bias = super().pull(rows)
        assert bias is not None
        form = np.matmul(self.matrix.swapaxes(1, 2), self._split(rows.coefs))  # tokens, heads, width, rows
        norms = self.ball.largest(np.moveaxis(form, 2, 0))
        left = (rows.read(self.far)[..., None] * norms).sum(1)
        if not rows.diagonal:
            left = left.sum(0).reshape(rows.groups, -1)
        return parts, bias - left * _MORE

    def push(self, *forms: Form) -> Form:
        return super().push(*forms).plus(-self.spread, self.spread)


def whole(
    planes: PlanesPiece,
    share: Array,
    values: tuple[Array, Array],
    boxes: tuple[Box, Box],
    local: Local,
    ball: Ball,
) -> WholePiece:
    """A share of the bound as a whole, by token and head, planes for the rest; any in [0, 1] is valid."""
    heads = share.shape[1]

    def weights(value: Array) -> Array:
        return value.reshape(len(value), heads, -1, 1)  # tokens, heads, keys, 1

    def features(value: Array) -> Array:
        return value.reshape(1, len(value), heads, -1).swapaxes(1, 2)  # 1, heads, keys, features of a head

    low, high = boxes[0]
    middle = (low + high) / 2
    away = weights(np.maximum(high - middle, middle - low)) * _MORE + TINY
    matrix = local.matrix.reshape(heads, -1, local.matrix.shape[1])
    norms = ball.largest(np.moveaxis(matrix, 2, 0))  # heads, features of a head
    far = share * away[:, :, ball.moved, 0].sum(2) * _MORE + TINY
    spread = (far[..., None] * norms).reshape(len(far), -1) * _MORE + TINY
    size = local.error.copy()
    size[ball.moved] += norms.reshape(-1)
    size = size * _MORE + TINY
    # Values are off their forms by an error, sums that make a form err, and mixing rounds all numbers.
    most = weights(magnitude(boxes[0]))
    rounded = (np.abs(weights(values[0])) + most) * features(size)
    rounded = rounded + (np.abs(features(values[1])) + features(size)) * most
    lost = TINY * (1 + most + features(size))  # by coefficients that underflow
    strayed = (away * features(local.error) + 64 * U * rounded + lost).sum(2).reshape(spread.shape) * _MORE
    residual = planes.residual + strayed + gamma(sum(matrix.shape[1:]) + 16) * spread

    def mixed(plane: Array, other: Array) -> Array:
        return (1 - share[..., None, None]) * plane + share[..., None, None] * other

    def scaled(constant: Array) -> Array:
        return ((1 - share[..., None]) * constant.reshape(len(constant), heads, -1)).reshape(constant.shape)

    return WholePiece(
        residual=residual,
        kind="mix",
        x_lower=mixed(planes.x_lower, features(values[1])),
        x_upper=mixed(planes.x_upper, features(values[1])),
        y_lower=mixed(planes.y_lower, weights(values[0] + middle)),
        y_upper=mixed(planes.y_upper, weights(values[0] + middle)),
        lower=scaled(planes.lower),
        upper=scaled(planes.upper),
        ball=ball,
        matrix=matrix,
        far=far,
        spread=spread,
        size=size,
        wobble=local.wobble,
    )
