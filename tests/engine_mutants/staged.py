"""Cases made for one kind of mistake each, which random networks are too kind to show.

cells        balls cut by planes: two cells that touch, in L2 and in L∞
cancelling   large numbers that cancel: what single precision loses of them is more than most bounds are tight
decided      units that are on or off in every leaf, so that bounds of leaves are nearly exact
absorbing    a clean run in which double precision has lost what decides; what it should be is known
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from buffet.lab.random_models import RandomModel, model_of, random_tensors
from buffet.lab.soundness.cases import Case
from buffet.lab.soundness.planted import planted_case
from buffet.lab.soundness.points import Points, points_of
from buffet.loading.config import ModelConfig
from buffet.regions import Cell, Cuts, LpBall

POINTS = 60
SINGLE, DOUBLE = 2, 1
"""Seeds of cases that are bounded in single and in double precision (`Case.engine`)."""
LAYER = "bert.encoder.layer.0."
CONFIG = ModelConfig(
    vocab_size=2,
    hidden_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=8,
    hidden_act="relu",
    layer_norm="no_var",
    head_act="none",
)


def _cells(seed: int, p: float) -> Points:
    """Both sides of a plane through the ball of a planted network, and a slice between two planes."""
    planted = planted_case(seed)
    assert planted.region.eps is not None
    ball = LpBall(planted.region.center, planted.region.moved[:1], p, planted.region.eps[:1])
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(ball.width, 2, generator=generator, dtype=torch.float64)
    cuts = Cuts((0, 0), torch.linalg.qr(directions)[0].T.contiguous())
    assert ball.eps is not None
    size = float(ball.eps[0])
    free, place = (-math.inf, math.inf), 0.25 * size
    cells = [
        [(-math.inf, place), free],
        [(place, math.inf), free],
        [(-0.5 * size, 0.1 * size), (0.0, 0.6 * size)],
    ]
    case = replace(planted, seed=DOUBLE, region=Cell(ball, cuts, cells), known=None, radius=None)
    return points_of(replace(case, name=f"cells in L{p:g} of {planted.name}"), POINTS)


def _ball(x: Tensor, tasks: int, eps: float) -> LpBall:
    return LpBall(x, [[0]] * tasks, 2, [eps * 1.1**task for task in range(tasks)])


def _cancelling(seed: int, size: float) -> Points:
    """Two hidden units that are always on, and an output layer that takes one from the other."""
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(8, generator=generator)
    tensors = random_tensors(CONFIG, generator)
    for name in ("attention.output.dense.weight", "attention.output.dense.bias"):
        tensors[LAYER + name].zero_()
    weight, bias = (tensors[LAYER + f"intermediate.dense.{part}"] for part in ("weight", "bias"))
    for unit, share in ((0, 1.0), (1, 2.0)):
        weight[unit] += share * size * direction
        bias[unit] = 30 * share * size
    output = tensors[LAYER + "output.dense.weight"]
    output[:, 1] = -output[:, 0] / 2
    ball = _ball(torch.randn(3, 8, generator=generator), 4, 0.1)
    return points_of(_case(model_of(CONFIG, tensors), ball, f"units of {size:g} that cancel", SINGLE), POINTS)


def _absorbing(seed: int, size: float) -> Points:
    """A classifier that takes one huge constant from another, with the points of one that does without.

    In real arithmetic both are the same network. So the margins of the second are those of the first.
    """

    def network(size: float) -> RandomModel:
        tensors = random_tensors(CONFIG, torch.Generator().manual_seed(seed))
        weight, bias = (tensors[LAYER + f"output.LayerNorm.{part}"] for part in ("weight", "bias"))
        weight[[3, 4]], bias[[3, 4]] = 0.0, 1.0
        tensors["classifier.weight"][:, [3, 4]] = torch.tensor([[size, -size], [0.0, 0.0]])
        return model_of(CONFIG, tensors)

    ball = _ball(torch.randn(3, 8, generator=torch.Generator().manual_seed(2)), 2, 1e-6)
    plain, huge = (_case(network(s), ball, f"constants of {s:g}", DOUBLE) for s in (0.0, size))
    right = points_of(replace(plain, label=huge.label), POINTS)
    found = Points(huge, right.deltas, exhaustive=False)
    found.__dict__["margins"] = right.margins
    return found


def _decided(seed: int) -> Points:
    """Attention does nothing, and one task: once every unit is on or off, bounds are nearly exact."""
    generator = torch.Generator().manual_seed(seed)
    tensors = random_tensors(CONFIG, generator)
    for name in ("attention.output.dense.weight", "attention.output.dense.bias"):
        tensors[LAYER + name].zero_()
    ball = _ball(torch.randn(3, 8, generator=generator), 1, 1.0)
    return points_of(_case(model_of(CONFIG, tensors), ball, "units that are decided", DOUBLE), 4 * POINTS)


def _case(model: RandomModel, ball: LpBall, name: str, seed: int) -> Case:
    label = int(model.program64.evaluate(ball.center.double()).argmax())
    return Case(seed, name, model, ball, torch.ones(len(ball.center), dtype=torch.bool), label)


CELLS = {"cells": partial(_cells, 203, 2.0), "cells in L∞": partial(_cells, 203, math.inf)}
CANCELLING = {
    f"cancelling {seed}, {size:g}": partial(_cancelling, seed, size)
    for seed, size in ((1, 1e6), (2, 1e6), (1, 1e4), (2, 3e3), (1, 3e2))
}
ABSORBING = {
    f"absorbing {seed}, 2^{power}": partial(_absorbing, seed, 2.0**power)
    for seed, power in ((3, 45), (2, 45), (2, 54), (3, 40))
}
"""Several of each: in which of them a rounding error makes a bound too large is up to the processor."""
DECIDED = {f"decided {seed}": partial(_decided, seed) for seed in (1, 2)}
STAGED: Mapping[str, Callable[[], Points]] = {**CELLS, **CANCELLING, **ABSORBING, **DECIDED}
