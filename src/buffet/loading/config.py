"""What a checkpoint says about itself: `config.json`, read and validated.

The keys are those of a Hugging Face BERT configuration, plus three that say what the network computes and
that such a file cannot express: `layer_norm`, `pooling` and `norm_position`. Keys nobody reads are
tolerated; a value that would change the network into something the program cannot express is not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from buffet.errors import BuffetError

# How a configuration spells an activation -> its name in `functions.FUNCTIONS`.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "tanh": "tanh",
}
MODEL_TYPES = ("bert",)

# The caps are far above any encoder in use: they turn a corrupt number into a message instead of an
# attempt to allocate it.
Width = Annotated[int, Field(ge=1, le=65_536, strict=True)]
Layers = Annotated[int, Field(ge=1, le=1_000, strict=True)]
Rows = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
Classes = Annotated[int, Field(ge=2, le=100_000, strict=True)]
Small = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False, strict=True)]

# Keys whose other values describe a different network: key -> (allowed values, what to say).
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "position_embedding_type": (("absolute", None), "only absolute position embeddings are supported"),
    "is_decoder": ((False, None), "only encoders are supported"),
    "add_cross_attention": ((False, None), "only encoders are supported"),
    "quantization_config": ((None,), "quantised weights are not supported"),
    "problem_type": (
        (None, "single_label_classification"),
        "only single-label classification is supported",
    ),
}


class ModelConfig(BaseModel):
    """The architecture of a checkpoint; every value is one the program can express."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_type: str = "bert"
    vocab_size: Rows
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    intermediate_size: Width
    hidden_act: str = "gelu"
    max_position_embeddings: Rows = 512
    type_vocab_size: Rows = 2
    layer_norm_eps: Small = 1e-12
    pad_token_id: Annotated[int, Field(ge=0, strict=True)] | None = 0
    num_labels: Classes = 2
    id2label: dict[int, str] | None = None
    layer_norm: Literal["standard", "no_var"] = "standard"
    pooling: Literal["cls", "mean"] = "cls"
    norm_position: Literal["post", "pre"] = "post"

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, raw: Any) -> Any:
        """Refuse other families and variants before their foreign keys are looked at."""
        if not isinstance(raw, dict):
            raise ValueError(f"expected an object with the keys of a BERT configuration, got {_show(raw)}")
        family = raw.get("model_type", "bert")
        if family not in MODEL_TYPES:
            raise ValueError(
                f"model_type {_show(family)} is not supported; supported: {_listed(MODEL_TYPES)}"
            )
        for key, (allowed, reason) in FIXED.items():
            if raw.get(key) not in allowed:
                raise ValueError(f"{key} is {_show(raw[key])}: {reason}")
        labels = raw.get("id2label")
        if isinstance(labels, dict) and "num_labels" not in raw:
            return {**raw, "num_labels": len(labels)}
        return raw

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act {_show(self.hidden_act)} is not supported; supported: {_listed(ACTIVATIONS)}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                f"{self.num_attention_heads}"
            )
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(f"pad_token_id {self.pad_token_id} is outside vocab_size {self.vocab_size}")
        if self.id2label is not None and sorted(self.id2label) != list(range(self.num_labels)):
            raise ValueError(
                f"id2label has the keys {_show(sorted(self.id2label))} but num_labels is {self.num_labels}: "
                f"expected one label for each of 0 to {self.num_labels - 1}"
            )
        return self

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of every class, in the order of the logits."""
        names = self.id2label or {i: f"LABEL_{i}" for i in range(self.num_labels)}
        return tuple(names[i] for i in range(self.num_labels))

    @property
    def activation(self) -> str:
        """The activation as named in `functions.FUNCTIONS`."""
        return ACTIVATIONS[self.hidden_act]

    @property
    def norm_eps(self) -> float | None:
        """The constant under the square root of a LayerNorm; None when it has no variance."""
        return self.layer_norm_eps if self.layer_norm == "standard" else None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor the weights must hold, and no other."""
        width, inner = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "bert.embeddings.word_embeddings.weight": (self.vocab_size, width),
            "bert.embeddings.position_embeddings.weight": (self.max_position_embeddings, width),
            "bert.embeddings.token_type_embeddings.weight": (self.type_vocab_size, width),
        }

        def norm(prefix: str) -> None:
            shapes.update({f"{prefix}.weight": (width,), f"{prefix}.bias": (width,)})

        def dense(prefix: str, out: int, inputs: int) -> None:
            shapes.update({f"{prefix}.weight": (out, inputs), f"{prefix}.bias": (out,)})

        norm("bert.embeddings.LayerNorm")
        for layer in range(self.num_hidden_layers):
            prefix = f"bert.encoder.layer.{layer}"
            for projection in ("query", "key", "value"):
                dense(f"{prefix}.attention.self.{projection}", width, width)
            dense(f"{prefix}.attention.output.dense", width, width)
            norm(f"{prefix}.attention.output.LayerNorm")
            dense(f"{prefix}.intermediate.dense", inner, width)
            dense(f"{prefix}.output.dense", width, inner)
            norm(f"{prefix}.output.LayerNorm")
        if self.norm_position == "pre":
            norm("bert.encoder.LayerNorm")
        if self.pooling == "cls":
            dense("bert.pooler.dense", width, width)
        dense("classifier", self.num_labels, width)
        return shapes


def read_config(path: Path) -> ModelConfig:
    """The configuration in `path`, or a `BuffetError` that names the file and the value at fault."""
    if not path.is_file():
        raise BuffetError(f"{path}: no such file; a checkpoint is a directory with config.json in it")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise BuffetError(f"{path}: not a JSON file: {_one_line(error)}") from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        return ModelConfig.model_validate(raw)
    except ValidationError as error:
        raise BuffetError(f"{path}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """The first complaint of a pydantic validation, in one line: which value, what it was, what is wrong."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("constrained"))
    if first["type"] == "missing":
        return f"{key} is missing"
    message = first["msg"][0].lower() + first["msg"][1:]
    return f"{key} is {_show(first['input'])}: {message}"


def _show(value: object) -> str:
    text = _one_line(repr(value))
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(value: object) -> str:
    return " ".join(str(value).split())


def _listed(names: Any) -> str:
    return ", ".join(names)
