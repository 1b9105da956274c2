"""Networks at the edges of floating point: tiny ones, in which nothing may be lost, whatever the sizes.

A random network hardly ever loses more than a few roundings. So weights are drawn by *themes*: large numbers
that cancel, numbers that underflow and are amplified again, scores and biases far beyond where functions are
flat, LayerNorms of rows without variance. Their exact values are known (`judge`), so nothing is tolerated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from buffet.lab.random_models import model_of
from buffet.lab.soundness.cases import Case, Options, random_config
from buffet.lab.soundness.dice import LEAST, LEAST_ROW, MOST, Dice
from buffet.lab.soundness.gadgets import RECIPES, Drawn, constructed
from buffet.loading import ModelConfig
from buffet.regions import Box, CandidateSet, LpBall, Region

NORMS = (1, 2, 3, math.inf)
"""Exponents for which powers of floats are rational: what is inside a ball is decided exactly."""


def extreme_case(seed: int) -> Case:
    """A tiny network of some theme, with a region of one task."""
    dice = Dice(seed)
    theme, config, tensors, x = extreme_network(dice)
    model = model_of(config, tensors)
    tokens, padding = len(x), dice.pick((0, 0, 0, 1))
    mask = torch.arange(tokens + padding) < tokens
    x = torch.cat([x, dice.odd(padding, x.shape[1])])
    if dice.chance(0.7) and _fits(x):
        x = _stored(x)  # rows of a model are float32; a region may have others
    region = extreme_region(x, tokens, dice, away=0.5 if theme in TIGHT else 0.2)
    logits = model.program64.evaluate(x.double(), mask).nan_to_num()
    label = int(logits.argmax()) if dice.chance(0.6) else dice.pick(range(config.num_labels))
    kind = f"{config.num_hidden_layers}×{config.hidden_size} {config.hidden_act} {config.layer_norm}"
    where = f"{config.norm_position} {config.pooling} {config.head}"
    return Case(seed, f"{theme}: {kind} {where}, {region}", model, region, mask, label)


def extreme_network(dice: Dice) -> tuple[str, ModelConfig, dict[str, Tensor], Tensor]:
    """A theme, and a network of it: its configuration, its tensors as they are stored, rows in float64."""
    theme = dice.pick(tuple(THEMES))
    config, tensors, x = THEMES[theme](dice)
    return theme, config, {name: _stored(tensor) for name, tensor in tensors.items()}, x


def _stored(values: Tensor) -> Tensor:
    """As float32 has them, which is finite."""
    largest = torch.finfo(torch.float32).max
    return values.clamp(-largest, largest).float()


def _fits(x: Tensor) -> bool:
    """Whether float32 has about the same numbers."""
    return bool(((_stored(x).double() - x).abs() <= x.abs() / 2).all())


def extreme_region(x: Tensor, tokens: int, dice: Dice, away: float) -> Region:
    """Balls, boxes with and without the clean rows in them, candidates; some of one point only."""
    count = min(tokens, dice.pick((1, 1, 2, 3)))
    words = torch.randperm(tokens, generator=dice.generator)[:count].tolist()
    size = _size(float(x[words].abs().max()), dice)
    kind = "away" if dice.chance(away) else dice.pick(("ball", "ball", "ball", "box", "candidates"))
    if kind == "ball":
        return LpBall(x, words, p=dice.pick(NORMS), eps=size)
    rows = x.double()[words]
    if kind == "candidates":
        choices = dice.pick((1, 3, 9))
        others = [_varied(row, size, choices, dice) for row in rows]
        return CandidateSet(x, words, others, budget=dice.pick((None, 1)))
    middle = rows if kind == "box" else _elsewhere(rows, size, dice)
    if kind == "away" and dice.chance(0.5):
        size = size * dice.pick((0.0, 1e-6))  # large numbers cancel where little moves
    below, above = size * dice.uniform(2, *rows.shape) * (dice.uniform(*rows.shape) < 0.7)
    return Box(x, (middle - below)[None], (middle + above)[None], words)


def _size(largest: float, dice: Dice) -> float:
    """Nothing, or any size: that of a usual ball, of the rows, or a power of 2."""
    spread = dice.pick((1.0, 1.0, 1.0, largest, largest, largest * 2.0**-30, 2.0 ** dice.power(-60, 60)))
    if not 2.0**-60 < largest < 2.0**60 and largest and dice.chance(0.9):
        spread = largest * dice.pick((1.0, 1.0, 2.0**-30))  # anything else would be hopeless, or nothing
    size = spread * float(dice.size(1)) if dice.chance(0.7) else spread
    return min(size, 1e300) * (not dice.chance(0.1))


def _elsewhere(rows: Tensor, size: float, dice: Dice) -> Tensor:
    """Each row somewhere else, or all of them with the same entries at first, one of them large."""
    if dice.chance(0.8):
        return torch.stack([_varied(row, size, 1, dice)[0] for row in rows])
    found = dice.digits(*rows.shape)
    found[:, 0], found[:, 1:2] = 2.0 ** dice.power(25, 40), found[:1, 1:2]
    return found


def _varied(row: Tensor, size: float, count: int, dice: Dice) -> Tensor:
    """Rows near one, with its entries exchanged or lost, or with large numbers that cancel."""
    width = len(row)
    changes: list[Callable[[], Tensor]] = [
        lambda: row + size * dice.odd(width),
        lambda: row[torch.randperm(width, generator=dice.generator)],
        lambda: row * (dice.uniform(width) < 0.6),
        lambda: 100 * dice.digits(width),
        lambda: _pairs(100 * dice.digits(width), 2.0 ** dice.power(30, 110), dice),
    ]
    return torch.stack([dice.pick((*changes, changes[-1]))() for _ in range(count)])


# --- themes: a configuration, its tensors (float64) and the rows --------------------------------------------

OPTIONS: Mapping[str, Options] = {
    "num_attention_heads": (1, 1, 2),
    "hidden_size": lambda chosen: (2, 2, 3) if chosen["num_attention_heads"] == 1 else (2, 4),
    "num_hidden_layers": (1, 1, 2),
    "intermediate_size": (2, 3, 4),
    "hidden_act": ("relu", "relu", "relu", "tanh", "gelu", "gelu_new"),
    "layer_norm": ("no_var", "no_var", "standard"),
    "layer_norm_eps": (1e-12, 1e-5, 1e-30, 1e-200),
    "norm_position": ("post", "pre"),
    "pooling": ("cls", "mean"),
    "head_act": ("none", "none", "tanh", "relu"),
    "embedding_size": (None, None, 2, 4),
    "embedding_norm": (False, False, True),
    "final_norm": (False, False, True),
    "num_labels": (2, 2, 3),
}


def _drawn(dice: Dice, **given: Any) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A configuration, and plain tensors for it.

    They are small whole numbers, or numbers of ordinary size; LayerNorms are near the identity.
    """
    config = random_config(dice, OPTIONS, max_position_embeddings=4, **given)

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if "LayerNorm.weight" in name:
            return torch.ones(shape, dtype=torch.float64) if dice.chance(0.5) else dice.weights(*shape)
        if name.endswith("bias") and dice.chance(0.5):
            return torch.zeros(shape, dtype=torch.float64)
        return dice.weights(*shape)

    return config, {name: draw(name, shape) for name, shape in config.shapes().items()}


def _rows(config: ModelConfig, dice: Dice, tokens: int | None = None) -> Tensor:
    """Ordinary rows, often with zeros: there clean values have no rounding errors, whatever the weights."""
    count = dice.pick((1, 1, 2, 3)) if tokens is None else tokens
    x = dice.weights(count, config.row_width)
    return x * dice.pick((0.0, 1.0, 1.0, 1.0)) * (dice.uniform(*x.shape) < dice.pick((0.4, 1.0)))


def _pairs(values: Tensor, size: float, dice: Dice) -> Tensor:
    """A large number added to some entries along the last axis, and taken off others."""
    values = values.clone()
    flat = values.view(-1, values.shape[-1])
    for row in flat:
        if len(row) > 1 and dice.chance(0.7):
            i, j = torch.randperm(len(row), generator=dice.generator)[:2].tolist()
            row[i] = size
            row[j] = -size
    return values


def _cancelling(dice: Dice) -> Drawn:
    """Rows, biases and weights that hold ±2^k, which sums take off again."""
    config, tensors = _drawn(dice, layer_norm="no_var")
    x = _rows(config, dice) * dice.pick((1, 100))
    size = 2.0 ** dice.power(20, 110)
    if dice.chance(0.7):
        x = _pairs(x, size, dice)
    for name, tensor in tensors.items():
        if "embeddings" not in name and dice.chance(0.25):
            tensors[name] = _pairs(tensor, size, dice)
    return config, tensors, x


def _chain(dice: Dice) -> Drawn:
    """Stages that make numbers small or large, one after the other; the last brings some of it back."""
    config, tensors = _drawn(
        dice, layer_norm="no_var", hidden_act=dice.pick(("relu", "relu", "tanh", "gelu"))
    )
    reach = dice.pick(((-900, 100), (-160, -120), (-300, 200), (-1060, -1000)))
    at = dice.power(-1000, 900) if dice.chance(0.3) else dice.power(-120, 120)
    x = _rows(config, dice) * 2.0**at
    for name in _path(tensors):
        target = dice.power(*reach) if dice.chance(0.7) else 0
        step = min(max(target - at, LEAST), MOST)
        tensors[name] = tensors[name] * 2.0**step
        at = max(at, at + step) if "output.dense" in name else at + step  # residual
        bias = name.removesuffix("weight") + "bias"
        tensors[bias] = tensors[bias] * 2.0 ** min(max(at, LEAST), MOST)
    return config, tensors, x


def _path(tensors: Mapping[str, Tensor]) -> list[str]:
    """The weights that the first row passes, in order."""
    return [n for n in tensors if n.endswith("weight") and "_embeddings" not in n]


def _products(dice: Dice) -> Drawn:
    """Many products of tiny numbers, each of which underflows, behind which weights are large."""
    config, tensors = _drawn(
        dice,
        layer_norm="no_var",
        norm_position="pre",
        intermediate_size=dice.pick((4, 16)),
        embedding_norm=False,
        final_norm=False,
        hidden_act="relu",
        head_act=dice.pick(("none", "relu")),
    )
    low, up = dice.power(-149, -60), dice.power(60, 120)
    x = _rows(config, dice, dice.pick((1, 2))) * 2.0 ** dice.power(LEAST_ROW, -900)
    path = _path(tensors)
    for place, name in enumerate(path):
        tensors[name] = tensors[name].abs() * 2.0 ** (low if place < len(path) // 3 else up)
        if dice.chance(0.3):
            tensors[name] = dice.sized(tensors[name], -4, 4)
    return config, tensors, x


def _saturated(dice: Dice) -> Drawn:
    """Scores, and what activations read, far beyond where they are flat; differences of them small."""
    config, tensors = _drawn(dice, hidden_act=dice.pick(("tanh", "gelu", "gelu_new", "relu")))
    for name, tensor in tensors.items():
        if (".query." in name or ".key." in name) and dice.chance(0.7):
            tensors[name] = tensor * 2.0 ** dice.power(5, 31)
        if name.endswith(("intermediate.dense.bias", "pooler.dense.bias")) and dice.chance(0.5):
            tensors[name] = tensor + dice.digits(*tensor.shape) * 2.0 ** dice.power(10, 60)
    x = _rows(config, dice)
    return config, tensors, x if dice.chance(0.6) else _pairs(x, 2.0 ** dice.power(10, 60), dice)


def _norms(dice: Dice) -> Drawn:
    """LayerNorms of huge, tiny and constant rows."""
    config, tensors = _drawn(
        dice,
        layer_norm="standard",
        layer_norm_eps=dice.pick((1e-12, 1e-30, 1e-100, 1e-300)),
        embedding_norm=dice.chance(0.6),
    )
    x = _rows(config, dice)
    if dice.chance(0.4):
        x = x[:, :1].expand_as(x) + x * 2.0 ** dice.power(-60, -10)  # hardly any variance
    x = x * 2.0 ** dice.power(-70, 70)
    for name, tensor in tensors.items():
        if "LayerNorm" in name and dice.chance(0.3):
            tensors[name] = dice.sized(tensor, -20, 20)
    return config, tensors, x


def _wild(dice: Dice) -> Drawn:
    """Every weight of a size of its own."""
    config, tensors = _drawn(dice)
    reach = dice.pick((10, 30, 60))
    for name, tensor in tensors.items():
        if dice.chance(0.6):
            tensors[name] = dice.sized(tensor, -reach, reach)
    return config, tensors, dice.sized(_rows(config, dice), -reach, reach)


def _last(dice: Dice) -> Drawn:
    """A classifier whose rows nearly agree, in weights or biases that are large."""
    config, tensors = _drawn(dice, layer_norm="no_var", final_norm=False)
    for name in ("classifier.weight", "classifier.bias"):
        size = 2.0 ** dice.power(20, 100)
        same = size * dice.digits(*tensors[name].shape[1:])
        tensors[name] = tensors[name] + same
        if dice.chance(0.3):
            tensors[name] = dice.sized(dice.digits(*tensors[name].shape), -40, 60)
    return config, tensors, _rows(config, dice)


THEMES: Mapping[str, Callable[[Dice], Drawn]] = {
    **{f"constructed, {name}": recipe for name, recipe in RECIPES.items()},
    "constructed": constructed,
    "constructed too": constructed,  # twice as often: it has the most to draw
    "cancelling": _cancelling,
    "chain": _chain,
    "products": _products,
    "saturated": _saturated,
    "norms": _norms,
    "wild": _wild,
    "last": _last,
}
TIGHT = tuple(name for name in THEMES if name.startswith("constructed"))
"""Themes of which bounds are tight."""
