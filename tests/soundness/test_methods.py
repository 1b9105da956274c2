"""The soundness campaign in small: no method is ever wrong, and one that is would be noticed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from buffet.cli import main
from buffet.engine import Engine, bound_margins
from buffet.errors import BuffetError
from buffet.lab.soundness import CampaignState, campaign, case_of, check_bounds, known_methods, points_of
from buffet.lab.soundness.claims import check_margins, check_verdicts
from buffet.lab.soundness.planted import planted_case
from buffet.methods import METHODS
from buffet.regions import CandidateSet, LpBall
from buffet.relaxations.table import Relaxer
from engine_mutants.hunting import SEEDS, Mutant, Patch, evidence, hunt
from engine_mutants.table import MUTANTS

PLAIN = [name for name, method in METHODS.items() if method.optimise == "none"]
COMMON = [m for m in MUTANTS if not any(isinstance(case, str) for case in m.cases) and len(m.cases) < 2]
QUICK = [m for m in COMMON[::2] if m.name not in ("one class", "own token", "NaN", "forms exchanged")]
LEARNED = [name for name, method in METHODS.items() if method.optimise != "none"]


def final(networks: int, methods: list[str] | None, seed: int = 0) -> CampaignState:
    *_, progress = campaign(networks, 60, seed, methods)
    return progress


@pytest.mark.parametrize("seed", [28])
def test_no_method_is_ever_wrong(seed):
    """Networks on which every method has a bound; `make soundness` has hundreds of all kinds."""
    progress = final(1, PLAIN, seed)
    assert list(progress.tallies) == PLAIN
    assert progress.violations == ()
    for tally in progress.tallies.values():
        assert (tally.networks, tally.no_bound) == (1, 0)
        assert tally.checks > 100


@pytest.mark.parametrize("method", LEARNED)
def test_learning_is_never_wrong_either(method):
    """A few steps are enough: every iterate must be sound."""
    found = check_margins(evidence(28), replace(known_methods()[method], steps=3), method)
    assert found.violations == ()
    assert found.checks > 100


def test_a_campaign_can_be_repeated_and_split():
    whole = final(2, ["interval"], seed=27)
    parts = [final(1, ["interval"], seed) for seed in (27, 28)]
    assert whole == final(2, ["interval"], seed=27)
    assert whole.points == sum(part.points for part in parts)
    assert whole.checks == sum(part.checks for part in parts)
    assert (whole.first, whole.next, whole.networks, whole.planted) == (27, 29, 2, 0)


def test_all_methods_have_their_turn():
    """Slow ones rarely: on this network it is the turn of few."""
    progress = final(1, None, seed=28)
    assert set(progress.tallies) == set(known_methods()) > set(METHODS)
    assert progress.violations == ()


def test_unknown_methods_are_named():
    with pytest.raises(BuffetError, match="unknown method 'none'; choose one of: interval, "):
        final(1, ["none"])


# --- points -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(0, 12, 2))
def test_all_points_are_points_of_the_region(seed):
    points = points_of(case_of(seed), 30)
    assert bool(points.case.region.contains(points.deltas).all())
    assert bool(points.margins.isfinite().all())


def test_small_candidate_sets_are_tried_exhaustively():
    points = evidence(282)
    region = points.case.region
    assert isinstance(region, CandidateSet)
    assert points.exhaustive
    assert points.deltas.shape[0] == region.offsets.shape[2] ** region.moved.shape[1]
    sampled = points_of(replace(points.case, mask=points.case.mask), 3).deltas  # made again, the same
    assert torch.equal(sampled, points.deltas)


@pytest.mark.parametrize("seed", [203, 311, 32, 116, 185])
def test_planted_points_are_just_inside_their_radius(seed):
    case = planted_case(seed)
    assert isinstance(case.region, LpBall)
    assert case.known is not None
    margins = evidence(seed).margins.amin(-1).amin(0)
    assert -1e-5 < margins[0] < 0  # there is another answer, only just
    # and a little inside of it there is none
    assert margins[1] > margins[0]
    logits = case.model.program64.evaluate(case.region.center.double())
    assert int(logits.argmax()) == case.label


def test_planted_radii_are_nearly_proven_on_linear_networks():
    """So the checks have teeth: the bound of the ball outside of which the point is planted is above 0."""
    case = planted_case(32)
    bounds = bound_margins(case.model, case.inner, known_methods()["backward"], case.label, Engine())
    assert bounds[0].min() < 0 < bounds[1].min()


# --- mutants ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_without_a_mutant_nothing_is_noticed(seed):
    name = "lse" if seed in (203, 28, 43) else "baseline"
    points, method = evidence(seed), known_methods()[name]
    assert all(found.violations == () for found in check_bounds(points, method, name, inside=True))
    if seed == 311:
        assert check_verdicts(points, known_methods()["interval"], "interval").violations == ()


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_mutants_are_noticed(mutant):
    """Those that show at once; `make soundness` has all."""
    assert hunt(mutant).violation is not None


def test_mutants_leave_the_engine_as_it_was():
    right = vars(Relaxer)["__call__"]
    with Patch(Relaxer, "__call__", lambda right: None)():
        assert vars(Relaxer)["__call__"] is None
    assert vars(Relaxer)["__call__"] is right
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_a_harmless_mutant_is_not_noticed(monkeypatch):
    monkeypatch.setattr("engine_mutants.hunting.SEEDS", (28,))
    harmless = Mutant("none", "nothing", LpBall, "minimise", lambda right: right, ("interval",))
    assert hunt(harmless).violation is None


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_counts(capsys):
    assert (
        main(["soundness", "--networks", "2", "--points", "10", "--seed", "27", "--method", "interval"]) == 0
    )
    shown = capsys.readouterr().out
    assert "seeds 27 to 28: 2 networks (0 planted" in shown
    assert "0 violations" in shown


def test_a_violation_is_told_with_all_that_shows_it_again(capsys, monkeypatch):
    right = LpBall.minimise

    def nothing(self: LpBall, form: Tensor) -> Tensor:
        return 0.0 * right(self, form)

    monkeypatch.setattr(LpBall, "minimise", nothing)
    command = ["soundness", "--networks", "1", "--points", "10", "--seed", "300", "--method", "baseline"]
    assert main(command) == 1
    shown = capsys.readouterr().out
    assert "VIOLATION baseline, margin: " in shown
    assert "buffet soundness --networks 1 --seed 300 --method 'baseline'" in shown
    assert main([*command, "--json"]) == 1
    first = json.loads(capsys.readouterr().out)["tallies"]["baseline"]["violations"][0]
    assert (first["seed"], first["method"], first["claim"], first["task"]) == (300, "baseline", "margin", 0)
    case = case_of(300)
    delta = torch.tensor(first["point"], dtype=torch.float64).expand(case.region.tasks, -1, -1)
    rows = case.region.points(delta)
    margins = case.model.program64.margins(case.label).evaluate(rows, case.mask.expand(rows.shape[:-1]))
    assert any(float(m) == pytest.approx(first["value"], abs=1e-9) for m in margins[0])
    assert first["bound"] > first["value"]
    assert case.engine.dtype == torch.float32
