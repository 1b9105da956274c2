"""Networks trained for substitutions: a vocabulary with the synonyms, the loss of the worst of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, pad

from buffet.loading.config import ModelConfig
from buffet.loading.tokenizer import Tokenizer
from buffet.synonyms import Synonyms
from buffet.training.corpus import Batch
from buffet.training.network import Network
from buffet.training.settings import TrainSettings
from buffet.training.worst_case import Folded

SHARE_BEFORE = 0.02
"""Of the steps, before substitutes begin to move."""


def with_substitutes(words: Iterable[str], synonyms: Synonyms) -> list[str]:
    """What a vocabulary of these words needs besides: their substitutes, and words with these as substitutes.

    A substitute that is not in it would be read as [UNK], and one [UNK] among the substitutes of a word lets
    it be erased.
    """
    known = dict.fromkeys(words)
    own = len(known)
    for word in list(known):
        known.update(dict.fromkeys(synonyms.get(word, ())))
    known.update({word: None for word, some in synonyms.items() if not known.keys().isdisjoint(some)})
    return list(known)[own:]


@dataclass(frozen=True, eq=False)
class Choices:
    """What every token may be exchanged for."""

    own: Int[Tensor, "vocabulary choices"]  # the token itself, then its substitutes; some repeat it
    near: Int[Tensor, "vocabulary neighbours"]  # its substitutes, and the tokens that it is one of
    counts: Int[Tensor, " vocabulary"]  # of them

    @classmethod
    def of(cls, tokenizer: Tokenizer, synonyms: Synonyms) -> Choices:
        """From words; substitutes that are no token of their own are left out: they are not known."""
        ids = tokenizer.inner.get_vocab(with_added_tokens=False)
        unknown = {*tokenizer.special_ids, tokenizer.unknown_id}
        lists = [[index] for index in range(tokenizer.size)]
        near: list[set[int]] = [set() for _ in lists]
        for word, some in synonyms.items():
            at = ids.get(word)
            if at is None or at in unknown:
                continue
            found = dict.fromkeys(ids[s.lower()] for s in some if s.lower() in ids)
            for other in found:
                if other != at and other not in unknown:
                    lists[at].append(other)
                    near[at].add(other)
                    near[other].add(at)
        return cls(
            _rectangle(lists), _rectangle([sorted(some) for some in near]), torch.tensor(list(map(len, near)))
        )

    def exchanged(
        self, ids: Int[Tensor, "*batch"], share: float, generator: torch.Generator
    ) -> Int[Tensor, "*batch"]:
        """Some words replaced by neighbours at random."""
        counts = self.counts[ids]
        which = (torch.rand(ids.shape, generator=generator) * counts).long()
        swap = (torch.rand(ids.shape, generator=generator) < share) & (counts > 0)
        return torch.where(swap, self.near[ids, which.clamp_max(self.near.shape[1] - 1)], ids)


def _rectangle(lists: Sequence[Sequence[int]]) -> Int[Tensor, "rows most"]:
    """Short rows repeat their first entry."""
    most = max(1, max(map(len, lists)))
    return torch.tensor([[*some, *[some[0] if some else 0] * (most - len(some))] for some in lists])


class SubstitutionNetwork(Network):
    """A sentence classifier of one layer, trained to keep its answer whatever words are exchanged.

    `shares` are those of the classes among the training sentences. Their logarithms are added to the logits
    in training, so that the network itself has no reason to prefer the class that is more frequent there.

    Its score is the share of sentences that are answered right whatever is exchanged, by the bound of its
    loss: it is at most what `buffet` can prove.
    """

    measure = "certified dev accuracy"
    shift: Tensor

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        counts: Int[Tensor, " vocabulary"],
        synonyms: Synonyms,
        shares: Float[Tensor, " classes"] | None = None,
    ) -> None:
        super().__init__(config, tensors, tokenizer, counts)
        self.shift = torch.zeros(config.num_labels) if shares is None else shares.log()
        self.choices = Choices.of(tokenizer, synonyms)

    def thinned(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Batch:
        """Some words replaced by [UNK], some of the others by substitutes at random."""
        batch = super().thinned(batch, settings, generator)
        ids = self.choices.exchanged(batch.inputs, settings.exchanged, generator)
        return replace(batch, inputs=ids)

    def loss(
        self, batch: Batch, settings: TrainSettings, generator: torch.Generator, done: float
    ) -> Float[Tensor, ""]:
        """The loss of the sentences, and that of the worst that substitutes can make of each.

        Substitutes move from the word to where they are, and their
        loss gains weight, over the first part of the steps.
        """
        batch = self.thinned(batch, settings, generator)
        total = self.plain_loss(batch, settings, generator)
        if settings.worst_case:
            size = min(1.0, max(0.0, done - SHARE_BEFORE) / settings.ramp)
            share = settings.worst_case * size
            words, places = batch.inputs.unique(return_inverse=True)
            rows = self.embeddings.words[self.choices.own[words]]
            total = (1 - share) * total + settings.closeness * _spread(rows)
            keep = 1 - settings.embedding_dropout
            kept = torch.rand(rows[:, :1].shape, generator=generator) < keep
            rows = torch.lerp(rows[:, :1], rows, size) * kept / keep
            margins = self._worst(rows, places, batch.mask, batch.labels) + self._ahead(batch.labels)
            # The cross-entropy of logits of which the label's is 0 and the others' are the worst.
            total = total + share * cross_entropy(pad(-margins, (1, 0)), torch.zeros_like(batch.labels))
        return total

    def worst_margins(self, batch: Batch) -> Float[Tensor, "sentences others"]:
        """Lower bounds of the margins of the labels over all substitutions."""
        words, places = batch.inputs.unique(return_inverse=True)
        rows = self.embeddings.words[self.choices.own[words]]
        return self._worst(rows, places, batch.mask, batch.labels)

    def _worst(
        self,
        rows: Float[Tensor, "words choices width"],
        places: Int[Tensor, "sentences tokens"],
        mask: Bool[Tensor, "sentences tokens"],
        labels: Int[Tensor, " sentences"],
    ) -> Float[Tensor, "sentences others"]:
        first = self.embeddings.rows(torch.tensor([self.tokenizer.inner.token_to_id("[CLS]")]))[0]
        folded = Folded.of(self.config, self.tensors, first)
        positions = self.embeddings.positions[: places.shape[1]] + self.embeddings.types[0]
        return folded.worst_margins(rows, places, positions, mask, labels)

    def _ahead(self, labels: Int[Tensor, " sentences"]) -> Float[Tensor, "sentences others"]:
        """By how much the shift of the labels is larger than that of the other classes."""
        classes = len(self.shift)
        others = torch.arange(classes - 1) + (torch.arange(classes - 1) >= labels[:, None])
        return self.shift[labels][:, None] - self.shift[others]

    @torch.no_grad()
    def score(self, batches: Sequence[Batch]) -> float:
        right = sum(int((self.worst_margins(b) > 0).all(-1).sum()) for b in batches)
        return right / sum(len(b.labels) for b in batches)


def _spread(rows: Float[Tensor, "words choices width"]) -> Float[Tensor, ""]:
    """How far choices are from their mean, squared."""
    return (rows - rows.mean(1, keepdim=True)).square().sum(-1).mean()
