"""The network of a checkpoint, built from its files alone.

The numbering of its nodes is part of the certificate's schema: they are numbered in the order in which
`_Encoder` adds them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from buffet_checker.balls import Array
from buffet_checker.errors import BadInputError, RejectedError
from buffet_checker.graph import Builder, Node
from buffet_checker.properties import Goal, finish
from buffet_checker.storage import LARGEST_FILE, LARGEST_TEXT, Stored, parse, parse_json, read_bytes, sha256

ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "tanh": "tanh",
}
FIXED: dict[str, tuple[object, ...]] = {
    "model_type": ("bert",),
    "position_embedding_type": ("absolute", None),
    "is_decoder": (False, None),
    "is_encoder_decoder": (False, None),
    "add_cross_attention": (False, None),
    "quantization_config": (None,),
    "pruned_heads": ({}, None),
    "problem_type": (None, "single_label_classification"),  # of others the largest logit is no answer
    "embedding_norm": (True, False),
    "final_norm": (True, False, None),
    "layer_norm": ("standard", "no_var"),
    "norm_position": ("post", "pre"),
    "pooling": ("cls", "mean"),
    "head_act": (None, "none", "tanh", "relu", "gelu"),
    "hidden_act": tuple(ACTIVATIONS),
}
"""The values of keys that this checker knows; any other is refused."""
DEFAULTS = {
    "model_type": "bert",
    "layer_norm": "standard",
    "norm_position": "post",
    "pooling": "cls",
    "embedding_norm": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
}
FILES = ("config.json", "model.safetensors")
POSITIONS = "bert.embeddings.position_embeddings.weight"


@dataclass(frozen=True)
class Checkpoint:
    """The configuration and float64 copies of the weights of a directory, with the hashes of its files."""

    config: Mapping[str, Any]
    tensors: Mapping[str, Array]
    hashes: Mapping[str, str]
    directory: Path

    @property
    def where(self) -> str:
        return str(self.directory)

    @property
    def width(self) -> int:
        """The width of the embedding rows."""
        return int(self.tensors[POSITIONS].shape[1])

    @property
    def longest(self) -> int:
        """No sentence has more rows."""
        return len(self.tensors[POSITIONS])

    def shape(self, tokens: int) -> tuple[int, int]:
        """The shape of an input with this many rows."""
        if tokens > self.longest:
            raise RejectedError(f"center has {tokens} rows, the model takes at most {self.longest}")
        return max(tokens, 1), self.width

    @property
    def classes(self) -> int:
        return len(self.tensors["classifier.bias"])

    def written(self, rows: Array, graph: str) -> tuple[Builder, int, Array, Array]:
        """The network from embedding rows to what the classifier reads, and the classifier."""
        config, net = self.config, _Encoder(self, rows, graph)
        x, width = 0, config["hidden_size"]
        if config["embedding_norm"]:
            x = net.norm(x, "bert.embeddings.LayerNorm", "embedding norm")
        if rows.shape[1] != width:
            x = net.dense(x, "bert.embeddings_project", width, "embedding projection")
        for layer in range(config["num_hidden_layers"]):
            last = layer == config["num_hidden_layers"] - 1
            x = net.block(x, layer, last and config["pooling"] == "cls")
        ends = config.get("final_norm")
        if config["norm_position"] == "pre" if ends is None else ends:
            x = net.norm(x, "bert.encoder.LayerNorm", "final norm")
        if config["pooling"] == "mean":
            x = net.add("mean", "mean pooling", x)
        head = config.get("head_act") or ("tanh" if config["pooling"] == "cls" else "none")
        if head != "none":
            dense = net.dense(x, "bert.pooler.dense", width, "head")
            x = net.add("apply", "head activation", dense, function=head)
        weight = net.tensor("classifier.weight", (self.classes, width))
        return net, x, weight, net.tensor("classifier.bias", (self.classes,))

    def class_name(self, number: int) -> str:
        """What config.json calls a class."""
        names = self.config.get("id2label")
        return f"LABEL_{number}" if names is None else str(names[str(number)])


def read_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and model.safetensors; whatever this checker does not know is refused."""
    limits = {"config.json": LARGEST_TEXT, "model.safetensors": LARGEST_FILE}
    contents = {name: read_bytes(directory / name, limits[name]) for name in FILES}
    where, weights = (str(directory / name) for name in FILES)
    config = _config(parse_json(contents[FILES[0]], where), where)
    tensors = _tensors(parse(contents[FILES[1]], weights), weights)
    classes = len(tensors["classifier.bias"])
    if classes < 2:
        raise BadInputError(f"{weights}: has 1 class, so there is no answer to change")
    _check_labels(config.get("id2label"), classes, where)
    hashes = {name: sha256(content) for name, content in contents.items()}
    return Checkpoint(config, tensors, hashes, directory)


def _config(raw: Any, where: str) -> dict[str, Any]:
    """The configuration with its defaults, every value one that this checker knows."""
    if not isinstance(raw, dict):
        raise BadInputError(f"{where}: expected an object")
    config = {**DEFAULTS, **raw}
    for key, allowed in FIXED.items():
        found = config.get(key)
        if not any(type(found) is type(value) and found == value for value in allowed):  # 0 is not False
            raise BadInputError(f"{where}: {key} {found!r:.60} is not supported by the checker")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        if type(config.get(key)) is not int or not 1 <= config[key] <= 65_536:
            raise BadInputError(f"{where}: {key} is {config.get(key)!r:.60}; expected a whole number ≥ 1")
    if config["hidden_size"] % config["num_attention_heads"]:
        raise BadInputError(f"{where}: hidden_size is no multiple of num_attention_heads")
    eps = config["layer_norm_eps"]
    if type(eps) is not float or not 0 < eps < 1:
        raise BadInputError(f"{where}: layer_norm_eps is {eps!r:.60}; expected a number between 0 and 1")
    return config


def _tensors(stored: Stored, where: str) -> dict[str, Array]:
    """The weights under BERT's names, finite, and each there once."""
    tensors: dict[str, Array] = {}
    for name, value in stored.tensors.items():
        if value.dtype == np.float64:
            raise BadInputError(f"{where}: {name[:80]!r} is F64; the checker reads F32 and F16")
        if not np.isfinite(value).all():
            raise BadInputError(f"{where}: {name[:80]!r} holds NaN or infinity")
        for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        name = name if name.startswith(("bert.", "classifier.")) else f"bert.{name}"
        if name in tensors:
            raise BadInputError(f"{where}: {name[:80]!r} is there twice")
        tensors[name] = value
    for name, axes in (("classifier.bias", 1), (POSITIONS, 2)):
        if name not in tensors or tensors[name].ndim != axes:
            raise BadInputError(f"{where}: {name} is missing, or no table of its kind")
    return tensors


def _check_labels(names: Any, classes: int, where: str) -> None:
    """The names of classes, if there are any, are a text for each."""
    if names is None:
        return
    wanted = {str(number) for number in range(classes)}
    if not isinstance(names, dict) or names.keys() != wanted:
        raise BadInputError(f"{where}: id2label does not name the classes 0 to {classes - 1}")
    if not all(isinstance(name, str) for name in names.values()):
        raise BadInputError(f"{where}: id2label holds something else than texts")


class _Encoder(Builder):
    """Writes the network of a checkpoint."""

    def __init__(self, checkpoint: Checkpoint, rows: Array, graph: str) -> None:
        super().__init__(rows, graph)
        self.checkpoint = checkpoint

    def tensor(self, name: str, shape: tuple[int, ...]) -> Array:
        value = self.checkpoint.tensors.get(name)
        if value is None or value.shape != shape:
            found = "missing" if value is None else f"of shape {list(value.shape)}"
            raise BadInputError(f"tensor {name} is {found}; the configuration says {list(shape)}")
        return value.astype(np.float64)

    def dense(self, x: int, prefix: str, out: int, name: str) -> int:
        shape = out, self.values[x].shape[1]
        weight, bias = self.tensor(f"{prefix}.weight", shape), self.tensor(f"{prefix}.bias", (out,))
        return self.add("affine", name, x, weight=weight, bias=bias)

    def norm(self, x: int, prefix: str, name: str) -> int:
        config, width = self.checkpoint.config, self.values[x].shape[1]
        y = self.add("center", f"{name}, centred", x)
        if config["layer_norm"] == "standard":
            eps = config["layer_norm_eps"]
            square = self.add("apply", f"{name}, squares", y, function="square")
            mean, bias = np.full((1, width), 1 / width), np.full(1, eps)
            variance = self.add("affine", f"{name}, variance", square, weight=mean, bias=bias, least=eps)
            inverse = self.add("apply", f"{name}, 1/deviation", variance, function="rsqrt")
            y = self.add("rescale", f"{name}, normalised", y, inverse)
        weight, bias = (self.tensor(f"{prefix}.{part}", (width,)) for part in ("weight", "bias"))
        return self.add("diagonal", name, y, weight=weight, bias=bias)

    def block(self, x: int, layer: int, first_only: bool) -> int:
        config = self.checkpoint.config
        width, heads = config["hidden_size"], config["num_attention_heads"]
        post, prefix, name = (
            config["norm_position"] == "post",
            f"bert.encoder.layer.{layer}",
            f"layer {layer}",
        )
        attention_norm, output_norm = f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"
        tokens = x if post else self.norm(x, attention_norm, f"{name} attention norm")
        residual = queries = x
        if first_only:
            residual = queries = self.add("first", f"{name} first row", x)
        if not post:
            queries = self.add("first", f"{name} query row", tokens) if first_only else tokens
        own = f"{prefix}.attention.self"
        q = self.dense(queries, f"{own}.query", width, f"{name} queries")
        k = self.dense(tokens, f"{own}.key", width, f"{name} keys")
        v = self.dense(tokens, f"{own}.value", width, f"{name} values")
        scale = 1 / math.sqrt(width // heads)
        scores = self.add("scores", f"{name} scores", q, k, heads=heads, scale=scale)
        mixed = self.add("mix", f"{name} attention", self.softmax(scores, heads, name), v, heads=heads)
        dense = self.dense(mixed, f"{prefix}.attention.output.dense", width, f"{name} attention output")
        x = self.add("add", f"{name} attention residual", residual, dense)
        if post:
            x = self.norm(x, attention_norm, f"{name} attention norm")
        inner = x if post else self.norm(x, output_norm, f"{name} output norm")
        size, function = config["intermediate_size"], ACTIVATIONS[config["hidden_act"]]
        inner = self.dense(inner, f"{prefix}.intermediate.dense", size, f"{name} feed-forward input")
        inner = self.add("apply", f"{name} activation", inner, function=function)
        inner = self.dense(inner, f"{prefix}.output.dense", width, f"{name} feed-forward output")
        x = self.add("add", f"{name} output residual", x, inner)
        return self.norm(x, output_norm, f"{name} output norm") if post else x


class Network(Protocol):
    """A network that can be written down node by node."""

    def shape(self, tokens: int) -> tuple[int, int]:
        """The shape of an input with this many rows; a `RejectedError` where there can be none."""

    def written(self, rows: Array, graph: str) -> tuple[Builder, int, Array, Array]:
        """All nodes but the last, from embedding rows; which one that reads, its weight and its bias."""


def build(network: Network, rows: Array, goal: Goal, graph: str) -> tuple[list[Node], list[Array]]:
    """The network from embedding rows to the margins of a goal, and its reference values."""
    net, x, weight, bias = network.written(rows, graph)
    finish(net, x, weight, bias, goal)
    return net.nodes, net.values
