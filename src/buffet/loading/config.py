"""The architecture of a classifier, validated: everything `network` needs to know besides the weights.

The keys are those of a Hugging Face BERT configuration, plus a few that say what such a file cannot express,
from `layer_norm` on. Other families are translated into these words first (`families`). Keys nobody reads
are tolerated; a value that would change the network into something the program cannot express is not.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from buffet.errors import show

# How a configuration spells an activation -> its name in `functions.FUNCTIONS`.
ACTIVATIONS = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "tanh": "tanh",
}

# The caps are far above any encoder in use: they turn a corrupt number into a message instead of an
# attempt to allocate it.
Width = Annotated[int, Field(ge=1, le=65_536, strict=True)]
Layers = Annotated[int, Field(ge=1, le=1_000, strict=True)]
TableSize = Annotated[int, Field(ge=1, le=10_000_000, strict=True)]
Classes = Annotated[int, Field(ge=2, le=100_000, strict=True)]
Small = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False, strict=True)]
Flag = Annotated[bool, Field(strict=True)]

# Keys whose other values describe a different network: key -> (allowed values, what to say).
FIXED: dict[str, tuple[tuple[Any, ...], str]] = {
    "position_embedding_type": (("absolute", None), "only absolute position embeddings are supported"),
    "is_decoder": ((False, None), "only encoders are supported"),
    "is_encoder_decoder": ((False, None), "only encoders are supported"),
    "add_cross_attention": ((False, None), "cross attention is not supported, only encoders are"),
    "quantization_config": ((None,), "quantised weights are not supported, only floating point"),
    "pruned_heads": (({}, None), "pruned heads are not supported"),
    "problem_type": (
        (None, "single_label_classification"),
        "only single-label classification is supported, where the largest logit is the answer",
    ),
}


class ModelConfig(BaseModel):
    """The architecture of a checkpoint; every value is one the program can express."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    model_type: Literal["bert"] = "bert"
    vocab_size: TableSize
    hidden_size: Width
    num_hidden_layers: Layers
    num_attention_heads: Width
    intermediate_size: Width
    hidden_act: str = "gelu"
    max_position_embeddings: TableSize = 512
    type_vocab_size: TableSize = 2
    layer_norm_eps: Small = 1e-12
    pad_token_id: Annotated[int, Field(ge=0, strict=True)] | None = 0
    num_labels: Classes = 2
    id2label: dict[int, str] | None = None
    layer_norm: Literal["standard", "no_var"] = "standard"
    norm_position: Literal["post", "pre"] = "post"
    pooling: Literal["cls", "mean"] = "cls"
    # The activation of the dense layer between pooling and classifier; "none": there is no such layer.
    # None: as BERT has it, tanh after "cls" and no layer after "mean".
    head_act: Literal["tanh", "relu", "gelu", "none"] | None = None
    embedding_size: Width | None = None  # of the embedding rows, if they are projected to hidden_size
    embedding_norm: Flag = True  # a LayerNorm before the first block
    final_norm: Flag | None = None  # one after the last block; None: for "pre" only

    @model_validator(mode="before")
    @classmethod
    def _fixed(cls, raw: Any) -> Any:
        """Refuse other kinds of network before their foreign keys are looked at."""
        for key, (allowed, reason) in FIXED.items():
            if not any(type(raw.get(key)) is type(value) and raw.get(key) == value for value in allowed):
                raise ValueError(f"{key} is {show(raw[key])}: {reason}")
        labels = raw.get("id2label")
        if isinstance(labels, dict) and "num_labels" not in raw:
            raw = {**raw, "num_labels": len(labels)}
        if raw.get("num_labels") == 1:
            raise ValueError("num_labels is 1: a regression head is not supported, only two or more classes")
        return raw

    @model_validator(mode="after")
    def _consistent(self) -> ModelConfig:
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act {show(self.hidden_act)} is not supported; supported: {', '.join(ACTIVATIONS)}"
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
                f"id2label has the keys {show(sorted(self.id2label))} but num_labels is {self.num_labels}: "
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

    @property
    def row_width(self) -> int:
        """The width of the embedding rows."""
        return self.embedding_size or self.hidden_size

    @property
    def head(self) -> str | None:
        """The activation of the head's dense layer as named in `functions.FUNCTIONS`; None without one."""
        chosen = self.head_act or ("tanh" if self.pooling == "cls" else "none")
        return None if chosen == "none" else chosen

    @property
    def ends_in_norm(self) -> bool:
        """Whether a LayerNorm follows the last block."""
        return self.norm_position == "pre" if self.final_norm is None else self.final_norm

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor the weights must hold, and no other."""
        width, inner, row = self.hidden_size, self.intermediate_size, self.row_width
        shapes: dict[str, tuple[int, ...]] = {
            "bert.embeddings.word_embeddings.weight": (self.vocab_size, row),
            "bert.embeddings.position_embeddings.weight": (self.max_position_embeddings, row),
            "bert.embeddings.token_type_embeddings.weight": (self.type_vocab_size, row),
        }

        def norm(prefix: str, width: int = width) -> None:
            shapes.update({f"{prefix}.weight": (width,), f"{prefix}.bias": (width,)})

        def dense(prefix: str, out: int, inputs: int) -> None:
            shapes.update({f"{prefix}.weight": (out, inputs), f"{prefix}.bias": (out,)})

        if self.embedding_norm:
            norm("bert.embeddings.LayerNorm", row)
        if row != width:
            dense("bert.embeddings_project", width, row)
        for layer in range(self.num_hidden_layers):
            prefix = f"bert.encoder.layer.{layer}"
            for projection in ("query", "key", "value"):
                dense(f"{prefix}.attention.self.{projection}", width, width)
            dense(f"{prefix}.attention.output.dense", width, width)
            norm(f"{prefix}.attention.output.LayerNorm")
            dense(f"{prefix}.intermediate.dense", inner, width)
            dense(f"{prefix}.output.dense", width, inner)
            norm(f"{prefix}.output.LayerNorm")
        if self.ends_in_norm:
            norm("bert.encoder.LayerNorm")
        if self.head:
            dense("bert.pooler.dense", width, width)
        dense("classifier", self.num_labels, width)
        return shapes
