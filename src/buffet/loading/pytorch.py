"""PyTorch's own `nn.TransformerEncoder`: what it needs around it to classify sentences, in BERT's words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional

from buffet.errors import BuffetError
from buffet.loading.families import POSITIONS, TYPES, WORDS

HEAD_ACTIVATIONS = {"tanh": torch.tanh, "relu": torch.relu, "gelu": functional.gelu}


class EncoderClassifier(nn.Module):
    """An `nn.TransformerEncoder` with embeddings before and a head after it: to be trained, and loaded.

    ``logits = classifier(a(dense(pool(encoder(norm(words[ids] + positions[:n]))))))``, where `norm` and
    `dense` (with its activation a) may be absent and `pool` is the first row or the mean of the unmasked
    rows. A factor on the embeddings, as in ``words(ids) * sqrt(width)``, belongs in their weights.

    >>> import buffet
    >>> layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    >>> encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    >>> parts = nn.Embedding(50, 8), nn.Embedding(20, 8), nn.Linear(8, 2)
    >>> module = buffet.loading.EncoderClassifier(encoder, *parts, pooling="mean")
    >>> model = buffet.load(module)  # tokenizer=... to give it texts
    """

    def __init__(
        self,
        encoder: nn.TransformerEncoder,
        words: nn.Embedding,
        positions: nn.Embedding | Float[Tensor, "positions width"],
        classifier: nn.Linear,
        *,
        pooling: Literal["cls", "mean"] = "mean",
        dense: nn.Linear | None = None,
        activation: Literal["tanh", "relu", "gelu"] = "tanh",
        norm: nn.LayerNorm | None = None,
        labels: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        self.encoder, self.words, self.classifier = encoder, words, classifier
        self.positions: nn.Embedding = (
            nn.Embedding.from_pretrained(positions) if isinstance(positions, Tensor) else positions
        )
        self.norm, self.dense = norm, dense
        self.pooling, self.activation = pooling, activation
        self.labels = None if labels is None else tuple(labels)

    def forward(
        self, ids: Int[Tensor, "batch tokens"], mask: Bool[Tensor, "batch tokens"] | None = None
    ) -> Float[Tensor, "batch classes"]:
        """The logits of token ids; padding is False in `mask`."""
        x = self.words(ids) + self.positions.weight[: ids.shape[1]]
        x = x if self.norm is None else self.norm(x)
        rows_first = self.encoder.layers[0].self_attn.batch_first
        x = x if rows_first else x.transpose(0, 1)
        x = self.encoder(x, src_key_padding_mask=None if mask is None else ~mask)
        x = x if rows_first else x.transpose(0, 1)
        if self.pooling == "cls":
            x = x[:, 0]
        elif mask is None:
            x = x.mean(1)
        else:
            x = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        if self.dense is not None:
            x = HEAD_ACTIVATIONS[self.activation](self.dense(x))
        return self.classifier(x)


def translate(module: EncoderClassifier, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration and the tensors of `module`, both in BERT's words."""
    layers = list(module.encoder.layers)
    first = layers[0]
    norms = [n for n in (module.norm, module.encoder.norm) if n is not None]
    for layer in layers:
        norms += [layer.norm1, layer.norm2]
        attention = layer.self_attn
        if attention.bias_k is not None or attention.add_zero_attn or attention.in_proj_weight is None:
            raise BuffetError(f"{where}: add_bias_kv, add_zero_attn, kdim and vdim are not supported")
    config = {
        "vocab_size": module.words.num_embeddings,
        "max_position_embeddings": module.positions.num_embeddings,
        "type_vocab_size": 1,
        "hidden_size": first.linear1.in_features,
        "intermediate_size": first.linear1.out_features,
        "num_hidden_layers": len(layers),
        "num_attention_heads": _one("heads", [layer.self_attn.num_heads for layer in layers], where),
        "hidden_act": _one("activations", [_activation(layer.activation) for layer in layers], where),
        "layer_norm_eps": _one("LayerNorm eps", [_layer_norm(norm, where).eps for norm in norms], where),
        "norm_position": _one("norm_first", ["pre" if la.norm_first else "post" for la in layers], where),
        "pooling": module.pooling,
        "head_act": "none" if module.dense is None else module.activation,
        "embedding_norm": module.norm is not None,
        "final_norm": module.encoder.norm is not None,
        "pad_token_id": module.words.padding_idx,
        "num_labels": module.classifier.out_features,
        "id2label": None if module.labels is None else dict(enumerate(module.labels)),
    }
    return config, _tensors(module)


def _tensors(module: EncoderClassifier) -> dict[str, Tensor]:
    parts: dict[str, nn.Module | None] = {
        "bert.embeddings.LayerNorm": module.norm,
        "bert.encoder.LayerNorm": module.encoder.norm,
        "bert.pooler.dense": module.dense,
        "classifier": module.classifier,
    }
    words = module.words.weight
    tensors = {WORDS: words, POSITIONS: module.positions.weight, TYPES: words.new_zeros(1, words.shape[1])}
    for number, layer in enumerate(module.encoder.layers):
        prefix = f"bert.encoder.layer.{number}"
        parts |= {
            f"{prefix}.attention.output.dense": layer.self_attn.out_proj,
            f"{prefix}.attention.output.LayerNorm": layer.norm1,
            f"{prefix}.intermediate.dense": layer.linear1,
            f"{prefix}.output.dense": layer.linear2,
            f"{prefix}.output.LayerNorm": layer.norm2,
        }
        weights = layer.self_attn.in_proj_weight.chunk(3)
        bias = layer.self_attn.in_proj_bias
        biases = weights[0].new_zeros(3, len(weights[0])) if bias is None else bias.chunk(3)
        for name, weight, offset in zip(("query", "key", "value"), weights, biases, strict=True):
            tensors |= _pair(f"{prefix}.attention.self.{name}", weight, offset)
    for name, part in parts.items():
        if isinstance(part, nn.Linear | nn.LayerNorm):
            rows = part.normalized_shape[0] if isinstance(part, nn.LayerNorm) else part.out_features
            weight = words.new_ones(rows) if part.weight is None else part.weight
            tensors |= _pair(name, weight, words.new_zeros(rows) if part.bias is None else part.bias)
    return tensors


def _pair(name: str, weight: Tensor, bias: Tensor) -> Mapping[str, Tensor]:
    return {f"{name}.weight": weight, f"{name}.bias": bias}


def _layer_norm(norm: nn.Module, where: str) -> nn.LayerNorm:
    if not isinstance(norm, nn.LayerNorm):
        raise BuffetError(f"{where}: its norm is a {type(norm).__name__}; supported: LayerNorm")
    return norm


def _activation(activation: Any) -> str:
    """The name of a function or module as configurations spell it; unknown ones keep their own name."""
    if isinstance(activation, nn.GELU):
        return "gelu" if activation.approximate == "none" else "gelu_pytorch_tanh"
    name = type(activation).__name__ if isinstance(activation, nn.Module) else activation.__name__
    return name.lower()


def _one(what: str, values: Sequence[Any], where: str) -> Any:
    if len(set(values)) > 1:
        raise BuffetError(f"{where}: layers with different {what} are not supported: {sorted(set(values))}")
    return values[0]
