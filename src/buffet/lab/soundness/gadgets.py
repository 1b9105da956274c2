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

from buffet.lab.soundness.dice import LEAST, LEAST_ROW, MOST, Dice
from buffet.loading import ModelConfig


@dataclass
class Draft:
    """A network in the making: all its weights are 0 before gadgets write them."""

    config: ModelConfig
    dice: Dice
    power: int  # numbers that cancel are about 2^power
    tensors: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.tensors = {n: torch.zeros(s, dtype=torch.float64) for n, s in self.config.shapes().items()}
        for name, tensor in self.tensors.items():
            if "LayerNorm.weight" in name:
                tensor.fill_(1.0)

    def put(self, prefix: str, weight: Tensor, bias: Tensor | None = None) -> None:
        self.tensors[f"{prefix}.weight"] = weight
        if bias is not None:
            self.tensors[f"{prefix}.bias"] = bias

    def rows(self, count: int, width: int) -> Tensor:
        """Whole numbers in every row; most sum to 0, which no mean of features disturbs."""
        found = self.dice.digits(count, width)
        if self.dice.chance(0.8):
            found[:, -1] -= found.sum(1)
        return found

    def scale(self) -> float:
        """An exact factor, often 1."""
        return 2.0 ** self.dice.pick((0, 0, 0, self.dice.power(LEAST, MOST), self.dice.power(-30, 30)))


Gadget = Callable[[Draft, str], None]
"""Writes the weights of one layer, the prefix of whose names is given."""


def _silent(draft: Draft, prefix: str) -> None:
    """Nothing but the residual connection."""


def _on(draft: Draft, prefix: str) -> None:
    """A linear map through units that a bias keeps on, which is taken off again behind them."""
    width, inner = draft.config.hidden_size, draft.config.intermediate_size
    reach = 2.0 ** draft.dice.power(0, draft.power)
    first, second = draft.rows(inner, width), draft.dice.digits(width, inner)
    a, b = draft.scale(), draft.scale()
    reach = reach * a
    draft.put(f"{prefix}.intermediate.dense", a * first, torch.full((inner,), reach, dtype=torch.float64))
    draft.put(f"{prefix}.output.dense", b * second, -b * reach * second.sum(1))


def _twins(draft: Draft, prefix: str) -> None:
    """Units that read nearly the same, and whose large multiples are subtracted from each other."""
    dice, width, inner = draft.dice, draft.config.hidden_size, draft.config.intermediate_size
    size = 2.0**draft.power
    first = draft.rows(1, width).repeat(inner, 1) + draft.rows(inner, width) * dice.pick((0.0, 1.0, 1 / size))
    second = dice.digits(width, inner)
    second[:, -1] -= second.sum(1)
    bias = dice.digits(1).expand(inner) * dice.pick((0.0, 1.0, size))
    draft.put(f"{prefix}.intermediate.dense", first, bias)
    draft.put(f"{prefix}.output.dense", second * dice.pick((1.0, size)), dice.digits(width))


def _asleep(draft: Draft, prefix: str) -> None:
    """Units that are off unless something moves far, and large then."""
    dice, width, inner = draft.dice, draft.config.hidden_size, draft.config.intermediate_size
    size = 2.0**draft.power
    draft.put(
        f"{prefix}.intermediate.dense", size * draft.rows(inner, width), -size * dice.digits(inner).abs()
    )
    draft.put(f"{prefix}.output.dense", dice.digits(width, inner))


def _whispering(draft: Draft, prefix: str) -> None:
    """Weights so small that products of a few of them are 0 in floating point."""
    dice, width, inner = draft.dice, draft.config.hidden_size, draft.config.intermediate_size
    low = 2.0 ** dice.power(LEAST, -60)
    draft.put(f"{prefix}.intermediate.dense", low * draft.rows(inner, width).abs(), low * dice.digits(inner))
    draft.put(f"{prefix}.output.dense", dice.pick((low, 1.0, 2.0**MOST)) * dice.digits(width, inner))


def _shouting(draft: Draft, prefix: str) -> None:
    """Weights that amplify whatever was lost."""
    dice, width, inner = draft.dice, draft.config.hidden_size, draft.config.intermediate_size
    high = 2.0 ** dice.power(60, MOST)
    draft.put(f"{prefix}.intermediate.dense", high * draft.rows(inner, width))
    draft.put(f"{prefix}.output.dense", dice.pick((1.0, high, 1 / high)) * dice.digits(width, inner))


INNER: Mapping[str, Gadget] = {
    "silent": _silent,
    "on": _on,
    "twins": _twins,
    "asleep": _asleep,
    "whispering": _whispering,
    "shouting": _shouting,
}


def _mean(draft: Draft, prefix: str) -> None:
    """All scores alike: attention is a linear map of the mean."""
    width = draft.config.hidden_size
    draft.put(f"{prefix}.attention.self.value", draft.scale() * draft.rows(width, width))
    draft.put(f"{prefix}.attention.output.dense", draft.scale() * draft.dice.digits(width, width))


def _biased(draft: Draft, prefix: str) -> None:
    """A large bias of the values, which the output takes off again: weights of attention sum to 1."""
    width, size = draft.config.hidden_size, 2.0**draft.power
    bias, matrix = size * draft.dice.digits(width), draft.dice.digits(width, width)
    draft.put(f"{prefix}.attention.self.value", draft.rows(width, width), bias)
    draft.put(f"{prefix}.attention.output.dense", matrix, -matrix @ bias)
    if draft.dice.chance(0.5):
        draft.put(f"{prefix}.attention.self.key", draft.rows(width, width))
        draft.put(
            f"{prefix}.attention.self.query", torch.zeros(width, width).double(), draft.dice.digits(width)
        )


def _sharp(draft: Draft, prefix: str) -> None:
    """Scores of up to 2^61, differences of which decide."""
    width, dice = draft.config.hidden_size, draft.dice
    a, b = 2.0 ** dice.power(0, 31), 2.0 ** dice.power(0, 30)
    draft.put(f"{prefix}.attention.self.query", a * dice.digits(width, width), a * dice.digits(width))
    draft.put(f"{prefix}.attention.self.key", b * dice.digits(width, width))
    draft.put(f"{prefix}.attention.self.value", dice.digits(width, width), dice.digits(width))
    draft.put(f"{prefix}.attention.output.dense", dice.digits(width, width))


ATTENTION: Mapping[str, Gadget] = {
    "silent": _silent,
    "silent too": _silent,  # what is not there hides nothing
    "mean": _mean,
    "biased": _biased,
    "sharp": _sharp,
}


def _head(draft: Draft) -> None:
    """A last linear map, kept on by a bias, or where its function is flat or nearly so."""
    if not draft.config.head:
        return
    dice, width = draft.dice, draft.config.hidden_size
    weight = draft.scale() * dice.digits(width, width)
    reach = dice.pick((0.0, 1.0, 2.0**draft.power, 2.0 ** dice.power(0, 100)))
    draft.put("bert.pooler.dense", weight, reach * dice.digits(width))


def _classifier(draft: Draft) -> None:
    """Rows that read few features, or nearly agree in large ones."""
    dice, shape = draft.dice, (draft.config.num_labels, draft.config.hidden_size)
    weight, bias = draft.scale() * dice.digits(*shape), dice.digits(shape[0])
    if dice.chance(0.2):
        weight = weight + 2.0**draft.power * dice.digits(shape[1])
    if dice.chance(0.5):
        bias = bias * float(weight.abs().max())
    if dice.chance(0.2):
        bias = bias + 2.0**draft.power
    draft.put("classifier", weight, bias)


def _config(dice: Dice, **given: Any) -> ModelConfig:
    """Pre-norm without norms at the ends: what nothing is written into passes as it is."""
    hidden = dice.pick((2, 3, 4))
    chosen = {
        "vocab_size": 4,
        "hidden_size": hidden,
        "num_hidden_layers": dice.pick((1, 1, 2)),
        "num_attention_heads": 1 if hidden == 3 else dice.pick((1, 2)),
        "intermediate_size": dice.pick((2, 3, 8)),
        "hidden_act": dice.pick(("relu", "relu", "relu", "relu", "tanh", "gelu")),
        "max_position_embeddings": 4,
        "type_vocab_size": 1,
        "layer_norm": "no_var",
        "norm_position": "pre",
        "pooling": dice.pick(("cls", "mean")),
        "head_act": "none",
        "embedding_norm": False,
        "final_norm": False,
        "num_labels": 2,
    }
    return ModelConfig(**{**chosen, **given})


Drawn = tuple[ModelConfig, dict[str, Tensor], Tensor]


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
    if config.row_width != config.hidden_size:
        draft.put(
            "bert.embeddings_project", draft.scale() * dice.digits(config.hidden_size, config.row_width)
        )
    for layer in range(config.num_hidden_layers):
        prefix = f"bert.encoder.layer.{layer}"
        ATTENTION[dice.pick(tuple(ATTENTION))](draft, prefix)
        INNER[dice.pick(tuple(INNER))](draft, prefix)
    _head(draft)
    _classifier(draft)
    return config, draft.tensors, _rows(config, dice)


def _rows(config: ModelConfig, dice: Dice) -> Tensor:
    """Whole numbers, or nothing at all: a clean run on zeros has no rounding errors to measure."""
    x = dice.digits(dice.pick((1, 1, 2)), config.row_width) * dice.pick((0.0, 1.0, 1.0, 100.0))
    return x * dice.pick((1.0, 1.0, 1.0, 2.0 ** dice.power(-140, 100)))


# --- recipes: one gadget by itself, where bounds are tightest -----------------------------------------------


def _sum(dice: Dice) -> Drawn:
    """Logits are sums of features; the large ones cancel wherever the region is."""
    draft = Draft(_config(dice, num_hidden_layers=1), dice, dice.power(30, 100))
    shape = 2, draft.config.hidden_size
    # Where the clean margin is 0, nothing is claimed at all.
    bias = dice.digits(2) + torch.tensor([0.5, 0.0], dtype=torch.float64)
    draft.put("classifier", dice.digits(*shape) * (dice.uniform(2, 1) < 0.7), bias)
    return draft.config, draft.tensors, _rows(draft.config, dice)


def _faint(dice: Dice) -> Drawn:
    """Logits about as small as numbers get in one precision or the other, by one factor or by two."""
    config = _config(dice, num_hidden_layers=1, head_act="relu")
    draft = Draft(config, dice, 60)
    low = dice.pick((dice.power(-149, -120), dice.power(-290, -240)))
    first = dice.power(max(low, -149), min(0, low + 149))
    weight, reach = dice.weights(config.hidden_size, config.hidden_size), dice.pick((1.0, 4.0, 100.0))
    draft.put("bert.pooler.dense", 2.0**first * weight, 2.0**first * reach * dice.digits(config.hidden_size))
    draft.put("classifier", 2.0 ** (low - first) * dice.weights(2, config.hidden_size))
    return config, draft.tensors, _rows(config, dice)


def _ladder(dice: Dice, turn: int, end: int, units: Tensor, row: Tensor) -> Drawn:
    """A sum ``units·row`` that goes to about 2^turn, step by step, and from there to about 2^end.

    It is there twice, with both signs, so that no mean disturbs it. The steps are the weights of LayerNorms
    without variance, of the embedding projection and of the classifier.
    """
    width = units.shape[1]
    config = _config(
        dice,
        num_hidden_layers=dice.pick((2, 3, 4)),
        hidden_size=2,
        num_attention_heads=1,
        embedding_size=width,
        intermediate_size=2,
        hidden_act=dice.pick(("relu", "relu", "relu", "tanh", "gelu")),
        norm_position="post",
        final_norm=dice.chance(0.5),
    )
    draft = Draft(config, dice, 60)
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
            _amplifier(draft, prefix, step(target), step(target))
        draft.tensors[name] *= step(target)
    if dice.chance(0.2):
        _on(draft, "bert.encoder.layer.0")
    draft.put("classifier", step(end) * dice.digits(2, 2))
    if at >= LEAST:
        draft.tensors["classifier.bias"] = 2.0**at * dice.digits(2)
    return config, draft.tensors, x


def _amplifier(draft: Draft, prefix: str, a: float, b: float) -> None:
    """``ab·(v, −v)`` added to ``(v, −v)``: one of two units is on, whatever the sign."""
    eye = torch.eye(2, dtype=torch.float64)
    draft.put(f"{prefix}.intermediate.dense", a * eye)
    draft.put(f"{prefix}.output.dense", b * (2 * eye - 1))


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
    width, size = config.hidden_size, 2.0**draft.power
    weight = dice.digits(width, width) * dice.pick((1.0, size))
    draft.put("bert.pooler.dense", weight, size * dice.digits(width))
    bias = dice.digits(2) * dice.pick((0.0, 1.0, 0.25))
    draft.put("classifier", dice.digits(2, width), bias + torch.tensor([0.125, 0.0], dtype=torch.float64))
    return config, draft.tensors, _rows(config, dice) * dice.pick((1.0, size))


def _huge_scores(dice: Dice) -> Drawn:
    """Scores of 2^40 to 2^62 that differ by little, or not at all: of biases, or wherever rows are large.

    Without biases, scores are ``(x₀ − x₁)(y₀ − y₁) + (x₁ − x₂)(y₁ − y₂)``: a feature that is large in all
    rows makes them large, and another decides.
    """
    biases = dice.chance(0.4)
    width = dice.pick((2, 3, 4)) if biases else 3
    config = _config(dice, num_hidden_layers=1, num_attention_heads=1, hidden_size=width)
    draft, own = Draft(config, dice, 60), "bert.encoder.layer.0.attention"
    apart = torch.eye(width, dtype=torch.float64)[: width - 1] - torch.eye(width, dtype=torch.float64)[1:]
    for name in ("query", "key"):
        weight, bias = torch.zeros(width, width, dtype=torch.float64), None
        weight[:-1] = apart
        if biases:
            weight, bias = dice.digits(width, width), 2.0 ** dice.power(20, 31) * dice.digits(width)
        draft.put(f"{own}.self.{name}", weight, bias)
    value = dice.digits(width, width) if biases else dice.digits(width, 1) * apart[-1]
    draft.put(f"{own}.self.value", value, dice.digits(width))
    draft.put(f"{own}.output.dense", dice.digits(width, width))
    bias = torch.tensor([dice.pick((0.5, -3.0, 100.0)), 0.0], dtype=torch.float64)
    draft.put("classifier", draft.rows(2, width), bias)
    if not biases:
        draft.tensors["classifier.weight"][:, 0] = 0.0
    return config, draft.tensors, dice.digits(dice.pick((2, 2, 3)), width) * dice.pick((0.0, 1.0, 100.0))


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
