"""The zonotopes we compare ourselves with: as sound as our own bounds, and as tight as they should be."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.errors import BuffetError
from buffet.lab.random_models import RandomModel, random_model
from buffet.loading.config import ModelConfig
from buffet.network import Affine, Apply, Builder, First, Mean, Mix, Rescale, Scores
from buffet.regions import LpBall
from peers import zonotope
from peers.multinorm import LINES, Zonotope, product, softmax

EXACT = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "reciprocal": torch.reciprocal,
    "rsqrt": torch.rsqrt,
    "square": torch.square,
}
POSITIVE = ("reciprocal", "rsqrt")
NORMS = [1.0, 2.0, 3.0, math.inf]


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def intervals(function: str) -> tuple[Tensor, Tensor]:
    """Random, one-sided, narrow, degenerate and wide intervals."""
    low = 6 * torch.randn(200, generator=generator(), dtype=torch.float64)
    width = torch.logspace(-14, 1.5, 200, dtype=torch.float64)
    width[:5] = 0
    if function in POSITIVE:
        low = low.abs() + 1e-3
    return low, low + width


def small(**changes: object) -> RandomModel:
    config = ModelConfig.model_validate(
        {
            "vocab_size": 2,
            "hidden_size": 8,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 12,
            "hidden_act": "relu",
            "layer_norm": "no_var",
            "num_labels": 3,
            **changes,
        }
    )
    return random_model(config, generator(1))


def rows(tokens: int = 4, width: int = 8) -> Tensor:
    return torch.randn(tokens, width, generator=generator(2), dtype=torch.float64)


def label_of(model: RandomModel, x: Tensor) -> int:
    return int(model.program64.evaluate(x).argmax())


@pytest.mark.parametrize("function", LINES)
def test_lines_hold_on_dense_grids(function: str) -> None:
    low, high = intervals(function)
    line = LINES[function](low, high)
    x = low + (high - low) * torch.linspace(0, 1, 401, dtype=torch.float64)[:, None]
    x = torch.cat([x, torch.minimum(low.clamp_min(0), high)[None]])  # where relu turns
    distance = EXACT[function](x) - line.slope * x - line.shift
    size = 1 + EXACT[function](x).abs() + (line.slope * x).abs()
    assert bool((distance.abs() <= line.slack + 1e-14 * size).all())
    # no wider than needed: both sides are touched, or all but touched by the grid
    tight = (distance.amax(0) - distance.amin(0)) >= 2 * line.slack * (1 - 1e-3) - 1e-13 * size.amax(0)
    assert bool(tight.all())
    assert not bool(line.slack[low == high].any())


@pytest.mark.parametrize("function", ["exp", "reciprocal"])
def test_lines_of_positive_functions_stay_positive(function: str) -> None:
    low, high = (end[:180] for end in intervals("reciprocal"))  # wider ones are beyond float64
    line = LINES[function](low, high)
    for end in (low, high):
        assert bool((line.slope * end + line.shift - line.slack > 0).all())


def test_lines_are_those_of_least_area() -> None:
    low, high = torch.tensor([-1.0, -2.0, 1.0], dtype=torch.float64), torch.tensor([3.0, -1.0, 2.0]).double()
    relu = LINES["relu"](low, high)
    assert relu.slope.tolist() == [0.75, 0.0, 1.0]
    assert relu.slack.tolist() == pytest.approx([0.375, 0.0, 0.0])
    chord = (math.exp(1.5) - math.exp(1.0)) / 0.5
    exp = LINES["exp"](torch.tensor([1.0]).double(), torch.tensor([1.5]).double())
    assert float(exp.slope) == pytest.approx(chord)
    inverse = LINES["reciprocal"](torch.tensor([1.0]).double(), torch.tensor([2.0]).double())
    assert float(inverse.slope) == pytest.approx(-1 / 2)


@pytest.mark.parametrize("function", POSITIVE)
def test_there_is_no_line_outside_of_the_domain(function: str) -> None:
    line = LINES[function](torch.tensor([-1.0, 0.0]).double(), torch.tensor([1.0, 1.0]).double())
    assert bool(line.slope.isnan().all())


# --- values -------------------------------------------------------------------------------------------------


def random_zonotope(*shape: int, p: float, words: int = 2, symbols: int = 5, seed: int = 0) -> Zonotope:
    def draw(*size: int) -> Tensor:
        return 0.3 * torch.randn(*size, generator=generator(seed + len(size)), dtype=torch.float64)

    q = 1.0 if math.isinf(p) else math.inf if p == 1 else p / (p - 1)
    return Zonotope(3 * draw(*shape), draw(words, 3, *shape), draw(symbols, *shape), q)


def assignments(z: Zonotope, p: float, count: int) -> tuple[Tensor, Tensor]:
    """φ and ε inside of their balls, most on the boundary."""
    phi = torch.randn(count, *z.moves.shape[:2], generator=generator(5), dtype=torch.float64)
    phi = phi / torch.linalg.vector_norm(phi, p, dim=-1, keepdim=True)
    eps = (3 * torch.randn(count, z.symbols, generator=generator(6), dtype=torch.float64)).clamp(-1, 1)
    return phi, eps


def at(z: Zonotope, phi: Tensor, eps: Tensor) -> Tensor:
    """The affine part of a value; symbols that `eps` does not know are 0."""
    known = z.noise[: eps.shape[1]].flatten(1)
    moved = phi.flatten(1) @ z.moves.flatten(0, 1).flatten(1) + eps[:, : len(known)] @ known
    return z.center + moved.unflatten(1, z.center.shape)


@pytest.mark.parametrize("p", NORMS)
def test_boxes_hold_and_are_attained(p: float) -> None:
    z = random_zonotope(2, 3, p=p)
    low, high = z.box()
    values = at(z, *assignments(z, p, 500))
    assert bool(((low - 1e-12 <= values) & (values <= high + 1e-12)).all())
    entry = z.moves[..., 0, 0]
    best = LpBall(torch.zeros(2, 3, dtype=torch.float64), [0, 1], p, 1.0).extreme(entry[None])[0]
    value = at(z, best[None], -z.noise[None, :, 0, 0].sign())[0, 0, 0]
    assert float(value) == pytest.approx(float(low[0, 0]))


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("op", [Scores(heads=2, scale=0.7), Mix(heads=2), Rescale(heads=2)], ids=str)
def test_products_hold(op: Scores | Mix | Rescale, p: float) -> None:
    shapes = {Scores: ((3, 4), (3, 4)), Mix: ((3, 6), (3, 4)), Rescale: ((3, 4), (3, 2))}[type(op)]
    x, y = (random_zonotope(*s, p=p, symbols=n, seed=n) for s, n in zip(shapes, (5, 3), strict=True))
    z = product(op, x, y, used=7)
    phi, eps = assignments(x, p, 500)
    exact = op.evaluate(at(x, phi, eps), at(y, phi, eps[:, :3]))
    fresh = z.noise[7:].abs().sum(0)
    distance = (exact - at(z, phi, eps)).abs()
    assert bool((distance <= fresh + 1e-12).all())
    assert bool((distance.amax(0) > 0.02 * fresh).all())
    assert not bool(z.noise[5:7].any())
    still = replace(y, moves=0 * y.moves, noise=0 * y.noise)
    assert product(op, x, still, used=5).symbols == 5  # a product with a constant is exact


@pytest.mark.parametrize("p", NORMS)
def test_softmax_holds(p: float) -> None:
    scores = random_zonotope(2, 8, p=p)
    found = softmax(scores, 2, used=5)
    phi, eps = assignments(scores, p, 500)
    exact = at(scores, phi, eps).unflatten(-1, (2, 4)).softmax(-1).flatten(-2)
    distance = (exact - at(found, phi, eps)).abs()
    fresh = found.noise[5:].abs().sum(0)
    assert bool((distance <= fresh + 1e-12).all())


def test_what_all_scores_have_in_common_cancels() -> None:
    scores = random_zonotope(2, 8, p=2)
    same = [part[..., :1].expand_as(part) for part in (scores.moves, scores.noise)]
    found = softmax(replace(scores, moves=same[0], noise=same[1]), 2, used=5)
    assert float(found.radius().max()) < 1e-12
    exact = scores.center.unflatten(-1, (2, 4)).softmax(-1).flatten(-2)
    assert torch.allclose(found.center, exact, atol=1e-12)


def test_an_entry_knows_that_the_others_leave_little() -> None:
    """Two keys: the smaller weight is bounded well, and the larger one as well as that."""
    scores = Zonotope(
        torch.tensor([[3.0, 0.0]]).double(),
        torch.zeros(0, 3, 1, 2).double(),
        torch.tensor([[[0.5, 0.0]], [[0.0, 0.5]]]).double(),
        1.0,
    )
    radius = softmax(scores, 1, used=2).radius()
    assert float(radius[0, 0]) == pytest.approx(float(radius[0, 1]))


def test_folding_symbols_keeps_boxes_and_the_largest() -> None:
    z = random_zonotope(2, 3, p=2, symbols=40)
    folded = z.reduced(10)
    assert folded.symbols == 16
    assert torch.allclose(folded.radius(), z.radius())
    assert float(folded.noise[:10].abs().sum()) > float(z.noise.abs().sum()) / 4
    assert z.reduced(34) is z  # there would be no fewer


# --- networks -----------------------------------------------------------------------------------------------

NETWORKS = [
    {},
    {"pooling": "mean", "hidden_act": "relu", "head_act": "relu"},
    {"norm_position": "pre", "num_hidden_layers": 3},
    {"layer_norm": "standard", "layer_norm_eps": 0.1, "num_hidden_layers": 1},
    {"layer_norm": "standard", "layer_norm_eps": 0.1, "norm_position": "pre"},
]


@pytest.mark.parametrize("changes", NETWORKS, ids=str)
@pytest.mark.parametrize("p", NORMS)
def test_no_point_is_below_a_bound(changes: dict[str, object], p: float) -> None:
    model, x = small(**changes), rows()
    label = label_of(model, x)
    program = model.program64.margins(label)
    clean = program.evaluate(x)
    for words, symbols in (([1], 6000), ([0, 2], 6000), ([1], 7)):
        ball = LpBall(x, [words, words], p, [0.003, 0.05])
        bound = zonotope.margins(model.program, ball, label, symbols=symbols)
        assert bound.shape == (2, 2)
        assert bool(bound[0].isfinite().all())
        bound = bound.nan_to_num(nan=-math.inf)
        assert bool((bound <= clean).all())
        found = attack(model.program64, ball, label, AttackSettings(steps=5, restarts=1))
        samples = ball.points(ball.sample(100, generator()))
        for points in (samples, found.points.double()):
            assert bool((program.evaluate(points) >= bound - 1e-9).all())


@pytest.mark.parametrize("p", NORMS)
def test_nothing_moves_at_zero_and_bounds_fall_from_there(p: float) -> None:
    model, x = small(), rows()
    label = label_of(model, x)
    ball = LpBall(x, [[1], [1], [1], [1]], p, [0.0, 0.001, 0.004, 0.016])
    bound = zonotope.margins(model.program64, ball, label)
    clean = model.program64.margins(label).evaluate(x)
    assert torch.allclose(bound[0], clean, rtol=0, atol=1e-12)
    assert bool((bound[1:] < bound[:-1]).all())
    slope = (clean - bound[1]) / 0.001  # of the bound, and of the network itself, at 0
    ascent = torch.autograd.functional.jacobian(model.program64.margins(label).evaluate, x)[:, 1]
    assert torch.allclose(slope, torch.linalg.vector_norm(ascent, ball.q, dim=-1), rtol=0.2)


@pytest.mark.parametrize("p", NORMS)
def test_affine_networks_are_exact(p: float) -> None:
    net = Builder()
    weight, bias = rows(5), rows(1, 5)[0]
    hidden = net.add(Mean(), net.affine(net.input, weight, bias))
    net.add(Affine(rows(3, 5), rows(1, 3)[0]), hidden)
    program, x = net.build(), rows()
    ball = LpBall(x, [[0, 3]], p, 0.7)
    found = zonotope.margins(program, ball, 1)
    form = (rows(3, 5)[1] - rows(3, 5)[[0, 2]]) @ weight / 4
    expected = program.margins(1).evaluate(x) + ball.minimise(torch.stack([form.mT, form.mT])[None])
    assert torch.allclose(found, expected)


def test_the_radius_is_what_is_proven() -> None:
    model, x = small(), rows()
    label = label_of(model, x)
    ball = LpBall(x, [[1, 3], [0, 2]], 2)
    radii = zonotope.radius(model, ball, tolerance=0.01)
    assert len(radii) == 2
    assert min(radii) > 0
    assert bool((zonotope.margins(model.program64, ball.with_eps(radii), label) > 0).all())
    above = zonotope.margins(model.program64, ball.with_eps([1.02 * r for r in radii]), label).amin(-1)
    assert not bool((above > 0).any())
    assert zonotope.radius(model, ball, label=(label + 1) % 3) == [0.0, 0.0]


def test_what_is_not_supported_is_said() -> None:
    x = rows()
    net = Builder()
    net.add(Affine(rows(2), rows(1, 2)[0]), net.add(First(), net.add(Apply("gelu"), net.input)))
    with pytest.raises(BuffetError, match="gelu is not supported"):
        zonotope.margins(net.build(), LpBall(x, [0], 2, 0.1), 0)
    program = small().program64
    with pytest.raises(BuffetError, match="with a size"):
        zonotope.margins(program, LpBall(x, [0], 2), 0)
    with pytest.raises(BuffetError, match="at least 1"):
        zonotope.margins(program, LpBall(x, [0], 2, 0.1), 0, symbols=0)
