"""Attention in runs with an account of rounding: at all points alike, and where there is less to do.

A score is off by δ or less: by what queries and keys are, and their product's rounding. Weights of such
scores, ``p'_j = p_j e^{Δ_j} / Σ p e^Δ`` with ``|Δ_j| ≤ δ``, move the mean ``o = Σ p_j v_j`` by

    ‖Σ_j p'_j (v_j − o)‖  =  ‖Σ_j p_j (e^{Δ_j} − 1)(v_j − o)‖ / Σ p e^Δ
                          ≤  e^δ (e^δ − 1) · √(Σ p_j ‖v_j‖² − ‖o‖²)  ≤  e^δ (e^δ − 1) · max_j ‖v_j‖

Other values move it by no more than the one that is off most, as weights add up to 1. Computed weights are
off by ρ, relative to themselves: exponents err in units of the scores' largest difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from buffet.network import Mix, Scores
from buffet.network.norms import UP
from buffet.propagation.computed import Computed, nothing, root, unit

EXP_UNITS = 64
"""Units in the last place by which the exponentials inside a softmax may be off: PyTorch allows itself 20
in single precision."""
BLOCK = 256
"""Of every so many keys, or more, the weights are brought into line with those of the others once more."""
MOST_MOVING = 3
"""Tokens that are mixed in one after the other; of more, all attention is computed anew."""


@dataclass(frozen=True)
class Sizes:
    """What queries, keys or values of heads are at most, and how far they may be off."""

    error: Float[Tensor, "points _ heads"]
    size: Float[Tensor, "points _ heads"]

    @classmethod
    def of(cls, x: Computed, heads: int) -> Sizes:
        return cls(*x.by_heads(heads))

    def most(self) -> Sizes:
        """Of the tokens of a point together."""
        return Sizes(self.error.amax(-2, keepdim=True), self.size.amax(-2, keepdim=True))

    def and_of(self, other: Sizes) -> Sizes:
        """The larger ones."""
        return Sizes(torch.maximum(self.error, other.error), torch.maximum(self.size, other.size))


def attention(op: Mix, scores: Scores, q: Computed, k: Computed, v: Computed) -> Computed:
    """Values mixed by the softmax of scores."""
    heads = op.heads
    value = _mixed(scores.scale, *(c.value.unflatten(-1, (heads, -1)) for c in (q, k, v)))
    keys, values = (Sizes.of(c, heads).most() for c in (k, v))
    return _account(op, scores, value, (q.value, k.value), (Sizes.of(q, heads), keys, values))


def _mixed(
    scale: float, *parts: Float[Tensor, "points _ heads _"]
) -> Float[Tensor, "points queries features"]:
    q, k, v = (part.transpose(-3, -2) for part in parts)
    return scaled_dot_product_attention(q, k, v, scale=scale).transpose(-3, -2).flatten(-2)


def _account(
    op: Mix,
    scores: Scores,
    value: Tensor,
    read: tuple[Tensor, Tensor],
    sizes: tuple[Sizes, Sizes, Sizes],
    times: int = 1,
) -> Computed:
    """How far mixed values may be off; `read` are queries and keys.

    Weights are found once, or several `times` with no more units each. To merge another key is one time: the
    sum of the scores so far, ``L = log Σ e^s``, and s − L are rounded, by units of what scores differ by and
    of log keys, and so is the weight.
    """
    dtype, keys, terms = value.dtype, read[1].shape[-2], read[0].shape[-1] // op.heads
    info, scale = torch.finfo(dtype), abs(scores.scale)
    q, k, v = sizes
    product = q.size * k.size
    delta = scale * (q.size * k.error + q.error * (k.size + k.error) + unit(dtype, terms) * product)
    delta = delta * (1 + UP) + nothing(dtype)
    apart = 2 * scale * product
    units = times * (keys + EXP_UNITS * (1 + keys // BLOCK) + 4 * apart.clamp_max(800.0))
    rho = units * info.eps + times * keys * 4 * info.tiny + 0.0 * apart
    moved = (delta.exp() * torch.expm1(delta) + rho + unit(dtype, keys) * (1 + rho)) * v.size
    known = (1 + rho + unit(dtype, keys)) * v.size
    error, known = abs(op.scale) * root(moved + v.error), abs(op.scale) * root(known)
    shape = value.shape[:-1]
    return Computed(
        value if op.scale == 1 else op.scale * value,
        error.expand(shape),
        known=(known + nothing(dtype)).expand(shape),
    )


def attention_of_few(
    op: Mix, scores: Scores, table: tuple[Computed, ...], index: Int[Tensor, "points tokens"]
) -> Computed | None:
    """The same of rows of a table, where most tokens are the same at all points; None: they are not.

    Those attend to each other once for all points. With ``L = log Σ e^s`` over the keys so far, one more key
    takes the weight ``σ(s − L)`` from all of them. Tokens that differ attend to all of their point.
    """
    moving = (index != index[0]).any(0).nonzero()[:, 0]
    if len(moving) > min(MOST_MOVING, index.shape[1] // 2) or any(c.heads != op.heads for c in table):
        return None
    still = torch.ones(index.shape[1], dtype=torch.bool, device=index.device).index_fill(0, moving, False)
    q, k, v = (c.value.unflatten(-1, (op.heads, -1)) for c in table)
    base, dtype = index[0], q.dtype
    wide = scores.scale * torch.einsum("ihk,jhk->ihj", q[base].double(), k[base[still]].double())
    common = torch.einsum("ihj,jhk->ihk", wide.softmax(-1), v[base[still]].double()).to(dtype)
    mixed, together = common.expand(len(index), *common.shape), wide.logsumexp(-1).to(dtype)
    for token in moving.tolist():
        score = scores.scale * torch.einsum("ihk,phk->pih", q[base], k[index[:, token]])
        weight = torch.sigmoid(score - together)
        mixed = torch.lerp(mixed, v[index[:, token]].unsqueeze(1), weight.unsqueeze(-1))
        together = torch.logaddexp(together, score)
    value = mixed.flatten(-2)
    if len(moving):
        keys, values = (c.gather(index).value.unflatten(-1, (op.heads, -1)) for c in table[1:])
        value[:, moving] = _mixed(scores.scale, q[index[:, moving]], keys, values)
    times = max(1, len(moving)) if dtype != torch.float64 else 1 + len(moving)
    queries, keyed, valued = (_largest(c, base[still], index[:, moving]) for c in table)
    return _account(op, scores, value, (table[0].value, value), (queries, keyed, valued), times)


def _largest(table: Computed, still: Int[Tensor, " rows"], moving: Int[Tensor, "points _"]) -> Sizes:
    """Of some rows of a table that all points have, and of some of each point's own."""
    common = Sizes(table.error[still][None], table.sizes[still][None]).most()
    if not moving.shape[1]:
        return common
    return Sizes(table.error[moving], table.sizes[moving]).most().and_of(common)
