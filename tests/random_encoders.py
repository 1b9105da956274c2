"""Encoders with random weights, balls around random rows, and what methods prove there."""

from __future__ import annotations

import torch

from buffet.engine import Engine, bound_margins
from buffet.lab.random_models import RandomModel, random_model
from buffet.loading.config import ModelConfig
from buffet.methods import METHODS, method_named
from buffet.propagation.plan import PROPAGATIONS
from buffet.propagation.walk import bound_nodes
from buffet.regions import LpBall
from buffet.relaxations.table import Relaxer

DOUBLE = Engine(dtype=torch.float64)


def encoder(seed: int, layers: int = 2, **changes: object) -> RandomModel:
    config = ModelConfig(
        vocab_size=2,
        hidden_size=8,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_act="relu",
        layer_norm="no_var",
        **changes,
    )
    return random_model(config, torch.Generator().manual_seed(seed))


def ball(seed: int, eps: float, p: float = 2) -> LpBall:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 + seed))
    return LpBall(x, [[1], [2]], p, eps)


def smallest(model: RandomModel, region: LpBall, method: str, **changes: object) -> torch.Tensor:
    label = int(model.program64.evaluate(region.center.double()).argmax())
    return bound_margins(model, region, method_named(method, **changes), label, DOUBLE).amin(-1)


def walk(model: RandomModel, region: LpBall, product: str = "zero"):
    clean_run = METHODS["baseline"].clean_run(model.program64, region.center, 0)
    return bound_nodes(clean_run, region, Relaxer(product), PROPAGATIONS["baf"], dtype=torch.float64)
