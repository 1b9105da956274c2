"""What is free in a relaxation: the rule, and that every share is sound."""

from __future__ import annotations

from dataclasses import replace

import torch

from buffet.methods import METHODS
from buffet.network import Bilinear, Mix, Scores
from buffet.optimisation.context import Context
from buffet.optimisation.starts import initial_parameters
from buffet.optimisation.warm_starts import WarmStarts
from buffet.propagation.plan import PROPAGATIONS
from buffet.propagation.walk import bound_nodes, margins
from buffet.relaxations import table as choices
from buffet.relaxations.products import rule
from buffet.relaxations.relaxation import Parameters, Site
from buffet.relaxations.table import Relaxer
from random_encoders import ball, encoder, smallest, walk


def test_the_rule_picks_both_values_beyond_the_first_layer():
    bounds = walk(encoder(0), ball(0, 0.3))
    chosen = [
        torch.cat(
            [torch.as_tensor(a).flatten() for a in choices.RULE(Site(bounds, bounds.nodes.index(node)))]
        )
        for node in bounds.nodes
        if isinstance(node.op, Bilinear)
    ]
    values = torch.cat(chosen)
    assert set(values.tolist()) == {0.0, 1.0}


def test_in_a_search_the_rule_is_asked_once_a_word_unless_sizes_fall_far(monkeypatch):
    asked: list[tuple[int, float]] = []

    def counted(op, x, *rest):
        asked.append((len(x.lower), size))
        return rule(op, x, *rest)

    monkeypatch.setattr(choices, "rule", counted)
    model, method, context = encoder(0), METHODS["r-buffet"], Context(WarmStarts())
    tasks = ball(0, 0.1).tasks
    assert tasks > 1
    clean_run = method.clean_run(model.program64, ball(0, 0.1).center, 0)
    for size in (0.1, 0.19, 0.06, 0.04):
        found = method.bound(clean_run, ball(0, size), context=context)
        if size in (0.1, 0.04):  # the same as without a warm_starts, where the rule was asked
            torch.testing.assert_close(found, method.bound(clean_run, ball(0, size)), rtol=0, atol=0)
    assert {*asked} == {(tasks, 0.1), (tasks, 0.04)}
    # Tasks do not depend on each other: one falls far, the others keep what was chosen for them at 0.04.
    asked.clear()
    sizes = torch.full((tasks,), 0.05, dtype=torch.float64)
    sizes[1] = size = 0.01
    found = method.bound(clean_run, ball(0, 0.1).with_eps(sizes), context=context)
    assert {*asked} == {(1, 0.01)}
    alone = method.bound(clean_run, ball(0, 0.1).select([0]).with_eps(0.05), context=context)
    torch.testing.assert_close(found[:1], alone, rtol=0, atol=1e-9)
    fresh = method.bound(clean_run, ball(0, 0.1).select([1]).with_eps(0.01))
    torch.testing.assert_close(found[1:2], fresh, rtol=0, atol=1e-9)


def test_ties_keep_zero():
    """In the first layer forms are exact, and their ranges over a ball symmetric."""
    bounds = walk(encoder(0), ball(0, 0.3))
    scores = next(node for node in bounds.nodes if isinstance(node.op, Scores))
    assert choices.RULE(Site(bounds, bounds.nodes.index(scores))) == (0.0, 0.0)
    x, y = scores.inputs
    forms = (bounds.locals[i].form(bounds.clean[i].shape[0]) for i in (x, y))
    for alphas in rule(scores.op, bounds.boxes[x], bounds.boxes[y], *forms, bounds.least_sums):
        assert (alphas == 0).all()


def test_the_rule_beats_the_fixed_plane_somewhere():
    gains = [
        smallest(encoder(s), ball(s, 0.2), "r-buffet") - smallest(encoder(s), ball(s, 0.2), "baseline")
        for s in range(3)
    ]
    assert max(float(g.max()) for g in gains) > 1e-3


def test_shares_are_sound_wherever_they_are():
    """Random parameters of everything free never lift a bound above an attained margin."""
    model, region = encoder(3, layers=2), ball(3, 0.3)
    label = int(model.program64.evaluate(region.center.double()).argmax())
    method = replace(METHODS["buffet"], optimise="none")
    clean_run = method.clean_run(model.program64, region.center, label)
    propagation = PROPAGATIONS["backward"]
    bounds = bound_nodes(clean_run, region, Relaxer(), propagation, dtype=torch.float64)
    points = region.points(region.sample(400, torch.Generator().manual_seed(0)))
    attained = model.program64.margins(label).evaluate(points).amin(0)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        parameters = initial_parameters(bounds, "zero", only_alphas=False)
        parameters = {
            i: {k: torch.rand(v.shape, generator=g, dtype=v.dtype) for k, v in s.items()}
            for i, s in parameters.items()
        }
        lower = margins(replace(bounds, relax=Relaxer(learned=parameters)), propagation)
        assert (lower <= attained).all()


def test_along_tokens_of_which_one_moves_one_share_is_as_good_as_many():
    """In the first layer α of any other term changes nothing."""
    model, region = encoder(4), ball(4, 0.05)
    clean_run = METHODS["baseline"].clean_run(model.program64, region.center, 0)
    propagation = PROPAGATIONS["backward"]
    bounds = bound_nodes(clean_run, region, Relaxer(), propagation, dtype=torch.float64)
    scores, mix = [i for i, node in enumerate(bounds.nodes) if isinstance(node.op, Scores | Mix)][:2]
    g = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64)

    few = initial_parameters(bounds, "zero", only_alphas=True)
    few = {i: {side: random(*v.shape) for side, v in s.items()} for i, s in few.items()}
    assert few[scores]["lower"].shape == (2, 1, 2, 1, 4)
    assert few[mix]["lower"].shape == (2, 4, 2, 1, 4)
    many = {**few, scores: {}, mix: {}}
    for side in ("lower", "upper"):
        of_scores, of_mix = random(2, 4, 2, 4, 4), random(2, 4, 2, 4, 4)
        for task, word in enumerate(region.moved[:, 0].tolist()):
            of_scores[task, word, :, word] = few[scores][side][task, 0, :, 0]
            of_mix[task, :, :, word] = few[mix][side][task, :, :, 0]
        many[scores][side], many[mix][side] = of_scores, of_mix

    def proven(parameters: dict[int, Parameters]) -> torch.Tensor:
        return margins(replace(bounds, relax=Relaxer(learned=parameters)), propagation)

    torch.testing.assert_close(proven(few), proven(many), rtol=0, atol=1e-12)
    assert not torch.allclose(proven(few), margins(bounds, propagation))
