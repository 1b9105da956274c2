"""Small complete checkpoints in BERT's own words, and what is said when one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from buffet.errors import BuffetError
from buffet.loading import ModelConfig, load
from buffet.loading.tokenizer import word_level

WORDS = "a gripping , moving film . it 's not bad"
CONFIG = {
    "model_type": "bert",
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "hidden_act": "relu",
    "max_position_embeddings": 9,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-6,
    "id2label": {"0": "no", "1": "maybe", "2": "yes"},
    "label2id": {"no": 0},
    "attention_probs_dropout_prob": 0.1,
}
QUERY = "bert.encoder.layer.1.attention.self.query.weight"


def config_of(**changes: object) -> ModelConfig:
    return ModelConfig.model_validate({**CONFIG, **changes})


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: 0.7 * torch.randn(shape, generator=generator) for name, shape in config.shapes().items()}


def write(directory: Path, tensors: dict[str, Tensor] | None = None, **changes: object) -> Path:
    """A small complete checkpoint, with whatever is asked for put wrong."""
    directory.mkdir(exist_ok=True)
    raw = {key: value for key, value in {**CONFIG, **changes}.items() if value != "absent"}
    (directory / "config.json").write_text(json.dumps(raw))
    save_file(random_tensors(config_of()) if tensors is None else tensors, directory / "model.safetensors")
    word_level([WORDS], size=20, min_count=1).save(str(directory / "tokenizer.json"))
    return directory


def refusal(path: str | Path) -> str:
    """The message of the error that loading `path` gives: always one line."""
    with pytest.raises(BuffetError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    return message
