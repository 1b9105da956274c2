"""The program of a BERT-style classifier, or of a vision transformer, from its named tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from buffet.loading.config import ModelConfig
from buffet.loading.vision import CLASS_TOKEN, PATCH_POSITIONS, PATCHES, ImageConfig
from buffet.network import Add, Apply, Builder, Diagonal, First, Mean, Offset, Program


def build_program(config: ModelConfig, tensors: Mapping[str, Tensor]) -> Program:
    """The network of `config`, from embedding rows (before the embedding LayerNorm) or pixels to logits.

    Blocks, with Attn and FFN the two sublayers:
        post-norm  ``x = LN(x + Attn(x)); x = LN(x + FFN(x))``
        pre-norm   ``x = x + Attn(LN(x)); x = x + FFN(LN(x))``, and a final LN after the last block.
    Heads: ``W a(P y + p) + b`` or ``W y + b``, where y is the first row (``cls``) or the mean of the unmasked
    rows (``mean``) and a the activation of the head.

    With ``cls`` only the first row of the last block is ever read, so that block attends *from* the first
    row only: the same function, with one row instead of all of them from there on.
    """
    net = _Network(config, tensors)
    x = net.patches(config) if isinstance(config, ImageConfig) else net.words()
    for layer in range(config.num_hidden_layers):
        last = layer == config.num_hidden_layers - 1
        x = net.block(x, f"bert.encoder.layer.{layer}", first_only=last and config.pooling == "cls")
    if config.ends_in_norm:
        x = net.norm(x, "bert.encoder.LayerNorm")
    if config.pooling == "mean":
        x = net.add(Mean(), x)
    if config.head:
        x = net.add(Apply(config.head), net.dense(x, "bert.pooler.dense"))
    net.dense(x, "classifier")
    return net.build()


class _Network(Builder):
    """A `Builder` that looks its weights up by name."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.config = config
        self.tensors = tensors

    def pair(self, prefix: str) -> tuple[Tensor, Tensor]:
        return self.tensors[f"{prefix}.weight"], self.tensors[f"{prefix}.bias"]

    def dense(self, x: int, prefix: str) -> int:
        return self.affine(x, *self.pair(prefix))

    def norm(self, x: int, prefix: str) -> int:
        weight, bias = self.pair(prefix)
        if self.config.layer_norm == "batch":
            mean, variance = (self.tensors[f"{prefix}.running_{name}"] for name in ("mean", "var"))
            scale = weight * torch.rsqrt(variance + self.config.layer_norm_eps)
            return self.add(Diagonal(scale, bias - scale * mean), x)
        return self.layer_norm(x, weight, bias, eps=self.config.norm_eps)

    def words(self) -> int:
        """Embedding rows as the first block reads them."""
        x = self.norm(self.input, "bert.embeddings.LayerNorm") if self.config.embedding_norm else self.input
        narrow = self.config.row_width != self.config.hidden_size
        return self.dense(x, "bert.embeddings_project") if narrow else x

    def patches(self, config: ImageConfig) -> int:
        """Rows of pixels as the first block reads them: ``W (x − mean)/std + b``, then the positions.

        The first row is zero, and becomes the class token.
        """
        weight, bias = self.pair(PATCHES)
        pixels = config.patch_size**2
        if config.image_std is not None:
            std = weight.new_tensor(config.image_std)
            weight = weight / std[:, None, None]
        weight = weight.flatten(1)
        if config.image_mean is not None:
            bias = bias - weight @ weight.new_tensor(config.image_mean).repeat_interleave(pixels)
        offset = self.tensors[PATCH_POSITIONS][0].clone()
        offset[0] = offset[0] + self.tensors[CLASS_TOKEN][0, 0] - bias
        return self.add(Offset(offset), self.affine(self.input, weight, bias))

    def block(self, x: int, prefix: str, *, first_only: bool) -> int:
        """One encoder block; with `first_only` it returns the first row of its result."""
        post = self.config.norm_position == "post"
        attention_norm, output_norm = f"{prefix}.attention.output.LayerNorm", f"{prefix}.output.LayerNorm"
        tokens = x if post else self.norm(x, attention_norm)
        residual = queries = x
        if first_only:
            residual = queries = self.add(First(), x)
        if not post:
            queries = self.add(First(), tokens) if first_only else tokens
        projections = [self.pair(f"{prefix}.attention.self.{name}") for name in ("query", "key", "value")]
        mixed = self.attention(queries, tokens, self.config.num_attention_heads, projections)
        x = self.add(Add(), residual, self.dense(mixed, f"{prefix}.attention.output.dense"))
        if post:
            x = self.norm(x, attention_norm)
        inner = x if post else self.norm(x, output_norm)
        inner = self.dense(inner, f"{prefix}.intermediate.dense")
        inner = self.dense(self.add(Apply(self.config.activation), inner), f"{prefix}.output.dense")
        x = self.add(Add(), x, inner)
        return self.norm(x, output_norm) if post else x
