"""The exactness of `Region.minimise`: attained by `extreme`, never beaten by a point of the region."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from buffet.regions import Box, CandidateSet, LpBall, Region

NORMS = [1.0, 1.5, 2.0, 3.0, math.inf]


@dataclass(frozen=True)
class Problem:
    """The recipe of a region of any kind, a linear form on it and a seeded generator."""

    seed: int
    kind: float | str
    moved: int
    width: int
    sizes: list[float]
    scale: float
    budget: int | None

    def build(self) -> tuple[Region, torch.Tensor, torch.Generator]:
        generator = torch.Generator().manual_seed(self.seed)
        tasks = len(self.sizes)
        x = torch.randn(4, self.width, generator=generator, dtype=torch.float64)
        words = torch.stack([torch.randperm(4, generator=generator)[: self.moved] for _ in range(tasks)])
        form = torch.randn(tasks, self.moved, self.width, generator=generator, dtype=torch.float64)
        form = form * self.scale * (torch.rand(form.shape, generator=generator) < 0.7)
        if self.kind == "box":
            low, high = torch.rand(2, *x.shape, generator=generator, dtype=torch.float64)
            return Box(x, x - low, x + high * self.sizes[0], words), form, generator
        if self.kind == "candidates":
            counts = torch.randint(0, 4, (tasks, self.moved), generator=generator).tolist()
            choices = [
                [torch.randn(n, self.width, generator=generator).double() for n in row] for row in counts
            ]
            return CandidateSet(x, words, choices, self.budget), form, generator
        return LpBall(x, words, self.kind, self.sizes), form, generator


problems = st.builds(
    Problem,
    seed=st.integers(0, 2**31),
    kind=st.sampled_from([*NORMS, "box", "candidates"]),
    moved=st.integers(1, 3),
    width=st.integers(1, 6),
    sizes=st.lists(st.sampled_from([0.0, 1e-3, 1.0, 50.0]), min_size=1, max_size=3),
    scale=st.sampled_from([1e-100, 1e-6, 1.0, 1e6, 1e150]),
    budget=st.sampled_from([None, 0, 1, 2]),
)


def value(form: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    return (form * delta).flatten(-2).sum(-1)


@given(problems)
@settings(max_examples=250, deadline=None)
def test_minimum_is_attained_and_never_beaten(
    problem: Problem,
) -> None:
    region, form, generator = problem.build()
    minimum = region.minimise(form)
    rounding = 1e-12 * (form.abs().amax() + minimum.abs()) + 1e-140
    extreme = region.extreme(form)
    assert region.contains(extreme).all()
    assert ((value(form, extreme) - minimum).abs() <= rounding * 50).all()
    samples = region.sample(40, generator)
    assert region.contains(samples).all()
    assert (value(form, samples) >= minimum - rounding).all()
    noise = torch.randn(40, *form.shape, generator=generator, dtype=torch.float64) * 10
    assert (value(form, region.project(noise)) >= minimum - rounding).all()


@given(problems)
@settings(max_examples=100, deadline=None)
def test_rows_are_minimised_one_by_one(problem: Problem) -> None:
    region, form, _ = problem.build()
    forms = torch.stack([form, -form, 2 * form, form * 0], -1)
    together = region.minimise(forms)
    for row in range(4):
        torch.testing.assert_close(together[:, row], region.minimise(forms[..., row]), rtol=1e-12, atol=0)


@given(problems, st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=150, deadline=None)
def test_projection_is_inside_and_idempotent(problem: Problem, dtype: torch.dtype) -> None:
    region, form, generator = problem.build()
    size = 10 ** (torch.rand(20, 1, 1, 1, generator=generator) * 6 - 4)
    delta = (torch.randn(20, *form.shape, generator=generator) * size).to(dtype)
    projected = region.project(delta)
    assert region.contains(projected, slack=0.0 if dtype == torch.float64 else 1e-6).all()
    assert torch.equal(region.project(projected), projected)


@given(problems)
@settings(max_examples=150, deadline=None)
def test_projection_is_the_nearest_point(problem: Problem) -> None:
    region, form, generator = problem.build()
    if isinstance(region, LpBall) and region.p not in (1.0, 2.0, math.inf):
        return
    delta = torch.randn(form.shape, generator=generator, dtype=torch.float64) * 2
    distance = (region.project(delta) - delta).flatten(1).norm(dim=1)
    others = (region.sample(60, generator) - delta).flatten(2).norm(dim=2)
    assert (distance <= others + 1e-9).all()


@given(st.integers(0, 2**31), st.integers(1, 3), st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_candidate_budget_against_enumeration(seed: int, moved: int, budget: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    choices = [torch.randn(n + 1, 3, generator=generator, dtype=torch.float64) for n in range(moved)]
    region = CandidateSet(x, list(range(moved)), choices, budget=budget)
    form, target = torch.randn(2, 1, moved, 3, generator=generator, dtype=torch.float64)
    points = []
    for pick in itertools.product(*(range(-1, len(c)) for c in choices)):
        if sum(j >= 0 for j in pick) <= budget:
            rows = [
                c[j] - x[d] if j >= 0 else torch.zeros_like(x[d])
                for d, (c, j) in enumerate(zip(choices, pick, strict=True))
            ]
            points.append(torch.stack(rows)[None])
    every = torch.stack(points)
    assert region.contains(every).all()
    assert region.minimise(form).item() == pytest.approx(value(form, every).min().item(), abs=1e-12)
    nearest = (region.project(target) - target).square().sum().item()
    assert nearest == pytest.approx((every - target).square().sum((1, 2, 3)).min().item(), abs=1e-12)


@given(problems)
@example(Problem(seed=200, kind="box", moved=3, width=2, sizes=[0.001, 0.0], scale=1e-100, budget=None))
@settings(max_examples=60, deadline=None)
def test_extent_is_the_smallest_box_around_the_region(problem: Problem) -> None:
    region, form, _ = problem.build()
    lower, upper = region.extent()
    unit = torch.eye(form[0].numel(), dtype=torch.float64).reshape(*form.shape[1:], -1)
    unit = unit.expand(region.tasks, -1, -1, -1)
    least, most = (region.minimise(unit).reshape(form.shape), -region.minimise(-unit).reshape(form.shape))
    rounding = 1e-12 * torch.maximum(lower.abs(), upper.abs())  # a small end is a difference of large numbers
    assert ((least - lower).abs() <= rounding).all()
    assert ((most - upper).abs() <= rounding).all()


def test_contains_counts_changed_words() -> None:
    x = torch.zeros(3, 2, dtype=torch.float64)
    one = torch.ones(1, 2, dtype=torch.float64)
    region = CandidateSet(x, [0, 1, 2], [one, one, one], budget=2)
    deltas = (
        torch.tensor([[0, 0, 0], [1, 0, 1], [1, 1, 1], [0.5, 0, 0]])
        .double()[:, None, :, None]
        .expand(-1, -1, -1, 2)
    )
    assert region.contains(deltas)[:, 0].tolist() == [True, True, False, False]


@given(problems)
@example(Problem(seed=0, kind=1.5, moved=1, width=1, sizes=[0.0], scale=1e150, budget=None))
@settings(max_examples=100, deadline=None)
def test_sums_of_pairs_are_minimised_like_any_form(problem: Problem) -> None:
    region, form, generator = problem.build()
    flat = form.flatten(1)[:, None, None]
    a = flat * torch.randn(1, 2, 3, 1, generator=generator, dtype=torch.float64)
    b = flat * torch.randn(1, 2, 4, 1, generator=generator, dtype=torch.float64)
    sums = region.minimise_sums(a, b)
    for i, j in ((0, 0), (2, 3)):
        single = (a[:, :, i] + b[:, :, j]).movedim(-1, 1).unflatten(1, form.shape[1:])
        size = 1e-6 * (region.minimise(form).abs()[:, None] + sums.abs().amax()) + 1e-100
        assert ((sums[:, :, i, j] - region.minimise(single)).abs() <= size).all()
