"""Image classifiers for scikit-learn's digits: the data, the configuration, the network in training."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError, validated
from buffet.loading.images import read_digits, rows_of
from buffet.loading.network import build_program
from buffet.loading.vision import ImageConfig
from buffet.network import Program
from buffet.training.corpus import Batch, Sample
from buffet.training.network import Trainable, architecture, first_weights
from buffet.training.settings import TrainSettings

SHARES = {"dev": 0.1, "test": 0.2}
PARTS_SEED = 0
"""Of the split, which no setting changes: the same images are never trained on."""


class ImageNetwork(Trainable):
    """An image classifier in training; its inputs are rows of pixels."""

    @property
    def program(self) -> Program:
        """Rebuilt for every step: the positions in it are computed from several weights."""
        return build_program(self.config, self.tensors)

    def noisy_rows(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Tensor:
        return batch.inputs

    def worst_move(
        self, x: Float[Tensor, "images tokens pixels"], batch: Batch, size: float
    ) -> Float[Tensor, "images tokens pixels"]:
        """Every pixel moved by `size` against the label (FGSM), within [0, 1]; the class token stays."""
        moved = (x + size * self.gradient(x, batch).sign()).clamp(0, 1) - x
        return torch.cat([torch.zeros_like(x[:, :1]), moved[:, 1:]], 1)


def read_images(settings: TrainSettings) -> tuple[ImageNetwork, dict[str, list[Sample]]]:
    """The network before its first step, and the training, dev and test images as rows of pixels."""
    images, labels = read_digits()
    config = image_config(settings, images.shape[-1], int(labels.max()) + 1)
    rows = rows_of(images[:, None], config)
    samples: list[Sample] = list(zip(rows, labels.tolist(), strict=True))
    parts = {name: [samples[i] for i in index.tolist()] for name, index in split(len(rows)).items()}
    return ImageNetwork(config, first_weights(config, settings)), parts


def image_config(settings: TrainSettings, size: int, classes: int) -> ImageConfig:
    """The configuration these settings ask for, for grey images of `size` × `size` pixels."""
    if size % settings.patch or settings.norm_position != "pre" or settings.pooling != "cls":
        raise BuffetError(
            f"patch {settings.patch}, norm_position {settings.norm_position}, pooling {settings.pooling}: an"
            f" image has {size} × {size} pixels, and its classifier is pre-norm and reads the class token"
        )
    pixels = {
        "image_size": size,
        "patch_size": settings.patch,
        "num_channels": 1,
        "image_mean": (0.0,),
        "image_std": (1.0,),
    }
    names = {i: str(i) for i in range(classes)}
    return validated(ImageConfig, {**architecture(settings, names), **pixels}, settings.data)


def split(count: int) -> dict[str, Tensor]:
    """Which images are for training, dev and test: always the same."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(PARTS_SEED))
    dev, test = (math.ceil(share * count) for share in SHARES.values())
    return dict(zip(("train", "dev", "test"), order.split([count - dev - test, dev, test]), strict=True))
