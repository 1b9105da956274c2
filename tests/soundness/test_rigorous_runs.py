"""Runs with an account of rounding, against exact arithmetic: no real margin is further away than told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from buffet.lab.soundness.cases import Case, random_case
from buffet.lab.soundness.extremes import extreme_case
from buffet.lab.soundness.judge import BITS, Judge
from buffet.lab.soundness.spans import Span, span_of
from buffet.network.norms import frobenius, largest_column, spectral
from buffet.propagation import attended, computed
from buffet.propagation.rigorous_run import RigorousRun

POINTS = 6


def points_of(case: Case) -> tuple[Tensor, Tensor]:
    """Rows, those of the sentence and those of points of the region; and which of them every point has."""
    region = case.inner.select([0])
    center, moved = region.center.double(), region.moved[0]
    samples = region.sample(POINTS, torch.Generator().manual_seed(case.seed))[:, 0]
    rows = torch.cat([center, (center[moved] + samples).flatten(0, 1)])
    index = torch.arange(len(center)).repeat(POINTS, 1)
    index[:, moved] = len(center) + torch.arange(POINTS * len(moved)).view(POINTS, -1)
    return rows, index


def contradicted(case: Case, dtype: torch.dtype) -> tuple[int, int]:
    """How many margins are certainly further from the exact ones than told; and how many are told at all."""
    rows, index = points_of(case)
    run = RigorousRun(case.model.program64.margins(case.label), dtype)
    value, error = run.margins(run.table(rows), index)
    exact = Judge(case.model.program64).margins(span_of(rows[index].numpy()), case.label, BITS[0])
    wrong = told = 0
    for point, other in np.ndindex(value.shape):
        off = float(error[point])
        if math.isfinite(off):
            told += 1
            wrong += outside(exact, (point, other), float(value[point, other]), off)
    return wrong, told


def outside(exact: Span, place: tuple[int, int], value: float, off: float) -> bool:
    low, high = math.nextafter(value - off, -math.inf), math.nextafter(value + off, math.inf)
    one = exact.map(lambda v: v[place[0] : place[0] + 1, place[1]])
    return bool(one.below(low)) or (math.isfinite(high) and bool(one.above(high)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("draw", [random_case, extreme_case])
def test_the_exact_margin_is_within_the_error(draw, dtype):
    found = [contradicted(draw(seed), dtype) for seed in range(60)]
    assert sum(wrong for wrong, _ in found) == 0
    assert sum(told for _, told in found) > 100  # most are told something


def test_it_would_be_noticed_if_roundings_were_forgotten(monkeypatch):
    monkeypatch.setattr(computed, "unit", lambda dtype, terms=0: 0.0)
    monkeypatch.setattr(computed, "UP", 0.0)
    cases = [extreme_case(seed) for seed in range(250)]
    assert sum(contradicted(case, torch.float64)[0] for case in cases) > 0


def test_a_run_errs_by_little_on_ordinary_networks():
    case = random_case(3)
    rows, index = points_of(case)
    program = case.model.program64.margins(case.label)
    run = RigorousRun(program, torch.float64)
    value, error = run.margins(run.table(rows), index)
    assert torch.allclose(value, program.evaluate(rows[index]), atol=1e-12)
    assert float(error.max()) < 1e-8


def test_what_overflows_proves_nothing():
    case = random_case(3)
    rows, index = points_of(case)
    run = RigorousRun(case.model.program64.margins(case.label), torch.float64)
    _, error = run.margins(run.table(rows * 1e300), index)
    assert not bool(error.isfinite().any())


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (40, 7), (64, 64)])
@pytest.mark.parametrize("scale", [1e-200, 1.0, 1e100])
def test_norms_are_no_smaller_than_they_are(shape, scale):
    matrix = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    largest = float(torch.linalg.svdvals(matrix / scale)[0]) * scale
    assert largest * (1 - 1e-12) <= spectral(matrix) <= max(largest * 1.001, 1e-150)
    assert spectral(matrix) <= frobenius(matrix) * 1.001
    assert largest_column(matrix) <= frobenius(matrix) * 1.001


def test_norms_of_matrices_of_one_direction_and_of_nothing():
    line = torch.ones(30, 20, dtype=torch.float64)
    assert 600**0.5 <= spectral(line) <= 600**0.5 * 1.001
    assert 0 <= spectral(torch.zeros(4, 4)) < 1e-100
    assert not math.isfinite(spectral(torch.full((2, 2), math.inf)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("moving", [0, 1, 2, 3])
def test_where_few_tokens_move_attention_is_the_same(dtype, moving):
    case = random_case(3)
    generator = torch.Generator().manual_seed(moving)
    rows = 0.3 * torch.randn(30, case.inner.center.shape[1], generator=generator, dtype=torch.float64)
    index = torch.arange(7).repeat(20, 1)
    index[:, 2 : 2 + moving] = torch.randint(7, 30, (20, moving), generator=generator)
    program = case.model.program64.margins(case.label)
    run = RigorousRun(program, dtype)
    value, error = run.margins(run.table(rows), index)
    apart = (value - program.evaluate(rows[index])).abs()
    assert bool((apart <= error.unsqueeze(-1) + 1e-9).all())
    assert float(apart.max()) < (1e-3 if dtype == torch.float32 else 1e-10)


def test_tokens_that_move_are_noticed_where_they_overflow():
    case = random_case(3)
    rows, _ = points_of(case)
    rows = torch.cat([rows[:4], rows[:1] * 1e300, rows[1:2]])
    index = torch.tensor([[0, 1, 2, 3], [0, 4, 2, 3], [0, 5, 2, 3]])
    run = RigorousRun(case.model.program64.margins(case.label), torch.float64)
    _, error = run.margins(run.table(rows), index)
    assert error.isfinite().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["single", "double"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("tokens", [3, 40, 700])
def test_weights_of_attention_err_by_no_more_units_than_are_reckoned_with(dtype, scale, tokens):
    generator = torch.Generator().manual_seed(tokens)
    q, k = (torch.randn(1, tokens, 1, 8, generator=generator).to(dtype) * scale**0.5 for _ in range(2))
    v = torch.eye(tokens, dtype=dtype)[None, :, None]
    weights = attended._mixed(0.5, q, k, v)[0].double()
    scores = 0.5 * torch.einsum("tk,uk->tu", q[0, :, 0].double(), k[0, :, 0].double())
    exact = scores.softmax(-1)
    eps = torch.finfo(dtype).eps
    apart = scores.amax(-1, keepdim=True) - scores.amin(-1, keepdim=True)
    rounded = 2 * 16 * eps * float(q.norm(dim=-1).max() * k.norm(dim=-1).max()) * 0.5
    units = attended.EXP_UNITS * (1 + tokens // attended.BLOCK) + tokens + 4 * apart
    if dtype == torch.float64:
        rounded += 1e-15 * tokens  # what is called exact here
    assert bool(((weights - exact).abs() <= (units * eps + rounded) * exact + 1e-37).all())
