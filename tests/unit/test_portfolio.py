"""Who is asked, and in which order: the cheapest method first, and nobody once a task is settled."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch

from buffet.attack import AttackSettings
from buffet.methods import METHODS, Method, method_named
from buffet.regions import LpBall
from buffet.search.policy import POLICY
from buffet.search.portfolio import Ladder
from buffet.verification.verify import verify
from random_encoders import ball, encoder

VERIFY = sys.modules["buffet.verification.verify"]  # the package's attribute of that name is the function
FLAGSHIP = method_named("buffet", steps=2)
Asked = list[tuple[Method, int]]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Every method that `verify` asks, with the number of tasks."""
    seen: Asked = []
    original = VERIFY.bound_margins

    def recorded(model, region, method, *rest, **named):
        seen.append((method, region.tasks))
        return original(model, region, method, *rest, **named)

    monkeypatch.setattr(VERIFY, "bound_margins", recorded)
    return seen


def test_a_ladder_goes_from_cheap_to_expensive():
    shallow, deep = encoder(0, layers=1).program64, encoder(0, layers=2).program64
    ladder = Ladder.of(FLAGSHIP, shallow)
    assert ladder.quick == (METHODS["lse"], METHODS["interval"])
    assert ladder.plain == (FLAGSHIP.plain(),)
    assert all(rival.learns for rival in ladder.slow)
    assert list(ladder)[-len(ladder.slow) - 1] == FLAGSHIP
    assert Ladder.of(FLAGSHIP, deep).slow == ()  # learning end to end pays on one layer only
    assert list(Ladder.of(METHODS["o-buffet"], shallow)) == [METHODS["o-buffet"]]


def test_a_quick_proof_is_enough(asked):
    model, region = encoder(0), ball(0, 1e-3)
    assert verify(model, region, method=FLAGSHIP).verdict == "certified"
    assert asked == [(METHODS["lse"], 2)]


def test_tasks_leave_as_soon_as_they_are_proven(asked):
    model, region = encoder(0), ball(0, 1e-3).with_eps([1e-3, 0.3])
    found = verify(model, region, method=FLAGSHIP, falsify=False)
    assert found.verdicts[0] == "certified"
    assert asked[0] == (METHODS["lse"], 2)
    assert {tasks for _, tasks in asked[1:]} == {1}
    methods = [method for method, _ in asked]
    assert methods == [METHODS["lse"], METHODS["interval"], FLAGSHIP.plain(), FLAGSHIP][: len(methods)]


def test_what_is_plainly_false_ends_before_anything_expensive(asked):
    model, region = encoder(0), ball(0, 1e3)
    for falsify in (True, AttackSettings(seed=1)):
        asked.clear()
        found = verify(model, region, method=FLAGSHIP, falsify=falsify)
        assert found.verdict == "falsified"
        assert {method for method, _ in asked} <= {METHODS["lse"], METHODS["interval"]}
        assert not (found.margins > 0).all(-1).any()


def test_the_best_margin_is_that_of_the_best_method(asked):
    model, region = encoder(0), ball(0, 0.02)
    first = verify(model, region, method=FLAGSHIP, falsify=False).margins
    asked.clear()
    best = verify(model, region, method=FLAGSHIP, falsify=False, best=True).margins
    assert [method for method, _ in asked] == [METHODS["lse"], METHODS["interval"], FLAGSHIP]
    alone = verify(model, region, method=replace(FLAGSHIP, rivals=()), falsify=False).margins
    assert (best >= first).all()
    assert (best >= alone).all()


def test_a_rival_that_cannot_win_does_not_learn(asked, monkeypatch):
    """On one layer `o-backward` may learn, unless the method is so far from a proof that nobody finds one."""
    model, region = encoder(0, layers=1), ball(0, 30.0).select([0])
    verify(model, region, method=FLAGSHIP, falsify=False)
    assert (FLAGSHIP, 1) in asked
    assert (METHODS["o-backward"], 1) not in asked
    asked.clear()
    monkeypatch.setattr(VERIFY, "POLICY", replace(POLICY, close=float("inf")))
    quick = replace(METHODS["o-backward"], steps=1)
    monkeypatch.setitem(METHODS, "o-backward", quick)
    verify(model, region, method=FLAGSHIP, falsify=False)
    assert (quick, 1) in asked


def test_nobody_makes_a_wrong_answer_right(asked):
    model, region = encoder(0), ball(0, 0.01)
    wrong = 1 - int(model.program64.evaluate(region.center.double()).argmax())
    found = verify(model, region, method=FLAGSHIP, label=wrong)
    assert found.verdict == "falsified"
    assert asked == [(METHODS["lse"], 2)]


def test_a_trace_hears_every_step_of_the_method_though_a_rival_has_proven_the_task():
    model, region = encoder(0), ball(0, 1e-3)
    told: list[tuple[list[int], int]] = []

    def trace(tasks: list[int], step: int, margins: torch.Tensor) -> None:
        told.append((tasks, step))

    assert verify(model, region, method=FLAGSHIP, trace=trace).verdict == "certified"
    assert sorted(told) == [([task], step) for task in (0, 1) for step in range(FLAGSHIP.steps)]


def test_without_a_portfolio_a_method_answers_for_itself(asked):
    model, region = encoder(0), LpBall(ball(0, 0.1).center, [[1]], 2, 1e-3)
    verify(model, region, method=method_named("buffet", steps=2, softmax="lse"))
    assert [method.softmax for method, _ in asked] == ["lse"]
    assert asked[0][0].rivals == ()
