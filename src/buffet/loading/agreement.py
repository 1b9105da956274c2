"""Whether the program computes what its source computes: compared by running both."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from buffet.errors import BuffetError
from buffet.loading.config import ModelConfig

TOLERANCE = 1e-4  # of the largest logit, or of 1 where that is smaller
SENTENCES, TOKENS = 4, 12
Ids = Int[Tensor, "sentences tokens"]
Inputs = tuple[Ids, Ids | None, Bool[Tensor, "sentences tokens"] | None]
"""Token ids, token types (None: there are none) and mask (None: no padding)."""


def random_inputs(config: ModelConfig) -> Iterator[Inputs]:
    """Random token sequences to compare two networks on: whole, and cut to different lengths by a mask."""
    generator = torch.Generator().manual_seed(0)
    shape = (SENTENCES, min(TOKENS, config.max_position_embeddings))
    ids = torch.randint(0, config.vocab_size, shape, generator=generator)
    padding = config.pad_token_id
    if padding is not None:  # position ids may depend on what is padding
        ids = torch.where(ids == padding, (padding + 1) % config.vocab_size, ids)
    types = None
    if config.type_vocab_size > 1:
        types = torch.randint(0, config.type_vocab_size, shape, generator=generator)
    yield ids, types, None
    lengths = torch.linspace(1, shape[1], SENTENCES).long()
    mask = torch.arange(shape[1]) < lengths[:, None]
    yield ids.where(mask, torch.tensor(padding or 0)), types, mask


def largest_difference(got: Tensor, expected: Tensor, where: str) -> float:
    """The largest difference between two answers, relative to logits above 1; too large a one is refused."""
    got, expected = got.detach().double(), expected.detach().cpu().double()
    if expected.shape != got.shape:
        raise BuffetError(
            f"{where}: gives logits of shape {list(expected.shape)}, the program {list(got.shape)}"
        )
    difference = float((got - expected).abs().max() / expected.abs().max().clamp(min=1))
    if not difference <= TOLERANCE:
        raise BuffetError(
            f"{where}: computes other logits than its program (difference {difference:.2g}, "
            f"allowed {TOLERANCE:g}): this variant of the architecture is not supported"
        )
    return difference


@contextmanager
def as_float32(module: nn.Module) -> Iterator[nn.Module]:
    """The module on the CPU in float32 without dropout; the one given is left as it was."""
    if any(part.dtype != torch.float32 or part.device.type != "cpu" for part in module.parameters()):
        module = copy.deepcopy(module).to("cpu", torch.float32)
    training = [part for part in module.modules() if part.training]
    try:
        module.eval()
        with torch.no_grad():
            yield module
    finally:
        for part in training:
            part.training = True
