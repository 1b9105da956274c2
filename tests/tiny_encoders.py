"""Random tiny encoders as numpy arrays, and their logits computed plainly.

Architecture and names are those of `oracle`; nothing here comes from the package.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]  # layers, heads, pooling


def logits(weights: Weights, config: Config, x: Array) -> Array:
    """The logits of rows `x` (``*batch tokens width``), computed plainly."""

    def dense(value: Array, name: str) -> Array:
        return value @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(value: Array, name: str) -> Array:
        centered = value - value.mean(-1, keepdims=True)
        return centered * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    heads = config["heads"]
    x = norm(x, "embeddings.LayerNorm")
    for layer in range(config["layers"]):
        at = f"encoder.layer.{layer}"
        q, k, v = (
            np.stack(np.split(dense(x, f"{at}.attention.self.{name}"), heads, axis=-1), axis=-3)
            for name in ("query", "key", "value")
        )
        scores = q @ np.swapaxes(k, -1, -2) / math.sqrt(q.shape[-1])
        exps = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = exps / exps.sum(-1, keepdims=True) @ v
        mixed = np.concatenate([mixed[..., h, :, :] for h in range(heads)], axis=-1)
        x = norm(x + dense(mixed, f"{at}.attention.output.dense"), f"{at}.attention.output.LayerNorm")
        inner = np.maximum(dense(x, f"{at}.intermediate.dense"), 0)
        x = norm(x + dense(inner, f"{at}.output.dense"), f"{at}.output.LayerNorm")
    if config["pooling"] == "cls":
        return dense(np.tanh(dense(x[..., 0, :], "pooler.dense")), "classifier")
    return dense(x.mean(-2), "classifier")


def random_weights(
    generator: np.random.Generator,
    *,
    layers: int,
    width: int,
    inner: int,
    pooling: str,
    classes: int = 2,
    gain: float = 1.0,
) -> dict[str, Array]:
    """Weights of a random network, in float32 precision so that both implementations read the same."""
    weights: dict[str, Array] = {}

    def dense(name: str, out: int, inputs: int) -> None:
        weights[f"{name}.weight"] = generator.normal(0, gain / math.sqrt(inputs), (out, inputs))
        weights[f"{name}.bias"] = generator.normal(0, 0.1, out)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = generator.uniform(0.6, 1.2, width) * generator.choice([-1, 1], width)
        weights[f"{name}.bias"] = generator.normal(0, 0.1, width)

    norm("embeddings.LayerNorm")
    for layer in range(layers):
        at = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            dense(f"{at}.attention.self.{name}", width, width)
        dense(f"{at}.attention.output.dense", width, width)
        norm(f"{at}.attention.output.LayerNorm")
        dense(f"{at}.intermediate.dense", inner, width)
        dense(f"{at}.output.dense", width, inner)
        norm(f"{at}.output.LayerNorm")
    if pooling == "cls":
        dense("pooler.dense", width, width)
    dense("classifier", classes, width)
    return {name: value.astype(np.float32).astype(np.float64) for name, value in weights.items()}
