"""Presets: what the name in ``buffet train NAME`` sets. A name is DATA-ARCHITECTURE, then any VARIANTS.

``sst-small-3-gelu`` is the recipe for SST-2, the architecture ``small-3``, with GELU. The tables below are
all there is: every name, the help and the error messages are derived from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from buffet.errors import BuffetError

DEFAULT = "sst2-small"
FINETUNE = "finetune"
DIGITS = "digits"  # the data of image presets: scikit-learn's, no directory


@dataclass(frozen=True)
class Part:
    """A part of a preset: what it is, and the fields of `TrainSettings` it sets."""

    summary: str
    values: Mapping[str, Any] = field(default_factory=dict)


# What most people train with; the default of `TrainSettings` is that of the embedded model.
USUAL = {"weight_decay": 0.1}


def _encoder(layers: int, width: int, inner: int, heads: int, note: str = "", **values: Any) -> Part:
    """An encoder of this size, and what else goes with it."""
    count = "1 layer" if layers == 1 else f"{layers} layers"
    size = {"layers": layers, "width": width, "inner": inner, "heads": heads}
    return Part(f"{count}, width {width}, FFN {inner}, {heads} heads{note}", {**size, **values})


def _small(layers: int) -> Part:
    """Networks small enough to be proven quickly are trained for that, as the embedded model is."""
    return _encoder(layers, 128, 128, 4, ", strong weight decay", rate=5e-4, weight_decay=2.0)


DATA: Mapping[str, Part] = {
    "sst": Part("SST-2", {"max_tokens": 64, "epochs": 5}),
    "yelp": Part("Yelp sentences (Shen et al. 2017)", {"max_tokens": 32, "epochs": 4}),
}

ARCHITECTURES: Mapping[str, Part] = {
    **{str(layers): _encoder(layers, 512, 512, 8, rate=2e-4, epochs=3) for layers in (1, 2, 3, 6)},
    "tinybert": _encoder(
        4, 312, 1200, 12, ", WordPiece: TinyBERT's architecture", rate=3e-4, epochs=3, tokenizer="wordpiece"
    ),
    **{f"small-{layers}": _small(layers) for layers in (1, 3, 6, 12)},
    "narrow-1": _encoder(1, 32, 32, 2, rate=2e-3, batch=128),
}

VARIANTS: Mapping[str, Part] = {
    "standard": Part("LayerNorm with variance", {"layer_norm": "standard"}),
    "gelu": Part("GELU instead of ReLU", {"activation": "gelu"}),
    "usual": Part("the usual weight decay, 0.1", USUAL),
    "certifiable": Part(
        "strong weight decay and moved words: as accurate, certified radii several times larger",
        {"weight_decay": 2.0, "adversarial": 0.3},
    ),
    "substitutions": Part(
        "certified training: words may be exchanged for their --synonyms; one layer (narrow-1, small-1)",
        {
            "head": "none",
            "vocabulary": 40_000,
            "weight_decay": 0.1,
            "gain": 1.0,
            "embedding_scale": 0.02,
            "embedding_dropout": 0.2,
            "word_dropout": 0.2,
            "patience": 100,  # what is certified grows to the end, as the bound's share does
            "epochs": 8,
            "rare_dropout": 40,
            "worst_case": 0.98,
            "ramp": 0.25,
            "exchanged": 0.15,
            "closeness": 0.1,
        },
    ),
}

# Whole presets, named apart from the grammar above.
NAMED: Mapping[str, Part] = {
    DEFAULT: Part("the embedded model: 3 layers, width 96, strong weight decay, for SST-2"),
    FINETUNE: Part(
        "what --from goes with: a low rate, mean pooling, little dropout",
        {
            "pooling": "mean",
            "rate": 5e-5,
            "epochs": 3,
            "batch": 32,
            "warmup": 0.1,
            "weight_decay": 0.01,
            "embedding_dropout": 0.1,
            "word_dropout": 0.05,
            "max_tokens": 128,
        },
    ),
    "digits-vit": Part(
        "a vision transformer for scikit-learn's digits (8 × 8 pixels, patches of 2 × 2): 2 layers, width 32",
        {
            "data": DIGITS,
            "layers": 2,
            "width": 32,
            "inner": 64,
            "norm_position": "pre",
            "patch": 2,
            "epochs": 60,
            "patience": 60,
            "batch": 32,
            "rate": 2e-3,
            "weight_decay": 0.5,
            "gain": 0.7,
            "embedding_dropout": 0.0,
            "adversarial": 0.1,
        },
    ),
}


def preset_names() -> tuple[str, ...]:
    """Every preset, without the variants that may be appended."""
    return (*NAMED, *(f"{data}-{architecture}" for data in DATA for architecture in ARCHITECTURES))


def preset_values(name: str) -> dict[str, Any]:
    """The settings a preset makes; what it leaves out stays at the default of `TrainSettings`."""
    if name in NAMED:
        return dict(NAMED[name].values)
    base, variants = name, list[Part]()
    while (cut := base.rpartition("-"))[2] in VARIANTS:
        base = cut[0]
        variants.insert(0, VARIANTS[cut[2]])
    data, _, architecture = base.partition("-")
    if data not in DATA or architecture not in ARCHITECTURES:
        raise BuffetError(_unknown(name, base))
    parts = (DATA[data], ARCHITECTURES[architecture], *variants)
    return {key: value for values in (USUAL, *(p.values for p in parts)) for key, value in values.items()}


def _unknown(name: str, base: str) -> str:
    close = difflib.get_close_matches(base, preset_names(), n=3)
    meant = f"did you mean {' or '.join(close)}?" if close else f"choose one of: {', '.join(preset_names())}"
    return f"unknown preset {name!r}; {meant} (variants go at the end: {', '.join(VARIANTS)})"
