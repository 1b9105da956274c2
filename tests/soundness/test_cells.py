"""Balls cut into cells: bounds over cells hold, cells cover the ball, and what they prove is true."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import buffet
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.methods import method_named
from buffet.query import Query
from buffet.regions import Cell, Cuts
from buffet.search import branching
from buffet.search import cells as cell_search
from buffet.search import radius as radii
from buffet.search.branching import Tree, changes
from buffet.search.margin_function import MarginFunction
from buffet.search.root_finding import Bracket, secant
from buffet.search.schedule import Found, Schedule, in_lockstep
from buffet_checker import regions as checker
from random_encoders import ball as random_ball
from random_encoders import encoder

TEXT = "a gripping film"


def random_cells(
    seed: int, moved: int, cuts: int, size: float, orthogonal: bool, p: float = 2.0
) -> tuple[Cell, torch.Generator]:
    """The cells of a random ball, halved at random places; some of them may be empty."""
    generator = torch.Generator().manual_seed(seed)
    width = 6
    x = torch.randn(4, width, generator=generator, dtype=torch.float64)
    directions = torch.randn(width, width, generator=generator, dtype=torch.float64)
    directions = torch.linalg.qr(directions)[0] if orthogonal else directions
    rows = torch.randint(moved, (cuts,), generator=generator).tolist()
    ball = buffet.LpBall(x, list(range(moved)), p, size)
    found = [Cell(ball, Cuts(tuple(rows), directions[:cuts]), [[(-math.inf, math.inf)] * cuts])]
    for _ in range(5):
        which, cut = (int(torch.randint(n, (), generator=generator)) for n in (len(found), cuts))
        cell = found.pop(which)
        low, high = (float(side[0, cut].clamp(-1.2 * size, 1.2 * size)) for side in (cell.lower, cell.upper))
        found += cell.halves(cut, low + (high - low) * float(torch.rand((), generator=generator)))
    return together(found), generator


def together(cells: list[Cell]) -> Cell:
    """Cells of the same ball in one region."""
    ends = [list(zip(cell.lower[0].tolist(), cell.upper[0].tolist(), strict=True)) for cell in cells]
    ball = buffet.LpBall(cells[0].center, cells[0].moved, cells[0].p, cells[0].eps)
    return Cell(ball, cells[0].cuts, ends)


def points_in(cells: Cell, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the ball, and of which cells they are points."""
    ball = buffet.LpBall(cells.center, cells.moved[:1], cells.p, cells.eps[:1])
    delta = ball.sample(400, generator)
    return delta, cells.contains(delta.expand(-1, cells.tasks, -1, -1))


@given(
    st.integers(0, 2**31),
    st.integers(1, 2),
    st.integers(1, 3),
    st.sampled_from([0.0, 1e-6, 1.0, 50.0]),
    st.booleans(),
    st.sampled_from([0.0, 1e-30, 1.0, 1e30]),
    st.sampled_from([torch.float32, torch.float64]),
    st.sampled_from([1.0, 1.5, 2.0, 3.0, math.inf]),
)
@settings(max_examples=300, deadline=None)
def test_no_point_of_a_cell_is_below_its_minimum(
    seed: int,
    moved: int,
    cuts: int,
    size: float,
    orthogonal: bool,
    scale: float,
    dtype: torch.dtype,
    p: float,
) -> None:
    cells, generator = random_cells(seed, moved, cuts, size, orthogonal, p)
    delta, inside = points_in(cells, generator)
    assert bool(inside.any(1).all()), "cells cover the ball"
    form = torch.randn(moved, cells.width, 5, generator=generator) * scale
    form = form * (torch.rand(form.shape, generator=generator) < 0.8)
    forms = form.to(dtype).expand(cells.tasks, -1, -1, -1)
    least = cells.minimise(forms)
    spread = cells.spread(forms, least).double()
    values = torch.einsum("nmw,mwr->nr", delta[:, 0], form.to(dtype).double())
    lowest = values[:, None].masked_fill(~inside[..., None], math.inf).amin(0)
    assert bool((least.double() <= lowest + 16 * torch.finfo(dtype).eps * spread + 1e-40).all())
    own = buffet.LpBall.minimise(cells, forms)
    if orthogonal or p != 2:
        assert bool((least >= own - 32 * torch.finfo(dtype).eps * spread).all()), "planes never do harm"
    for cell in range(cells.tasks):
        part = checker.Cell(
            moved=np.arange(moved),
            lower=-np.full((moved, cells.width), size),
            upper=np.full((moved, cells.width), size),
            p=p,
            eps=size,
            rows=cells.cuts.rows,
            directions=cells.cuts.directions.numpy(),
            low=tuple(cells.lower[cell].tolist()),
            high=tuple(cells.upper[cell].tolist()),
        )
        with np.errstate(all="ignore"):  # as in `judge`
            independent = part.minimum(form.to(dtype).double().numpy())
        assert bool((torch.from_numpy(independent) <= lowest[cell]).all())


def test_the_minimum_between_two_planes_is_attained() -> None:
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        x = torch.zeros(1, 5, dtype=torch.float64)
        u = torch.nn.functional.normalize(torch.randn(1, 5, generator=generator, dtype=torch.float64))
        ends = [-math.inf, -0.5, 0.1, 0.6, math.inf]
        cells = Cell(buffet.LpBall(x, [0], 2, 1.0), Cuts((0,), u), [[pair] for pair in pairwise(ends)])
        form = torch.randn(1, 1, 5, generator=generator, dtype=torch.float64).expand(4, -1, -1)
        lowest = cells.lowest(form)
        assert bool(cells.contains(lowest, slack=1e-9).all())
        values = (form * lowest).sum((1, 2))
        torch.testing.assert_close(values, cells.minimise(form.unsqueeze(-1)).squeeze(-1))


@pytest.mark.parametrize("p", [1.0, 1.5, 3.0, math.inf])
def test_planes_are_worth_as_much_in_every_norm(p: float) -> None:
    """Against the linear or convex program itself: the least value at very many points of the cell."""
    generator = torch.Generator().manual_seed(1)
    u = torch.nn.functional.normalize(torch.randn(1, 3, generator=generator, dtype=torch.float64))
    ball = buffet.LpBall(torch.zeros(1, 3, dtype=torch.float64), [0], p, 1.0)
    cells = Cell(ball, Cuts((0,), u), [[(-math.inf, -0.2)], [(-0.2, 0.3)], [(0.3, math.inf)]])
    delta = ball.sample(200_000, generator)
    inside = cells.contains(delta.expand(-1, 3, -1, -1))
    for _ in range(10):
        form = torch.randn(1, 3, generator=generator, dtype=torch.float64)
        values = (delta[:, 0] * form).sum((1, 2))
        lowest = values[:, None].masked_fill(~inside, math.inf).amin(0)
        least = cells.minimise(form.expand(3, 1, 3).unsqueeze(-1)).squeeze(-1)
        assert bool((least <= lowest).all())
        torch.testing.assert_close(least, lowest, atol=0.05, rtol=0)
        for cell in range(3):
            ends = [tuple(side[cell].tolist()) for side in (cells.lower, cells.upper)]
            end = np.ones((1, 3))
            part = checker.Cell(np.arange(1), -end, end, p, 1.0, (0,), u.numpy(), *ends)
            independent = float(part.minimum(form.unsqueeze(-1).numpy())[0])
            assert independent <= lowest[cell]
            assert abs(independent - least[cell]) < 0.01


@given(
    st.integers(0, 2**31), st.integers(1, 2), st.integers(1, 3), st.sampled_from([1.0, 1.5, 2.0, math.inf])
)
@settings(max_examples=60, deadline=None)
def test_points_are_projected_into_their_cell(seed: int, moved: int, cuts: int, p: float) -> None:
    cuts = cuts if p == 2 else moved
    cells, generator = random_cells(seed, moved, cuts, 1.0, True, p)
    if len(set(cells.cuts.rows)) < cuts and p != 2:
        return  # planes of one row are looked at one by one: only in L2 does that lead into the cell
    nearest = torch.zeros_like(cells.lower).clamp(cells.lower, cells.upper)  # to the centre, along every cut
    reach = torch.linalg.vector_norm(cells.cuts.directions, cells.q, dim=1)
    cells = cells.select((nearest / reach).square().sum(1) < 0.98)
    delta = torch.randn(20, *cells.moved.shape, cells.width, generator=generator, dtype=torch.float64)
    assert bool(cells.contains(cells.project(delta), slack=1e-9).all())


def test_the_worst_cell_is_cut_until_all_are_proven() -> None:
    """Against margins that are known: of a cell, how far its furthest point along the first cut is from 1."""
    model = encoder(3)
    ball = buffet.LpBall(random_ball(3, 0.1).center, [[1, 2]], 2, 0.8)
    asked: list[Cell] = []

    def ask(cell: Cell) -> torch.Tensor:
        asked.append(cell)
        eps = float(cell.eps)
        lower, upper = cell.lower[0].clamp(-eps, eps), cell.upper[0].clamp(-eps, eps)
        return (1 - upper[0] - 0.2 * (upper - lower).sum())[None]

    tree = Tree(model.program64, ball, ask, 40, together=False)
    assert tree.grow(0.5)
    few = len(tree.leaves)
    assert tree.asked == len(asked) == 2 * few - 1
    assert tree.limit(0.5) >= tree.margin > 0
    assert tree.limit(0.4) > 0
    assert len(asked) == tree.asked, "a smaller ε is known"
    assert not tree.grow(1.2)
    assert few < len(tree.leaves) <= 40
    assert tree.limit(1.2) < 0 < tree.limit(0.5)
    cells = together([leaf.part.with_eps(0.8) for leaf in tree.leaves])
    _, inside = points_in(cells, torch.Generator().manual_seed(0))
    assert bool(inside.any(1).all())
    outer = [leaf for leaf in tree.leaves if leaf.part.upper[0, 0] > 0]
    assert len(outer) > len(tree.leaves) / 2, "cuts are where margins are low"


def test_a_tree_without_answers_proves_nothing() -> None:
    model, ball = encoder(3), random_ball(3, 0.1).select([0])
    for answer in (math.nan, math.inf, -math.inf, 0.0):
        tree = Tree(model.program64, ball, lambda cell, m=answer: torch.tensor([m, 1.0]), 6, together=False)
        assert not tree.grow(0.1)
        assert len(tree.leaves) == 6
        assert not tree.limit(0.05) > 0


def test_directions_of_large_networks_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ball = encoder(3), random_ball(3, 0.1).select([0])

    def directions() -> torch.Tensor:
        cell, _ = ball.cuttable(changes(model.program64, ball))
        assert isinstance(cell, Cell)
        return cell.cuts.directions

    whole = directions()
    monkeypatch.setattr(branching, "CHUNK", 1)
    torch.testing.assert_close(directions(), whole)
    monkeypatch.setattr(branching, "SOME", 30)
    assert float((directions()[0] @ whole[0]).abs()) > 0.8


@pytest.mark.parametrize(
    ("method", "p"), [("baseline", 2.0), ("lse", 1.0), ("lse", math.inf), ("backward", 2.0), ("buffet", 2.0)]
)
def test_cells_prove_more_and_nothing_wrong(method: str, p: float) -> None:
    model, ball = encoder(5), random_ball(5, 0.1, p)
    chosen = method_named(method, steps=4)
    if chosen.rivals:  # these see no cells, and learning takes its time
        chosen, ball = replace(chosen, rivals=chosen.rivals[:1]), ball.select([0])
    whole = buffet.radius(model, ball, chosen, tolerance=0.01)
    attacked = [task.attacked for task in whole.tasks]
    cells = buffet.radius(model, ball, method_named(chosen, cells=4), tolerance=0.01, attacked=attacked)
    for a, b in zip(whole.tasks, cells.tasks, strict=True):
        assert a.certified <= b.certified < b.attacked
    assert sum(b.certified for b in cells.tasks) > 1.01 * sum(a.certified for a in whole.tasks)
    size = [0.99 * b.certified for b in cells.tasks]
    found = buffet.verify(model, ball, size, method_named(chosen, cells=4))
    assert found.verdicts == ("certified",) * ball.tasks
    sized = ball.with_eps(size)
    points = sized.points(sized.sample(300, torch.Generator().manual_seed(1)))
    logits = model.program64.evaluate(points.double())
    margins = logits[..., found.label] - logits[..., 1 - found.label]
    assert bool((margins.amin(0) >= found.margins[:, 0]).all())


def test_cells_tell_how_far_they_are_and_end_with_the_budget() -> None:
    model, ball = encoder(5), random_ball(5, 0.1)
    seen: list[float] = []
    buffet.radius(
        model, ball, method_named("lse", cells=4), tolerance=0.01, attack=False, progress=seen.append
    )
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len({share for share in seen if 0.3 < share < 0.95}) >= 4
    rough = buffet.radius(model, ball, "interval", tolerance=0.5)
    short = buffet.radius(model, ball, method_named("lse", cells=1000), budget=0.05)
    assert short.seconds < 2
    assert all(a.certified <= b.attacked for a, b in zip(short.tasks, rough.tasks, strict=True))


class Known(Tree):
    """A tree that proves all up to a limit and, beyond it, cuts for as long as it may."""

    margin = 0.01  # type: ignore[assignment]

    def __init__(self, limit: float, interrupted_at: int = 1000) -> None:
        self.limit, self.interrupted_at, self.tried, self.asked = limit, interrupted_at, list[float](), 1

    def grow(self, eps: float, go_on: Callable[[], bool]) -> bool:
        self.tried.append(eps)
        if len(self.tried) == self.interrupted_at:
            raise KeyboardInterrupt
        while eps > self.limit and go_on():
            pass
        return eps <= self.limit


def searched(tree: Known, monkeypatch: pytest.MonkeyPatch, attacked: float) -> Found:
    """What a tree makes of a ball that is proven up to 1, within 1000 looks at the clock."""
    looks = count()
    monkeypatch.setattr(cell_search, "time", SimpleNamespace(perf_counter=lambda: float(next(looks))))
    monkeypatch.setattr(cell_search, "tree_of_cells", lambda *_: tree)
    goal = buffet.Property.margins(0, 2)
    query = Query(encoder(5), random_ball(5, 0.1).select([0]), goal, Engine(), None)
    schedule = Schedule(lambda guess, shape, most: secant(1.0, guess, 1e-3, most, shape), 1, None)
    schedule.brackets[0] = Bracket(1.0, 0.5)
    one = cell_search.CellSearch(query, method_named("lse"), schedule, 0, math.inf, attacked)
    return one.in_time(1000.0)


@pytest.mark.parametrize("attacked", [1.51, 1.6, math.inf])
def test_in_time_a_tree_is_asked_for_what_it_may_prove(
    monkeypatch: pytest.MonkeyPatch, attacked: float
) -> None:
    tree = Known(1.5)
    found = searched(tree, monkeypatch, attacked)
    assert 0.99 * tree.limit < found.brackets[0].certified <= tree.limit
    assert max(tree.tried) < attacked
    assert not found.interrupted


def test_of_an_interrupted_search_what_cells_have_proven_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = Known(1.5, interrupted_at=3)
    found = searched(tree, monkeypatch, 3.0)
    assert found.interrupted
    assert found.brackets[0].certified == tree.tried[1] > 1.1


def test_an_interrupted_radius_within_a_budget_is_what_is_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ball = encoder(5), random_ball(5, 0.1).select([0])
    proven = 0.25

    def interrupt(margin: MarginFunction, goal: radii.Goal, schedule: Schedule, *_: object) -> None:
        schedule.keep(Found({0: Bracket(proven, 0.1)}, {0: 1}, 1, interrupted=True))

    monkeypatch.setattr(radii, "_search", interrupt)
    found = buffet.radius(model, ball, "lse", attack=False, budget=1000.0)
    assert found.interrupted
    assert found.to_dict()["interrupted"]
    assert found.certified == proven
    with pytest.raises(KeyboardInterrupt):  # without a budget nobody waits for less than all
        buffet.radius(model, ball, "lse", attack=False)
    proven = 0.0
    with pytest.raises(KeyboardInterrupt):  # nothing is known
        buffet.radius(model, ball, "lse", attack=False, budget=1000.0)


def test_a_margin_function_that_is_interrupted_ends_a_search_with_what_it_has() -> None:
    asked: list[float] = []

    def margin(_: Sequence[int], sizes: Sequence[float]) -> list[float]:
        asked.extend(sizes)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return [1.0 / size for size in sizes]

    finder = secant(2.0, 0.1, 1e-3, 1e4)
    found = in_lockstep(margin, {0: finder}, None)
    assert found.interrupted
    assert found.brackets[0].certified == max(asked[:2])


def test_a_little_less_than_radius_found_with_cells_is_verified_again() -> None:
    """By other cells: those depend on ε."""
    model, ball = encoder(2), random_ball(2, 0.1)
    found = buffet.radius(model, ball, method_named("lse", cells=4), attack=False)
    size = [0.95 * task.certified for task in found.tasks]
    again = buffet.verify(model, ball, size, method_named("lse", cells=4), falsify=False)
    assert again.verdicts == ("certified",) * ball.tasks


def test_cells_of_a_ball_of_no_size_and_of_an_engine_with_little_memory() -> None:
    model, ball = encoder(5), random_ball(5, 0.1)
    assert buffet.verify(model, ball, 0.0, method_named("lse", cells=4), budget=1e-6).verdicts[0] in (
        "certified",
        "unknown",
    )
    small = buffet.Engine(memory=4 << 20)
    alone = replace(method_named("buffet"), rivals=())
    with_cells = buffet.verify(
        model, ball.select([0]), 2.0, method_named(alone, cells=2), falsify=False, engine=small
    )
    assert with_cells.verdict in ("certified", "unknown"), "and not an error"


def test_there_is_a_cell_at_least() -> None:
    model, ball = encoder(5), random_ball(5, 0.1)
    with pytest.raises(BuffetError, match="cells 0"):
        buffet.radius(model, ball, method_named("lse", cells=0))
