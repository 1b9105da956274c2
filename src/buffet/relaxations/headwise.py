"""Attention weights times values that move linearly: the features of a head bounded as a whole.

Where the values are exact linear functions of the input, as in the first layer, a row c of the attention
output reads the product of a weight ``p_j = p̂ + a``, ``a ∈ [m − r, m + r]``, with the number ``c·v_j``, which
deviates by ``(c·V) δ_j``. With μ the middle of the region of δ_j,

    Σ_k c_k a V_k δ_j  =  m (c·V) δ_j  +  (a − m) (c·V) μ  +  (a − m) (c·V) (δ_j − μ)

of which the first two parts are linear and the third is at most r times what ``|(c·V)(δ_j − μ)|`` can get to
in the region, its support: ``ε‖c·V‖_q`` in a ball, ``Σ_i ρ_i|(c·V)_i|`` in a box with half-widths ρ, the
largest ``|(c·V)(o − μ)|`` of all candidates o. Planes lose as much of every single feature, ``Σ_k |c_k|`` of
it in all: several times as much where many features are read. In return they can be tilted by α; so any
mixture of both is used, a share for every token and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Form, Local, Rows
from buffet.bounds.intervals import EPS, Box
from buffet.network import Mix
from buffet.regions import Region
from buffet.regions.norms import largest_norm, lp_norm
from buffet.relaxations.enclosures import Moved, PlanesEnclosure, Pulled, split_axes


@dataclass(frozen=True, eq=False)
class HeadwiseProduct:
    """What bounds a product as a whole: in the middle of the weights, with what is left by token and head.

    Of rows c that is ``Σ_g reach_g ‖c·F_g‖_q``, with the columns of F in equal groups F_g. F is V, or a
    square matrix with the same norms, or V times offsets of the input, by task.
    """

    values: Float[Tensor, "*own keys heads depth"]  # clean ones, those of moved keys in their middle
    middle: Float[Tensor, "tasks tokens heads keys"]  # of the weights, clean values included
    offset: Float[Tensor, "tasks tokens heads depth"] | None  # what both middles count twice; None: 0
    reach: Float[Tensor, "tasks tokens heads groups"]
    factors: Float[
        Tensor, "*tasks heads depth columns"
    ]  # F: V, or a square matrix with the same norms, or V·O
    sizes: Float[Tensor, "*each heads depth groups"]  # norms of F_g for single features; nothing cancels
    exponent: float  # of the norm, q
    terms: int  # of the sums that make c·F

    @staticmethod
    def of(
        op: Mix, clean: tuple[Tensor, ...], weights: Box, values: Local, region: Region
    ) -> HeadwiseProduct:
        """In float64, for weights and values that deviate from their clean ones by so much."""
        support = region.support()

        def split(value: Tensor) -> Tensor:
            return value.unflatten(-1, (op.heads, -1))

        half = split((weights.upper - weights.lower) / 2).abs()
        moved = region.moved[:, None, None].expand(-1, *half.shape[1:3], -1)
        half = half.gather(3, moved)
        if support.weights.shape[1] == 1:  # all words alike
            reach = half.sum(3, keepdim=True) * support.weights.unsqueeze(1)
        else:
            reach = half @ support.weights.unsqueeze(1)
        reach = reach * (1 + 32 * EPS)
        matrix = values.unrounded.unflatten(0, (op.heads, -1))
        groups, terms = reach.shape[3], sum(matrix.shape[1:]) + 16
        if support.columns is not None:
            columns = support.columns.unsqueeze(1)
            sizes = _norms(matrix.abs() @ columns.abs(), support.exponent, groups)
            matrix, terms = matrix @ columns, terms + columns.shape[3]
        else:
            if support.exponent == 2 and matrix.shape[1] < matrix.shape[2]:
                matrix = torch.linalg.qr(matrix.mT, mode="r").R.mT
                terms = sum(matrix.shape[1:]) + 16
            sizes = _norms(matrix, support.exponent, groups)
        middle = split(clean[0]) + split((weights.lower + weights.upper) / 2)
        shifted, offset = split(clean[1]), None
        if support.middle is not None:
            away = split(support.middle @ values.unrounded.mT)  # tasks, moved, heads, depth
            index = region.moved[..., None, None].expand_as(away)
            shifted = shifted.expand(len(away), *shifted.shape).scatter_add(1, index, away)
            own = split((weights.lower + weights.upper) / 2).gather(3, moved)
            offset = -torch.einsum("tihd,tdhk->tihk", own, away)
        return HeadwiseProduct(shifted, middle, offset, reach, matrix, sizes, support.exponent, terms)

    @property
    def groups(self) -> int:
        return self.reach.shape[3]

    def spread(self) -> Float[Tensor, "tasks tokens features"]:
        """What is left of every single feature."""
        if self.groups == 1:
            return (self.reach * self.sizes.squeeze(-1).unsqueeze(-3)).flatten(2)
        return torch.einsum("tihg,...hkg->tihk", self.reach, self.sizes).flatten(2)

    def mixed(
        self, enclosure: PlanesEnclosure, share: Float[Tensor, "tasks tokens heads"]
    ) -> HeadwiseEnclosure:
        """A mixture of this, so much of it, and of planes."""
        dtype = enclosure.lower.dtype
        each = share[..., None, None]
        x = self.values.transpose(-3, -2)  # heads, keys, depth
        x = x.unsqueeze(1) if x.ndim == 4 else x
        y = self.middle.unsqueeze(-1)
        taken = (1 - share).unsqueeze(-1)

        def scaled(constant: Tensor) -> Tensor:
            found = taken * constant.unflatten(-1, (share.shape[-1], -1))
            if self.offset is not None:
                found = found + share.unsqueeze(-1) * self.offset
            return found.flatten(2).to(dtype)

        def between(planes: Tensor, value: Tensor) -> Tensor:
            return (planes + each * (value - planes)).to(dtype)

        return HeadwiseEnclosure(
            op=enclosure.op,
            x_lower=between(enclosure.x_lower, x),
            x_upper=between(enclosure.x_upper, x),
            y_lower=between(enclosure.y_lower, y),
            y_upper=between(enclosure.y_upper, y),
            lower=scaled(enclosure.lower),
            upper=scaled(enclosure.upper),
            reach=(share.unsqueeze(-1) * self.reach * (1 + torch.finfo(dtype).eps)).to(dtype),
            factors=self.factors.to(dtype),
            spread=(share.repeat_interleave(self.factors.shape[-2], -1) * self.spread()).to(dtype),
            exponent=self.exponent,
            terms=self.terms,
        )


@dataclass(frozen=True, eq=False)
class HeadwiseEnclosure(PlanesEnclosure):
    """A mixture of planes and of a bound of all features of a head as a whole."""

    reach: Float[Tensor, "tasks tokens heads groups"]
    factors: Float[Tensor, "*each heads depth columns"]
    spread: Float[Tensor, "tasks tokens features"]
    exponent: float
    terms: int

    def pull_moved(self, rows: Rows, moved: Sequence[Moved]) -> Pulled:
        parts, constant = super().pull_moved(rows, moved)
        assert constant is not None
        return parts, constant - self._left(rows)

    def _left(self, rows: Rows) -> Float[Tensor, "tasks groups rows"]:
        """What the weights may do besides."""
        heads = split_axes(self.op, rows.coefs, self.op.out).unbind(2)
        reach, groups = rows.read(self.reach), self.reach.shape[3]
        # One head at a time: their forms together are several times the rows.
        found = []
        for h, (matrix, head) in enumerate(zip(self.factors.unbind(-3), heads, strict=True)):
            matrix = matrix.unsqueeze(1) if matrix.ndim == 3 else matrix
            norms = _grouped(matrix.mT @ head, self.exponent, groups)
            found.append(norms if groups == 1 else reach[:, :, h].unsqueeze(2) @ norms)
        left = torch.cat(found, 2)
        left = (reach * left if groups == 1 else left).sum(2)
        if not rows.diagonal:
            left = left.sum(1).unflatten(-1, (rows.groups, -1))
        # Sums may cancel, to more than what their terms were rounded by.
        rounding = rows.like(rows.coefs.abs()).contract(self.spread)
        return torch.add(left, rounding, alpha=self.terms * torch.finfo(left.dtype).eps)

    def push(self, *forms: Form) -> Form:
        return super().push(*forms).plus(torch.stack([-self.spread, self.spread]))


def _norms(matrix: Float[Tensor, "*each heads depth columns"], exponent: float, groups: int) -> Tensor:
    """The norms of the groups of columns, for every single feature."""
    return lp_norm(matrix.unflatten(-1, (groups, -1)), exponent, -1)


def _grouped(
    forms: Float[Tensor, "tasks tokens columns rows"], exponent: float, groups: int
) -> Float[Tensor, "tasks tokens groups rows"]:
    """The norms of the groups of columns, for every row."""
    if groups == 1:
        return largest_norm(forms, exponent, 2)
    return largest_norm(forms.unflatten(2, (groups, -1)), exponent, 3).squeeze(3)
