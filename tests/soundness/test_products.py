"""Planes of products hold in their whole boxes for every α; at 0 and 1 they are the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from buffet.bounds.forms import Form, Rows
from buffet.bounds.intervals import Box
from buffet.network import Bilinear, Mix, Normalise, Rescale, Scores
from buffet.relaxations.enclosures import PlanesEnclosure
from buffet.relaxations.products import planes

TASKS, QUERIES, KEYS, HEADS, DEPTH = 2, 2, 3, 2, 2
OPS: dict[str, Bilinear] = {
    "scores": Scores(heads=HEADS, scale=0.6),
    "mix": Mix(heads=HEADS),
    "rescale": Rescale(heads=HEADS),
    "normalise": Normalise(heads=HEADS),
}
SIZES = {"i": QUERIES, "j": KEYS, "h": HEADS, "g": HEADS, "k": DEPTH, "m": DEPTH}
# The same examples every time; a failure names its case, so shrinking would only cost minutes.
QUICK = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate], max_examples=60)
ROUNDING = 1e-13  # of what the terms of a sum add up to in absolute value


@dataclass(frozen=True)
class Product:
    """A product with boxes of its factors' deviations; everything follows from the drawn numbers."""

    op: Bilinear
    seed: int
    clean: tuple[float, float]  # sizes of the clean values
    width: tuple[float, float]  # sizes of the boxes; 0: the factor cannot move
    shape: str  # "around" 0, "above", "below", or "off" to one side without touching 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def values(self) -> tuple[tuple[Tensor, Tensor], tuple[Box, Box]]:
        g, cleans, boxes = self.generator(), [], []
        for axes, size, width in zip((self.op.x, self.op.y), self.clean, self.width, strict=True):
            shape = [SIZES[c] for c in axes]
            cleans.append(size * torch.randn(shape, generator=g, dtype=torch.float64).flatten(1))
            low, high = -width * torch.rand(2, TASKS, *shape, generator=g, dtype=torch.float64)
            low, high = low.flatten(2), -high.flatten(2)
            if self.shape == "above":
                low = torch.zeros_like(low)
            elif self.shape == "below":
                high = torch.zeros_like(high)
            elif self.shape == "off":
                low, high = high, high + width
            # A few entries cannot move at all, as the rows of an unmoved word.
            still = torch.rand(low.shape, generator=g) < 0.2
            boxes.append(Box(low.masked_fill(still, 0.0), high.masked_fill(still, 0.0)))
        return (cleans[0], cleans[1]), (boxes[0], boxes[1])

    def points(self, count: int) -> tuple[Tensor, Tensor]:
        """Deviations ``[points, tasks, …]`` of both factors, corners and inner points by turns."""
        g = self.generator()
        found = []
        for box in self.values()[1]:
            share = torch.rand(count, *box.lower.shape, generator=g, dtype=torch.float64)
            share[::2] = share[::2].round()
            inner = box.lower + share * (box.upper - box.lower)
            found.append(torch.minimum(torch.maximum(inner, box.lower), box.upper))
        return found[0], found[1]


PRODUCTS = st.builds(
    Product,
    op=st.sampled_from(list(OPS.values())),
    seed=st.integers(0, 2**31),
    clean=st.tuples(*[st.sampled_from([0.0, 1e-3, 1.0, 1e6])] * 2),
    width=st.tuples(*[st.sampled_from([0.0, 1e-12, 1e-3, 1.0, 1e3, 1e8])] * 2),
    shape=st.sampled_from(["around", "above", "below", "off"]),
)
NUMBER = st.one_of(st.sampled_from([0.0, 0.5, 1.0]), st.floats(0, 1))
SIDES = st.one_of(st.tuples(NUMBER, NUMBER), st.just(("per term", "per term")))  # α below and above


def chosen(alpha: float | str, op: Bilinear, seed: int) -> float | Tensor:
    """A number, or one α per task and term, many of them at the ends."""
    if isinstance(alpha, float):
        return alpha
    shape = (TASKS, *(SIZES[c] for c in op.terms))
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (1.5 * drawn - 0.25).clamp(0, 1)


def deviation(product: Product, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """``(x̂+a)(ŷ+b) − x̂ŷ = ŷa + x̂b + ab``, with no cancellation, and the size of its terms."""
    op, (x_clean, y_clean) = product.op, product.values()[0]
    parts = [op.evaluate(x, y_clean), op.evaluate(x_clean, y), op.evaluate(x, y)]
    sizes = [op.evaluate(x.abs(), y_clean.abs()), op.evaluate(x_clean.abs(), y.abs())]
    return sum(parts[1:], parts[0]), sum(sizes, op.evaluate(x.abs(), y.abs()))


def unit_rows(enclosure: PlanesEnclosure) -> Rows:
    """Every entry and its negative, of every token."""
    eye = torch.eye(enclosure.lower.shape[-1], dtype=torch.float64)
    return Rows(torch.cat([eye, -eye], 1)[None, None], QUERIES, diagonal=True)


def bounds_at(enclosure: PlanesEnclosure, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The lower and upper plane of every entry at points of all tasks, and the size of their terms."""
    (to_x, to_y), bias = enclosure.pull(unit_rows(enclosure))
    total = torch.stack([to_x.contract(a) + to_y.contract(b) for a, b in zip(x, y, strict=True)]) + bias
    sizes = torch.stack(
        [
            to_x.like(to_x.coefs.abs()).contract(a.abs()) + to_y.like(to_y.coefs.abs()).contract(b.abs())
            for a, b in zip(x, y, strict=True)
        ]
    )
    lower, upper = total.chunk(2, -1)
    return lower, -upper, (sizes + bias.abs()).chunk(2, -1)[0]


@QUICK
@given(PRODUCTS, SIDES)
def test_pulled_planes_hold(product, sides):
    clean, boxes = product.values()
    alphas = [chosen(a, product.op, product.seed + i) for i, a in enumerate(sides)]
    enclosure = planes(product.op, clean, *boxes, alpha_lower=alphas[0], alpha_upper=alphas[1])
    x, y = product.points(24)
    truth, size = deviation(product, x, y)
    lower, upper, terms = bounds_at(enclosure, x, y)
    slack = ROUNDING * (size + terms + widest(product.op, clean, boxes))
    assert (lower <= truth + slack).all()
    assert (upper >= truth - slack).all()


@QUICK
@given(PRODUCTS, SIDES)
def test_pushed_planes_hold(product, sides):
    """Both factors as forms of two inputs in [−1, 1] plus a spread; their boxes follow."""
    op, (clean, _) = product.op, product.values()
    g = product.generator()
    forms, boxes = [], []
    for value, width in zip(clean, product.width, strict=True):
        mid = width * torch.randn(TASKS, *value.shape, 3, generator=g, dtype=torch.float64)
        spread = torch.zeros_like(mid)
        spread[..., -1] = width * torch.rand(mid.shape[:-1], generator=g, dtype=torch.float64)
        form = Form.between(mid - spread, mid + spread)
        reach = mid[..., :-1].abs().sum(-1)
        forms.append(form)
        boxes.append(Box(form.lower[..., -1] - reach, form.upper[..., -1] + reach))
    alphas = [chosen(a, op, product.seed + i) for i, a in enumerate(sides)]
    enclosure = planes(op, clean, *boxes, alpha_lower=alphas[0], alpha_upper=alphas[1])
    pushed = enclosure.push(*forms)
    for _ in range(8):
        delta = torch.cat([2 * torch.rand(2, generator=g, dtype=torch.float64) - 1, torch.ones(1).double()])
        x, y = (
            torch.where(torch.rand(f.lower.shape[:-1], generator=g) < 0.5, f.lower @ delta, f.upper @ delta)
            for f in forms
        )
        truth, size = deviation(product, x, y)
        terms = (pushed.lower.abs() + pushed.upper.abs()).sum(-1)
        slack = ROUNDING * (size + terms + widest(op, clean, boxes))
        assert (pushed.lower @ delta <= truth + slack).all()
        assert (pushed.upper @ delta >= truth - slack).all()


def widest(op: Bilinear, clean: tuple[Tensor, Tensor], boxes: Sequence[Box]) -> Tensor:
    """The largest sum of absolute terms that the boxes allow: what intermediate sums are rounded to."""
    ends = [c.abs() + torch.maximum(b.lower.abs(), b.upper.abs()) for c, b in zip(clean, boxes, strict=True)]
    return op.evaluate(*ends)


NAMED: dict[str, Any] = {  # side, α -> the plane of the design notes in absolute coordinates
    "L1": ("lower", 0.0, lambda x, y, lx, ux, ly, uy: ly * x + lx * y - lx * ly),
    "L2": ("lower", 1.0, lambda x, y, lx, ux, ly, uy: uy * x + ux * y - ux * uy),
    "U1": ("upper", 0.0, lambda x, y, lx, ux, ly, uy: uy * x + lx * y - lx * uy),
    "U2": ("upper", 1.0, lambda x, y, lx, ux, ly, uy: ly * x + ux * y - ux * ly),
}


@pytest.mark.parametrize("per_term", [False, True])
@pytest.mark.parametrize("plane", NAMED)
@pytest.mark.parametrize("name", OPS)
def test_ends_of_alpha_are_the_named_planes(name, plane, per_term):
    op, (side, alpha, formula) = OPS[name], NAMED[plane]
    product = Product(op, seed=5, clean=(1.0, 2.0), width=(1.0, 0.5), shape="around")
    clean, boxes = product.values()
    value = torch.full((TASKS, *(SIZES[c] for c in op.terms)), alpha).double() if per_term else alpha
    enclosure = planes(op, clean, *boxes, alpha_lower=value, alpha_upper=value)
    x, y = product.points(6)
    lower, upper, _ = bounds_at(enclosure, x, y)

    def terms(value: Tensor, axes: str) -> Tensor:
        """``[…, tokens, features]`` over the term axes, written independently of the engine."""
        split = value.reshape(*value.shape[:-2], *(SIZES[c] for c in axes))
        ones = torch.ones([SIZES[c] for c in op.terms]).double()
        return torch.einsum(f"...{axes},{op.terms}->...{op.terms}", split, ones)

    xs = [terms(clean[0] + v, op.x) for v in (x, boxes[0].lower, boxes[0].upper)]
    ys = [terms(clean[1] + v, op.y) for v in (y, boxes[1].lower, boxes[1].upper)]
    planes_of_terms = formula(xs[0], ys[0], xs[1], xs[2], ys[1], ys[2])
    expected = op.scale * torch.einsum(f"...{op.terms}->...{op.out}", planes_of_terms).flatten(-2)
    torch.testing.assert_close(lower if side == "lower" else upper, expected - op.evaluate(*clean))


def test_a_number_on_one_side_and_a_tensor_on_the_other():
    product = Product(OPS["scores"], seed=3, clean=(1.0, 1.0), width=(1.0, 1.0), shape="around")
    clean, boxes = product.values()
    enclosure = planes(
        product.op, clean, *boxes, alpha_lower=0.0, alpha_upper=chosen("per term", product.op, 3)
    )
    x, y = product.points(24)
    lower, upper, _ = bounds_at(enclosure, x, y)
    truth, _ = deviation(product, x, y)
    assert (lower <= truth + ROUNDING).all()
    assert (upper >= truth - ROUNDING).all()


@QUICK
@given(PRODUCTS, st.floats(0, 1), st.floats(0, 1))
def test_one_alpha_or_the_same_for_every_term(product, low, high):
    clean, boxes = product.values()
    x, y = product.points(4)
    ones = torch.ones(1, *[1] * len(product.op.terms)).double()
    one = bounds_at(planes(product.op, clean, *boxes, alpha_lower=low, alpha_upper=high), x, y)
    each = bounds_at(planes(product.op, clean, *boxes, alpha_lower=low * ones, alpha_upper=high * ones), x, y)
    for a, b in zip(one[:2], each[:2], strict=True):
        assert ((a - b).abs() <= ROUNDING * (one[2] + each[2] + widest(product.op, clean, boxes))).all()


@pytest.mark.parametrize("alpha", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("name", OPS)
def test_constants_do_not_cancel(name, alpha):
    """Tiny boxes around huge clean values: the constants are products of deviations, to full precision."""
    op = OPS[name]
    product = Product(op, seed=1, clean=(1e9, 1e9), width=(1e-9, 1e-9), shape="around")
    clean, boxes = product.values()
    enclosure = planes(op, clean, *boxes, alpha_lower=alpha, alpha_upper=alpha)
    a, b = boxes
    lower = (1 - alpha) * op.evaluate(a.lower, b.lower) + alpha * op.evaluate(a.upper, b.upper)
    upper = (1 - alpha) * op.evaluate(a.lower, b.upper) + alpha * op.evaluate(a.upper, b.lower)
    torch.testing.assert_close(enclosure.lower, -lower, rtol=1e-12, atol=0.0)
    torch.testing.assert_close(enclosure.upper, -upper, rtol=1e-12, atol=0.0)
    assert enclosure.lower.abs().max() < 1e-15


@pytest.mark.parametrize("name", OPS)
def test_what_cannot_move_has_no_gap(name):
    """Two still factors: both planes are exact. One still factor: the product is linear in the other."""
    op = OPS[name]
    for width in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        product = Product(op, seed=2, clean=(1.0, 3.0), width=width, shape="around")
        clean, boxes = product.values()
        for alpha in (0.0, 0.5, 1.0):
            enclosure = planes(op, clean, *boxes, alpha_lower=alpha, alpha_upper=alpha)
            assert not enclosure.lower.any()
            assert not enclosure.upper.any()
            x, y = product.points(6)
            lower, upper, _ = bounds_at(enclosure, x, y)
            truth, _ = deviation(product, x, y)
            torch.testing.assert_close(lower, truth)
            torch.testing.assert_close(upper, truth)
