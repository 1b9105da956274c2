"""A checkpoint of one layer with fixed weights, proven in milliseconds, and labelled sentences for it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from buffet.loading.checkpoint import write_checkpoint
from buffet.loading.config import ModelConfig
from buffet.loading.tokenizer import word_level

SENTENCES = (
    "good film , bad plot",
    "a warm and funny story",
    "dull , slow and cold",
    "the plot is a mess",
    "what a great , great cast",
    "not a bad film at all",
    "funny but slow and long",
    "the story has no heart",
    "a film with great heart",
    "bad acting and a dull plot",
    "warm , funny and never long",
    "no plot , no heart",
)


def write_model(directory: Path, seed: int = 3, scale: float = 0.4) -> Path:
    """The checkpoint; another seed gives other weights, a larger scale makes words matter more."""
    tokenizer = word_level([*SENTENCES, *SENTENCES], size=60, min_count=1)
    config = ModelConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_act="relu",
        max_position_embeddings=12,
        type_vocab_size=1,
        layer_norm="no_var",
        id2label={0: "negative", 1: "positive"},
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: scale * torch.randn(shape, generator=generator) for name, shape in config.shapes().items()
    }
    texts = {"config.json": json.dumps(config.model_dump()), "tokenizer.json": tokenizer.to_str()}
    write_checkpoint(directory, texts, tensors)
    return directory


def write_sentences(path: Path) -> Path:
    """The sentences as a file, half of them labelled positive."""
    lines = [f"{sentence}\t{place % 2}" for place, sentence in enumerate(SENTENCES)]
    path.write_text("\n".join(["sentence\tlabel", *lines]) + "\n", encoding="utf-8")
    return path
