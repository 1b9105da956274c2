"""The worst case over substitutions, as a differentiable bound: what certified training makes large.

For an encoder of one layer whose classifier reads the first token. All maps between an embedding row and the
scores, and between it and what the ReLUs read, are linear, so they are multiplied out and applied to single
rows: the range over a word's choices is then exact, as is the range of the attention-weighted mean over boxes
of scores and values. The margins are bounded by what the ReLUs' intervals leave, the last maps taken as one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buffet.loading.config import ModelConfig

LAYER = "bert.encoder.layer.0"
ROUNDS = 20
"""Most of the search for the worst weights, which hardly ever takes more than five."""
ROUNDING = 1e-6
"""Relative to the sizes of a sum: differences called none. Training proves nothing, `verify` does."""


@dataclass(frozen=True, eq=False)
class Folded:
    """The network, its linear maps multiplied out.

    ``scores[h, j] = score_h · x_j``, ``read = Σ_h Σ_j p[h, j] value_h x_j + rest``; of what is read, the
    first are inputs of the ReLUs, the others one for every class and other class:
    ``logit[label] − logit[other]`` is that plus ``Σ out · relu``.
    """

    score: Float[Tensor, "heads width"]
    value: Float[Tensor, "heads read width"]
    rest: Float[Tensor, " read"]
    out: Float[Tensor, "classes others hidden"]

    @classmethod
    def of(cls, config: ModelConfig, tensors: Mapping[str, Tensor], first: Float[Tensor, " width"]) -> Folded:
        """The network that reads the row `first` in front of every sentence."""
        heads = config.num_attention_heads
        norms = [
            (tensors[f"{name}.weight"], tensors[f"{name}.bias"])
            for name in (
                "bert.embeddings.LayerNorm",
                f"{LAYER}.attention.output.LayerNorm",
                f"{LAYER}.output.LayerNorm",
            )
        ]
        query, key, value, mixed, inner, output = (
            (tensors[f"{LAYER}.{name}.weight"], tensors[f"{LAYER}.{name}.bias"])
            for name in (
                *(f"attention.self.{part}" for part in ("query", "key", "value")),
                *("attention.output.dense", "intermediate.dense", "output.dense"),
            )
        )
        weight, bias = tensors["classifier.weight"], tensors["classifier.bias"]
        classes = len(bias)
        others = torch.tensor([[o for o in range(classes) if o != label] for label in range(classes)])
        differences = (weight[:, None] - weight[others]).flatten(0, 1)
        last, constant = _before_norm(differences, norms[2])
        constant = constant + last @ output[1] + (bias[:, None] - bias[others]).flatten()
        # Behind the attention: x + W_o (values) + b_o, through a LayerNorm.
        reads, rest = _before_norm(torch.cat([inner[0], last]), norms[1])
        rest = rest + torch.cat([inner[1], constant])
        first = _norm(first, norms[0])
        q = (query[0] @ first + query[1]).unflatten(0, (heads, -1))
        scores = torch.einsum("hd,hdw->hw", q, key[0].unflatten(0, (heads, -1))) / math.sqrt(q.shape[1])
        values = torch.einsum(
            "rhd,hdw->hrw", (reads @ mixed[0]).unflatten(1, (heads, -1)), value[0].unflatten(0, (heads, -1))
        )
        rest = rest + reads @ (first + mixed[0] @ value[1] + mixed[1])
        score, _ = _before_norm(scores, norms[0])  # what all scores of a head have in common has no effect
        value_, more = _before_norm(values.flatten(0, 1), norms[0])
        return cls(
            score,
            value_.unflatten(0, (heads, -1)),
            rest + more.unflatten(0, (heads, -1)).sum(0),
            (last @ output[0]).unflatten(0, (classes, classes - 1)),
        )

    def worst_margins(
        self,
        choices: Float[Tensor, "words choices width"],
        words: Int[Tensor, "sentences tokens"],
        positions: Float[Tensor, "tokens width"],
        mask: Bool[Tensor, "sentences tokens"],
        labels: Int[Tensor, " sentences"],
    ) -> Float[Tensor, "sentences others"]:
        """Lower bounds of ``logit[label] − logit[other]`` over all sentences that choices make.

        `choices` are rows without positions, for every word that occurs; `words` says which word is where.
        A NaN, where weights underflow, says nothing.
        """
        hidden = self.out.shape[-1]
        low, high = _range(choices @ self.score.mT, words, positions @ self.score.mT)
        low, high = (
            low.masked_fill(~mask[..., None], -math.inf),
            high.masked_fill(~mask[..., None], -math.inf),
        )
        largest = high.detach().amax(1, keepdim=True)
        weights = (low - largest).exp()[..., None], (high - largest).exp()[..., None]
        least, most = _range(
            torch.einsum("wck,hrk->wchr", choices, self.value),
            words,
            torch.einsum("tk,hrk->thr", positions, self.value),
        )
        lower = _least_mean(*weights, least).sum(1) + self.rest
        upper = self.rest[:hidden] - _least_mean(*weights, -most[..., :hidden]).sum(1)
        out = self.out[labels]
        direct = lower[:, hidden:].unflatten(1, self.out.shape[:2])[torch.arange(len(labels)), labels]
        relus = out.clamp_min(0) * lower[:, None, :hidden].relu() + out.clamp_max(0) * upper[:, None].relu()
        return direct + relus.sum(-1)


def _norm(x: Tensor, norm: tuple[Tensor, Tensor]) -> Tensor:
    """LayerNorm without variance."""
    return (x - x.mean(-1, keepdim=True)) * norm[0] + norm[1]


def _before_norm(
    matrix: Float[Tensor, "rows width"], norm: tuple[Tensor, Tensor]
) -> tuple[Float[Tensor, "rows width"], Float[Tensor, " rows"]]:
    """Matrix and constant of ``matrix · LayerNorm(x)``."""
    scaled = matrix * norm[0]
    return scaled - scaled.mean(-1, keepdim=True), matrix @ norm[1]


def _range(
    per_choice: Tensor, words: Int[Tensor, "sentences tokens"], per_position: Tensor
) -> tuple[Tensor, Tensor]:
    """The least and largest value of every token: over the choices of its word, in its position."""
    return per_choice.amin(1)[words] + per_position, per_choice.amax(1)[words] + per_position


def _least_mean(
    low: Float[Tensor, "sentences tokens heads 1"],
    high: Float[Tensor, "sentences tokens heads 1"],
    values: Float[Tensor, "sentences tokens heads read"],
) -> Float[Tensor, "sentences heads read"]:
    """A lower bound of ``Σ_j e_j v_j / Σ_j e_j`` over all ``low ≤ e ≤ high``.

    At the minimum m, e is as large as it can be where ``v < m`` and as small as it can be elsewhere. From any
    mean t that is attained, choosing so for t gives a smaller one, and after a few rounds the same. Where the
    rounds are over before that, what may be missing is bounded: ``m ≥ t + min_e Σ e (v − t) / Σ low``, as
    ``Σ e (v − t) = (m − t) Σ e`` where m is attained.
    """
    with torch.no_grad():
        mean = (high * values).sum(1) / high.sum(1)
        up = values < mean[:, None]
        for _ in range(ROUNDS):
            weights = torch.where(up, high, low)
            mean = (weights * values).sum(1) / weights.sum(1)
            before, up = up, values < mean[:, None]
            if bool((done := (up == before).all(1)).all()):
                break
    weights = torch.where(before, high, low)
    mean = (weights * values).sum(1) / weights.sum(1)
    with torch.no_grad():
        apart = values - mean[:, None]
        missing = torch.where(apart < 0, high * apart, low * apart).sum(1)
        done = done | (missing >= -ROUNDING * (weights * apart.abs()).sum(1))
    return mean + torch.where(done, 0.0, missing / low.sum(1))
