"""Attention weights times values that move linearly: the features of a head bounded as a whole.

Where the values are exact linear functions of the input, as in the first layer, a row c of the attention
output reads the product of a weight ``p_j = p̂ + a``, ``a ∈ [m − r, m + r]``, with the number ``c·v_j``, which
deviates by ``(c·V) δ_j``. So of

    Σ_k c_k a V_k δ_j  =  m (c·V) δ_j  +  (a − m) (c·V) δ_j

the first part is linear and the second at most ``r·ε‖c·V‖_q`` in size. Planes lose ``Σ_k |c_k| r·ε‖V_k‖_q``
there, one feature at a time: several times as much where many features are read. In return they can be tilted
by α; so any mixture of both is used, a share for every token and head.
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
from buffet.regions import LpBall
from buffet.regions.norms import largest_norm, lp_norm
from buffet.relaxations.linear import Moved, PlanesPiece, Pulled, split_axes


@dataclass(frozen=True, eq=False)
class Whole:
    """What bounds a product as a whole: in the middle of the weights, with what is left by token and head."""

    values: Float[Tensor, "keys heads depth"]  # clean
    middle: Float[Tensor, "tasks tokens heads keys"]  # of the weights, clean values included
    reach: Float[Tensor, "tasks tokens heads"]  # ε·r, summed over the moved keys
    factors: Float[Tensor, "heads depth columns"]  # V, or a square matrix with the same norms
    exponent: float  # of the norm, q

    @staticmethod
    def of(op: Mix, clean: tuple[Tensor, ...], weights: Box, values: Local, ball: LpBall) -> Whole:
        """In float64, for weights and values that deviate from their clean ones by so much."""
        assert ball.eps is not None

        def split(value: Tensor) -> Tensor:
            return value.unflatten(-1, (op.heads, -1))

        half = split((weights.upper - weights.lower) / 2).abs()
        moved = ball.moved[:, None, None].expand(-1, *half.shape[1:3], -1)
        reach = half.gather(3, moved).sum(3) * ball.eps[:, None, None] * (1 + 32 * EPS)
        matrix = values.unrounded.unflatten(0, (op.heads, -1))
        if ball.q == 2 and matrix.shape[1] < matrix.shape[2]:
            matrix = torch.linalg.qr(matrix.mT, mode="r").R.mT
        middle = split(clean[0]) + split((weights.lower + weights.upper) / 2)
        return Whole(split(clean[1]), middle, reach, matrix, ball.q)

    def spread(self) -> Float[Tensor, "tasks tokens features"]:
        """What is left of every single feature."""
        return (self.reach.unsqueeze(-1) * lp_norm(self.factors, self.exponent, 2)).flatten(2)

    def mixed(self, piece: PlanesPiece, share: Float[Tensor, "tasks tokens heads"]) -> WholePiece:
        """A mixture of this, so much of it, and of planes."""
        dtype = piece.lower.dtype
        each = share[..., None, None]
        x = self.values.movedim(0, 1)  # heads, keys, depth
        y = self.middle.unsqueeze(-1)
        taken = (1 - share).unsqueeze(-1)

        def scaled(constant: Tensor) -> Tensor:
            return (taken * constant.unflatten(-1, (share.shape[-1], -1))).flatten(2).to(dtype)

        def between(planes: Tensor, value: Tensor) -> Tensor:
            return (planes + each * (value - planes)).to(dtype)

        return WholePiece(
            op=piece.op,
            x_lower=between(piece.x_lower, x),
            x_upper=between(piece.x_upper, x),
            y_lower=between(piece.y_lower, y),
            y_upper=between(piece.y_upper, y),
            lower=scaled(piece.lower),
            upper=scaled(piece.upper),
            reach=(share * self.reach * (1 + torch.finfo(dtype).eps)).to(dtype),
            factors=self.factors.to(dtype),
            spread=(share.repeat_interleave(self.factors.shape[1], -1) * self.spread()).to(dtype),
            exponent=self.exponent,
        )


@dataclass(frozen=True, eq=False)
class WholePiece(PlanesPiece):
    """A mixture of planes and of a bound of all features of a head as a whole."""

    reach: Float[Tensor, "tasks tokens heads"]
    factors: Float[Tensor, "heads depth columns"]
    spread: Float[Tensor, "tasks tokens features"]
    exponent: float

    def pull_moved(self, rows: Rows, moved: Sequence[Moved]) -> Pulled:
        parts, constant = super().pull_moved(rows, moved)
        assert constant is not None
        return parts, constant - self._left(rows)

    def _left(self, rows: Rows) -> Float[Tensor, "tasks groups rows"]:
        """What the weights may do besides."""
        heads = split_axes(self.op, rows.coefs, self.op.out).unbind(2)
        # One head at a time: their forms together are several times the rows.
        norms = [
            largest_norm(matrix.mT @ head, self.exponent, 2)
            for matrix, head in zip(self.factors, heads, strict=True)
        ]
        left = (rows.read(self.reach).unsqueeze(-1) * torch.cat(norms, 2)).sum(2)
        if not rows.diagonal:
            left = left.sum(1).unflatten(-1, (rows.groups, -1))
        # Sums may cancel, to more than what their terms were rounded by.
        terms = sum(self.factors.shape[1:]) + 16
        rounding = rows.like(rows.coefs.abs()).contract(self.spread)
        return torch.add(left, rounding, alpha=terms * torch.finfo(left.dtype).eps)

    def push(self, *forms: Form) -> Form:
        return super().push(*forms).plus(torch.stack([-self.spread, self.spread]))
