"""Random networks with a region around a random input: what the campaign tries every method on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from buffet.engine import Engine
from buffet.lab.random_models import RandomModel, model_of, random_tensors
from buffet.lab.soundness.dice import Dice
from buffet.loading import ModelConfig
from buffet.loading.config import ACTIVATIONS
from buffet.methods import Method
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.results import Verification
from buffet.search.radius import radius
from buffet.verification.verify import verify

NORMS = (1, 1.5, 2, 3, math.inf)


@dataclass(frozen=True, eq=False)
class Case:
    """One network with a region around one input. The same seed always makes the same case."""

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

    @property
    def engine(self) -> Engine:
        """Single precision, the default, for even seeds; double, which allows for less, for odd ones."""
        return Engine(dtype=torch.float64 if self.seed % 2 else torch.float32)

    def verify(self, method: Method, *, falsify: bool = False) -> Verification:
        """What a method answers about the region."""
        return verify(
            self.model,
            self.region,
            method=method,
            label=self.label,
            mask=self.mask,
            engine=self.engine,
            falsify=falsify,
            best=True,  # every method of a portfolio is held against the points
        )

    def certified_radius(self, method: Method, largest: float) -> float:
        """The radius that a method certifies for the first task, whatever the size of its ball."""
        found = radius(
            self.model,
            self.region.select([0]),
            method,
            label=self.label,
            mask=self.mask,
            search="bisection",
            largest=largest,
            attack=False,
            engine=self.engine,
        )
        return found.certified


def random_case(seed: int) -> Case:
    """A network of 1 to 4 layers over a random choice of everything a program can express."""
    dice = Dice(seed)
    config = random_config(dice)
    scale = dice.pick((0.3, 1.0, 1.0, 2.0, 10.0))
    stress = dice.pick((*["plain"] * 3, *STRESSES))
    tensors = random_tensors(config, dice.generator, scale)
    if stress in STRESSES:
        change = STRESSES[stress](dice)
        tensors = {name: change(name, tensor) for name, tensor in tensors.items()}
    model = model_of(config, tensors)
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


Options = Sequence[Any] | Callable[[Mapping[str, Any]], Sequence[Any]]
"""What may be chosen for an entry of a configuration; it may depend on what was chosen before."""
FIXED = {"vocab_size": 4, "max_position_embeddings": 8, "type_vocab_size": 1}
EVERYTHING: Mapping[str, Options] = {
    "num_attention_heads": (1, 2, 3),
    "pooling": ("cls", "mean"),
    "hidden_size": lambda chosen: [chosen["num_attention_heads"] * size for size in (2, 3, 4)],
    "num_hidden_layers": (1, 1, 2, 2, 3, 4),
    "intermediate_size": (3, 8),
    "hidden_act": tuple(ACTIVATIONS),
    "layer_norm": ("standard", "no_var"),
    "layer_norm_eps": (1e-12, 1e-5, 1e-2),
    "norm_position": ("post", "pre"),
    "head_act": (None, None, "tanh", "relu", "gelu", "none"),
    "embedding_size": (None, None, 3, 7),
    "embedding_norm": (True, True, False),
    "final_norm": (None, None, True, False),
    "num_labels": (2, 2, 3, 4, 5),
}
"""Every option of an architecture."""


def random_config(dice: Dice, options: Mapping[str, Options] = EVERYTHING, **given: Any) -> ModelConfig:
    """An architecture, chosen at random but for what is given."""
    chosen: dict[str, Any] = dict(FIXED)
    for name, values in options.items():
        open_ = values(chosen) if callable(values) else values
        chosen[name] = dice.pick(open_) if len(open_) > 1 else open_[0]
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

Stress = Callable[[str, Tensor], Tensor]
"""Changes a tensor, given its name, so that its network is difficult."""


def _sparse(dice: Dice) -> Stress:
    """Most weights exactly 0."""
    return lambda name, v: v * (dice.uniform(*v.shape) < 0.3).to(v.dtype)


def _spikes(dice: Dice) -> Stress:
    """One weight of every matrix a hundred times the others."""

    def spike(name: str, v: Tensor) -> Tensor:
        v = v.clone()
        if v.ndim == 2:
            v.view(-1)[int(torch.randint(v.numel(), (1,), generator=dice.generator))] *= 100
        return v

    return spike


def _wild_norms(dice: Dice) -> Stress:
    """LayerNorms with weights of any sign and size."""

    def wild(name: str, v: Tensor) -> Tensor:
        return dice.normal(*v.shape) * 10 ** (2 * dice.normal(*v.shape)) if "LayerNorm.weight" in name else v

    return wild


def _dead(dice: Dice) -> Stress:
    """Some whole tensors 0."""
    return lambda name, v: v * dice.pick((0, 1, 1, 1))


def _tiny(dice: Dice) -> Stress:
    """Weights of a size at which sums of squares leave the range of float32."""
    factor = dice.pick((1e-4, 1e-10, 1e-25))
    return lambda name, v: v if "LayerNorm.weight" in name else factor * v


STRESSES: Mapping[str, Callable[[Dice], Stress]] = {
    "sparse": _sparse,
    "spikes": _spikes,
    "offsets": lambda dice: lambda name, v: 30 * v if "bias" in name else v,  # far from 0
    "wild norms": _wild_norms,
    "dead": _dead,
    "sharp": lambda dice: lambda name, v: 5 * v if ".query" in name or ".key" in name else v,  # one word
    "tiny": _tiny,
}
