"""Networks built to have an adversarial point at a radius that is known.

Their first layer reads a row x only through one number, w·x: ``h = a (w·x) + b``. So whatever follows, with
all its nonlinearities, is a function g of ``t = w·δ`` when one word moves by δ, and the Lp ball of size ε is
the interval ``|t| ≤ ε‖w‖_q``, all of it attained by multiples of one δ. The classifier's bias is then chosen
such that the smallest margin within a radius r is just below 0: the answer changes within r, and the point
where it does is known. No method may prove r, and a tight one comes close to it.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from buffet.lab.random_models import RandomModel, model_of, random_tensors
from buffet.lab.soundness.cases import NORMS, Case, random_config
from buffet.lab.soundness.dice import Dice
from buffet.regions import LpBall

GRID = 201
"""Points along the line through the ball, before and after zooming in on the lowest."""
INSIDE, OUTSIDE = 1 + 1e-9, 1 - 1e-3
"""Sizes of the two balls, relative to the distance of the adversarial point: it is just inside the first and
outside the second, which a tight method may prove."""

SILENT = {
    "whole": "$^",
    "attention only": r"\d\.output\.dense\.weight",
    "activation only": r"attention\.output\.dense\.weight",
    "linear": r"output\.dense\.weight",
}
"""What is left of a block when these maps at its end are 0: few nonlinearities, on which bounds are tight."""


def planted_case(seed: int) -> Case:
    """A network whose answer is known to change at a known distance."""
    dice = Dice(seed)
    silent = dice.pick(tuple(SILENT))
    linear = silent == "linear"
    given: dict[str, Any] = {"head_act": "none", "layer_norm": "no_var"} if linear else {}
    hidden = 2 * dice.pick((2, 3))
    config = random_config(
        dice,
        num_attention_heads=2,
        hidden_size=hidden,
        num_hidden_layers=dice.pick((1, 1, 2)),
        embedding_size=hidden - 1,
        embedding_norm=False,
        **given,
    )
    tensors = random_tensors(config, dice.generator, dice.pick((0.5, 1.0, 2.0)))
    for name, tensor in tensors.items():
        if re.search(SILENT[silent], name):
            tensor.zero_()
    w, a = dice.normal(config.row_width), dice.normal(config.hidden_size)
    tensors["bert.embeddings_project.weight"] = a[:, None] * w
    tokens = dice.pick((1, 2, 3, 4))
    x = dice.normal(tokens, config.row_width)
    word = dice.pick(range(tokens))
    p, r = dice.pick(NORMS), float(dice.size(1))

    model = model_of(config, tensors)
    label = int(model.program64.evaluate(x.double()).argmax())
    unit = LpBall(x, [word], p, 1.0).extreme(-w.double()[None, None])[0, 0]
    at, least = _lowest(model, x, word, label, r * unit)
    bias = tensors["classifier.bias"]
    # Two roundings of float32 below the lowest margin, so that the point is adversarial for certain.
    below = 4 * torch.finfo(torch.float32).eps * (abs(least) + bias.abs().amax())
    bias[label] -= least + below
    model = model_of(config, tensors)

    distance = r * abs(at)
    ball = LpBall(x, [[word], [word]], p, [INSIDE * distance, OUTSIDE * distance])
    line = torch.linspace(-1, 1, GRID, dtype=torch.float64)
    steps = torch.cat([line, line.new_tensor([at])])[:, None, None, None]
    known = ball.project((r * steps * unit).expand(-1, 2, 1, -1))
    name = f"planted at {distance:.3g} in L{p:g}: {config.num_hidden_layers} layers, {silent}"
    kind = f"{config.hidden_act} {config.layer_norm} {config.norm_position} {config.pooling}"
    mask = torch.ones(tokens, dtype=torch.bool)
    return Case(seed, f"{name}, {kind}", model, ball, mask, label, known, INSIDE * distance)


def _lowest(model: RandomModel, x: Tensor, word: int, label: int, reach: Tensor) -> tuple[float, float]:
    """Where ``x[word] + s·reach``, |s| ≤ 1, has the smallest margin, and that margin."""
    low, high = -1.0, 1.0
    program = model.program64.margins(label)
    for _ in range(4):
        s = torch.linspace(low, high, GRID, dtype=torch.float64)
        rows = x.double().repeat(GRID, 1, 1)
        rows[:, word] += s[:, None] * reach
        margins = program.evaluate(rows).amin(-1)
        best, step = int(margins.argmin()), (high - low) / (GRID - 1)
        at, least = float(s[best]), float(margins[best])
        low, high = max(-1.0, at - step), min(1.0, at + step)
    return at, least
