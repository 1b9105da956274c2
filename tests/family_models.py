"""Tiny random classifiers of `transformers`, of every family that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from buffet.loading.tokenizer import word_level

transformers = pytest.importorskip("transformers")

WORDS = "a gripping , moving film . it 's not bad"
SIZES = {
    "vocab_size": 40,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 20,
    "num_labels": 3,
}
DISTIL = {
    "dim": 24,
    "n_layers": 2,
    "n_heads": 4,
    "hidden_dim": 32,
    **{key: SIZES[key] for key in ("vocab_size", "max_position_embeddings", "num_labels")},
}
# Name -> class of its configuration and what it says.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertConfig", SIZES),
    "bert, GELU by tanh, eps": ("BertConfig", {**SIZES, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3}),
    "tinybert": ("BertConfig", {**SIZES, "num_hidden_layers": 4, "num_attention_heads": 12}),
    "minilm": ("BertConfig", {**SIZES, "num_hidden_layers": 6, "hidden_act": "gelu"}),
    "distilbert": ("DistilBertConfig", DISTIL),
    "distilbert, ReLU": ("DistilBertConfig", {**DISTIL, "activation": "relu", "sinusoidal_pos_embds": True}),
    "roberta": ("RobertaConfig", {**SIZES, "type_vocab_size": 1, "layer_norm_eps": 1e-5}),
    "roberta, other padding": ("RobertaConfig", {**SIZES, "pad_token_id": 4}),
    "xlm-roberta": ("XLMRobertaConfig", SIZES),
    "camembert": ("CamembertConfig", SIZES),
    "electra": ("ElectraConfig", {**SIZES, "embedding_size": 24}),
    "electra, projected": ("ElectraConfig", {**SIZES, "embedding_size": 10}),
}


transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


def classifier(family: str, **changes: object) -> Any:
    """A random classifier whose weights are large enough for every part of it to matter."""
    name, values = FAMILIES[family]
    config = getattr(transformers, name)(**{**values, **changes})
    torch.manual_seed(7)
    module = transformers.AutoModelForSequenceClassification.from_config(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.35)
    return module.eval()


def saved(module: Any, directory: Path) -> Path:
    """What `save_pretrained` writes, with a tokenizer beside it."""
    module.save_pretrained(directory)
    word_level([WORDS], size=40, min_count=1).save(str(directory / "tokenizer.json"))
    return directory
