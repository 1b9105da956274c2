"""Products bounded as a whole hold for all weights in their box, all values of a region and every share."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from buffet.bounds.forms import Form, Local, Rows
from buffet.bounds.intervals import Box
from buffet.network import Mix
from buffet.regions import Box as InputBox
from buffet.regions import CandidateSet, Cell, LpBall, Region
from buffet.regions.cells import Cuts
from buffet.relaxations.headwise import HeadwiseEnclosure, HeadwiseProduct
from buffet.relaxations.products import planes
from buffet_checker import pieces as checked
from buffet_checker import regions as checked_regions
from buffet_checker.rows import Local as CheckedLocal
from buffet_checker.rows import Rows as CheckedRows
from buffet_checker.wholes import whole

QUERIES, KEYS, HEADS, DEPTH, WIDTH, ROWS = 2, 4, 2, 3, 5, 6
OP = Mix(heads=HEADS)
QUICK = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate], max_examples=60)
NORMS = (1, 1.5, 2, 3, "inf")
KINDS = (*NORMS, "box", "far box", "candidates")
WORDS = ([[1], [3]], [[0, 2], [1, 3]])


@dataclass(frozen=True)
class Setting:
    """Weights and values near some clean ones; everything follows from the drawn numbers."""

    seed: int
    words: list[list[int]]
    p: float | str
    eps: float
    width: float  # of the weights' box; 0: they cannot move
    size: float  # of the values' matrix
    share: float | None  # None: one for every token and head
    dtype: torch.dtype = torch.float64

    def draw(self, *shape: int, salt: int = 0) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * self.seed + salt)
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    @property
    def region(self) -> Region:
        x, shape = torch.zeros(KEYS, WIDTH), (2, len(self.words[0]), WIDTH)
        if self.p in ("box", "far box"):
            middle = self.eps * self.draw(*shape, salt=9) * (3.0 if self.p == "far box" else 0.2)
            wide = self.eps * self.draw(*shape, salt=10).abs()
            return InputBox(x, middle - wide, middle + wide, self.words)
        if self.p == "candidates":
            rows = self.eps * self.draw(*shape[:2], 3, WIDTH, salt=9)
            return CandidateSet(x, self.words, [list(task) for task in rows])
        return LpBall(x, self.words, self.p, self.eps)

    @property
    def clean(self) -> tuple[Tensor, Tensor]:
        weights = self.draw(QUERIES, HEADS, KEYS, salt=1).softmax(-1).flatten(1)
        return weights, self.draw(KEYS, HEADS * DEPTH, salt=2)

    @property
    def local(self) -> Local:
        matrix = self.size * self.draw(HEADS * DEPTH, WIDTH, salt=3)
        return Local(matrix.to(self.dtype), self.region.moved, matrix)

    @property
    def weights(self) -> Box:
        low = -self.width * self.draw(2, QUERIES, HEADS * KEYS, salt=4).abs()
        return Box(low, low + self.width * self.draw(2, QUERIES, HEADS * KEYS, salt=5).abs() * 2)

    @property
    def shares(self) -> Tensor:
        if self.share is None:
            return self.draw(2, QUERIES, HEADS, salt=6).sigmoid()
        return torch.full((2, QUERIES, HEADS), self.share, dtype=torch.float64)

    def enclosure(self) -> HeadwiseEnclosure:
        flat = planes(
            OP, self.clean, self.weights, self.values, alpha_lower=0.3, alpha_upper=0.6, dtype=self.dtype
        )
        return HeadwiseProduct.of(OP, self.clean, self.weights, self.local, self.region).mixed(
            flat, self.shares
        )

    @property
    def values(self) -> Box:
        lower, upper = self.region.extent()
        reach = torch.maximum(-lower, upper) @ self.local.unrounded.abs().mT * (1 + 1e-12)
        full = torch.zeros(2, KEYS, HEADS * DEPTH, dtype=torch.float64)
        for task, words in enumerate(self.words):
            full[task, words] = reach[task]
        return Box(-full, full)

    def points(self, count: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """δ and deviations of weights, values and output, ``[points, tasks, …]``; corners by turns."""
        generator = torch.Generator().manual_seed(self.seed)
        share = torch.rand(count, *self.weights.lower.shape, generator=generator, dtype=torch.float64)
        share[::2] = share[::2].round()
        a = torch.lerp(self.weights.lower, self.weights.upper, share)
        b = torch.zeros(count, 2, KEYS, HEADS * DEPTH, dtype=torch.float64)
        delta = self.region.sample(count, generator)
        for task, words in enumerate(self.words):
            b[:, task, words] = delta[:, task] @ self.local.unrounded.mT
        x, y = (v.expand(count, 2, *v.shape) for v in self.clean)
        return delta, a, b, OP.evaluate(a, y) + OP.evaluate(x, b) + OP.evaluate(a, b)

    def sizes(self, a: Tensor, b: Tensor) -> Tensor:
        """What the terms of the output add up to in absolute value, at most."""
        x, y = (v.abs() for v in self.clean)
        most, largest = a.abs().amax(0), b.abs().amax(0)
        return OP.evaluate(most, y + largest) + OP.evaluate(x + most, largest)

    def rows(self, diagonal: bool) -> Rows:
        coefs = self.draw(2, QUERIES, HEADS * DEPTH, ROWS * (1 if diagonal else QUERIES), salt=8)
        return Rows(coefs.to(self.dtype), QUERIES, diagonal)


SETTINGS = st.builds(
    Setting,
    seed=st.integers(0, 10_000),
    words=st.sampled_from(WORDS),
    p=st.sampled_from(KINDS),
    eps=st.sampled_from([0.0, 1e-6, 0.3, 20.0]),
    width=st.sampled_from([0.0, 1e-5, 0.2, 3.0]),
    size=st.sampled_from([0.0, 1e-4, 1.0, 100.0]),
    share=st.sampled_from([None, 0.0, 0.5, 1.0]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
)


@QUICK
@given(SETTINGS, st.booleans())
def test_rows_are_bounded_for_all_weights_and_values(setting, diagonal):
    enclosure, rows = setting.enclosure(), setting.rows(diagonal)
    (to_a, to_b), constant = enclosure.pull(rows)
    _, a, b, out = setting.points(40)
    sizes = 32 * torch.finfo(setting.dtype).eps * setting.sizes(a, b)
    slack = rows.like(rows.coefs.abs()).contract(sizes.to(setting.dtype))
    for one, two, three in zip(a, b, out, strict=True):
        value = rows.contract(three.to(setting.dtype))
        line = to_a.contract(one.to(setting.dtype)) + to_b.contract(two.to(setting.dtype)) + constant
        assert (value >= line - slack).all()


@QUICK
@given(SETTINGS)
def test_forms_pushed_through_it_hold(setting):
    ends = setting.weights.lower, setting.weights.upper
    still = torch.zeros(2, QUERIES, HEADS * KEYS, len(setting.words[0]) * WIDTH)
    sides = [torch.cat([still, end.unsqueeze(-1)], -1).to(setting.dtype) for end in ends]
    form = setting.enclosure().push(Form.between(*sides), setting.local.form(KEYS))
    delta, a, b, out = setting.points(40)
    inputs = torch.cat([delta.flatten(2), torch.ones(40, 2, 1)], -1)
    lower, upper = (torch.einsum("tnfd,ptd->ptnf", s.double(), inputs) for s in (form.lower, form.upper))
    slack = 32 * torch.finfo(setting.dtype).eps * setting.sizes(a, b)
    assert (out >= lower - slack).all()
    assert (out <= upper + slack).all()


@pytest.mark.parametrize("p", NORMS)
def test_many_features_lose_less_as_a_whole(p):
    """Over a symmetric box, planes of every α lose what single features do, added up."""
    setting = Setting(1, WORDS[0], p, 0.5, 0.3, 1.0, share=None)
    lost = {}
    for share in (0.0, 1.0):
        enclosure = Setting(1, WORDS[0], p, 0.5, 0.3, 1.0, share).enclosure()
        rows = setting.rows(diagonal=True)
        (_, _), constant = enclosure.pull(rows)
        lost[share] = -constant
    alone = Rows(rows.coefs.abs(), QUERIES, True).contract(
        HeadwiseProduct.of(OP, setting.clean, setting.weights, setting.local, setting.region).spread()
    )
    assert (lost[1.0] <= alone * (1 + 1e-12)).all()
    assert lost[1.0].mean() < 0.9 * alone.mean()
    assert lost[1.0].mean() < lost[0.0].mean()


def test_of_a_cell_the_ball_around_it_counts():
    setting = Setting(2, [[1]], 2, 0.5, 0.3, 1.0, 1.0)
    direction = torch.eye(WIDTH, dtype=torch.float64)[:1]
    ball = LpBall(torch.zeros(KEYS, WIDTH), [[1]], 2, 0.5)
    cell = Cell(ball, Cuts((0,), direction), [[(0.1, 0.4)]])
    weights = Box(setting.weights.lower[:1], setting.weights.upper[:1])
    local = Local(setting.local.matrix, ball.moved, setting.local.unrounded)
    whole, part = (HeadwiseProduct.of(OP, setting.clean, weights, local, region) for region in (ball, cell))
    assert torch.equal(whole.reach, part.reach)
    assert torch.equal(whole.middle, part.middle)


def checked_region(setting: Setting, task: int) -> checked_regions.Region:
    """The same region of a task in the checker."""
    region = setting.region
    where = np.array(setting.words[task]), *(v[task].numpy() for v in region.extent())
    if isinstance(region, CandidateSet):
        offsets = region.offsets[task, :, 1:].numpy()
        return checked_regions.Candidates(*where, offsets, 0 * offsets, region.budget)
    if isinstance(region, LpBall):
        return checked_regions.Ball(*where, region.p, setting.eps)
    return checked_regions.Box(*where)


@QUICK
@given(SETTINGS.filter(lambda s: s.dtype == torch.float64), st.booleans())
def test_the_checker_finds_the_same_bounds_and_they_hold(setting, diagonal):
    enclosure, rows = setting.enclosure(), setting.rows(diagonal)
    (to_a, to_b), constant = enclosure.pull(rows)
    _, a, b, out = setting.points(40)
    for task in range(2):
        region = checked_region(setting, task)
        values = tuple(v.numpy() for v in setting.clean)
        boxes = tuple(
            (box.lower[task].numpy(), box.upper[task].numpy()) for box in (setting.weights, setting.values)
        )
        nothing = np.zeros((KEYS, HEADS * DEPTH))
        flat = checked.planes(
            "mix",
            HEADS,
            1.0,
            values,  # type: ignore[arg-type]
            boxes,  # type: ignore[arg-type]
            (np.array(0.3), np.array(0.6)),
            np.zeros((QUERIES, HEADS * DEPTH)),
        )
        local = CheckedLocal(setting.local.unrounded.numpy(), nothing, nothing)
        found = whole(flat, setting.shares[task].numpy(), values, boxes, local, region)  # type: ignore[arg-type]
        own = CheckedRows(rows.coefs[task].numpy(), QUERIES, diagonal)
        (x, y), bias = found.pull(own)
        assert np.allclose(x.coefs, to_a.coefs[task].numpy(), rtol=1e-9, atol=1e-12)
        assert np.allclose(y.coefs, to_b.coefs[task].numpy(), rtol=1e-9, atol=1e-12)
        assert np.allclose(bias, constant[task].numpy(), rtol=1e-7, atol=1e-12)
        slack = own.size().contract(found.residual) + 1e-300
        for one, two, three in zip(a[:, task].numpy(), b[:, task].numpy(), out[:, task].numpy(), strict=True):
            size = own.size().contract(np.abs(three)) * 1e-14
            assert (own.contract(three) >= x.contract(one) + y.contract(two) + bias - slack - size).all()
