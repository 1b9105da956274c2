"""Attention weights times values that move linearly: the features of a head bounded as a whole.

With weights ``x̂ + a``, a ∈ [l, u], m = (l + u)/2 and r no less than |a − m|, and values that deviate by
``b_k = V_k δ`` up to an error, and w_k = V_k μ for the middle μ of the region:

    Σ_k c_k a b_k  =  m Σ_k c_k b_k + (a − m) Σ_k c_k w_k + (a − m) (c·V) (δ − μ)

of which the third part is at most r times what |(c·V) (δ − μ)| can get to in the region, plus r times
``Σ_k |c_k|`` of the errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import TINY, Array, U, gamma
from buffet_checker.intervals import Box, magnitude
from buffet_checker.pieces import PlanesPiece, Pulled
from buffet_checker.regions import Region
from buffet_checker.rows import Form, Local, Rows

_MORE = 1 + 1e-9
"""More than the relative error of any sum of non-negative terms made here (up to 10⁶ terms)."""


@dataclass(frozen=True)
class WholePiece(PlanesPiece):
    """A mixture of planes and of a bound of all features of a head as a whole."""

    region: Region
    matrix: Array  # heads, features of a head, width: V
    far: Array  # moved, tokens, heads: r of every moved key
    spread: Array  # tokens, features: what is left of a single feature
    size: Array  # keys, features: no value is further from its clean one, or from its middle
    wobble: Array  # keys, features: how far from V δ those of a deployed run may be

    @property
    def constant(self) -> Array:
        return super().constant + self.spread

    def pull(self, rows: Rows) -> Pulled:
        parts, bias = super().pull(rows)
        assert bias is not None
        form = np.matmul(self.matrix.swapaxes(1, 2), self._split(rows.coefs))  # tokens, heads, width, rows
        far = np.stack([rows.read(one) for one in self.far])
        left = self.region.left(np.moveaxis(form, 2, 0), far[..., None]).sum(1)
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
    region: Region,
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
    by_width = np.moveaxis(matrix, 2, 0)  # width, heads, features of a head
    far = share * np.moveaxis(away[:, :, region.moved, 0], 2, 0) * _MORE + TINY
    spread = region.left(by_width[:, None], far[..., None]).reshape(len(share), -1) * _MORE + TINY
    sizes = region.size(by_width)  # moved, heads, features of a head
    coarse = np.einsum("dth,dhk->thk", far, sizes) * _MORE + TINY
    size = local.error.copy()
    size[region.moved] += sizes.reshape(len(sizes), -1)
    size = size * _MORE + TINY
    # What V·μ is off, and what both middles count twice.
    shift, off = np.zeros_like(local.error), np.zeros_like(local.error)
    shift[region.moved] = region.middle @ local.matrix.T
    off[region.moved] = gamma(local.matrix.shape[1] + 8) * (np.abs(region.middle) @ np.abs(local.matrix).T)
    twice = -(weights(middle) * features(shift)).sum(2)  # tokens, heads, features of a head
    # Values are off their forms by an error, sums that make a form err, and mixing rounds all numbers.
    most = weights(magnitude(boxes[0]))
    rounded = (np.abs(weights(values[0])) + most) * features(size)
    rounded = rounded + (np.abs(features(values[1])) + features(size)) * most
    lost = TINY * (1 + most + features(size))  # by coefficients that underflow
    strayed = away * features(local.error + off * _MORE + TINY) + 64 * U * rounded + lost
    strayed = strayed.sum(2).reshape(spread.shape) * _MORE
    # Sums err relative to the sizes of their terms: those over keys, and those that make c·V.
    summed = gamma(len(shift) + 16) * (most * np.abs(features(shift))).sum(2).reshape(spread.shape)
    summed = summed + gamma(sum(matrix.shape[1:]) + 16) * coarse.reshape(spread.shape)
    residual = planes.residual + strayed + summed * _MORE

    def mixed(plane: Array, other: Array) -> Array:
        return (1 - share[..., None, None]) * plane + share[..., None, None] * other

    def scaled(constant: Array) -> Array:
        plane = (1 - share[..., None]) * constant.reshape(twice.shape)
        return (plane + share[..., None] * twice).reshape(constant.shape)

    return WholePiece(
        residual=residual,
        kind="mix",
        x_lower=mixed(planes.x_lower, features(values[1] + shift)),
        x_upper=mixed(planes.x_upper, features(values[1] + shift)),
        y_lower=mixed(planes.y_lower, weights(values[0] + middle)),
        y_upper=mixed(planes.y_upper, weights(values[0] + middle)),
        lower=scaled(planes.lower),
        upper=scaled(planes.upper),
        region=region,
        matrix=matrix,
        far=far,
        spread=spread,
        size=size,
        wobble=local.wobble,
    )
