"""The families of checkpoints: how each differs from BERT, in one table, `FAMILIES`.

All of them are the same encoder under other names. A family says how its configuration and its tensors are
called in BERT's words; from there on there is one configuration (`ModelConfig`) and one network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from buffet.errors import BuffetError, one_line, show, validated
from buffet.loading.config import ModelConfig

WORDS = "bert.embeddings.word_embeddings.weight"
POSITIONS = "bert.embeddings.position_embeddings.weight"
TYPES = "bert.embeddings.token_type_embeddings.weight"
LARGEST_JSON = 64 << 20
"""Bytes of a configuration or an index of weights: a thousand times what any of them has."""
Rules = tuple[tuple[str, str], ...]  # regular expression -> replacement, applied one after the other


@dataclass(frozen=True)
class Family:
    """What one family says differently from BERT; the defaults are BERT itself."""

    names: Rules  # tensor names -> BERT's; the prefix of the encoder may be absent
    ignored: str  # stored names of other tasks' heads, no part of the classifier
    keys: Mapping[str, str] = field(default_factory=dict)  # configuration keys -> BERT's
    defaults: Mapping[str, object] = field(default_factory=dict)  # where the configuration says nothing
    facts: Mapping[str, object] = field(default_factory=dict)  # true of every member, whatever it says
    token_types: bool = True
    positions_after_padding: bool = False  # position ids start at pad_token_id + 1 instead of 0


def _prefix(name: str, parts: str = "embeddings|encoder") -> tuple[str, str]:
    return rf"^(?:{name}\.)?({parts})\.", r"bert.\1."


# RoBERTa and ELECTRA keep the head's two layers under `classifier`.
_HEAD: Rules = ((r"^classifier\.dense\.", "bert.pooler.dense."), (r"^classifier\.out_proj\.", "classifier."))
_ROBERTA = Family(
    names=(_prefix("roberta"), *_HEAD),
    ignored=r"^(roberta\.)?pooler\.|^lm_head\.",
    defaults={"pad_token_id": 1},
    facts={"head_act": "tanh"},
    positions_after_padding=True,
)
FAMILIES: dict[str, Family] = {
    # TinyBERT and MiniLM too; TinyBERT's distillation leaves `fit_dense` behind.
    "bert": Family(
        names=(_prefix("bert", "embeddings|embeddings_project|encoder|pooler"),), ignored=r"^cls\.|^fit_dense"
    ),
    "distilbert": Family(
        keys={
            "dim": "hidden_size",
            "hidden_dim": "intermediate_size",
            "n_layers": "num_hidden_layers",
            "n_heads": "num_attention_heads",
            "activation": "hidden_act",
        },
        facts={"layer_norm_eps": 1e-12, "type_vocab_size": 1, "head_act": "relu"},
        names=(
            _prefix("distilbert", "embeddings|transformer"),
            (r"^bert\.transformer\.", "bert.encoder."),
            (r"\.attention\.q_lin\.", ".attention.self.query."),
            (r"\.attention\.k_lin\.", ".attention.self.key."),
            (r"\.attention\.v_lin\.", ".attention.self.value."),
            (r"\.attention\.out_lin\.", ".attention.output.dense."),
            (r"\.sa_layer_norm\.", ".attention.output.LayerNorm."),
            (r"\.ffn\.lin1\.", ".intermediate.dense."),
            (r"\.ffn\.lin2\.", ".output.dense."),
            (r"\.output_layer_norm\.", ".output.LayerNorm."),
            (r"^pre_classifier\.", "bert.pooler.dense."),
        ),
        ignored=r"^vocab_",
        token_types=False,
    ),
    "electra": Family(
        names=(_prefix("electra", "embeddings|embeddings_project|encoder"), *_HEAD),
        ignored=r"^(discriminator|generator)_",
        defaults={"embedding_size": 128},
        facts={"head_act": "gelu"},
    ),
    "roberta": _ROBERTA,
    # The same network under other training data and tokenizers.
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
}
# Older exports: LayerNorms in TensorFlow's words, and buffers that count 0, 1, 2, …
COMMON: Rules = ((r"\.gamma$", ".weight"), (r"\.beta$", ".bias"))
BUFFERS = r"\.(position_ids|token_type_ids)$"

# What well-known other architectures are, so that a refusal can say why.
FOREIGN = {
    "a causal decoder": "gpt2 gpt_neo gpt_neox gptj opt bloom falcon llama mistral mixtral qwen2 qwen3 gemma "
    "gemma2 gemma3 phi phi3",
    "an encoder-decoder": "t5 mt5 umt5 bart mbart pegasus marian led",
    "sparse attention": "longformer big_bird reformer",
    "a state-space model": "mamba mamba2 falcon_mamba jamba rwkv",
    "relative positions": "deberta deberta-v2 mpnet xlnet modernbert",
    "shared layers": "albert",
    "images": "vit deit swin",
}


@dataclass(frozen=True)
class Architecture:
    """A configuration in BERT's words, and how the stored tensors become those it calls for."""

    config: ModelConfig
    family: Family
    model_type: str = "bert"  # what the family is called

    @classmethod
    def of(cls, raw: Any, where: str) -> Architecture:
        """What a configuration with the keys of its own family says; `where` names it in a refusal."""
        family = _family(raw, where)
        merged = {**family.defaults, **{family.keys.get(key, key): value for key, value in raw.items()}}
        config = validated(ModelConfig, {**merged, **family.facts, "model_type": "bert"}, where)
        return cls(config, family, raw.get("model_type", "bert"))._without_padding_rows(where)

    def _without_padding_rows(self, where: str) -> Architecture:
        rows = self.config.max_position_embeddings - self.skipped
        if rows < 1:
            raise BuffetError(
                f"{where}: max_position_embeddings is {rows + self.skipped}, "
                f"but positions start at pad_token_id + 1 = {self.skipped}"
            )
        return replace(self, config=self.config.model_copy(update={"max_position_embeddings": rows}))

    @property
    def skipped(self) -> int:
        """How many rows of the stored position table come before that of the first token."""
        if not self.family.positions_after_padding or self.config.pad_token_id is None:
            return 0
        return self.config.pad_token_id + 1

    def name(self, stored: str) -> str | None:
        """What BERT calls a stored tensor; None for what is no part of the classifier."""
        if re.search(self.family.ignored, stored) or re.search(BUFFERS, stored):
            return None
        for pattern, replacement in (*COMMON, *self.family.names):
            stored = re.sub(pattern, replacement, stored)
        return stored

    def stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors a source must have, by BERT's names."""
        shapes = self.config.shapes()
        rows, width = shapes[POSITIONS]
        shapes[POSITIONS] = (rows + self.skipped, width)
        if not self.family.token_types:
            del shapes[TYPES]
        return shapes

    def complete(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors `config` calls for, from those of `stored_shapes`."""
        complete = {**tensors, POSITIONS: tensors[POSITIONS][self.skipped :]}
        if not self.family.token_types:
            complete[TYPES] = torch.zeros(self.config.shapes()[TYPES])
        return {name: complete[name] for name in self.config.shapes()}


def _family(raw: Any, where: str) -> Family:
    """The family a configuration belongs to; what belongs to none is refused, with what it is instead."""
    if not isinstance(raw, dict):
        raise BuffetError(
            f"{where}: expected an object with the keys of a BERT configuration, got {show(raw)}"
        )
    model_type = raw.get("model_type", "bert")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        kind = next((kind for kind, names in FOREIGN.items() if model_type in names.split()), None)
        found = f"model_type {show(model_type)}" + (f" ({kind})" if kind else "")
        raise BuffetError(f"{where}: {found} is not supported; supported: {', '.join(FAMILIES)}")
    classes = raw.get("architectures") or []
    if classes and not any(
        name.endswith(("ForSequenceClassification", "Model")) for name in names_in(classes)
    ):
        raise BuffetError(
            f"{where}: architectures is {show(classes)}: only sequence classifiers are supported, "
            "such as BertForSequenceClassification"
        )
    return FAMILIES[model_type]


def names_in(value: Any) -> list[str]:
    """The texts in a list of a configuration; none if it is not such a list."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list | tuple) else []


def read_architecture(path: Path) -> Architecture:
    """What a `config.json` says, or a `BuffetError` that names the file and the value at fault."""
    if not path.is_file():
        raise BuffetError(f"{path}: no such file; a checkpoint is a directory with config.json in it")
    return Architecture.of(read_json(path), str(path))


def read_json(path: Path) -> Any:
    """The content of a JSON file, or one line that says why there is none."""
    try:
        if (size := path.stat().st_size) > LARGEST_JSON:
            raise BuffetError(f"{path}: has {size} bytes, larger than the {LARGEST_JSON} that are read")
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BuffetError(f"{path}: not a JSON file: {one_line(error)}") from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None
