"""What is free in a relaxation: the rule, the optimisers, and that learning never loses."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from buffet.bounds.choices import Relaxer, initial_shares
from buffet.bounds.optimise import Adam, Control, Learning, Memory, learn
from buffet.bounds.products import rule
from buffet.bounds.propagation import PROPAGATIONS, bound_nodes, margins
from buffet.bounds.sheet import Gradient, Sheet
from buffet.errors import BuffetError
from buffet.loading.config import ModelConfig
from buffet.methods import METHODS, method_named
from buffet.program import Bilinear, Scores
from buffet.random_models import RandomModel, random_model
from buffet.regions import LpBall
from buffet.search import radius
from buffet.tracing import MarginTrace
from buffet.verify import Engine, bound_margins, verify

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
    scene = METHODS["baseline"].scene(model.program64, region.center, 0)
    return bound_nodes(scene, region, Relaxer(product), PROPAGATIONS["baf"], dtype=torch.float64)


def test_the_rule_picks_both_values_beyond_the_first_layer():
    bounds = walk(encoder(0), ball(0, 0.3))
    chosen = [
        torch.cat([torch.as_tensor(a).flatten() for a in Relaxer("rule").alphas(bounds, node)])
        for node in bounds.nodes
        if isinstance(node.op, Bilinear)
    ]
    values = torch.cat(chosen)
    assert set(values.tolist()) == {0.0, 1.0}


def test_ties_keep_zero():
    """In the first layer forms are exact, and their ranges over a ball symmetric."""
    bounds = walk(encoder(0), ball(0, 0.3))
    scores = next(node for node in bounds.nodes if isinstance(node.op, Scores))
    assert Relaxer("rule").alphas(bounds, scores) == (0.0, 0.0)
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


@pytest.mark.parametrize("name", ["o-buffet", "lse+o-buffet"])
@pytest.mark.parametrize("seed", range(3))
def test_learning_never_loses(name, seed):
    model, region = encoder(seed), ball(seed, 0.5)
    learned = smallest(model, region, name, steps=6)
    fixed = smallest(model, region, name, optimise="none")
    usable = ~fixed.isnan()
    assert (learned >= fixed)[usable].all()


def test_the_flagship_is_never_worse():
    """On every task of a small suite, `buffet` proves at least the radius of every other method."""
    model, region = encoder(0, layers=1, pooling="mean"), ball(0, 0.1)
    best = radius(model, region, "buffet", steps=5, attack=False, tolerance=0.02)
    for name in set(METHODS) - {"buffet"}:
        other = radius(model, region, name, steps=20, attack=False, tolerance=0.02)
        for ours, theirs in zip(best.tasks, other.tasks, strict=True):
            assert ours.certified >= theirs.certified * (1 - 0.05), name


def test_shares_are_sound_wherever_they_are():
    """Random shares of everything free never lift a bound above an attained margin."""
    model, region = encoder(3, layers=2), ball(3, 0.3)
    label = int(model.program64.evaluate(region.center.double()).argmax())
    method = replace(METHODS["buffet"], optimise="none")
    scene = method.scene(model.program64, region.center, label)
    propagation = PROPAGATIONS["backward"]
    bounds = bound_nodes(scene, region, Relaxer(), propagation, dtype=torch.float64)
    points = region.points(region.sample(400, torch.Generator().manual_seed(0)))
    attained = model.program64.margins(label).evaluate(points).amin(0)
    for seed in range(5):
        g = torch.Generator().manual_seed(seed)
        shares = initial_shares(bounds, "zero", products_only=False)
        shares = {
            i: {k: torch.rand(v.shape, generator=g, dtype=v.dtype) for k, v in s.items()}
            for i, s in shares.items()
        }
        lower = margins(replace(bounds, relax=Relaxer(learned=shares)), propagation)
        assert (lower <= attained).all()


def test_adam_finds_the_minimum_in_the_cube():
    sheet = Sheet({0: {"lower": torch.full((3,), 0.5, dtype=torch.float64)}})
    target = torch.tensor([0.2, 0.7, 5.0], dtype=torch.float64)
    adam = Adam(sheet, 0.05)
    for _ in range(200):
        adam.descend(sheet.gradient(((sheet.shares[0]["lower"] - target) ** 2).sum()))
    assert sheet.shares[0]["lower"].detach().tolist() == pytest.approx([0.2, 0.7, 1.0], abs=0.01)


def test_learning_keeps_the_best_iterate_and_tells_its_trace():
    """A loss that gets worse with every step: what comes back is the start."""
    bounds = walk(encoder(0), ball(0, 0.1))
    told = []

    def evaluate(sheet: Sheet) -> tuple[torch.Tensor, Gradient]:
        total = sheet.values.detach().sum()
        return (-1 - total).expand(2, 1), lambda weights: -torch.ones_like(sheet.values)

    control = Control(trace=lambda step, margin: told.append((step, margin.tolist())))
    shares = learn(bounds, evaluate, Learning(steps=3), products_only=True, control=control)
    assert [step for step, _ in told] == [0, 1, 2]
    assert told[0][1] == [-1.0, -1.0]
    assert all((v == 0).all() for s in shares.values() for v in s.values())


def test_memory_recalls_tasks_in_any_batch():
    bounds = walk(encoder(0), ball(0, 0.1))
    shares = initial_shares(bounds, "random", products_only=True)
    memory = Memory()
    memory.keep(bounds.region, 7, shares)
    swapped = replace(bounds, region=bounds.region.select([1, 0]))
    found = memory.shares_of(swapped.region, 7)
    assert found is not None
    for index, node in shares.items():
        for name, value in node.items():
            assert torch.equal(found[index][name], value.flip(0))
    assert memory.shares_of(bounds.region, 8) is None
    other = ball(0, 0.1).with_eps(0.2)
    assert memory.shares_of(other, 7, within=0.5) is None
    assert memory.shares_of(other, 7) is not None


def test_a_budget_is_kept_and_what_it_proves_is_proven():
    """Out of time, the flagship still answers with what its quick rivals have proven."""
    model, region = encoder(0), ball(0, 0.05)
    start = time.perf_counter()
    found = radius(model, region, "buffet", attack=False, budget=5.0)
    assert time.perf_counter() - start < 15
    quick = radius(model, region, "lse", attack=False)
    for ours, theirs in zip(found.tasks, quick.tasks, strict=True):
        assert ours.certified >= theirs.certified * 0.99 > 0
    sizes = [task.certified for task in found.tasks]
    assert all_keep_the_answer(model, region.with_eps(sizes), found.label)
    hurried = verify(model, region, sizes, "buffet", budget=1e-9)
    assert hurried.verdict in ("certified", "unknown")
    with pytest.raises(BuffetError, match="budget"):
        verify(model, region, budget=0.0)


def test_time_may_run_out_while_learning_starts():
    """The rule needs linear forms, and these take time: what was proven before counts."""
    model, region = encoder(0), ball(0, 0.6)
    for name in ("o-buffet", "lse+o-buffet"):
        plain = smallest(model, region, name, optimise="none")
        for budget in (1e-6, 0.05, 0.2, 0.4):
            found = verify(model, region, method=name, start="best", budget=budget, falsify=False)
            assert (found.margins.amin(-1).isnan() | (found.margins.amin(-1) >= plain - 1e-3)).all()


@pytest.mark.parametrize("name", METHODS)
def test_a_single_token_has_no_differences(name):
    model, region = encoder(0, pooling="mean"), LpBall(ball(0, 0.1).center[:1], [[0]], 2, 1e-4)
    assert verify(model, region, method=name, steps=3).verdict == "certified"


def test_a_trace_takes_every_step_though_the_task_is_proven(tmp_path):
    model, region = encoder(0), ball(0, 0.01)
    trace = MarginTrace(["one", "two"], [0.5, 0.25])
    assert verify(model, region, method="o-buffet", steps=3, trace=trace).verdict == "certified"
    assert [len(curve) for curve in trace.curves] == [3, 3]
    lines = trace.render(tmp_path / "trace.csv").decode().splitlines()
    assert lines[0] == "task,step,margin,baseline"
    assert len(lines) == 7
    assert lines[1].startswith("one,0,")
    assert b"<svg" in trace.render(tmp_path / "trace.svg")


def test_following_the_root_gains_radius():
    """Learned at the edge of what can be proven, α certify more than any fixed one here."""
    model, region = encoder(1), ball(1, 0.1)
    plain = radius(model, region, "baseline", attack=False)
    learned = radius(model, region, "o-buffet", attack=False, steps=40)
    for ours, theirs in zip(learned.tasks, plain.tasks, strict=True):
        assert ours.certified >= theirs.certified
    assert learned.certified > 1.02 * plain.certified
    sizes = [task.certified for task in learned.tasks]
    assert all_keep_the_answer(model, region.with_eps(sizes), learned.label)


def all_keep_the_answer(model: RandomModel, region: LpBall, label: int) -> bool:
    points = region.points(region.sample(500, torch.Generator().manual_seed(0)))
    return bool((model.program64.evaluate(points).argmax(-1) == label).all())
