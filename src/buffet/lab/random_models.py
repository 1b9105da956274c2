"""Networks with random weights, for measurements and for the soundness campaign."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from buffet.loading.config import ModelConfig
from buffet.loading.network import build_program
from buffet.network import Program


@dataclass(frozen=True, eq=False)
class RandomModel:
    """What `verify` needs of a model: its program in both precisions."""

    config: ModelConfig
    program: Program
    program64: Program

    def to(self, device: torch.device) -> RandomModel:
        """The same model on another device."""
        return replace(self, program=self.program.to(device), program64=self.program64.to(device))


def random_model(config: ModelConfig, generator: torch.Generator, scale: float = 1.0) -> RandomModel:
    """Weights of standard deviation ``scale / √inputs``, LayerNorms near the identity."""
    return model_of(config, random_tensors(config, generator, scale))


def random_tensors(config: ModelConfig, generator: torch.Generator, scale: float = 1.0) -> dict[str, Tensor]:
    """The float32 weights of `random_model`, by name."""
    return {name: _tensor(name, shape, scale, generator) for name, shape in config.shapes().items()}


def model_of(config: ModelConfig, tensors: Mapping[str, Tensor]) -> RandomModel:
    """The network with the given float32 weights."""
    double = {name: tensor.double() for name, tensor in tensors.items()}
    return RandomModel(config, build_program(config, tensors), build_program(config, double))


def _tensor(name: str, shape: tuple[int, ...], scale: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if "LayerNorm.weight" in name:
        return 1 + 0.1 * noise
    return 0.1 * scale * noise if name.endswith("bias") else scale * noise / math.sqrt(shape[-1])
