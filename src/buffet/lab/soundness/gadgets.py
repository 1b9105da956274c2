"""Networks put together from gadgets, each of which floating point gets wrong, and bounds of which are tight.

Where bounds are loose, nothing that rounding does is ever seen. So these networks are linear, or nearly,
around what moves: attention over one row or with all scores alike, functions that are on everywhere. What
they compute is spread over stages that add large numbers and take them off again, or make numbers too small
to be represented and amplify them again. Every stage is drawn from a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from buffet.lab.soundness.cases import Options, random_config
from buffet.lab.soundness.dice import LEAST, LEAST_ROW, MOST, Dice
from buffet.loading import ModelConfig

Drawn = tuple[ModelConfig, dict[str, Tensor], Tensor]
"""A configuration, tensors and rows, all in float64."""
OPTIONS: Mapping[str, Options] = {
    "hidden_size": (2, 3, 4),
    "num_hidden_layers": (1, 1, 2),
    "num_attention_heads": lambda chosen: (1,) if chosen["hidden_size"] == 3 else (1, 2),
    "intermediate_size": (2, 3, 8),
    "hidden_act": ("relu", "relu", "relu", "relu", "tanh", "gelu"),
    "pooling": ("cls", "mean"),
}
TRANSPARENT: Mapping[str, Any] = {
    "max_position_embeddings": 4,
    "layer_norm": "no_var",
    "norm_position": "pre",
    "head_act": "none",
    "embedding_norm": False,
    "final_norm": False,
}
"""Pre-norm without norms at the ends: what nothing is written into passes as it is."""


def _config(dice: Dice, **given: Any) -> ModelConfig:
    return random_config(dice, OPTIONS, **{**TRANSPARENT, **given})


def _number(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@dataclass
class Draft:
    """A network in the making: all its weights are 0 before gadgets write them."""

    config: ModelConfig
    dice: Dice
    power: int = 60  # numbers that cancel are about 2^power
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.size, self.digits = 2.0**self.power, self.dice.digits
        self.width, self.inner = self.config.hidden_size, self.config.intermediate_size
        self.tensors = {n: torch.zeros(s, dtype=torch.float64) for n, s in self.config.shapes().items()}
        for name, tensor in self.tensors.items():
            if "LayerNorm.weight" in name:
                tensor.fill_(1.0)

    def put(self, prefix: str, weight: Tensor, bias: Tensor | None = None) -> None:
        self.tensors[f"{prefix}.weight"] = weight
        if bias is not None:
            self.tensors[f"{prefix}.bias"] = bias

    def feed(self, layer: str, first: Tensor, bias: Tensor | None, second: Tensor, *last: Tensor) -> None:
        """Both maps of the feed-forward part of a layer."""
        self.put(f"{layer}.intermediate.dense", first, bias)
        self.put(f"{layer}.output.dense", second, *last)

    def rows(self, count: int, width: int) -> Tensor:
        """Whole numbers in every row; most sum to 0, which no mean of features disturbs."""
        found = self.digits(count, width)
        if self.dice.chance(0.8):
            found[:, -1] -= found.sum(1)
        return found

    def units(self) -> Tensor:
        """Rows that units of the feed-forward part read."""
        return self.rows(self.inner, self.width)

    def square(self) -> Tensor:
        return self.digits(self.width, self.width)

    def scale(self) -> float:
        """An exact factor, often 1."""
        return 2.0 ** self.dice.pick((0, 0, 0, self.dice.power(LEAST, MOST), self.dice.power(-30, 30)))

    def drawn(self, x: Tensor | None = None) -> Drawn:
        """The network, with rows: whole numbers, or zeros, on which a clean run has no rounding errors."""
        if x is None:
            dice = self.dice
            x = self.digits(dice.pick((1, 1, 2)), self.config.row_width) * dice.pick((0.0, 1.0, 1.0, 100.0))
            x = x * dice.pick((1.0, 1.0, 1.0, 2.0 ** dice.power(-140, 100)))
        return self.config, self.tensors, x


Gadget = Callable[[Draft, str], None]
"""Writes the weights of one layer, the prefix of whose names is given."""


def _silent(draft: Draft, layer: str) -> None:
    """Nothing but the residual connection."""


def _on(draft: Draft, layer: str) -> None:
    """A linear map through units that a bias keeps on, which is taken off again behind them."""
    reach = 2.0 ** draft.dice.power(0, draft.power)
    first, second = draft.units(), draft.digits(draft.width, draft.inner)
    a, b = draft.scale(), draft.scale()
    bias = torch.full((draft.inner,), reach * a, dtype=torch.float64)
    draft.feed(layer, a * first, bias, b * second, -b * (reach * a) * second.sum(1))


def _twins(draft: Draft, layer: str) -> None:
    """Units that read nearly the same, and whose large multiples are subtracted from each other."""
    dice, size = draft.dice, draft.size
    same = draft.rows(1, draft.width).repeat(draft.inner, 1)
    first = same + draft.units() * dice.pick((0.0, 1.0, 1 / size))
    second = draft.digits(draft.width, draft.inner)
    second[:, -1] -= second.sum(1)
    bias = draft.digits(1).expand(draft.inner) * dice.pick((0.0, 1.0, size))
    draft.feed(layer, first, bias, second * dice.pick((1.0, size)), draft.digits(draft.width))


def _asleep(draft: Draft, layer: str) -> None:
    """Units that are off unless something moves far, and large then."""
    first, bias = draft.size * draft.units(), -draft.size * draft.digits(draft.inner).abs()
    draft.feed(layer, first, bias, draft.digits(draft.width, draft.inner))


def _whispering(draft: Draft, layer: str) -> None:
    """Weights so small that products of a few of them are 0 in floating point."""
    low = 2.0 ** draft.dice.power(LEAST, -60)
    first, bias = low * draft.units().abs(), low * draft.digits(draft.inner)
    after = draft.dice.pick((low, 1.0, 2.0**MOST))
    draft.feed(layer, first, bias, after * draft.digits(draft.width, draft.inner))


def _shouting(draft: Draft, layer: str) -> None:
    """Weights that amplify whatever was lost."""
    high = 2.0 ** draft.dice.power(60, MOST)
    first, after = high * draft.units(), draft.dice.pick((1.0, high, 1 / high))
    draft.feed(layer, first, None, after * draft.digits(draft.width, draft.inner))


INNER: tuple[Gadget, ...] = (_silent, _on, _twins, _asleep, _whispering, _shouting)


def _mean(draft: Draft, layer: str) -> None:
    """All scores alike: attention is a linear map of the mean."""
    draft.put(f"{layer}.attention.self.value", draft.scale() * draft.rows(draft.width, draft.width))
    draft.put(f"{layer}.attention.output.dense", draft.scale() * draft.square())


def _biased(draft: Draft, layer: str) -> None:
    """A large bias of the values, which the output takes off again: weights of attention sum to 1."""
    bias, matrix = draft.size * draft.digits(draft.width), draft.square()
    draft.put(f"{layer}.attention.self.value", draft.rows(draft.width, draft.width), bias)
    draft.put(f"{layer}.attention.output.dense", matrix, -matrix @ bias)
    if draft.dice.chance(0.5):
        draft.put(f"{layer}.attention.self.key", draft.rows(draft.width, draft.width))
        draft.tensors[f"{layer}.attention.self.query.bias"] = draft.digits(draft.width)


def _sharp(draft: Draft, layer: str) -> None:
    """Scores of up to 2^61, differences of which decide."""
    a, b = 2.0 ** draft.dice.power(0, 31), 2.0 ** draft.dice.power(0, 30)
    draft.put(f"{layer}.attention.self.query", a * draft.square(), a * draft.digits(draft.width))
    draft.put(f"{layer}.attention.self.key", b * draft.square())
    draft.put(f"{layer}.attention.self.value", draft.square(), draft.digits(draft.width))
    draft.put(f"{layer}.attention.output.dense", draft.square())


ATTENTION: tuple[Gadget, ...] = (_silent, _silent, _mean, _biased, _sharp)
"""Which gadgets are drawn; silent ones count twice, as what does nothing hides nothing."""


def _head(draft: Draft) -> None:
    """A last linear map, kept on by a bias, or where its function is flat or nearly so."""
    if draft.config.head:
        weight = draft.scale() * draft.square()
        reach = draft.dice.pick((0.0, 1.0, draft.size, 2.0 ** draft.dice.power(0, 100)))
        draft.put("bert.pooler.dense", weight, reach * draft.digits(draft.width))


def _classifier(draft: Draft) -> None:
    """Rows that read few features, or nearly agree in large ones."""
    dice, labels = draft.dice, draft.config.num_labels
    weight, bias = draft.scale() * dice.digits(labels, draft.width), dice.digits(labels)
    if dice.chance(0.2):
        weight = weight + draft.size * dice.digits(draft.width)
    if dice.chance(0.5):
        bias = bias * float(weight.abs().max())
    if dice.chance(0.2):
        bias = bias + draft.size
    draft.put("classifier", weight, bias)


def constructed(dice: Dice) -> Drawn:
    """A network of random gadgets, and rows for it."""
    config = _config(
        dice,
        norm_position=dice.pick(("pre", "pre", "pre", "post")),
        head_act=dice.pick(("none", "none", "relu", "tanh")),
        embedding_size=dice.pick((None, None, 2, 3)),
        final_norm=dice.chance(0.2),
    )
    draft = Draft(config, dice, dice.power(20, 100))
    if config.row_width != draft.width:
        draft.put("bert.embeddings_project", draft.scale() * dice.digits(draft.width, config.row_width))
    for layer in range(config.num_hidden_layers):
        dice.pick(ATTENTION)(draft, f"bert.encoder.layer.{layer}")
        dice.pick(INNER)(draft, f"bert.encoder.layer.{layer}")
    _head(draft)
    _classifier(draft)
    return draft.drawn()


# --- recipes: one gadget by itself, where bounds are tightest -----------------------------------------------


def _sum(dice: Dice) -> Drawn:
    """Logits are sums of features; the large ones cancel wherever the region is."""
    draft = Draft(_config(dice, num_hidden_layers=1), dice, dice.power(30, 100))
    # Where the clean margin is 0, nothing is claimed at all.
    bias = dice.digits(2) + _number(0.5, 0.0)
    draft.put("classifier", dice.digits(2, draft.width) * (dice.uniform(2, 1) < 0.7), bias)
    return draft.drawn()


def _faint(dice: Dice) -> Drawn:
    """Logits about as small as numbers get in one precision or the other, by one factor or by two."""
    draft = Draft(_config(dice, num_hidden_layers=1, head_act="relu"), dice)
    low = dice.pick((dice.power(-149, -120), dice.power(-290, -240)))
    first = dice.power(max(low, -149), min(0, low + 149))
    weight, reach = dice.weights(draft.width, draft.width), dice.pick((1.0, 4.0, 100.0))
    draft.put("bert.pooler.dense", 2.0**first * weight, 2.0**first * reach * dice.digits(draft.width))
    draft.put("classifier", 2.0 ** (low - first) * dice.weights(2, draft.width))
    return draft.drawn()


def _ladder(dice: Dice, turn: int, end: int, units: Tensor, row: Tensor) -> Drawn:
    """A sum ``units·row`` that goes to about 2^turn, step by step, and from there to about 2^end.

    It is there twice, with both signs, so that no mean disturbs it. The steps are the weights of LayerNorms
    without variance, of the embedding projection and of the classifier.
    """
    config = _config(
        dice,
        num_hidden_layers=dice.pick((2, 3, 4)),
        hidden_size=2,
        num_attention_heads=1,
        embedding_size=units.shape[1],
        intermediate_size=2,
        hidden_act=dice.pick(("relu", "relu", "relu", "tanh", "gelu")),
        norm_position="post",
        final_norm=dice.chance(0.5),
    )
    draft = Draft(config, dice)
    at = max(turn, LEAST_ROW) if dice.chance(0.7) else dice.power(*sorted((0, max(turn, LEAST_ROW))))
    x = units * 2.0**at
    norms = [n for n in draft.tensors if "LayerNorm.weight" in n]
    turning = dice.pick((0, dice.power(0, len(norms) - 1)))

    def step(target: int) -> float:
        nonlocal at
        change = min(max(target - at, LEAST), MOST)
        at += change
        return 2.0**change

    draft.put("bert.embeddings_project", step(turn) * torch.cat([row, -row]))
    for place, name in enumerate(norms):
        target = turn if place < turning else end
        prefix = name.removesuffix(".output.LayerNorm.weight")
        if target - at > MOST and f"{prefix}.intermediate.dense.weight" in draft.tensors:
            # ab·(v, −v) added to (v, −v): one of two units is on, whatever the sign.
            eye = torch.eye(2, dtype=torch.float64)
            draft.feed(prefix, step(target) * eye, None, step(target) * (2 * eye - 1))
        draft.tensors[name] *= step(target)
    if dice.chance(0.2):
        _on(draft, "bert.encoder.layer.0")
    draft.put("classifier", step(end) * dice.digits(2, 2))
    if at >= LEAST:
        draft.tensors["classifier.bias"] = 2.0**at * dice.digits(2)
    return draft.drawn(x)


def _units(dice: Dice) -> tuple[Tensor, Tensor]:
    """Whole numbers for rows, and for what reads them."""
    width = dice.pick((3, 3, 16))
    units = dice.digits(dice.pick((1, 1, 2)), width)
    return units, dice.digits(1, width) if dice.chance(0.5) else torch.ones(1, width, dtype=torch.float64)


def _valley(dice: Dice) -> Drawn:
    """So small that nothing is left of it in floating point, and then of ordinary size again."""
    turn = dice.power(-1100, -1000) if dice.chance(0.6) else dice.power(-400, -100)
    return _ladder(dice, turn, 0, *_units(dice))


def _dust(dice: Dice) -> Drawn:
    """A sum of many products, each of which rounds to 0, and then of ordinary size again."""
    ones = torch.ones(1, dice.pick((64, 64, 256)), dtype=torch.float64)
    return _ladder(dice, dice.pick((-1075, -1075, -1076, -1078)), 0, ones, ones)


def _hill(dice: Dice) -> Drawn:
    """Large first, and then so small that coefficients, from there to here, are 0 in floating point."""
    if dice.chance(0.5):
        return _ladder(dice, dice.power(250, 325), dice.power(-1070, -740), *_units(dice))
    return _ladder(dice, dice.power(50, 300), dice.power(-1000, -100), *_units(dice))


def _slope(dice: Dice) -> Drawn:
    """Smaller and smaller."""
    return _ladder(dice, dice.power(-100, 100), dice.power(-1070, -130), *_units(dice))


def _biased_function(dice: Dice) -> Drawn:
    """A function of small numbers to which large ones were added, as large as the region."""
    config = _config(dice, num_hidden_layers=1, head_act=dice.pick(("tanh", "tanh", "relu")))
    draft = Draft(config, dice, dice.power(40, 70))
    weight = draft.square() * dice.pick((1.0, draft.size))
    draft.put("bert.pooler.dense", weight, draft.size * dice.digits(draft.width))
    bias = dice.digits(2) * dice.pick((0.0, 1.0, 0.25))
    draft.put("classifier", dice.digits(2, draft.width), bias + _number(0.125, 0.0))
    _, _, x = draft.drawn()
    return draft.drawn(x * dice.pick((1.0, draft.size)))


def _huge_scores(dice: Dice) -> Drawn:
    """Scores of 2^40 to 2^62 that differ by little, or not at all: of biases, or wherever rows are large.

    Without biases, scores are ``(x₀ − x₁)(y₀ − y₁) + (x₁ − x₂)(y₁ − y₂)``: a feature that is large in all
    rows makes them large, and another decides.
    """
    biases = dice.chance(0.4)
    width = dice.pick((2, 3, 4)) if biases else 3
    draft = Draft(_config(dice, num_hidden_layers=1, num_attention_heads=1, hidden_size=width), dice)
    eye, own = torch.eye(width, dtype=torch.float64), "bert.encoder.layer.0.attention"
    apart = torch.cat([eye[:-1] - eye[1:], torch.zeros_like(eye[:1])])
    for name in ("query", "key"):
        if biases:
            draft.put(f"{own}.self.{name}", draft.square(), 2.0 ** dice.power(20, 31) * dice.digits(width))
        else:
            draft.put(f"{own}.self.{name}", apart)
    value = draft.square() if biases else dice.digits(width, 1) * apart[-2]
    draft.put(f"{own}.self.value", value, dice.digits(width))
    draft.put(f"{own}.output.dense", draft.square())
    bias = _number(dice.pick((0.5, -3.0, 100.0)), 0.0)
    draft.put("classifier", draft.rows(2, width), bias)
    if not biases:
        draft.tensors["classifier.weight"][:, 0] = 0.0
    return draft.drawn(dice.digits(dice.pick((2, 2, 3)), width) * dice.pick((0.0, 1.0, 100.0)))


RECIPES: Mapping[str, Callable[[Dice], Drawn]] = {
    "sum": _sum,
    "faint": _faint,
    "valley": _valley,
    "dust": _dust,
    "hill": _hill,
    "slope": _slope,
    "biased function": _biased_function,
    "huge scores": _huge_scores,
}
