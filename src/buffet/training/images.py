"""Training an image classifier on scikit-learn's digits: a minute, so that it is simply done again."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from buffet.errors import BuffetError
from buffet.loading.checkpoint import serialise, write_checkpoint
from buffet.loading.images import read_digits, rows_of
from buffet.loading.network import build_program
from buffet.loading.vision import ImageConfig
from buffet.network import Program
from buffet.training.results import Progress, TrainSummary
from buffet.training.settings import TrainSettings

SHARES = {"train": 0.7, "dev": 0.1, "test": 0.2}
PARTS_SEED = 0
"""Of the split, which no setting changes: the same images are never trained on."""
Rows = Float[Tensor, "images tokens pixels"]
Labels = Int[Tensor, "images"]

CARD = """\
# {name}

An image classifier trained by this repository's `buffet train`.

| | |
| --- | --- |
| architecture | vision transformer, {layers} layers, width {width}, {heads} heads, FFN {inner}, \
{activation}, LayerNorm `{layer_norm}` (pre-norm), patches of {patch} × {patch} pixels |
| parameters | {parameters:,} (float32) |
| data | scikit-learn's digits, 8 × 8 pixels: {train} training images, {dev} dev, {test} test |
| dev accuracy | {dev_accuracy:.2%} (epoch {epoch}, chosen on dev, so slightly flattering) |
| test accuracy | {test_accuracy:.2%} (the chosen epoch; took no part in any choice) |
| time | {seconds:.0f} seconds, threads: {threads} |
| seed | {seed} |
| sha256 of `model.safetensors` | `{sha256}` |

Made by

    {command}
"""


def train_images(settings: TrainSettings, progress: Callable[[Progress], None] | None = None) -> TrainSummary:
    """Train on the digits, keep the weights with the best dev accuracy, write the checkpoint directory."""
    images, labels = read_digits()
    config = image_config(settings, images.shape[-1], int(labels.max()) + 1)
    rows = rows_of(images[:, None], config)
    parts = {name: (rows[index], labels[index]) for name, index in split(len(rows)).items()}
    tensors = first_image_weights(config, settings)
    begin = time.monotonic()
    accuracies, losses, best = _fit(config, tensors, settings, parts, progress)
    seconds = time.monotonic() - begin
    with torch.no_grad():
        for name, tensor in best.items():
            tensors[name].copy_(tensor)
        test = accuracy(build_program(config, tensors), *parts["test"])
    summary = TrainSummary(
        out=settings.out,
        preset=settings.preset,
        dev_accuracy=max(accuracies),
        test_accuracy=test,
        losses=tuple(losses),
        dev_accuracies=tuple(accuracies),
        best_epoch=accuracies.index(max(accuracies)) + 1,
        parameters=sum(tensor.numel() for tensor in tensors.values()),
        rows=len(parts["train"][0]),
        seconds=seconds,
        sha256=hashlib.sha256(serialise(tensors)).hexdigest(),
    )
    texts = {
        "config.json": json.dumps(config.model_dump(), indent=2) + "\n",
        "README.md": _card(settings, {name: len(part[1]) for name, part in parts.items()}, summary),
    }
    write_checkpoint(settings.out, texts, tensors, overwrite=settings.overwrite)
    return summary


def image_config(settings: TrainSettings, size: int, classes: int) -> ImageConfig:
    """The configuration these settings ask for, for grey images of `size` × `size` pixels."""
    if size % settings.patch or settings.norm_position != "pre" or settings.pooling != "cls":
        raise BuffetError(
            f"patch {settings.patch}, norm_position {settings.norm_position}, pooling {settings.pooling}: an"
            f" image has {size} × {size} pixels, and its classifier is pre-norm and reads the class token"
        )
    return ImageConfig(
        image_size=size,
        patch_size=settings.patch,
        num_channels=1,
        image_mean=(0.0,),
        image_std=(1.0,),
        hidden_size=settings.width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        intermediate_size=settings.inner,
        hidden_act=settings.activation,
        layer_norm=settings.layer_norm,
        num_labels=classes,
        id2label={i: str(i) for i in range(classes)},
    )


def split(count: int) -> dict[str, Tensor]:
    """Which images are for training, dev and test: always the same."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(PARTS_SEED))
    dev, test = (math.ceil(SHARES[name] * count) for name in ("dev", "test"))
    train, dev_part, test_part = order.split([count - dev - test, dev, test])
    return {"train": train, "dev": dev_part, "test": test_part}


def first_image_weights(config: ImageConfig, settings: TrainSettings) -> dict[str, Tensor]:
    """Random weights: Glorot-uniform matrices, small positions, LayerNorms that do nothing yet."""
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = {}
    for name, shape in config.shapes().items():
        tensor = torch.zeros(shape)
        if name.endswith(("cls_token", "position_embeddings")):
            tensor.normal_(0, settings.embedding_scale, generator=generator)
        elif tensor.ndim > 1:
            torch.nn.init.xavier_uniform_(tensor.view(shape[0], -1), settings.gain, generator=generator)
        elif name.endswith("LayerNorm.weight"):
            tensor.fill_(1.0)
        tensors[name] = tensor.requires_grad_()
    return tensors


@torch.no_grad()
def accuracy(program: Program, rows: Rows, labels: Labels) -> float:
    """The fraction of the images whose largest logit is that of their label."""
    return float((program.evaluate(rows).argmax(-1) == labels).double().mean())


def _fit(
    config: ImageConfig,
    tensors: dict[str, Tensor],
    settings: TrainSettings,
    parts: dict[str, tuple[Tensor, Tensor]],
    progress: Callable[[Progress], None] | None,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """The dev accuracies and losses of all epochs, and the weights of the best one."""
    x, y = parts["train"]
    generator = torch.Generator().manual_seed(settings.seed)
    decays = [tensor for tensor in tensors.values() if tensor.ndim == 2]
    others = [tensor for tensor in tensors.values() if tensor.ndim != 2]
    groups = [
        {"params": decays, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=settings.rate)
    steps = settings.epochs * math.ceil(len(x) / settings.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, settings.rate, steps, pct_start=max(settings.warmup, 1 / steps)
    )
    accuracies: list[float] = []
    losses: list[float] = []
    best: dict[str, Tensor] = {}
    begin = time.monotonic()
    for epoch in range(1, settings.epochs + 1):
        total, batches = 0.0, torch.randperm(len(x), generator=generator).split(settings.batch)
        for index in batches:
            loss = _loss(build_program(config, tensors), x[index], y[index], settings.adversarial)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(tensors.values(), settings.clip)
            optimiser.step()
            schedule.step()
            total += loss.item()
        losses.append(total / len(batches))
        found = accuracy(build_program(config, tensors), *parts["dev"])
        if found > max(accuracies, default=-1.0):
            best = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        accuracies.append(found)
        if progress:
            rate, spent = float(schedule.get_last_lr()[0]), time.monotonic() - begin
            step = epoch * len(batches)
            progress(Progress(epoch, settings.epochs, step, steps, losses[-1], rate, spent, found))
        if epoch - (accuracies.index(max(accuracies)) + 1) >= settings.patience:
            break
    return accuracies, losses, best


def _loss(program: Program, x: Rows, y: Labels, size: float) -> Float[Tensor, ""]:
    """The cross-entropy; with `size`, of images whose every pixel moved by it against the label (FGSM)."""
    if size:
        still = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(cross_entropy(program.evaluate(still), y), still)
        moved = (x + size * gradient.sign()).clamp(0, 1)
        x = torch.cat([x[:, :1], moved[:, 1:]], 1)
    return cross_entropy(program.evaluate(x), y)


def _card(settings: TrainSettings, counts: dict[str, int], summary: TrainSummary) -> str:
    return CARD.format(
        name=settings.out.name,
        epoch=summary.best_epoch,
        command=settings.command(),
        **counts,
        **settings.model_dump(
            include={
                "layers",
                "width",
                "heads",
                "inner",
                "activation",
                "layer_norm",
                "patch",
                "threads",
                "seed",
            }
        ),
        **{k: v for k, v in vars(summary).items() if k in ("parameters", "dev_accuracy", "test_accuracy")},
        **{k: v for k, v in vars(summary).items() if k in ("seconds", "sha256")},
    )
