"""Regions: what they accept, the shapes of their operations, and their closed forms."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

from buffet.errors import BuffetError
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.regions.norms import lp_norm, underflow

X = torch.arange(12.0).reshape(4, 3) / 10


def regions() -> list[Region]:
    """One region of every kind, each with two tasks that move two words."""
    words = [[0, 2], [1, 3]]
    choices = [[X + 1, X[:1] - 1], [X[:0], X * 2]]
    balls: list[Region] = [LpBall(X, words, p=p, eps=[0.5, 0.0]) for p in (1, 1.5, 2, 3, math.inf)]
    return [*balls, Box(X, X - 0.1, X + 0.2, words), CandidateSet(X, words, choices, budget=1)]


BAD = {
    "words -1": lambda: LpBall(X, [-1]),
    "word 4 in task 1": lambda: LpBall(X, [[0], [4]]),
    "word twice": lambda: LpBall(X, [1, 1]),
    "words is empty": lambda: LpBall(X, []),
    "words is empty;": lambda: LpBall(X, [[1], []]),
    "task 0 moves 1 words and task 1 moves 2": lambda: LpBall(X, [[1], [2, 3]]),
    r"words must be .* got 1\.0": lambda: LpBall(X, torch.tensor([1.0])),
    "eps is -1": lambda: LpBall(X, [1], eps=-1.0),
    "eps is nan": lambda: LpBall(X, [1], eps=math.nan),
    "eps is inf": lambda: LpBall(X, [1]).with_eps(math.inf),
    r"eps has shape \(3,\)": lambda: LpBall(X, [[1], [2]], eps=[1.0, 1.0, 1.0]),
    "no size yet": lambda: LpBall(X, [1]).minimise(torch.ones(1, 1, 3)),
    "p is 0.5": lambda: LpBall(X, [1], p=0.5),
    "p is nan": lambda: LpBall(X, [1], p=math.nan),
    "p is two": lambda: LpBall(X, [1], p="two"),
    "NaN or infinity in row 0": lambda: LpBall(X / 0, [1]),
    r"float matrix .* \(12,\)": lambda: LpBall(X.flatten(), [1]),
    "float matrix .* int64": lambda: LpBall(X.long(), [1]),
    "lower is above upper at row 2, feature 0": lambda: Box(X, X + 0.1, X, words=[2]),
    "upper holds NaN": lambda: Box(X, X, X * math.nan),
    "a row for each of x or of words; give": lambda: Box(X, X - 0.1, X + 0.1, words=[2, 0, 1, 3]),
    r"lower has shape \(3, 3\)": lambda: Box(X, X[1:], X[1:], words=[1, 2]),
    r"word 0 in task 0 have shape \(4, 2\)": lambda: CandidateSet(X, [1], [X[:, 1:]]),
    r"have shape \(3,\)": lambda: CandidateSet(X, [1], [X[1]]),
    "hold NaN": lambda: CandidateSet(X, [1], [X / 0]),
    "candidates for 1 words and moves 2": lambda: CandidateSet(X, [1, 2], [X]),
    "words make 2 tasks, candidates 1": lambda: CandidateSet(X, [[1], [2]], [X]),
    "budget is -1": lambda: CandidateSet(X, [1], [X], budget=-1),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_one_clear_line(message: str) -> None:
    pattern = message.replace("words -1", "word -1 in task 0 is not a row of x").replace(
        "word twice", "a word twice"
    )
    with pytest.raises(BuffetError, match=pattern) as caught:
        BAD[message]()
    assert "\n" not in str(caught.value)


def test_words_make_tasks() -> None:
    assert LpBall(X, [2]).moved.tolist() == [[2]]
    assert LpBall(X, [2, 3]).moved.tolist() == [[2, 3]]
    assert LpBall(X, [[1], [2]]).moved.tolist() == [[1], [2]]
    assert LpBall(X, torch.tensor([3])).moved.tolist() == [[3]]
    assert Box(X, X, X).moved.tolist() == [[0, 1, 2, 3]]


def test_norm_and_size() -> None:
    ball = LpBall(X, [[1], [2]], p="inf")
    assert math.isinf(ball.p)
    assert ball.eps is None
    assert ball.with_eps(2).eps.tolist() == [2.0, 2.0]
    assert ball.with_eps(torch.tensor([1.0, 3.0])).eps.dtype == torch.float64
    with pytest.raises(FrozenInstanceError):
        ball.p = 2.0


def test_box_bounds_by_row_by_moved_row_and_by_task() -> None:
    whole = Box(X, X - 1, X + 1, words=[2, 1])
    part = Box(X, X[[2, 1]] - 1, X[[2, 1]] + 1, words=[2, 1])
    task = Box(X, whole.lower, whole.upper, words=[[2, 1]])
    for box in (part, task):
        assert torch.equal(box.lower, whole.lower)
        assert torch.equal(box.upper, whole.upper)


@pytest.mark.parametrize("region", regions(), ids=lambda r: type(r).__name__ + str(getattr(r, "p", "")))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_shapes_precision_and_membership(region: Region, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    form = torch.randn(5, 2, 2, 3, generator=generator, dtype=dtype)
    assert region.minimise(form[0]).shape == (2,)
    assert region.minimise(form[0][..., None, None].expand(-1, -1, -1, 6, 7)).shape == (2, 6, 7)
    assert region.minimise(form[0]).dtype == dtype
    samples = region.sample(9, generator)
    assert samples.shape == (9, 2, 2, 3)
    assert samples[0].abs().max() == 0
    assert samples[1:, 0].abs().max() > 0
    assert region.contains(samples).all()
    for operation in (region.extreme, region.project):
        delta = operation(form)
        assert delta.shape == form.shape
        assert delta.dtype == dtype
        assert region.contains(delta).all()
        assert torch.equal(region.project(delta), delta)
    zero = torch.zeros_like(form)
    assert region.minimise(zero[0]).abs().max() < 1e-15
    assert region.contains(region.extreme(zero)).all()
    points = region.points(delta)
    assert points.shape == (5, 2, 4, 3)
    assert points.dtype == dtype
    assert torch.equal(points[:, 1, [0, 2]], X.to(dtype)[[0, 2]].expand(5, -1, -1))
    assert torch.equal(points[:, 1, [1, 3]], X.to(dtype)[[1, 3]] + delta[:, 1])


@pytest.mark.parametrize("region", regions(), ids=lambda r: type(r).__name__ + str(getattr(r, "p", "")))
def test_select_is_the_same_task(region: Region) -> None:
    form = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for index in ([1], torch.tensor([1]), torch.tensor([False, True])):
        chosen = region.select(index)
        assert chosen.tasks == 1
        assert torch.equal(chosen.moved, region.moved[1:])
        assert torch.equal(chosen.minimise(form[1:]), region.minimise(form)[1:])
    assert region.select([1, 0, 1]).tasks == 3


def test_contains_rejects_what_is_outside() -> None:
    far = torch.full((2, 2, 3), 5.0)
    for region in regions():
        assert not region.contains(far).any()
        assert region.contains(far, slack=100.0)[0] or isinstance(region, CandidateSet)


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0, 3.0, 40.0, math.inf])
@pytest.mark.parametrize("size", [1e-300, 1e-30, 1.0, 1e30, 1e300])
def test_norm_neither_overflows_nor_vanishes(p: float, size: float) -> None:
    x = torch.tensor([[3.0, -4.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    expected = 4.0 if math.isinf(p) else (3**p + 4**p) ** (1 / p)
    norm, zero = lp_norm(x * size, p, dim=1)
    lost = underflow(torch.float64, p, 3)
    assert norm.item() <= expected * size * (1 + 1e-12)
    assert norm.item() + lost >= expected * size * (1 - 1e-12)
    assert zero.item() == 0
    assert lost < 1e-150


def test_norm_of_small_entries_with_a_large_exponent() -> None:
    x = torch.full((1, 2), 0.4)
    assert lp_norm(x, 101.0, dim=1).item() == pytest.approx(0.4 * 2 ** (1 / 101))


def test_norm_has_finite_gradients_at_zero() -> None:
    for p in (1.0, 1.5, 2.0, 3.0, math.inf):
        x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
        lp_norm(x, p, dim=1).sum().backward()
        assert torch.isfinite(x.grad).all()


def test_float32_size_is_rounded_outward_in_a_bound() -> None:
    eps = 0.1 - 1e-10
    bound = LpBall(X, [1], p=1, eps=eps).minimise(torch.ones(1, 1, 3, dtype=torch.float32))
    assert bound.double().item() <= -eps


def test_projection_scale_invariance_at_extreme_sizes() -> None:
    for p in (1, 1.5, 2, 3, math.inf):
        for eps in (0.0, 1e-40, 1e-8, 1e8):
            ball = LpBall(X, [1], p=p, eps=eps)
            for dtype in (torch.float32, torch.float64):
                delta = torch.tensor([[[1e30, -1e-30, 3.0]], [[0.0, 0.0, 0.0]]], dtype=dtype)[:, None]
                assert ball.contains(ball.project(delta)).all()
                assert ball.contains(ball.extreme(delta)).all()


WRONG_TYPES = """
import buffet, torch
model = buffet.load()
x = model.embed("a moving film")
ball = buffet.LpBall(x, [2])
for attempt in (
    lambda: buffet.LpBall(x.tolist(), [2]),
    lambda: buffet.LpBall(x, 2),
    lambda: buffet.LpBall(x, "2"),
    lambda: buffet.LpBall(x, torch.tensor(2)),
    lambda: buffet.LpBall(x, [2], p=None),
    lambda: buffet.LpBall(x, [2], eps="wide"),
    lambda: buffet.verify(model, ball, eps=[[0.1], [0.1, 0.2]]),
    lambda: buffet.verify(model, ball, eps=0.1, label="positive"),
    lambda: buffet.radius(model, ball, "baseline", attacked=[1.0, 2.0]),
):
    try:
        attempt()
    except buffet.BuffetError as error:
        print(error)
"""


def test_wrong_types_are_one_clear_line_too() -> None:
    """In a process of its own: here, types are checked before any of our checks."""
    run = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    starts = ("region: x", *3 * ("region: words",), *3 * ("LpBall: ",), "label 'positive'", "attacked has")
    lines = run.stdout.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))
