"""Certificates and checkpoints made by hand, number by number, and exact margins to hold the checker against.

A tiny BERT-like checkpoint has all its weights 0 (norms 1) until a test sets them; the certificate derives
the margin only, by one backward substitution, or by nothing but interval arithmetic.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from buffet_checker.certificate import read_certificate, region_of
from buffet_checker.check import Result, judge
from buffet_checker.graph import Node
from buffet_checker.network import Checkpoint, build
from buffet_checker.storage import sha256
from buffet_checker.substitution import Claimed

Array = np.ndarray
HASH = "0" * 64
CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "hidden_act": "relu",
    "layer_norm": "no_var",
    "norm_position": "post",
    "pooling": "mean",
    "layer_norm_eps": 1e-12,
    "embedding_norm": True,
    "final_norm": False,
}


def checkpoint(width: int, tensors: Mapping[str, Array], inner: int = 1, **config: Any) -> Checkpoint:
    """A checkpoint whose other weights are 0, other norms 1; two classes."""
    config = {**CONFIG, "hidden_size": width, "intermediate_size": inner, **config}
    shapes: dict[str, tuple[int, ...]] = {
        "bert.embeddings.position_embeddings.weight": (8, width),
        "bert.embeddings.LayerNorm.weight": (width,),
        "classifier.weight": (2, width),
        "classifier.bias": (2,),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"bert.encoder.layer.{layer}"
        for name in ("self.query", "self.key", "self.value", "output.dense"):
            shapes[f"{at}.attention.{name}.weight"] = (width, width)
        shapes[f"{at}.attention.output.LayerNorm.weight"] = (width,)
        shapes[f"{at}.intermediate.dense.weight"] = (inner, width)
        shapes[f"{at}.output.dense.weight"] = (width, inner)
        shapes[f"{at}.output.LayerNorm.weight"] = (width,)
    for name, shape in list(shapes.items()):
        if name.startswith("bert.encoder") or name.endswith("LayerNorm.weight"):
            shapes[name.removesuffix("weight") + "bias"] = shape[:1]
    found = {
        name: np.full(shape, float(name.endswith("LayerNorm.weight")), dtype=np.float32)
        for name, shape in shapes.items()
    }
    for name, value in tensors.items():
        assert found[name].shape == np.shape(value), name
        found[name] = np.asarray(value, dtype=np.float32)
        assert np.isfinite(found[name]).all(), name
    return Checkpoint(config, found, {"config.json": HASH, "model.safetensors": HASH}, Path("."))


def claimed(
    model: Checkpoint,
    rows: Array,
    label: int,
    eps: float,
    margin: float,
    derive: bool,
    p: str | float = "inf",
) -> Result:
    """What the checker says of ``margin`` for row 0 in a ball (of p, or a "box" of the same extent).

    `derive`: by substitution of the margin.
    """
    return judge(_certificate(model, rows, label, eps, margin, derive, p), "made by hand", model)


def derived(
    model: Checkpoint, rows: Array, label: int, eps: float, derive: bool, p: str | float = "inf"
) -> tuple[float, float]:
    """The largest margins that the checker derives for the same: exact, and as deployed."""
    found = read_certificate(_certificate(model, rows, label, eps, 1.0, derive, p), "made by hand")
    nodes, values = build(model, rows, label, "plain")
    region = region_of(found.claims[0], rows, found.tensors)
    with np.errstate(all="ignore"):
        exact, deployed = Claimed(nodes, values, region, found.claims[0], found.tensors).margins()
    return float(exact[0]), float(deployed[0])


def _certificate(
    model: Checkpoint, rows: Array, label: int, eps: float, margin: float, derive: bool, p: str | float
) -> bytes:
    region: dict[str, Any] = {"kind": "ball", "moved": [0], "p": p, "eps": eps}
    nodes, values = build(model, rows, label, "plain")
    last = len(nodes) - 1
    tensors: dict[str, Array] = {"center": rows}
    if p == "box":
        region = {"kind": "box", "moved": [0]}
        tensors |= {"0.region.lower": rows[:1] - eps, "0.region.upper": rows[:1] + eps}
    for index, node in enumerate(nodes if derive else ()):
        shape, prefix = values[index].shape, f"0.0.{index}"
        if node.kind == "apply":
            tensors[f"{prefix}.lower"] = tensors[f"{prefix}.upper"] = np.zeros(shape)
        elif node.kind == "softmax":
            tensors[f"{prefix}.point"] = np.array(0.5)
            tensors[f"{prefix}.mixture"] = np.zeros((len(rows), node.heads, len(rows)))
        elif node.kind in ("scores", "mix", "rescale"):
            tensors[f"{prefix}.lower"] = tensors[f"{prefix}.upper"] = np.array(0.0)
    head = {
        "schema": 1,
        "model": dict(model.hashes),
        "input": sha256(np.ascontiguousarray(rows).tobytes()),
        "label": label,
        "claims": [
            {
                "graph": "plain",
                "nodes": [node.kind for node in nodes],
                "region": region,
                "margins": [margin],
                "derivations": [{"nodes": [last], "choices": 0}] if derive else [],
            }
        ],
    }
    return save(tensors, {"buffet-certificate": json.dumps(head)})


def exact_margin(model: Checkpoint, rows: Array, label: int) -> Fraction:
    """The margin of the rows in exact rational arithmetic; queries have to be 0, functions ReLU."""
    nodes, _ = build(model, rows.astype(np.float64), label, "plain")
    values: list[Array] = []
    for node in nodes:
        values.append(_exact(node, [values[i] for i in node.inputs]) if values else _fractions(rows))
    return values[-1][0, 0]


def _fractions(values: Array) -> Array:
    return np.vectorize(Fraction, otypes=[object])(values)


def _exact(node: Node, inputs: list[Array]) -> Array:
    x = inputs[0]
    match node.kind:
        case "affine":
            return x.dot(_fractions(node.weight).T) + _fractions(node.bias)
        case "diagonal":
            return x * _fractions(node.weight) + _fractions(node.bias)
        case "center":
            return x - x.sum(-1, keepdims=True) / Fraction(x.shape[1])
        case "add":
            return x + inputs[1]
        case "first":
            return x[:1]
        case "mean":
            return x.sum(0, keepdims=True) / Fraction(len(x))
        case "apply" if node.function == "relu":
            return np.maximum(x, Fraction(0))
        case "scores":
            assert all(v == 0 for v in inputs[0].flat), "queries other than 0"
            return np.full((len(x), len(inputs[1]) * node.heads), Fraction(0), dtype=object)
        case "softmax":
            return np.full(x.shape, Fraction(node.heads, x.shape[1]), dtype=object)
        case "mix":
            p, v = (value.reshape(len(value), node.heads, -1) for value in inputs)
            mixed = [p[:, h].dot(v[:, h]) for h in range(node.heads)]
            return np.concatenate(mixed, 1)
    raise NotImplementedError(node.kind)
