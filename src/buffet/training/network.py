"""Networks in training: their first weights, their loss, their accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from buffet.errors import validated
from buffet.loading.config import ModelConfig
from buffet.loading.model import Embeddings
from buffet.loading.network import build_program
from buffet.loading.tokenizer import Tokenizer
from buffet.network import Program
from buffet.training.corpus import Batch
from buffet.training.settings import TrainSettings


class Trainable:
    """A classifier whose weights can still change."""

    measure = "dev accuracy"  # what `score` is called
    shift: Tensor | float = 0.0  # added to the logits in training only

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self.tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}

    @property
    def program(self) -> Program:
        """The network, from rows to logits."""
        raise NotImplementedError

    @property
    def pad(self) -> int:
        """What padding consists of; it has no effect, as padding is masked."""
        return self.config.pad_token_id or 0

    def rows(self, batch: Batch) -> Float[Tensor, "samples tokens width"]:
        """The rows of a batch as the program reads them."""
        return batch.inputs

    def thinned(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Batch:
        """A batch with some of its inputs replaced."""
        return batch

    def noisy_rows(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Tensor:
        """The rows of a batch behind the regularisers."""
        raise NotImplementedError

    def worst_move(self, x: Tensor, batch: Batch, size: float) -> Tensor:
        """How rows are moved, by `size`, to make the loss larger."""
        raise NotImplementedError

    def gradient(self, x: Tensor, batch: Batch) -> Tensor:
        """The gradient of the loss at the rows `x`."""
        x = x.detach().requires_grad_()
        return torch.autograd.grad(cross_entropy(self.program.evaluate(x, batch.mask), batch.labels), x)[0]

    def loss(
        self, batch: Batch, settings: TrainSettings, generator: torch.Generator, done: float
    ) -> Float[Tensor, ""]:
        """What a step makes smaller; `done` is the share of the steps that are behind it."""
        return self.plain_loss(self.thinned(batch, settings, generator), settings, generator)

    def plain_loss(
        self, batch: Batch, settings: TrainSettings, generator: torch.Generator
    ) -> Float[Tensor, ""]:
        """The cross-entropy of a batch whose input rows went through the regularisers."""
        x = self.noisy_rows(batch, settings, generator)
        if settings.adversarial:
            x = x + self.worst_move(x.detach(), batch, settings.adversarial)
        return cross_entropy(self.program.evaluate(x, batch.mask) + self.shift, batch.labels)

    @torch.no_grad()
    def accuracy(self, batches: Sequence[Batch]) -> float:
        """The fraction of the samples whose largest logit is that of their label."""
        right = sum(
            int((self.program.evaluate(self.rows(b), b.mask).argmax(-1) == b.labels).sum()) for b in batches
        )
        return right / sum(len(b.labels) for b in batches)

    def score(self, batches: Sequence[Batch]) -> float:
        """What epochs are compared by."""
        return self.accuracy(batches)


class Network(Trainable):
    """A sentence classifier in training, and the tokenizer its rows belong to; its inputs are token ids.

    `counts` says how often each of them occurs in the training sentences; settings may ask for it.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        counts: Int[Tensor, " vocabulary"] | None = None,
    ) -> None:
        super().__init__(config, tensors)
        self.counts = counts
        self.tokenizer = tokenizer
        self.embeddings = Embeddings.of(self.tensors)
        self._program = build_program(config, self.tensors)
        self.words = torch.ones(config.vocab_size, dtype=torch.bool)  # ids that are words or pieces of words
        self.words[[i for i in (*tokenizer.special_ids, tokenizer.unknown_id) if i is not None]] = False

    @property
    def program(self) -> Program:
        return self._program

    def rows(self, batch: Batch) -> Float[Tensor, "sentences tokens width"]:
        return self.embeddings.rows(batch.inputs)

    def noisy_rows(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Tensor:
        """Some numbers of the rows are replaced by 0."""
        x = self.embeddings.rows(batch.inputs)
        if settings.embedding_dropout:
            keep = 1 - settings.embedding_dropout
            x = x * (torch.rand(x.shape, generator=generator) < keep) / keep
        return x

    def thinned(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Batch:
        """Some words replaced by [UNK]."""
        if not (settings.word_dropout or settings.rare_dropout) or self.tokenizer.unknown_id is None:
            return batch
        ids = batch.inputs
        share: Tensor | float = settings.word_dropout
        if settings.rare_dropout:
            assert self.counts is not None
            often = self.counts[ids]
            share = share + (1 - share) * settings.rare_dropout / (settings.rare_dropout + often)
        drop = torch.rand(ids.shape, generator=generator) < share
        return replace(batch, inputs=torch.where(self.words[ids] & drop, self.tokenizer.unknown_id, ids))

    def worst_move(
        self, x: Float[Tensor, "sentences tokens width"], batch: Batch, size: float
    ) -> Float[Tensor, "sentences tokens width"]:
        """In every sentence, the most sensitive row moved by `size` (L2) in the direction of the gradient."""
        gradient = self.gradient(x, batch)
        norms = gradient.norm(dim=-1)
        worst = norms == norms.amax(-1, keepdim=True)
        return size * normalize(gradient, dim=-1) * worst[..., None]


def labels_of(classes: int) -> dict[int, str]:
    """The names of the classes: of two, 0 is negative and 1 positive."""
    names = ("negative", "positive") if classes == 2 else [f"LABEL_{i}" for i in range(classes)]
    return dict(enumerate(names))


def architecture(settings: TrainSettings, labels: Mapping[int, str]) -> dict[str, Any]:
    """What these settings say about a network, whatever its input is."""
    return {
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.inner,
        "hidden_act": settings.activation,
        "layer_norm": settings.layer_norm,
        "pooling": settings.pooling,
        "norm_position": settings.norm_position,
        "num_labels": len(labels),
        "id2label": labels,
    }


def new_config(settings: TrainSettings, classes: int, vocab_size: int) -> ModelConfig:
    """The configuration these settings ask for."""
    words = {
        "vocab_size": vocab_size,
        "max_position_embeddings": settings.max_tokens,
        "type_vocab_size": 1,
        "pad_token_id": 0,
        "head_act": None if settings.head == "dense" else "none",
    }
    return validated(ModelConfig, {**words, **architecture(settings, labels_of(classes))}, settings.data)


def first_weights(config: ModelConfig, settings: TrainSettings) -> dict[str, Tensor]:
    """Random weights: Gaussian embeddings, Glorot-uniform matrices, LayerNorms that do nothing yet."""
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = {}
    for name, shape in config.shapes().items():
        tensor = torch.empty(shape)
        if name.endswith(("_embeddings.weight", "position_embeddings", "cls_token")):
            tensor.normal_(0, settings.embedding_scale, generator=generator)
        elif tensor.ndim > 1:
            torch.nn.init.xavier_uniform_(tensor.view(shape[0], -1), settings.gain, generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        tensors[name] = tensor
    return tensors
