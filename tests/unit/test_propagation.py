"""Which nodes a propagation looks at; batches, chunks, windows and precision do not change its bounds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from buffet.lab.random_models import random_model
from buffet.loading import ModelConfig
from buffet.network import Affine, Apply, Bilinear, Input, Mix, Program, Scores
from buffet.network.structure import attention_nodes, passages
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import PROPAGATIONS, Propagation, needed_boxes
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import bound_nodes, margins
from buffet.regions import Box as BoxRegion
from buffet.regions import CandidateSet, LpBall, Region
from buffet.relaxations.elementwise import relax
from buffet.relaxations.enclosures import Enclosure, LinesEnclosure
from buffet.relaxations.products import planes
from buffet.relaxations.softmax import decompose

TOKENS, WIDTH, LAYERS = 4, 6, 2
# norm position, pooling, layer norm, activation
VARIANTS = {
    "post, cls": ("post", "cls", "no_var", "relu"),
    "post, mean": ("post", "mean", "no_var", "gelu"),
    "pre, cls": ("pre", "cls", "standard", "tanh"),
    "pre, mean": ("pre", "mean", "no_var", "relu"),
}
ALL = {**PROPAGATIONS, "window": replace(PROPAGATIONS["backward"], window=1)}
# Every propagation with one of the networks, by turns.
TURNS = [(list(VARIANTS)[turn % len(VARIANTS)], name) for turn, name in enumerate(ALL)]


def lines_and_planes(bounds: Bounds, index: int) -> Enclosure:
    """The default relaxations."""
    node = bounds.nodes[index]
    clean = tuple(bounds.clean[i] for i in node.inputs)
    boxes = tuple(bounds.boxes[i] for i in node.inputs)
    if isinstance(node.op, Bilinear):
        return planes(node.op, clean, *boxes, dtype=bounds.dtype)
    assert isinstance(node.op, Apply)
    lines = relax(node.op.function, clean[0], boxes[0].lower, boxes[0].upper, dtype=bounds.dtype)
    return LinesEnclosure(lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)


@cache
def program_of(variant: str, layers: int = LAYERS) -> Program:
    """Margins of a random three-class network (float64)."""
    norm_position, pooling, layer_norm, activation = VARIANTS[variant]
    config = ModelConfig(
        vocab_size=2,
        hidden_size=WIDTH,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=5,
        hidden_act=activation,
        layer_norm=layer_norm,
        layer_norm_eps=1e-3,
        norm_position=norm_position,
        pooling=pooling,
        num_labels=3,
    )
    return random_model(config, torch.Generator().manual_seed(7)).program64.margins(0)


@cache
def rows() -> Tensor:
    return torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(8), dtype=torch.float64)


@cache
def clean_run_of(variant: str, layers: int = LAYERS) -> CleanRun:
    return CleanRun(*decompose(program_of(variant, layers), rows()))


def ball(eps: list[float]) -> LpBall:
    return LpBall(rows(), [[0], [2], [3]], 2, eps)


def bounds_of(
    variant: str,
    region: Region,
    propagation: Propagation,
    dtype: torch.dtype = torch.float64,
    chunk_bytes: int = 4 << 20,
) -> Bounds:
    clean_run = clean_run_of(variant)
    return bound_nodes(clean_run, region, lines_and_planes, propagation, dtype=dtype, chunk_bytes=chunk_bytes)


def margins_of(variant: str, region: Region, propagation: Propagation, **engine: object) -> Tensor:
    return margins(bounds_of(variant, region, propagation, **engine), propagation)


# --- the graph ----------------------------------------------------------------------------------------------


def ancestors(program: Program, index: int, without: int | None = None) -> set[int]:
    """Nodes that `index` depends on, on paths that avoid the node `without`."""
    found: set[int] = set()
    pending = [index]
    while pending:
        for source in program.nodes[pending.pop()].inputs:
            if source not in found and source != without:
                found.add(source)
                pending.append(source)
    return found


@pytest.mark.parametrize("decomposed", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_attention_nodes(variant, decomposed):
    """Queries, keys, values, mixes, and all that lies between scores and mixes; nothing else."""
    program = clean_run_of(variant).program if decomposed else program_of(variant)
    found = attention_nodes(program)
    expected: set[int] = set()
    scores = [i for i, n in enumerate(program.nodes) if isinstance(n.op, Scores)]
    mixes = [i for i, n in enumerate(program.nodes) if isinstance(n.op, Mix)]
    assert len(scores) == len(mixes) == LAYERS
    for start, end in zip(scores, mixes, strict=True):
        between = {i for i in ancestors(program, end) if start in ancestors(program, i)}
        expected |= {start, end, *program.nodes[start].inputs, *program.nodes[end].inputs} | between
    assert found == expected
    # per layer: q, k, v, scores, mix and softmax (as offset, exp, sum, reciprocal, product)
    assert len(found) == LAYERS * (10 if decomposed else 6)
    inputs = {i for s in (*scores, *mixes) for i in program.nodes[s].inputs}
    assert sum(isinstance(program.nodes[i].op, Affine) for i in inputs) == 3 * LAYERS


@pytest.mark.parametrize("decomposed", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
def test_passages_separate_every_attention_layer_from_the_input(variant, decomposed):
    program = clean_run_of(variant, 3).program if decomposed else program_of(variant, 3)
    found = sorted(passages(program))
    scores = [i for i, n in enumerate(program.nodes) if isinstance(n.op, Scores)]
    assert len(found) == len(scores) == 3
    for cut, score in zip(found, scores, strict=True):
        reads = min(program.nodes[score].inputs)
        last = len(program.nodes) - 1
        assert cut < reads
        # No path around the cut, neither to this layer nor past it; and it is the last such node.
        assert 0 not in ancestors(program, last, without=cut)
        later = [i for i in range(cut + 1, reads) if 0 not in ancestors(program, last, without=i)]
        assert later == []


@pytest.mark.parametrize("variant", VARIANTS)
def test_needed_boxes(variant):
    """What products, activations and softmax read, unless its box is exact: the input, a function's value."""
    program = clean_run_of(variant).program
    needed = needed_boxes(program)
    for node in program.nodes:
        for source in node.inputs:
            if isinstance(node.op, Bilinear | Apply):
                exact = isinstance(program.nodes[source].op, Input | Apply)
                assert (source in needed) != exact
    for index in needed:
        readers = [n.op for n in program.nodes if index in n.inputs]
        assert any(isinstance(op, Bilinear | Apply) for op in readers)


def test_kept_forms():
    program = clean_run_of("post, cls").program
    assert ALL["interval"].kept(program) == frozenset()
    assert ALL["backward"].kept(program) == frozenset()
    assert ALL["forward"].kept(program) == frozenset(range(1, len(program.nodes)))
    assert ALL["baf"].kept(program) == ALL["baf+backward"].kept(program)
    assert ALL["baf"].kept(program) == attention_nodes(program)
    assert ALL["window"].kept(program) == passages(program)


# --- the same bounds, however they are computed -------------------------------------------------------------

SIZES = [1e-3, 0.01, 0.02]
DTYPES = [torch.float32, torch.float64]


@cache
def usual(variant: str, name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return margins_of(variant, ball(SIZES), ALL[name], dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("variant", "name"), TURNS)
def test_a_batch_of_tasks_is_its_tasks_one_by_one(variant, name, dtype):
    close = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-10}
    together = usual(variant, name, dtype)
    assert together.shape == (3, 2)
    assert together.isfinite().all()
    task = int(dtype == torch.float64)
    single = margins_of(variant, ball(SIZES).select([task]), ALL[name], dtype=dtype)
    torch.testing.assert_close(together[[task]], single, **close)


@pytest.mark.parametrize(("variant", "name"), TURNS)
def test_both_precisions_agree(variant, name):
    single, double = (usual(variant, name, dtype) for dtype in DTYPES)
    assert single.dtype == double.dtype == torch.float64
    tolerance = 1e-2 if name == "forward" else 1e-4  # forms that are pushed err by units of their inputs
    torch.testing.assert_close(single, double, rtol=tolerance, atol=1e-4)


@pytest.mark.parametrize(("variant", "name"), TURNS[2:])
def test_chunks_do_not_change_bounds(variant, name):
    chunked = margins_of(variant, ball(SIZES), ALL[name], chunk_bytes=6000)
    torch.testing.assert_close(chunked, usual(variant, name), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["post, cls", "pre, mean"])
def test_a_large_window_is_full_backward(variant):
    full = usual(variant, "backward")
    windowed = margins_of(variant, ball(SIZES), replace(ALL["backward"], window=99))
    torch.testing.assert_close(windowed, full, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("variant", "name"), TURNS)
def test_a_ball_of_size_zero_has_the_clean_margin(variant, name):
    clean = program_of(variant).evaluate(rows())
    found = margins_of(variant, LpBall(rows(), [0, 2], 2, 0.0), ALL[name], dtype=torch.float32)
    torch.testing.assert_close(found, clean[None], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["interval", "forward", "baf", "backward"])
def test_a_larger_ball_has_a_smaller_margin(name):
    found = margins_of("post, cls", LpBall(rows(), [[1]] * 4, 2, [0.0, 1e-4, 1e-3, 1e-2]), ALL[name])
    assert (found[:-1] > found[1:]).all()


# --- every bound on the way holds ---------------------------------------------------------------------------


def regions() -> list[Region]:
    x = rows()
    reach = 0.02 * torch.rand(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(3)).double()
    candidates = [[x[w] + 0.03 * x[[w - 1, w - 2]] for w in words] for words in ([1, 2], [0, 3])]
    return [
        LpBall(x, [[0], [2], [3]], 2, [1e-3, 0.02, 0.3]),
        LpBall(x, [[0, 1], [2, 3]], "inf", [1e-3, 0.02]),
        LpBall(x, [[1], [3]], 1, [0.01, 0.2]),
        BoxRegion(x, x - reach[0], x + reach[1]),
        CandidateSet(x, [[1, 2], [0, 3]], candidates, budget=1),
    ]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_node_stays_in_its_box_and_form(variant, name):
    """Every intermediate bound, not only the margin's, at sampled points and corners of a region."""
    turn = len(ALL) * list(VARIANTS).index(variant) + list(ALL).index(name)
    region, dtype = regions()[turn % 5], DTYPES[turn // 5 % 2]
    check_nodes(variant, ALL[name], region, dtype)


def test_every_node_stays_in_its_box_over_candidates_in_single_precision():
    check_nodes("pre, mean", ALL["backward"], regions()[4], torch.float32)


def check_nodes(variant: str, propagation: Propagation, region: Region, dtype: torch.dtype) -> None:
    clean_run, bounds = clean_run_of(variant), bounds_of(variant, region, propagation, dtype)
    delta = region.sample(60, torch.Generator().manual_seed(1))
    values = clean_run.program.values(region.points(delta))
    extended = torch.cat([delta.flatten(2), torch.ones(*delta.shape[:2], 1)], -1)
    assert needed_boxes(clean_run.program) <= bounds.boxes.keys()
    for index, value in enumerate(values):
        deviation, where = value - clean_run.clean[index], (index, clean_run.program.nodes[index].op)
        slack = 1e-12 * (1 + value.abs() + clean_run.clean[index].abs())
        if index in bounds.boxes:
            assert holds(deviation, bounds.boxes[index].lower, bounds.boxes[index].upper, slack), where
        if index in bounds.forms:
            form = bounds.forms[index]
            lower, upper = (
                torch.einsum("tnfd,std->stnf", side.double(), extended) for side in (form.lower, form.upper)
            )
            # A form is only widened for rounding once it is minimised.
            slack = slack + 16 * torch.finfo(dtype).eps * (lower.abs() + upper.abs() + 1)
            assert holds(deviation, lower, upper, slack), where
    found = margins(bounds, propagation)
    assert holds(values[-1].squeeze(-2), found, found + torch.inf, 1e-12)


def holds(value: Tensor, lower: Tensor, upper: Tensor, slack: Tensor | float) -> bool:
    """Whether no number is outside its bounds; what is not a number bounds nothing."""
    return not bool(((value < lower - slack) | (value > upper + slack)).any())


@pytest.mark.parametrize("name", ["baf", "backward"])
def test_the_walk_ends_where_nothing_can_be_proven_any_more(name: str) -> None:
    propagation = PROPAGATIONS[name]
    hopeless, mixed = ball([1e30, 1e30, 1e30]), ball([0.01, 1e30, 1e30])
    with torch.no_grad():
        ended, whole = (bounds_of("pre, cls", region, propagation) for region in (hopeless, mixed))
    assert max(ended.boxes) < max(whole.boxes)
    assert margins(ended, propagation).isnan().all()
    found = margins(whole, propagation)
    assert found[0].isfinite().all()
    assert found[1:].isnan().all()
    # Gradients need the whole way, and no margin either.
    assert margins_of("pre, cls", hopeless, propagation).isnan().all()
