"""Random networks with a region around a random input: what the campaign tries every method on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from buffet.lab.random_models import RandomModel, model_of, random_tensors
from buffet.loading import ModelConfig
from buffet.loading.config import ACTIVATIONS
from buffet.regions import Box, CandidateSet, LpBall, Region

NORMS = (1, 1.5, 2, 3, math.inf)


@dataclass(frozen=True, eq=False)
class Case:
    """One network with a region around one input. The seed makes the very same case again."""

    seed: int
    name: str
    model: RandomModel
    region: Region
    mask: Bool[Tensor, "tokens"]
    label: int
    known: Tensor | None = None  # points of the region that decide, restarts × tasks × moved × width
    radius: float | None = None  # an answer other than the label is known to be this near, in task 0

    @property
    def inner(self) -> Region:
        """The region of the sentence without padding, as the engine sees it."""
        return self.region.without_padding(self.mask)


class Dice:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def pick(self, choices: Sequence[Any]) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=self.generator))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64)

    def size(self, *shape: int) -> Tensor:
        """Sizes of regions, from 1e-4 to 1."""
        return 10 ** (-4 + 4 * self.uniform(*shape))


def random_case(seed: int) -> Case:
    """A network of 1 to 4 layers over a random choice of everything a program can express."""
    dice = Dice(seed)
    config = random_config(dice)
    scale = dice.pick((0.3, 1.0, 1.0, 2.0, 10.0))
    stress = dice.pick((*["plain"] * 3, *STRESSES))
    tensors = random_tensors(config, dice.generator, scale)
    model = model_of(config, STRESSES[stress](tensors, dice) if stress in STRESSES else tensors)
    tokens, padding = dice.pick((1, 2, 3, 5, 6)), dice.pick((0, 0, 1, 2))
    mask = torch.arange(tokens + padding) < tokens
    x = dice.pick((0.1, 1.0, 5.0)) * dice.normal(tokens + padding, config.row_width)
    if dice.pick((False,) * 7 + (True,)):
        x[0] = x[0].mean()  # a LayerNorm of a row without variance
    label = int(model.program64.evaluate(x.double(), mask).argmax())
    region = random_region(x, tokens, dice)
    kind = f"{config.num_hidden_layers}×{config.hidden_size} {config.hidden_act} {config.layer_norm}"
    name = f"{kind} {config.norm_position} {config.pooling} {stress} scale {scale}, {type(region).__name__}"
    return Case(seed, name, model, region, mask, label)


def random_config(dice: Dice, **given: Any) -> ModelConfig:
    """Every option of an architecture, chosen at random unless it is given."""
    pick = dice.pick
    heads = pick((1, 2, 3))
    pooling = pick(("cls", "mean"))
    chosen = {
        "vocab_size": 4,
        "hidden_size": heads * pick((2, 3, 4)),
        "num_hidden_layers": pick((1, 1, 2, 2, 3, 4)),
        "num_attention_heads": heads,
        "intermediate_size": pick((3, 8)),
        "hidden_act": pick(tuple(ACTIVATIONS)),
        "max_position_embeddings": 8,
        "type_vocab_size": 1,
        "layer_norm": pick(("standard", "no_var")),
        "layer_norm_eps": pick((1e-12, 1e-5, 1e-2)),
        "norm_position": pick(("post", "pre")),
        "pooling": pooling,
        "head_act": pick((None, None, "tanh", "relu", "gelu", "none")),
        "embedding_size": pick((None, None, 3, 7)),
        "embedding_norm": pick((True, True, False)),
        "final_norm": pick((None, None, True, False)),
        "num_labels": pick((2, 2, 3, 4, 5)),
    }
    return ModelConfig(**{**chosen, **given})


def random_region(x: Tensor, tokens: int, dice: Dice) -> Region:
    """A region around one or two words, two tasks of very different sizes."""
    count = min(tokens, dice.pick((1, 1, 2, 3)))
    words = [torch.randperm(tokens, generator=dice.generator)[:count].tolist() for _ in range(2)]
    size = dice.size(2)
    kind = dice.pick(("ball", "ball", "ball", "box", "candidates"))
    if kind == "ball":
        return LpBall(x, words, p=dice.pick(NORMS), eps=size)
    if kind == "box":
        below, above = size[0] * dice.uniform(2, *x.shape)
        inside = dice.pick((1.0, 1.0, 1.0, -0.3))  # or a box that does not contain the clean rows
        low, high = (side[torch.tensor(words)] for side in (x - inside * below, x + below + above))
        return Box(x, low, high, words)
    choices = dice.pick((1, 3))
    rows = [[x[w] + size[t] * dice.normal(choices, x.shape[1]) for w in ws] for t, ws in enumerate(words)]
    return CandidateSet(x, words, rows, budget=dice.pick((None, 1, 2)))


# --- weights no training would give -------------------------------------------------------------------------

Tensors = Mapping[str, Tensor]


def _sparse(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """Most weights exactly 0."""
    return {n: v * (dice.uniform(*v.shape) < 0.3).to(v.dtype) for n, v in tensors.items()}


def _spikes(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """One weight of every matrix a hundred times the others."""

    def spike(v: Tensor) -> Tensor:
        v = v.clone()
        v.view(-1)[int(torch.randint(v.numel(), (1,), generator=dice.generator))] *= 100
        return v

    return {n: spike(v) if v.ndim == 2 else v for n, v in tensors.items()}


def _offsets(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """Biases that drive every activation far from 0."""
    return {n: 30 * v if n.endswith("bias") else v for n, v in tensors.items()}


def _wild_norms(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """LayerNorms with weights of any sign and size."""

    def wild(v: Tensor) -> Tensor:
        return dice.normal(*v.shape) * 10 ** (2 * dice.normal(*v.shape))

    return {n: wild(v) if "LayerNorm.weight" in n else v for n, v in tensors.items()}


def _dead(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """Some whole tensors 0."""
    return {n: v * dice.pick((0, 1, 1, 1)) for n, v in tensors.items()}


def _sharp(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """Scores so large that attention looks at one word."""
    return {n: 5 * v if ".self.query" in n or ".self.key" in n else v for n, v in tensors.items()}


def _tiny(tensors: Tensors, dice: Dice) -> dict[str, Tensor]:
    """Weights of a size at which sums of squares leave the range of float32."""
    factor = dice.pick((1e-4, 1e-10, 1e-25))
    return {n: v if "LayerNorm.weight" in n else factor * v for n, v in tensors.items()}


STRESSES: Mapping[str, Callable[[Tensors, Dice], dict[str, Tensor]]] = {
    "sparse": _sparse,
    "spikes": _spikes,
    "offsets": _offsets,
    "wild norms": _wild_norms,
    "dead": _dead,
    "sharp": _sharp,
    "tiny": _tiny,
}
