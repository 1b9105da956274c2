"""Branch and bound: leaves cover the region, and what is proven of a leaf holds in it."""

from __future__ import annotations

import time

import pytest
import torch

import buffet
from buffet.branching.leaf_bounds import LeafBounds
from buffet.branching.leaves import Leaves
from buffet.branching.prove import Cutting, Walked
from buffet.branching.stems import Effort, Ground, Trunk, clipped, learn_row
from buffet.lab.random_models import random_model
from buffet.loading.config import ModelConfig
from buffet.methods import METHODS
from buffet.optimisation.context import Context
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.verification.verify import Evidence

TOKENS, WIDTH = 4, 8


def rows(*shape: int, seed: int = 7) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


X = rows(TOKENS, WIDTH)
REGIONS: dict[str, Region] = {
    "L1": LpBall(X, [[1]], 1, 0.5),
    "L2": LpBall(X, [[1]], 2, 0.35),
    "Linf, two words": LpBall(X, [[1, 2]], "inf", 0.08),
    "box": Box(X, X - 0.05, X + 0.1, [[1, 3]]),
    "candidates": CandidateSet(X, [1, 2], [X[1] + 0.3 * rows(3, WIDTH), X[2] + 0.3 * rows(2, WIDTH)], 1),
}
NETWORKS: dict[str, dict[str, object]] = {
    "relu": {"hidden_act": "relu", "layer_norm": "no_var"},
    "gelu, mean, 3 classes": {
        "hidden_act": "gelu",
        "layer_norm": "no_var",
        "pooling": "mean",
        "num_labels": 3,
    },
    "variance": {"hidden_act": "relu", "layer_norm": "standard", "num_hidden_layers": 1},
    "one layer": {"hidden_act": "gelu_new", "layer_norm": "no_var", "num_hidden_layers": 1},
}


def walked(network: str, region: Region, label: int | None = None) -> Walked:
    shape = {"vocab_size": 2, "hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2}
    config = ModelConfig(**{**shape, "num_hidden_layers": 2, **NETWORKS[network]})
    program = random_model(config, torch.Generator().manual_seed(3)).program64
    method = METHODS["buffet"]
    label = int(program.evaluate(X.double()).argmax()) if label is None else label
    clean_run = method.clean_run(program, X, label)
    found = Walked.by(method, method.problem(clean_run, region), Context())
    assert found is not None
    return found


def leaves_of(found: Walked, row: int = 0) -> Leaves:
    unit = torch.eye(found.bounds.clean[-1].shape[-1], dtype=torch.float64)[row]
    parameters = learn_row(found.bounds, unit, found.learned.get(found.problem.root, {}), 3)
    return Leaves(LeafBounds.over(found.bounds, unit, parameters))


def runs(found: Walked, count: int = 300) -> list[torch.Tensor]:
    """Values of all nodes at points of the region, at its ends and inside, as deviations."""
    region = found.bounds.region
    generator = torch.Generator().manual_seed(11)
    delta = region.sample(count, generator)[:, 0]
    points = X.double().repeat(len(delta), 1, 1)
    points[:, region.moved[0]] += delta.double()
    values = found.problem.clean_run.program.values(points)
    return [v - clean for v, clean in zip(values, found.bounds.clean, strict=True)]


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("network", NETWORKS)
def test_what_is_proven_of_a_leaf_holds_in_it(network: str, region: str) -> None:
    found = walked(network, REGIONS[region])
    leaves = leaves_of(found)
    leaves.grow(lambda: leaves.asked < 60)
    entries, bounds = leaves.bounds.entries, leaves.bounds
    assert leaves.asked >= 60 or not leaves.open or all(leaf.entry < 0 for leaf in leaves.open[:1])
    every = [*leaves.open, *leaves.proven]
    ends = entries.boxes([leaf.intervals for leaf in every])
    lower = bounds.prove(ends, torch.stack([leaf.slopes for leaf in every], -1))
    values = runs(found)
    arguments = torch.cat(
        [values[place.source][:, : place.tokens].flatten(1)[:, place.where] for place in entries.places], 1
    )
    inside = ((arguments[..., None] >= ends[0]) & (arguments[..., None] <= ends[1])).all(1)
    assert bool(inside.any(1).all())  # the leaves cover the region
    margin = (values[-1] + found.bounds.clean[-1])[:, 0] @ bounds.row
    assert bool((margin[:, None] >= lower)[inside].all())
    for leaf, least in zip(every[len(leaves.open) :], lower[len(leaves.open) :].tolist(), strict=True):
        assert least == pytest.approx(leaf.margin, abs=1e-9)  # rows next to others round differently


@pytest.mark.parametrize("leaves", [1, 5])
def test_leaves_have_lines_of_their_own_however_rows_lie_in_memory(leaves: int) -> None:
    own = leaves_of(walked("relu", REGIONS["L2"])).bounds
    place = own.entries.places[0]
    reached = rows(1, place.tokens, WIDTH, leaves)
    lines = [rows(2, len(own.entries), leaves, seed=k) for k in (1, 2)]
    found = []
    for order in ((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1)):
        lying = reached.permute(order).contiguous().permute(*torch.tensor(order).argsort().tolist())
        state = (lying, lying.sin(), lying.cos(), None)
        multipliers = torch.zeros(len(own.entries), leaves)
        (passed,), _ = own._own(place, lying, state, *lines, multipliers)
        found.append(passed)
        assert bool((multipliers[place.part] == reached[0].flatten(0, 1)[place.where]).all())
    assert all(bool((one == found[0]).all()) for one in found)


@pytest.mark.parametrize("network", NETWORKS)
def test_the_lines_of_a_leaf_hold_over_its_interval(network: str) -> None:
    leaves = leaves_of(walked(network, REGIONS["L2"]))
    leaves.grow(lambda: leaves.asked < 40)
    bounds, entries = leaves.bounds, leaves.bounds.entries
    every = [*leaves.open, *leaves.proven]
    ends = entries.boxes([leaf.intervals for leaf in every])
    slopes = torch.stack([leaf.slopes for leaf in every], -1)
    for place, own in entries.lines(*ends, slopes):
        found = bounds._row_lines(place, own)
        below, from_below, above, from_above = (
            side[0, : place.tokens].flatten(0, 1)[place.where]
            for side in (found.lower_slope, found.lower_intercept, found.upper_slope, found.upper_intercept)
        )
        low, high = (end[place.part] for end in ends)
        for share in torch.linspace(0, 1, 33, dtype=torch.float64):
            deviation = torch.zeros(len(entries), len(every), dtype=torch.float64)
            deviation[place.part] = torch.lerp(low, high, share)
            value, at = entries.values(deviation)[place.part], deviation[place.part]
            assert bool((below * at + from_below <= value + 1e-15).all())
            assert bool((above * at + from_above >= value - 1e-15).all())


def test_a_half_is_no_worse_than_the_whole() -> None:
    leaves = leaves_of(walked("relu", REGIONS["L2"]))
    before = float(leaves.whole.lower[0])
    leaves.grow(lambda: leaves.asked < 30)
    assert all(leaf.lower >= before - 1e-4 for leaf in leaves.open)
    assert leaves.asked >= 30


def test_what_bounds_lose_is_blamed_on_lines_and_nothing_is_gained() -> None:
    leaves = leaves_of(walked("relu", REGIONS["L2"]))
    assert float(leaves.whole.blame.min()) > -1e-5
    assert float(leaves.whole.blame.max()) > 0


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("region", ["L2", "box"])
def test_a_stem_is_bounded_within_its_limits(region: str, anew: bool) -> None:
    found = walked("relu", REGIONS[region])
    leaves = leaves_of(found)
    entry = int(leaves.whole.blame[:, 0].argmax())
    entries = leaves.bounds.entries
    node, place = entries.place_of(entry)
    at = float(runs(found)[node].flatten(1)[:, place].median())
    for limits in ({(node, place): (float(entries.lower[entry]), at)}, {(node, place): (at, 9.0)}):
        ground = Ground(found.bounds, found.problem.propagation, found.problem.product, found.learned)
        part = ground.within(limits, anew)
        values = runs(found)
        argument = values[node].flatten(1)[:, place]
        ((low, high),) = limits.values()
        inside = (argument >= low) & (argument <= high)
        assert bool(inside.any())
        for index, box in part.boxes.items():
            assert bool((values[index][inside] >= box.lower - 1e-9).all())
            assert bool((values[index][inside] <= box.upper + 1e-9).all())
        parameters = learn_row(part, leaves.bounds.row, {}, 2)
        own = LeafBounds.over(part, leaves.bounds.row, parameters)
        lower = own.prove(own.entries.boxes([{}]), own.start.unsqueeze(-1))
        margin = (values[-1] + found.bounds.clean[-1])[:, 0] @ own.row
        assert bool((margin[inside] >= lower).all())


def test_nothing_is_left_of_a_box_whose_limits_lie_elsewhere() -> None:
    box = buffet.bounds.intervals.Box(torch.zeros(1, 2, 2), torch.ones(1, 2, 2))
    found = clipped({(5, 3): (2.0, 3.0), (5, 0): (0.25, 0.5)}, {5: box, 6: box})
    assert found[5].lower.flatten().tolist() == [0.25, 0.0, 0.0, 2.0]
    assert found[5].upper.flatten().tolist() == [0.5, 1.0, 1.0, 3.0]
    assert found[6] is box


def size_that_cuts_prove() -> tuple[Walked, float]:
    """A ball that is not proven as a whole, but by cuts."""
    for eps in (0.2, 0.205, 0.21, 0.215, 0.22, 0.225, 0.23, 0.235, 0.24):
        found = walked("relu", LpBall(X, [[1]], 2, eps))
        from_walk = leaves_of(found)
        if from_walk.open and from_walk.grow(lambda leaves=from_walk: leaves.asked < 400):
            return found, eps
    raise AssertionError("no size is proven by cuts only")


def test_cuts_prove_more() -> None:
    found, _ = size_that_cuts_prove()
    cutting = Cutting(found)
    assert cutting.grow(Effort(None, 1, 512))
    margins = cutting.found
    assert margins is not None
    assert cutting.unfinished is None
    assert bool((margins > 0).all())
    least = (runs(found, 2000)[-1] + found.bounds.clean[-1]).amin()
    assert float(margins.min()) <= float(least)


def test_a_tree_ends_in_time_and_proves_nothing_wrong() -> None:
    found = walked("relu", LpBall(X, [[1]], 2, 5.0))
    begin = time.perf_counter()
    cutting = Cutting(found)
    assert not cutting.grow(Effort(begin + 0.5))
    assert cutting.found is not None
    assert not bool((cutting.found > 0).all())
    assert time.perf_counter() - begin < 20  # a busy machine


def test_stems_prove_what_one_tree_of_leaves_does_not() -> None:
    found, _ = size_that_cuts_prove()
    ground = Ground(found.bounds, found.problem.propagation, found.problem.product, found.learned)
    trunk = Trunk(ground, torch.ones(1, dtype=torch.float64), found.learned.get(found.problem.root, {}))
    done = trunk.grow(Effort(time.perf_counter() + 60, leaves=8))
    assert done
    assert len(trunk.proven) >= 1
    assert 0 < trunk.margin <= float((runs(found, 2000)[-1] + found.bounds.clean[-1]).amin())


def test_an_interrupted_tree_tells_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    found, _ = size_that_cuts_prove()
    cutting = Cutting(found)
    monkeypatch.setattr(Trunk, "_grown", interrupt)
    with pytest.raises(KeyboardInterrupt):
        cutting.grow(Effort(time.perf_counter() + 60))
    told = cutting.unfinished
    assert told is not None
    assert (told.proven, told.share, told.leaves) == (told.cases - 1, 0.0, 0)
    assert -1 < told.lower <= 0
    assert "0 % of the tree" in str(told)


def test_an_interruption_within_a_budget_returns_what_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    model = buffet.load()
    region = LpBall(model.embed("a gripping , moving film"), [2], 2, 2.0)
    monkeypatch.setattr(Evidence, "_branch", interrupt)
    result = buffet.verify(
        model, region, budget=60.0, falsify=False, method=buffet.method("buffet", steps=1, rivals=())
    )
    assert result.verdict == "unknown"
    assert result.interrupted
    assert result.progress == "interrupted"
    assert result.to_dict()["interrupted"]
    with pytest.raises(KeyboardInterrupt):
        buffet.verify(model, region, method=buffet.method("buffet", steps=1, rivals=()), falsify=False)
