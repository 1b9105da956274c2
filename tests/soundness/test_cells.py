"""Balls cut into cells: bounds over cells hold, cells cover the ball, and what they prove is true."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import buffet
from buffet import branching
from buffet.branching import cut
from buffet.certificate import certify
from buffet.cli import main
from buffet.errors import BuffetError
from buffet.methods import method_named
from buffet.regions import Cell, Cuts
from buffet_checker import regions as checker
from buffet_checker.check import judge
from certificate_campaign import write_variant
from corruptions import Opened
from random_encoders import ball as random_ball
from random_encoders import encoder

TEXT = "a gripping film"


def random_cells(
    seed: int, moved: int, cuts: int, size: float, orthogonal: bool
) -> tuple[Cell, torch.Generator]:
    """The cells of a random ball; some of them may be empty."""
    generator = torch.Generator().manual_seed(seed)
    width = 6
    x = torch.randn(4, width, generator=generator, dtype=torch.float64)
    directions = torch.randn(width, width, generator=generator, dtype=torch.float64)
    directions = torch.linalg.qr(directions)[0] if orthogonal else directions
    rows = torch.randint(moved, (cuts,), generator=generator).tolist()
    counts = torch.randint(1, 4, (cuts,), generator=generator).tolist()
    places = [size * (2.4 * torch.rand(n, generator=generator).double() - 1.2) for n in counts]
    found = Cuts(tuple(rows), directions[:cuts], tuple(tuple(p.sort()[0].tolist()) for p in places))
    ball = buffet.LpBall(x, list(range(moved)), 2, size)
    return Cell(ball, found, found.cells), generator


def points_in(cells: Cell, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Points of the ball, and of which cells they are points."""
    ball = buffet.LpBall(cells.center, cells.moved[:1], 2, cells.eps[:1])
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
)
@settings(max_examples=200, deadline=None)
def test_no_point_of_a_cell_is_below_its_minimum(
    seed: int, moved: int, cuts: int, size: float, orthogonal: bool, scale: float, dtype: torch.dtype
) -> None:
    cells, generator = random_cells(seed, moved, cuts, size, orthogonal)
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
    if orthogonal:
        assert bool((least >= own - 16 * torch.finfo(dtype).eps * spread).all()), "planes never do harm"
    for cell in range(cells.tasks):
        part = checker.Cell(
            moved=np.arange(moved),
            lower=-np.full((moved, cells.width), size),
            upper=np.full((moved, cells.width), size),
            p=2,
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
        cuts = Cuts((0,), u, ((-0.5, 0.1, 0.6),))
        cells = Cell(buffet.LpBall(x, [0], 2, 1.0), cuts, cuts.cells)
        form = torch.randn(1, 1, 5, generator=generator, dtype=torch.float64).expand(4, -1, -1)
        lowest = cells.lowest(form)
        assert bool(cells.contains(lowest, slack=1e-9).all())
        values = (form * lowest).sum((1, 2))
        torch.testing.assert_close(values, cells.minimise(form.unsqueeze(-1)).squeeze(-1))


@given(st.integers(0, 2**31), st.integers(1, 2), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_points_are_projected_into_their_cell(seed: int, moved: int, cuts: int) -> None:
    cells, generator = random_cells(seed, moved, cuts, 1.0, True)
    nearest = torch.zeros_like(cells.lower).clamp(cells.lower, cells.upper)  # to the centre, along every cut
    cells = cells.select(nearest.square().sum(1) < 0.98)
    delta = torch.randn(20, *cells.moved.shape, cells.width, generator=generator, dtype=torch.float64)
    assert bool(cells.contains(cells.project(delta), slack=1e-9).all())


def test_a_ball_is_cut_across_what_moves_scores() -> None:
    model = encoder(3)
    ball = buffet.LpBall(random_ball(3, 0.1).center, [[1, 2]], 2, 0.1)
    for count in (2, 3, 6, 12):
        cells = cut(model.program64, ball, count)
        assert 1 < cells.tasks <= count
        assert len(cells.cuts.rows) == len(cells.cuts.places)
        _, inside = points_in(cells, torch.Generator().manual_seed(0))
        assert bool(inside.any(1).all())


def test_directions_of_large_networks_are_found_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ball = encoder(3), random_ball(3, 0.1).select([0])
    whole = cut(model.program64, ball, 4).cuts
    monkeypatch.setattr(branching, "CHUNK", 1)
    torch.testing.assert_close(cut(model.program64, ball, 4).cuts.directions, whole.directions)
    monkeypatch.setattr(branching, "SOME", 30)
    likely = cut(model.program64, ball, 4).cuts
    assert float((likely.directions[0] @ whole.directions[0]).abs()) > 0.8


@pytest.mark.parametrize("method", ["baseline", "lse", "backward", "buffet"])
def test_cells_prove_more_and_nothing_wrong(method: str) -> None:
    model, ball = encoder(5), random_ball(5, 0.1)
    chosen = method_named(method, steps=4)
    whole, cells = (buffet.radius(model, ball, chosen, cells=n) for n in (None, 4))
    for a, b in zip(whole.tasks, cells.tasks, strict=True):
        assert a.certified <= b.certified < b.attacked
    assert sum(b.certified for b in cells.tasks) > 1.01 * sum(a.certified for a in whole.tasks)
    size = [0.99 * b.certified for b in cells.tasks]
    found = buffet.verify(model, ball, size, chosen, cells=4)
    assert found.verdicts == ("certified", "certified")
    sized = ball.with_eps(size)
    points = sized.points(sized.sample(300, torch.Generator().manual_seed(1)))
    logits = model.program64.evaluate(points.double())
    margins = logits[..., found.label] - logits[..., 1 - found.label]
    assert bool((margins.amin(0) >= found.margins[:, 0]).all())


def test_cells_tell_how_far_they_are_and_end_with_the_budget() -> None:
    model, ball = encoder(5), random_ball(5, 0.1)
    seen: list[float] = []
    buffet.radius(model, ball, "lse", cells=4, attack=False, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    assert len({share for share in seen if 0.3 < share < 0.95}) >= 4
    whole = buffet.radius(model, ball, "lse")
    short = buffet.radius(model, ball, "lse", cells=1000, budget=0.05)
    assert short.seconds < 2
    assert all(a.certified <= b.attacked for a, b in zip(short.tasks, whole.tasks, strict=True))


def test_only_l2_balls_are_cut() -> None:
    model, ball = encoder(5), random_ball(5, 0.1)
    with pytest.raises(BuffetError, match="only L2 balls can be cut, not a Linf ball"):
        buffet.radius(model, random_ball(5, 0.1, math.inf), "lse", cells=2)
    box = buffet.Box(ball.center, ball.center - 0.1, ball.center + 0.1, words=[1])
    with pytest.raises(BuffetError, match="not a Box"):
        buffet.verify(model, box, method="lse", cells=2)
    with pytest.raises(BuffetError, match="cells 0"):
        buffet.radius(model, ball, "lse", cells=0)


# --- certificates -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def proven(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, object]:
    """A certificate of a ball that is proven by cells only."""
    path = tmp_path_factory.mktemp("cells") / "model"
    model = buffet.load(write_variant(path, {"layer_norm": "no_var", "num_hidden_layers": 2}, 1))
    ball = buffet.LpBall(model.embed(TEXT), [2])
    whole, cells = (buffet.radius(model, ball, "lse", cells=n).certified for n in (None, 6))
    assert cells > 1.02 * whole
    region = ball.with_eps(0.2 * whole + 0.8 * cells)
    _, content, checkpoint = certify(model, [region], method_named("lse", cells=6))
    return content, checkpoint


def test_a_certificate_of_cells_is_accepted(proven: tuple[bytes, object]) -> None:
    result = judge(proven[0], "certificate", proven[1])
    assert result.accepted, result.reason
    assert [proof.cells for proof in result.proofs] == [len(Opened.of(proven[0]).head["claims"])]
    assert result.proofs[0].cells > 1


def _drop(opened: Opened) -> None:
    opened.head["claims"].pop()
    number = len(opened.head["claims"])
    opened.tensors = {k: v for k, v in opened.tensors.items() if not k.startswith(f"{number}.")}


def _shrink(opened: Opened) -> None:
    cell = next(c for c in opened.head["claims"] if c["region"]["upper"][0] is not None)
    cell["region"]["upper"][0] -= 1e-3


def _close(opened: Opened) -> None:
    cell = next(c for c in opened.head["claims"] if c["region"]["upper"][0] is None)
    cell["region"]["upper"][0] = 1e6


def _smaller(opened: Opened) -> None:
    opened.claim["region"]["eps"] *= 0.9


def _apart(opened: Opened) -> None:
    opened.claim["region"]["cuts"] = 77
    opened.tensors["cuts.77"] = opened.tensors["cuts.0"]


def _turned(opened: Opened) -> None:
    opened.tensors["cuts.0"] = -opened.tensors["cuts.0"][:, ::-1].copy()


def _empty(opened: Opened) -> None:
    region = opened.claim["region"]
    region["lower"], region["upper"], region["rows"] = [], [], []


def _reversed(opened: Opened) -> None:
    region = opened.claim["region"]
    region["lower"][0], region["upper"][0] = 1.0, -1.0


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (_drop, "is not claimed"),
        (_shrink, "gap, or an overlap"),
        (_close, "gap, or an overlap"),
        (_smaller, "another eps"),
        (_apart, "is not claimed|gap, or an overlap"),
        (_turned, "node"),
        (_empty, "another rows"),
        (_reversed, "not below"),
    ],
)
def test_cells_that_prove_nothing_are_rejected(
    proven: tuple[bytes, object], corrupt: Callable[[Opened], None], reason: str
) -> None:
    opened = Opened.of(proven[0])
    corrupt(opened)
    result = judge(opened.close(), "certificate", proven[1])
    assert not result.accepted
    assert re.search(reason, result.reason), result.reason


def test_the_command_writes_and_checks_cells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "proof.safetensors"
    command = ["certify", "a gripping , moving film", "--words", "3", "--method", "lse", "--no-attack"]
    assert main([*command, "--eps", "0.7", "--cells", "4", "--certificate", str(path)]) == 0
    assert "4 cells" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    assert "row 3 · 4 cells" in capsys.readouterr().out
    assert main([*command, "--norm", "1", "--cells", "4"]) == 2
    assert "only L2 balls" in capsys.readouterr().err
