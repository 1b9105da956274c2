"""The network in training: its first weights, its loss, its accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from pydantic import ValidationError
from torch import Tensor

from buffet.errors import BuffetError
from buffet.loading.config import ModelConfig, explain
from buffet.loading.model import Embeddings
from buffet.loading.network import build_program
from buffet.loading.tokenizer import Tokenizer
from buffet.training.corpus import Batch
from buffet.training.settings import TrainSettings


class Network:
    """A program whose weights can still change, and the tokenizer its rows belong to."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor], tokenizer: Tokenizer) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.tensors = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        self.embeddings = Embeddings.of(self.tensors)
        self.program = build_program(config, self.tensors)
        self.words = torch.ones(config.vocab_size, dtype=torch.bool)  # ids that are words or pieces of words
        self.words[[i for i in (*tokenizer.special_ids, tokenizer.unknown_id) if i is not None]] = False

    @property
    def pad(self) -> int:
        """The id in padding rows; what it is changes nothing, as they are masked."""
        return self.config.pad_token_id or 0

    @torch.no_grad()
    def accuracy(self, batches: Sequence[Batch]) -> float:
        """The fraction of the sentences whose largest logit is that of their label."""
        right = sum(
            int((self.program.evaluate(self.embeddings.rows(b.ids), b.mask).argmax(-1) == b.labels).sum())
            for b in batches
        )
        return right / sum(len(b.labels) for b in batches)

    def loss(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Float[Tensor, ""]:
        """The cross-entropy of a batch whose input rows went through the regularisers."""
        x = self.embeddings.rows(self._drop_words(batch.ids, settings.word_dropout, generator))
        if settings.embedding_dropout:
            keep = 1 - settings.embedding_dropout
            x = x * (torch.rand(x.shape, generator=generator) < keep) / keep
        if settings.adversarial:
            x = x + self.worst_move(x.detach(), batch, settings.adversarial)
        return torch.nn.functional.cross_entropy(self.program.evaluate(x, batch.mask), batch.labels)

    def worst_move(
        self, x: Float[Tensor, "sentences tokens width"], batch: Batch, size: float
    ) -> Float[Tensor, "sentences tokens width"]:
        """In every sentence, the most sensitive row moved by `size` (L2) in the direction of the gradient."""
        logits = self.program.evaluate(x.requires_grad_(), batch.mask)
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits, batch.labels), x)
        norms = gradient.norm(dim=-1)
        worst = norms == norms.amax(-1, keepdim=True)
        return size * torch.nn.functional.normalize(gradient, dim=-1) * worst[..., None]

    def _drop_words(
        self, ids: Int[Tensor, "sentences tokens"], share: float, generator: torch.Generator
    ) -> Int[Tensor, "sentences tokens"]:
        if not share or self.tokenizer.unknown_id is None:
            return ids
        drop = torch.rand(ids.shape, generator=generator) < share
        return torch.where(self.words[ids] & drop, self.tokenizer.unknown_id, ids)


def labels_of(classes: int) -> dict[int, str]:
    """The names of the classes: of two, 0 is negative and 1 positive."""
    names = ("negative", "positive") if classes == 2 else [f"LABEL_{i}" for i in range(classes)]
    return dict(enumerate(names))


def new_config(settings: TrainSettings, classes: int, vocab_size: int) -> ModelConfig:
    """The configuration these settings ask for."""
    values = {
        "vocab_size": vocab_size,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.inner,
        "hidden_act": settings.activation,
        "max_position_embeddings": settings.max_tokens,
        "type_vocab_size": 1,
        "pad_token_id": 0,
        "num_labels": classes,
        "id2label": labels_of(classes),
        "layer_norm": settings.layer_norm,
        "pooling": settings.pooling,
        "norm_position": settings.norm_position,
    }
    return validated(values, settings.data)


def validated(values: dict[str, Any], source: str) -> ModelConfig:
    """A configuration of these values, or a `BuffetError` that names where they come from."""
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise BuffetError(f"{source}: {explain(error)}") from None


def first_weights(config: ModelConfig, settings: TrainSettings) -> dict[str, Tensor]:
    """Random weights: Gaussian embeddings, Glorot-uniform matrices, LayerNorms that do nothing yet."""
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = {}
    for name, shape in config.shapes().items():
        tensor = torch.empty(shape)
        if name.endswith("_embeddings.weight"):
            tensor.normal_(0, settings.embedding_scale, generator=generator)
        elif tensor.ndim == 2:
            torch.nn.init.xavier_uniform_(tensor, settings.gain, generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        tensors[name] = tensor
    return tensors
