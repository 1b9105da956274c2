"""Tiny random networks of every kind that is read from ONNX, and how they are exported."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

TEXT: dict[str, Any] = {
    "vocab_size": 20,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "max_position_embeddings": 16,
    "num_labels": 3,
}
IMAGE: dict[str, Any] = {**TEXT, "image_size": 6, "patch_size": 3, "num_channels": 2}


def shaken(module: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and statistic random: nothing agrees by being 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in module.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1 + 0.3 * noise.abs() if "running_var" in name else 0.4 * noise)
    return module.eval()


class Logits(nn.Module):
    """A classifier of `transformers` as a function of its embedding rows or pixels."""

    def __init__(self, inner: nn.Module, key: str) -> None:
        super().__init__()
        self.inner, self.key = inner, key

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(**{self.key: x}).logits


def bert(**changes: Any) -> nn.Module:
    config = transformers.BertConfig(**{**TEXT, **changes})
    return shaken(transformers.BertForSequenceClassification(config))


def roberta() -> nn.Module:
    config = transformers.RobertaConfig(**TEXT, pad_token_id=1)
    return shaken(transformers.RobertaForSequenceClassification(config))


def distilbert() -> nn.Module:
    names = {"dim": 8, "n_layers": 2, "n_heads": 2, "hidden_dim": 12}
    config = transformers.DistilBertConfig(vocab_size=20, max_position_embeddings=16, num_labels=3, **names)
    return shaken(transformers.DistilBertForSequenceClassification(config))


def vit() -> nn.Module:
    return shaken(transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGE)))


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "bert": bert,
    "bert-tanh-gelu": lambda: bert(hidden_act="gelu_new"),
    "bert-relu": lambda: bert(hidden_act="relu"),
    "roberta": roberta,
    "distilbert": distilbert,
    "vit": vit,
}


class Attention(nn.Module):
    """Attention with one matrix for queries, keys and values, as timm has it.

    With a number of `tokens`, a constant for every pair of them is added to the scores.
    """

    def __init__(self, width: int, heads: int, tokens: int | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(heads, tokens, tokens)) if tokens else None
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.qkv(x).reshape(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = parts[0], parts[1], parts[2]
        scores = q * (width // self.heads) ** -0.5 @ k.transpose(-2, -1)
        scores = scores if self.bias is None else scores + self.bias
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, tokens, width))


class BatchNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


class Block(nn.Module):
    def __init__(
        self, width: int, norm: type[nn.Module], act: type[nn.Module], tokens: int | None = None
    ) -> None:
        super().__init__()
        self.attend = nn.Sequential(norm(width), Attention(width, 2, tokens))
        self.think = nn.Sequential(norm(width), nn.Linear(width, 10), act(), nn.Linear(10, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(x)
        return x + self.think(x)


class PixelTransformer(nn.Module):
    """As in VNN-COMP: patches by a convolution, a class token, BatchNorm, ReLU, the mean of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token, self.positions = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(5, 8))
        self.blocks = nn.Sequential(*(Block(8, BatchNorm, nn.ReLU) for _ in range(2)))
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows = (
            self.patches((x - 0.4) / torch.tensor([0.2, 0.3, 0.25])[:, None, None]).flatten(2).transpose(1, 2)
        )
        token = torch.zeros(x.shape[0], 1, 8) + self.token
        rows = self.blocks(torch.cat([token, rows], 1) + self.positions)
        return self.head(self.norm(rows.mean(1)))


class Controller(nn.Module):
    """A history of states → an action between −1 and 1, read from the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(3, 8), nn.Parameter(torch.zeros(4, 8))
        self.block, self.norm = Block(8, nn.LayerNorm, nn.GELU), nn.LayerNorm(8)
        self.head = nn.Sequential(nn.Linear(8, 2), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.block(self.embed(x) + self.positions))[:, -1])


class LinearPatches(nn.Module):
    """Patches cut out by reshaping, embedded by a matrix, and no class token; scores have a constant bias."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(12, 8), nn.Linear(8, 2)
        self.block = Block(8, nn.LayerNorm, nn.Tanh, tokens=4)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(1, 3, 2, 2, 2, 2).permute(0, 2, 4, 3, 5, 1).reshape(1, 4, 12)
        return self.head(self.block(self.embed(rows)).sum(1) / 4)


class TorchEncoder(nn.Module):
    """PyTorch's own encoder layers."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 12, activation="gelu", batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x)[:, 0])


PLAIN: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "pixels": (PixelTransformer, (1, 3, 8, 8)),
    "controller": (Controller, (1, 4, 3)),
    "linear patches": (LinearPatches, (1, 3, 4, 4)),
    "torch encoder": (TorchEncoder, (1, 5, 8)),
}


def wrapped(module: nn.Module) -> tuple[nn.Module, Tensor]:
    """A classifier of `transformers` as a plain module, and an input of it."""
    generator = torch.Generator().manual_seed(1)
    if isinstance(module, transformers.ViTForImageClassification):
        return Logits(module, "pixel_values").eval(), torch.rand(1, 2, 6, 6, generator=generator)
    return Logits(module, "inputs_embeds").eval(), torch.randn(1, 5, 8, generator=generator)


def export(
    module: nn.Module, x: Tensor, path: Path, *, dynamo: bool = False, opset: int | None = None
) -> Path:
    """The module as an ONNX file; what the exporter prints is nobody's business."""
    quiet = io.StringIO()
    with warnings.catch_warnings(), contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), (x,), str(path), dynamo=dynamo, opset_version=opset)
    return path
