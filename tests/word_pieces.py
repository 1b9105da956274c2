"""A random model with word pieces and token types."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers, pre_tokenizers

import buffet
from buffet.loading.config import ModelConfig
from buffet.loading.network import build_program
from buffet.loading.tokenizer import Tokenizer, framed

PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "film",
    "grip",
    "##ping",
    "good",
    "dull",
    ",",
    "movie",
    "##s",
]


def pieces(seed: int = 0) -> buffet.Model:
    inner = RawTokenizer(models.WordPiece({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]"))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = Tokenizer.of(framed(inner, ["[PAD]", "[UNK]", "[CLS]", "[SEP]"], pairs=True))
    config = ModelConfig(
        vocab_size=len(PIECES),
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_act="relu",
        max_position_embeddings=16,
        type_vocab_size=2,
        layer_norm="no_var",
    )
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: 0.4 * torch.randn(shape, generator=generator) for name, shape in config.shapes().items()}
    return buffet.Model("pieces", config, build_program(config, tensors), tokenizer, tensors)
