"""Attacks: every success is real, easy ones are found, sizes are true counterexample sizes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from buffet.attack import AttackSettings, attack, attacked_radius, nearest_attack
from buffet.errors import BuffetError
from buffet.network import Add, Apply, Builder, First, Program
from buffet.regions import Box, CandidateSet, LpBall, Region

NORMS = [1, 1.5, 2, math.inf]
QUICK = AttackSettings(steps=20, restarts=2)


def encoder(seed: int = 0, layers: int = 1, width: int = 8, classes: int = 3) -> Program:
    """A small random post-norm encoder in float32."""
    generator = torch.Generator().manual_seed(seed)

    def dense(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        weight = torch.randn(rows, columns, generator=generator) / math.sqrt(columns)
        return weight, 0.1 * torch.randn(rows, generator=generator)

    build = Builder()
    one, zero = torch.ones(width), torch.zeros(width)
    h = build.layer_norm(build.input, one, zero, eps=None)
    for _ in range(layers):
        mixed = build.affine(
            build.attention(h, h, 2, [dense(width, width) for _ in range(3)]), *dense(width, width)
        )
        h = build.layer_norm(build.add(Add(), h, mixed), one, zero, eps=None)
        inner = build.add(Apply("relu"), build.affine(h, *dense(2 * width, width)))
        h = build.layer_norm(
            build.add(Add(), h, build.affine(inner, *dense(width, 2 * width))), one, zero, eps=None
        )
    build.affine(build.add(First(), h), *dense(classes, width))
    return build.build()


def linear(weight: torch.Tensor, bias: torch.Tensor) -> Program:
    """Logits that are an affine function of the first row."""
    build = Builder()
    build.affine(build.add(First(), build.input), weight, bias)
    return build.build()


def sentence(seed: int = 0, tokens: int = 5, width: int = 8) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(100 + seed))


def margin(program: Program, x: torch.Tensor, label: int) -> torch.Tensor:
    logits = program.to(x.dtype).evaluate(x)
    others = logits.clone()
    others[..., label] = -math.inf
    return logits[..., label] - others.amax(-1)


def example(seed: int = 0) -> tuple[Program, torch.Tensor, int]:
    """A network, a sentence and the network's answer."""
    program, x = encoder(seed), sentence(seed)
    return program, x, int(program.evaluate(x).argmax())


def region_of_every_kind(x: torch.Tensor, size: float) -> list[Region]:
    words = [[0, 1], [2, 4]]
    choices = [[x + size, x[:2] - size] for _ in words]
    balls: list[Region] = [LpBall(x, words, p, [size, size / 4]) for p in NORMS]
    return [*balls, Box(x, x - size, x + size / 2, words), CandidateSet(x, words, choices, budget=1)]


@pytest.mark.parametrize("kind", range(6))
@pytest.mark.parametrize("size", [0.01, 1.0, 10.0])
def test_the_report_is_true(kind: int, size: float) -> None:
    program, x, label = example()
    region = region_of_every_kind(x, size)[kind]
    found = attack(program, region, label, AttackSettings(steps=8, restarts=3))
    assert region.contains(found.deltas).all()
    assert torch.equal(region.points(found.deltas), found.points)
    assert torch.equal(margin(program, found.points, label), found.margin)
    single = margin(program, found.points.float(), label)
    assert torch.equal(found.success, (found.margin < 0) & (single < 0))
    assert (found.margin <= margin(program, x.double(), label) + 1e-6).all()


@pytest.mark.parametrize("p", NORMS)
def test_attack_beats_random_points(p: float) -> None:
    program, x, label = example(1)
    region = LpBall(x, [[0], [2]], p, 0.5)
    found = attack(program, region, label)
    samples = region.sample(500, torch.Generator().manual_seed(0))
    assert (
        found.success | (found.margin <= margin(program, region.points(samples), label).amin(0) + 1e-6)
    ).all()


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("words", [[[0], [1], [3]], [[0, 2], [1, 4]]])
def test_radius_is_a_counterexample_size_and_locally_smallest(p: float, words: list[list[int]]) -> None:
    program, x, label = example(0)
    ball = LpBall(x, words, p)
    found = nearest_attack(program, ball, label)
    radius = attacked_radius(program, ball, label)
    assert found.success.all()
    assert (margin(program, found.points, label) < 0).all()
    assert ball.with_eps(radius).contains(found.deltas).all()
    assert not ball.with_eps(radius * 0.9999).contains(found.deltas).any()
    assert not attack(program, ball.with_eps(0.9 * radius), label).success.any()


@pytest.mark.parametrize("p", NORMS)
def test_radius_of_a_linear_classifier_is_exact(p: float) -> None:
    weight = torch.tensor([[1.0, -2.0, 0.5], [-1.0, 1.0, 0.0]])
    x = torch.tensor([[1.0, -1.0, 0.2], [3.0, 3.0, 3.0]])
    program, ball = linear(weight, torch.zeros(2)), LpBall(x, [[0], [1]], p)
    exact = margin(program, x.double(), 0) / torch.linalg.vector_norm(
        (weight[0] - weight[1]).double(), ball.q
    )
    radius = attacked_radius(program, ball, 0, QUICK)
    assert exact.item() < radius[0].item() <= 1.001 * exact.item()
    assert radius[1].item() == math.inf


def test_radius_of_a_misclassified_input_is_zero() -> None:
    program, x = encoder(), sentence()
    wrong = int(program.evaluate(x).argmin())
    ball = LpBall(x, [[0], [1]])
    assert attacked_radius(program, ball, wrong).tolist() == [0.0, 0.0]
    assert attack(program, ball.with_eps(0.0), wrong).success.all()


def test_a_tie_is_not_a_flip() -> None:
    x = torch.zeros(1, 3)
    constant = linear(torch.zeros(2, 3), torch.zeros(2))
    assert not attack(constant, LpBall(x, [0], eps=1.0), 0).success.any()
    assert attacked_radius(constant, LpBall(x, [0]), 0).tolist() == [math.inf]
    tied = linear(torch.eye(2, 3), torch.zeros(2))
    assert 0 < attacked_radius(tied, LpBall(x, [0]), 0).item() < 1e-3


def test_overflowing_networks_end_without_a_success() -> None:
    weight = torch.full((2, 3), 1e38)
    broken = linear(weight, torch.tensor([math.inf, math.inf]))
    ball = LpBall(torch.ones(1, 3), [0])
    assert attacked_radius(broken, ball, 0).tolist() == [math.inf]
    assert not attack(broken, ball.with_eps(1.0), 0).success.any()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [1, 2])
def test_candidates_against_enumeration(seed: int, budget: int) -> None:
    program, x = encoder(seed), sentence(seed)
    label = int(program.evaluate(x).argmax())
    generator = torch.Generator().manual_seed(seed)
    choices = [x[d] + torch.randn(3, 8, generator=generator) for d in range(3)]
    region = CandidateSet(x, [0, 1, 2], choices, budget)
    every = []
    for pick in itertools.product(range(-1, 3), repeat=3):
        rows = x.clone()
        for d, j in enumerate(pick):
            rows[d] = choices[d][j] if j >= 0 else x[d]
        if sum(j >= 0 for j in pick) <= budget:
            every.append(rows)
    exact = margin(program, torch.stack(every), label).min().item()
    found = attack(program, region, label)
    assert found.margin.item() >= exact - 1e-4
    if budget == 1:
        assert found.success.item() == (exact < 0)


def test_mask_is_respected() -> None:
    program, x = encoder(), sentence()
    mask = torch.tensor([True, True, True, False, False])
    label = int(program.evaluate(x, mask).argmax())
    ball = LpBall(x, [[1], [4]], eps=5.0)
    found = attack(program, ball, label, mask=mask)
    assert found.success.tolist()[1] is False
    assert found.margin[1].item() == pytest.approx(margin(program, x[:3].double(), label).item(), abs=1e-5)


def test_the_same_seed_gives_the_same_answer() -> None:
    program, x, label = example()
    ball = LpBall(x, [[0], [1]], eps=0.3)
    first, second = (attack(program, ball, label, AttackSettings(seed=7)) for _ in range(2))
    assert torch.equal(first.points, second.points)
    assert torch.equal(
        attacked_radius(program, ball, label, QUICK),
        attacked_radius(program.to(torch.float64), ball, label, QUICK),
    )


def test_settings_are_checked() -> None:
    with pytest.raises(BuffetError, match="at least 1"):
        AttackSettings(steps=0)
