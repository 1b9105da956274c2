"""Interval arithmetic of every operation contains whatever points of its boxes evaluate to."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from buffet.bounds.intervals import Box, interval
from buffet.network import (
    Add,
    Affine,
    Apply,
    Center,
    Diagonal,
    First,
    Input,
    Mean,
    Mix,
    Normalise,
    Offset,
    Op,
    Rescale,
    Scores,
    Softmax,
)
from buffet.network.functions import FUNCTIONS

TASKS, TOKENS, HEADS = 2, 3, 2
# The same examples every time; a failure names its case, so shrinking would only cost minutes.
QUICK = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate], max_examples=40)
ROUNDING = 1e-13


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix(out: int, inputs: int) -> Affine:
    return Affine(random(out, inputs, seed=1), random(out, seed=2))


# Name -> operation and the shapes of its inputs.
OPS: dict[str, tuple[Op, tuple[tuple[int, int], ...]]] = {
    "affine": (matrix(5, 4), ((TOKENS, 4),)),
    "diagonal": (Diagonal(random(4, seed=1), random(4, seed=2)), ((TOKENS, 4),)),
    "center": (Center(), ((TOKENS, 4),)),
    "center of one": (Center(), ((TOKENS, 1),)),
    "add": (Add(), ((TOKENS, 4), (TOKENS, 4))),
    "offset": (Offset(random(TOKENS, 4, seed=3)), ((TOKENS, 4),)),
    "first": (First(), ((TOKENS, 4),)),
    "mean": (Mean(), ((TOKENS, 4),)),
    "scores": (Scores(heads=HEADS, scale=0.7), ((2, 4), (TOKENS, 4))),
    "mix": (Mix(heads=HEADS), ((2, HEADS * TOKENS), (TOKENS, 4))),
    "rescale": (Rescale(heads=HEADS), ((TOKENS, 4), (TOKENS, HEADS))),
    "softmax": (Softmax(HEADS), ((2, HEADS * TOKENS),)),
    "softmax of one": (Softmax(HEADS), ((2, HEADS),)),
}


@dataclass(frozen=True)
class Inputs:
    """Clean values and boxes that follow from the drawn numbers."""

    seed: int
    clean: float
    width: float
    shape: str

    def draw(self, shapes: tuple[tuple[int, int], ...]) -> tuple[tuple[Tensor, ...], list[Box]]:
        cleans, boxes = [], []
        for i, shape in enumerate(shapes):
            cleans.append(self.clean * random(*shape, seed=self.seed + 2 * i))
            low, high = self.width * random(2, TASKS, *shape, seed=self.seed + 2 * i + 1).abs()
            if self.shape == "above":
                boxes.append(Box(torch.zeros_like(low), high))
            elif self.shape == "off":
                boxes.append(Box(-low - high, -low))
            else:
                boxes.append(Box(-low, high))
        return tuple(cleans), boxes


INPUTS = st.builds(
    Inputs,
    seed=st.integers(0, 2**31),
    clean=st.sampled_from([0.0, 1.0, 30.0, 1e6]),
    width=st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 100.0, 1e7]),
    shape=st.sampled_from(["around", "above", "off"]),
)


def points(boxes: list[Box], count: int, seed: int) -> list[Tensor]:
    """Corners and inner points of the boxes by turns."""
    found = []
    for i, box in enumerate(boxes):
        g = torch.Generator().manual_seed(seed + i)
        share = torch.rand(count, *box.lower.shape, generator=g, dtype=torch.float64)
        share[::2] = share[::2].round()
        inner = box.lower + share * (box.upper - box.lower)
        found.append(torch.minimum(torch.maximum(inner, box.lower), box.upper))
    return found


def finite(box: Box) -> bool:
    return bool((box.upper - box.lower).isfinite().all())


def assert_holds(box: Box, values: Tensor, clean: Tensor) -> None:
    slack = ROUNDING * (values.abs() + clean.abs() + 1)
    assert (box.lower <= values - clean + slack).all()
    assert (box.upper >= values - clean - slack).all()


@pytest.mark.parametrize("name", OPS)
@QUICK
@given(inputs=INPUTS)
def test_contains_every_value(name, inputs):
    op, shapes = OPS[name]
    clean, boxes = inputs.draw(shapes)
    found = interval(op, clean, *boxes)
    moved = [c + p for c, p in zip(clean, points(boxes, 30, inputs.seed), strict=True)]
    values, middle = op.evaluate(*moved), op.evaluate(*clean)
    # What evaluating a point and subtracting its clean value may round by itself.
    size = max(float(v.abs().max()) for v in (*moved, *clean))
    slack = ROUNDING * (1 + (size**2 if len(moved) == 2 and name != "add" else size))
    assert finite(found)
    assert (found.lower <= values - middle + slack).all()
    assert (found.upper >= values - middle - slack).all()


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@QUICK
@given(inputs=INPUTS)
def test_contains_every_value_of_a_function(name, inputs):
    f = FUNCTIONS[name]
    (clean,), (box,) = inputs.draw(((TOKENS, 4),))
    if f.domain == 0:
        clean = clean.abs() + 1e-3
        box = Box(torch.maximum(box.lower, 1e-6 - clean), torch.maximum(box.upper, 1e-6 - clean))
    found = interval(Apply(name), (clean,), box)
    values = f.value(clean + points([box], 30, inputs.seed)[0])
    usable = (found.upper - found.lower).isfinite().expand_as(values)
    assert values[~usable].numel() == 0 or name in ("exp", "square", "reciprocal", "rsqrt")
    slack = ROUNDING * (values.abs() + f.value(clean).abs() + 1)
    inside = (found.lower <= values - f.value(clean) + slack) & (
        found.upper >= values - f.value(clean) - slack
    )
    assert inside[usable].all()


@QUICK
@given(inputs=INPUTS)
def test_normalise_contains_every_value(inputs):
    """Over a box of positive e, with the second factor 1 / Σ e."""
    (scores,), (box,) = inputs.draw(((2, HEADS * TOKENS),))
    clean = scores.abs() + 1e-3
    box = Box(torch.maximum(box.lower, 1e-9 - clean), torch.maximum(box.upper, 1e-9 - clean))
    sums = clean.unflatten(-1, (HEADS, -1)).sum(-1)
    unread = Box(torch.zeros(TASKS, 2, HEADS).double(), torch.zeros(TASKS, 2, HEADS).double())
    found = interval(Normalise(heads=HEADS), (clean, 1 / sums), box, unread)
    values = normalised(clean + points([box], 30, inputs.seed)[0])
    assert finite(found)
    assert_holds(found, values, normalised(clean))


def normalised(e: Tensor) -> Tensor:
    e = e.unflatten(-1, (HEADS, -1))
    return (e / e.sum(-1, keepdim=True)).flatten(-2)


# --- exactness ----------------------------------------------------------------------------------------------


def corners(box: Box) -> Tensor:
    """All corners of a box, ``[corners, tasks, tokens, features]``."""
    picks = torch.tensor(list(itertools.product((0.0, 1.0), repeat=box.lower[0].numel()))).double()
    share = picks.reshape(-1, 1, *box.lower.shape[1:])
    return torch.where(share == 1, box.upper, box.lower)


def assert_exact(found: Box, values: Tensor) -> None:
    torch.testing.assert_close(found.lower, values.amin(0), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.upper, values.amax(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [1e-6, 0.5, 5.0])
@pytest.mark.parametrize("name", ["softmax", "normalise", "affine", "center"])
def test_exact_for_operations_of_one_value(name, width, seed):
    """Monotone in every entry: the extreme values are at corners, and the box is exactly their range."""
    inputs = Inputs(seed=seed, clean=1.0, width=width, shape="around")
    (clean,), (box,) = inputs.draw(((1, 2 * 3),))
    op = {"softmax": Softmax(2), "affine": matrix(4, 6), "center": Center(), "normalise": Normalise(heads=2)}[
        name
    ]
    if name == "normalise":
        clean = clean.exp()
        box = Box(torch.maximum(box.lower, 0.01 - clean), torch.maximum(box.upper, 0.02 - clean))
        sums = clean.unflatten(-1, (2, -1)).sum(-1)
        unread = Box(torch.zeros(TASKS, 1, 2).double(), torch.zeros(TASKS, 1, 2).double())
        found = interval(op, (clean, 1 / sums), box, unread)
        assert_exact(found, normalised(clean + corners(box)) - normalised(clean))
    else:
        assert_exact(interval(op, (clean,), box), op.evaluate(clean + corners(box)) - op.evaluate(clean))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", ["around", "off"])
@pytest.mark.parametrize(
    ("op", "shapes"),
    [
        (Scores(heads=1, scale=0.5), ((1, 3), (2, 3))),
        (Mix(heads=1), ((1, 2), (2, 3))),
        (Rescale(heads=2), ((1, 4), (1, 2))),
    ],
)
def test_exact_for_products(op, shapes, shape, seed):
    clean, (x, y) = Inputs(seed=seed, clean=1.0, width=1.0, shape=shape).draw(shapes)
    pairs = itertools.product(corners(x), corners(y))
    values = torch.stack([op.evaluate(clean[0] + a, clean[1] + b) for a, b in pairs])
    assert_exact(interval(op, clean, x, y), values - op.evaluate(*clean))


def test_deviations_of_huge_values_do_not_cancel():
    """A width of 1e-9 around values of 1e9 survives: nothing subtracts one large value from another."""
    clean, boxes = Inputs(seed=0, clean=1e9, width=1e-9, shape="around").draw(((2, 4), (TOKENS, 4)))
    op = Scores(heads=HEADS)
    found = interval(op, clean, *boxes)
    width = op.evaluate(boxes[0].upper - boxes[0].lower, clean[1].abs())
    width = width + op.evaluate(clean[0].abs(), boxes[1].upper - boxes[1].lower)
    torch.testing.assert_close(found.upper - found.lower, width, rtol=1e-9, atol=0.0)


# --- extremes -----------------------------------------------------------------------------------------------


def still(*shape: int) -> Box:
    return Box(torch.zeros(shape).double(), torch.zeros(shape).double())


@pytest.mark.parametrize("size", [1e2, 1e4, 1e8, 1e300])
def test_softmax_of_extreme_scores(size):
    """Weights stay in [0, 1], whatever the scores; no NaN."""
    scores = size * random(2, HEADS * TOKENS, seed=1)
    box = Box(
        -size * torch.ones(TASKS, *scores.shape).double(), size * torch.ones(TASKS, *scores.shape).double()
    )
    for chosen in (box, still(TASKS, *scores.shape)):
        found = interval(Softmax(HEADS), (scores,), chosen)
        weights = Softmax(HEADS).evaluate(scores)
        assert finite(found)
        assert (found.lower + weights >= -2e-12).all()
        assert (found.upper + weights <= 1 + 2e-12).all()
        assert (found.lower <= 1e-15).all()
        assert (found.upper >= -1e-15).all()


@pytest.mark.parametrize("size", [1e3, 1e9, 1e17])
def test_softmax_of_large_equal_scores(size):
    """Equal scores have equal weights, however large they are; the clean value is in its own box."""
    scores = torch.full((2, HEADS * TOKENS), size, dtype=torch.float64)
    found = interval(Softmax(HEADS), (scores,), still(TASKS, *scores.shape))
    assert (found.lower <= 0).all()
    assert (found.upper >= 0).all()


def test_a_single_key_has_weight_one():
    scores = random(2, HEADS, seed=1)
    box = Box(torch.full((TASKS, 2, HEADS), -50.0).double(), torch.full((TASKS, 2, HEADS), 50.0).double())
    found = interval(Softmax(HEADS), (scores,), box)
    assert found.lower.abs().max() < 1e-12
    assert found.upper.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("name", "clean", "lower", "upper"),
    [
        ("exp", 0.0, -1.0, 800.0),
        ("reciprocal", 1.0, -1.0, 1.0),
        ("reciprocal", 1.0, -2.0, 1.0),
        ("rsqrt", 1.0, -1.0, 1.0),
        ("rsqrt", 1.0, -3.0, 1.0),
        ("sqrt", 1.0, -3.0, 1.0),
        ("square", 0.0, -1e200, 1e200),
        ("gelu", 0.0, -math.inf, math.inf),
        ("exp", 0.0, math.nan, 1.0),
    ],
)
def test_overflow_and_domain_violations_are_never_finite(name, clean, lower, upper):
    value, low, high = (torch.tensor([[v]], dtype=torch.float64) for v in (clean, lower, upper))
    box = Box(low[None], high[None])
    assert not finite(interval(Apply(name), (value,), box))


def test_least_holds_whatever_the_box_says():
    """The variance of a LayerNorm: a mean of squares that cannot fall below its ε."""
    op = Affine(torch.full((1, 4), 0.25).double(), torch.full((1,), 1e-5).double(), least=1e-5)
    clean = random(TOKENS, 4, seed=1).square()
    box = Box(torch.full((TASKS, TOKENS, 4), -1e3).double(), torch.full((TASKS, TOKENS, 4), 1.0).double())
    found = interval(op, (clean,), box)
    torch.testing.assert_close(
        op.evaluate(clean) + found.lower, torch.full((TASKS, TOKENS, 1), 1e-5).double()
    )
    torch.testing.assert_close(found.upper, torch.ones(TASKS, TOKENS, 1).double())
    tight = interval(op, (clean,), Box(-0.5 * clean.expand(TASKS, -1, -1), 0 * clean.expand(TASKS, -1, -1)))
    torch.testing.assert_close(tight.lower, (-0.5 * clean.mean(-1, keepdim=True)).expand(TASKS, -1, -1))


def test_intersection_keeps_what_is_not_a_number():
    a = Box(torch.tensor([[[math.nan, -1.0]]]).double(), torch.tensor([[[1.0, 2.0]]]).double())
    b = Box(torch.tensor([[[0.0, -2.0]]]).double(), torch.tensor([[[1.0, 1.0]]]).double())
    for box in (a & b, b & a):
        assert box.lower.isnan().tolist() == [[[True, False]]]
        assert box.lower[0, 0, 1] == -1.0
        assert box.upper[0, 0].tolist() == [1.0, 1.0]
        assert not finite(box)


def test_an_operation_without_intervals_is_refused():
    with pytest.raises(NotImplementedError, match="Input"):
        interval(Input(), ())
