"""Rows as functions of the parameters: the same as by substitution, and so is their gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from buffet.bounds.forms import Rows
from buffet.lab.random_models import random_model
from buffet.loading.config import ModelConfig
from buffet.methods import method_named
from buffet.network import Apply
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import FlatParameters
from buffet.optimisation.starts import initial_parameters
from buffet.propagation.plan import PROPAGATIONS, needed_boxes
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.propagation.walk import bound_nodes
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.relaxations.table import Relaxer

TOKENS, WIDTH = 4, 8


def rows(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = rows(TOKENS, WIDTH)
REGIONS: dict[str, Region] = {
    "L1": LpBall(X, [[1], [2]], 1, [0.1, 0.3]),
    "L2": LpBall(X, [[1], [2]], 2, [0.02, 0.1]),
    "L3": LpBall(X, [[0, 3]], 3, 0.05),
    "Linf": LpBall(X, [[1, 2], [0, 3]], "inf", 0.01),
    "box": Box(X, X - 0.02, X + 0.05, [[1], [3]]),
    "candidates": CandidateSet(X, [1, 2], [X[1] + 0.05 * rows(3, WIDTH), X[2] + 0.05 * rows(2, WIDTH)], 1),
}
NETWORKS: dict[str, dict[str, object]] = {
    "relu": {"hidden_act": "relu", "layer_norm": "no_var"},
    "gelu, mean, 3 classes": {
        "hidden_act": "gelu",
        "layer_norm": "no_var",
        "pooling": "mean",
        "num_labels": 3,
    },
    "gelu_new, one layer": {"hidden_act": "gelu_new", "layer_norm": "no_var", "num_hidden_layers": 1},
    "variance": {"hidden_act": "relu", "layer_norm": "standard", "num_labels": 3},
}


def setting(network: str, region: Region, softmax: str) -> tuple[Bounds, FlatParameters]:
    """Boxes of a network, and random parameters of everything that is free over them."""
    shape = {"vocab_size": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2}
    config = ModelConfig(**{**shape, "num_hidden_layers": 2, **NETWORKS[network]})
    generator = torch.Generator().manual_seed(3)
    program = random_model(config, generator).program64
    method = method_named("backward", softmax=softmax)
    clean_run = method.clean_run(program, X, int(program.evaluate(X.double()).argmax()))
    bounds = bound_nodes(clean_run, region, Relaxer(), PROPAGATIONS["backward"], dtype=torch.float64)
    assert len(clean_run.program.nodes) - 1 in bounds.enclosures
    start = initial_parameters(bounds, "zero", only_alphas=False)
    drawn = {
        i: {k: torch.rand(v.shape, generator=generator, dtype=v.dtype) for k, v in node.items()}
        for i, node in start.items()
    }
    return bounds, FlatParameters(drawn)


def compare(bounds: Bounds, flat: FlatParameters, dtype: torch.dtype, tolerance: float) -> None:
    exact = bounds.relaxed(Relaxer(learned=flat.parameters), torch.float64)
    deviation = exact.margin(exact.locals)
    weights = rows(*deviation.shape, seed=5).double()
    right = flat.gradient(deviation, weights)
    margins, gradient = Lagrangian.of_margins(bounds, dtype).bound(flat)
    found = gradient(weights)
    size = deviation.detach().abs()
    assert ((margins - bounds.clean[-1] - deviation.detach()).abs() <= tolerance * size).all()
    assert (found - right).abs().max() <= tolerance * right.abs().max()


@pytest.mark.parametrize("softmax", ["decomposed", "lse", "differences"])
@pytest.mark.parametrize("network", NETWORKS)
def test_margin_and_gradient_are_those_of_substitution(network, softmax):
    with torch.no_grad():
        bounds, flat = setting(network, REGIONS["L2"], softmax)
    # points of GELU are looked up in a table, which makes an error of 1e-4 in them
    compare(bounds, flat, torch.float64, 1e-4 if "gelu" in network else 1e-6)
    compare(bounds, flat, torch.float32, 1e-3)


@pytest.mark.parametrize("softmax", ["decomposed", "differences"])
@pytest.mark.parametrize("region", ["L2", "Linf", "candidates"])
@pytest.mark.parametrize("network", NETWORKS)
def test_rows_of_every_box_are_those_of_substitution(network, region, softmax):
    with torch.no_grad():
        bounds, flat = setting(network, REGIONS[region], softmax)
    exact = bounds.relaxed(Relaxer(learned=flat.parameters), torch.float64)
    free = 0
    for node in needed_boxes(bounds.clean_run.program):
        root, units = bounds.units([node])
        tokens = len(bounds.clean[root])
        found = exact.substitute(root, Rows(units[None, None], tokens, diagonal=True), exact.locals)
        lower = exact.concretise(*found).flatten(1)
        if not lower.requires_grad:  # only linear operations lie before it
            continue
        free += 1
        weights = rows(*lower.shape, seed=5).double()
        right = torch.autograd.grad(lower, [flat.values], weights, retain_graph=True)[0]
        each = torch.einsum("np,fu->nfpu", torch.eye(tokens, dtype=torch.float64), units).flatten(2)
        lagrangian = Lagrangian.over(bounds, root, each)
        again, gradient = lagrangian.bound(flat)
        deviation, size = again - lagrangian.clean, lower.detach().abs().amax(1, keepdim=True)
        # points of GELU are looked up in a table
        assert ((deviation - lower.detach()).abs() <= 1e-4 * size).all()
        assert (gradient(weights) - right).abs().max() <= 1e-4 * right.abs().max()
    assert free > 2


@pytest.mark.parametrize("region", REGIONS)
def test_every_region_has_its_lowest_point(region):
    with torch.no_grad():
        bounds, flat = setting("relu", REGIONS[region], "decomposed")
    compare(bounds, flat, torch.float64, 1e-6)


def test_what_the_margin_does_not_read_has_no_gradient():
    """Queries of the last layer other than the first token's."""
    with torch.no_grad():
        bounds, flat = setting("gelu_new, one layer", REGIONS["L2"], "decomposed")
    lagrangian = Lagrangian.of_margins(bounds)
    _, gradient = lagrangian.bound(flat)
    found = flat.reading(gradient(torch.ones(2, 1)))
    assert all((part[:, 1:] == 0).all() for node in found.values() for part in node.values())
    assert any((part[:, :1] != 0).any() for node in found.values() for part in node.values())


def test_a_task_without_a_bound_leaves_the_others_alone():
    with torch.no_grad():
        bounds, flat = setting("relu", REGIONS["L2"], "decomposed")
        right = Lagrangian.of_margins(bounds).bound(flat)[0]
        for box in bounds.boxes.values():
            box.lower[0], box.upper[0] = torch.nan, torch.nan
    margins, gradient = Lagrangian.of_margins(bounds).bound(flat)
    assert margins[0].isnan().all()
    assert torch.equal(margins[1], right[1])
    assert gradient(torch.ones_like(margins))[1].isfinite().all()


def test_sides_without_a_share_keep_their_default_line():
    """What was learned at another ε may lack sides that are free here, and have some that are not."""
    with torch.no_grad():
        bounds, flat = setting("relu", REGIONS["L2"], "decomposed")
    parameters = flat.parameters
    lines = [i for i, node in enumerate(bounds.nodes) if isinstance(node.op, Apply)]
    parameters[lines[0]] = {}
    parameters[lines[1]]["upper"] = parameters[lines[1]]["lower"]
    compare(bounds, FlatParameters(parameters), torch.float64, 1e-6)


def test_a_deadline_is_looked_at_on_the_way():
    with torch.no_grad():
        bounds, flat = setting("relu", REGIONS["L2"], "decomposed")
    with pytest.raises(OutOfTime):
        Lagrangian.of_margins(replace(bounds, deadline=0.0)).bound(flat)
