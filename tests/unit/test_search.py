"""Certified radii of real models: which tasks are asked together, who else is asked, and what comes out."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import buffet
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.lab.random_models import RandomModel, random_model
from buffet.loading import ModelConfig
from buffet.methods import METHODS, Method, method_named
from buffet.optimisation.starts import STARTS
from buffet.regions import Box, LpBall
from buffet.search import margin_function, portfolio
from buffet.search.margin_function import MarginFunction
from buffet.search.policy import POLICY
from buffet.search.radius import radius
from buffet.search.root_finding import ROOT_FINDERS
from buffet.search.schedule import Schedule
from buffet.verification.verify import verify
from random_encoders import encoder

TOLERANCE = 1e-3


def small_model(seed: int = 0, classes: int = 2) -> RandomModel:
    config = ModelConfig(
        vocab_size=2,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
        hidden_act="relu",
        layer_norm="no_var",
        num_labels=classes,
    )
    return random_model(config, torch.Generator().manual_seed(seed))


def sentence(tokens: int = 4, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, 8, generator=torch.Generator().manual_seed(seed))


def flagship(*rivals: str, steps: int = 5) -> Method:
    """The flagship with few steps, and only some of its rivals."""
    assert set(rivals) <= set(METHODS["buffet"].rivals)
    return replace(METHODS["buffet"], steps=steps, rivals=rivals)


@pytest.mark.parametrize("search", ROOT_FINDERS)
def test_one_task_leads_and_the_others_are_asked_in_one_call(search, monkeypatch):
    """After the first task one engine call per round, for unfinished tasks only; radii as one by one."""
    sizes: list[int] = []
    original = margin_function.bound_margins

    def counted(model, region, *rest):
        sizes.append(region.tasks)
        return original(model, region, *rest)

    monkeypatch.setattr(margin_function, "bound_margins", counted)
    model, x = small_model(), sentence()
    words = [[0], [1], [3]]
    together = radius(model, LpBall(x, words, 2), "interval", search=search, attack=False)
    first, *others = (t.evaluations for t in together.tasks)
    assert len(sizes) == together.evaluations == first + max(others)
    assert sum(sizes) == first + sum(others)
    assert sizes[:first] == [1] * first
    assert sizes[first] == 2
    assert sizes[first:] == sorted(sizes[first:], reverse=True)
    for task, word in zip(together.tasks, words, strict=True):
        alone = radius(model, LpBall(x, [word], 2), "interval", search=search, attack=False)
        assert alone.certified == pytest.approx(task.certified, rel=1e-3)
        assert task.words == tuple(word)
        assert task.attacked == math.inf


def test_on_more_layers_tasks_start_in_groups_that_grow(monkeypatch):
    """Every group profits by what is known of the groups before it; none begins before these have ended."""
    begun: list[list[int]] = []
    original = Schedule.run

    def seen(self, margin, guesses, *rest):
        begun.append(list(guesses))
        return original(self, margin, guesses, *rest)

    monkeypatch.setattr(Schedule, "run", seen)
    found = radius(encoder(0), LpBall(sentence(6), [[i] for i in range(6)], 2), "interval", attack=False)
    assert begun == [[0], [1, 2], [3, 4, 5]]
    assert all(task.certified > 0 for task in found.tasks)


def test_a_margin_is_learned_for_all_tasks_at_once_after_one_was_asked_without_learning(monkeypatch):
    asked: list[tuple[str, int]] = []
    original = margin_function.bound_margins

    def seen(model, region, method, *rest):
        asked.append((method.optimise, region.tasks))
        return original(model, region, method, *rest)

    monkeypatch.setattr(margin_function, "bound_margins", seen)
    ball = LpBall(sentence(), [[0], [1], [3]], 2)
    learned = radius(small_model(), ball, method_named("baseline", optimise="final"), attack=False)
    first = [mode for mode, _ in asked].index("final")
    assert first > 0
    assert asked[:first] == [("none", 1)] * first
    assert asked[first] == ("final", 3)
    assert all(mode == "final" for mode, _ in asked[first:])
    plain = radius(small_model(), ball, "baseline", attack=False)
    for with_it, without in zip(learned.tasks, plain.tasks, strict=True):
        assert with_it.certified >= (1 - 2 * TOLERANCE) * without.certified


@pytest.mark.parametrize(("method", "p"), [("baseline", 1), ("baseline", math.inf), ("backward", 2)])
def test_the_radius_is_certified_and_a_little_more_is_not(method, p):
    model, x = small_model(classes=3), sentence()
    region = LpBall(x, [[1], [3]], p)
    found = radius(model, region, method)
    sizes = [t.certified for t in found.tasks]
    assert found.certified == min(sizes) > 0
    assert found.attacked == min(t.attacked for t in found.tasks)
    assert verify(model, region, sizes, method).verdict == "certified"
    beyond = verify(model, region, [1.002 * s for s in sizes], method)
    assert "certified" not in beyond.verdicts
    margins = verify(model, region, sizes, method).margins.amin(1).tolist()
    assert [t.margin for t in found.tasks] == pytest.approx(margins, rel=1e-5)
    for task in found.tasks:
        assert task.certified <= task.attacked


def test_the_paper_search_agrees_with_the_secant():
    model, region = small_model(), LpBall(sentence(), [[0], [2]], 2)
    secant, paper = (
        radius(model, region, "interval", search=s, attack=False) for s in ("secant", "bisection")
    )
    for a, b in zip(secant.tasks, paper.tasks, strict=True):
        assert a.certified == pytest.approx(b.certified, rel=3e-3)


def test_wrong_label_has_radius_zero():
    model, region = small_model(), LpBall(sentence(), [[0], [2]], 2)
    right = radius(model, region, "baseline", attack=False).label
    found = radius(model, region, "baseline", label=1 - right, attack=False)
    assert found.clean_margin < 0
    assert found.certified == found.attacked == 0.0
    assert found.evaluations == 0


def test_a_masked_sentence_has_the_radius_of_the_sentence():
    model, x = small_model(), sentence(6)
    mask = torch.tensor([True, True, False, True, False, True])
    padded = radius(model, LpBall(x, [[1], [5]], 2), "interval", mask=mask, attack=False)
    short = radius(model, LpBall(x[mask], [[1], [3]], 2), "interval", attack=False)
    assert [t.words for t in padded.tasks] == [(1,), (5,)]
    assert [t.certified for t in padded.tasks] == [t.certified for t in short.tasks]


def test_a_constant_model_is_certified_up_to_the_cap():
    model = small_model()
    *body, last = model.program64.nodes
    flat = type(model.program64)(
        (*body, type(last)(type(last.op)(0 * last.op.weight, last.op.bias), last.inputs))
    )
    model = RandomModel(model.config, flat.to(torch.float32), flat)
    found = radius(model, LpBall(sentence(), [1], 2), "baseline", largest=0.5)
    assert found.certified == 0.5
    assert found.attacked == math.inf


def test_progress_grows_to_one():
    seen: list[float] = []
    radius(small_model(), LpBall(sentence(), [[0], [2]], 2), "interval", attack=False, progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"search": "golden"}, "unknown search 'golden'"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"largest": math.inf}, "largest"),
        ({"largest": 0.0}, "largest"),
        ({"label": 2}, "label 2"),
    ],
)
def test_bad_arguments_are_one_line(settings, message):
    with pytest.raises(BuffetError, match=message) as caught:
        radius(small_model(), LpBall(sentence(), [1], 2), attack=False, **settings)
    assert "\n" not in str(caught.value)


def test_only_a_ball_has_a_radius():
    x = sentence()
    with pytest.raises(BuffetError, match="Box"):
        radius(small_model(), Box(x, x - 1, x + 1))


def test_every_word_of_the_embedded_model_is_bracketed():
    model = buffet.load()
    text = "a moving film"
    words = [[i] for i, special in enumerate(model.encode(text).special) if not special]
    region = LpBall(model.embed(text), words, 2)
    found = radius(model, region, "baseline", engine=Engine())
    for task in found.tasks:
        assert 0 < task.certified <= task.attacked < math.inf
        assert task.margin > 0
        assert task.evaluations <= 15
    assert verify(model, region, found.certified, "baseline").verdict == "certified"
    assert verify(model, region, [t.attacked for t in found.tasks], "baseline").verdict != "certified"


def test_words_side_by_side_have_the_radii_they_have_one_after_the_other():
    """What is learned for a word does not depend on which other word came first."""
    model, x = small_model(), sentence()
    region = LpBall(x, [[0], [1], [2], [3]], 2)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            result = radius(model, region, flagship("lse"), attack=False)
            assert torch.get_num_threads() == threads
            found.append([task.certified for task in result.tasks])
    finally:
        torch.set_num_threads(before)
    assert found[0] == pytest.approx(found[1], rel=1e-4)


@pytest.mark.parametrize("method", ["lse", "o-buffet", "buffet"])
def test_a_label_that_is_wrong_to_begin_with_has_radius_0_by_every_kind_of_search(method):
    model, x = small_model(), sentence()
    wrong = 1 - int(model.program64.evaluate(x.double()).argmax())
    found = radius(model, LpBall(x, [[0], [1]], 2), method, label=wrong)
    assert [(task.certified, task.attacked, task.evaluations) for task in found.tasks] == [(0.0, 0.0, 0)] * 2


def test_rivals_are_first_asked_in_single_precision_only(monkeypatch):
    """Where it is too narrow for a rival, its bounds are wide: no second try in double precision."""
    widened: list[bool] = []
    original = margin_function.bound_margins

    def seen(model, region, method, label, engine, *rest):
        widened.append(engine.widen)
        return original(model, region, method, label, engine, *rest)

    monkeypatch.setattr(margin_function, "bound_margins", seen)
    monkeypatch.setattr(portfolio, "side_by_side", lambda work, items, done=None: [work(i) for i in items])
    method = flagship("lse", "interval")
    found = radius(small_model(), LpBall(sentence(), [[0]], 2), method, attack=False)
    assert found.certified > 0
    assert widened[0]
    assert not all(widened)


def test_a_rival_that_gains_by_learning_is_asked_on_one_layer_however_far_it_is_before(monkeypatch):
    """alpha-CROWN's way of learning may prove a fifth more than the same bounds without it."""
    asked: list[str] = []
    original = MarginFunction.learn_from

    def seen(self, tasks, eps):
        asked.append(self.method.propagation)
        return original(self, tasks, eps)

    monkeypatch.setattr(MarginFunction, "learn_from", seen)
    # Nobody comes near without learning, nor with.
    policy = replace(POLICY, close=-math.inf, promising=math.inf)
    monkeypatch.setattr(portfolio, "POLICY", policy)
    radius(small_model(), LpBall(sentence(), [[0], [1]], 2), flagship("lse", "o-backward"), attack=False)
    assert "backward" in asked


@pytest.mark.parametrize("promising", [0.0, math.inf])
def test_a_rival_that_learns_searches_on_its_own_if_it_promises_something(monkeypatch, promising):
    """It is asked about the task that it comes nearest to without learning."""
    learned: list[tuple[int, ...]] = []
    margins: list[float] = []
    ask, learn_from = MarginFunction.__call__, MarginFunction.learn_from

    def asked(self, tasks, eps):
        found = ask(self, tasks, eps)
        if self.method == METHODS["o-backward"].plain() and not self.query.engine.widen:
            margins[:] = found
        return found

    def seen(self, tasks, eps):
        if self.method == METHODS["o-backward"]:
            learned.append(tuple(tasks))
        return learn_from(self, tasks, eps)

    monkeypatch.setattr(MarginFunction, "__call__", asked)
    monkeypatch.setattr(MarginFunction, "learn_from", seen)
    monkeypatch.setattr(portfolio, "POLICY", replace(POLICY, promising=promising))
    monkeypatch.setitem(METHODS, "o-backward", replace(METHODS["o-backward"], steps=30))
    # Of this network it proves more than a flagship that does not learn.
    model, region = small_model(1), LpBall(sentence(), [[0], [1], [2]], 2)
    best = radius(model, region, flagship("lse", "o-backward", steps=0), attack=False)
    nearest = max(range(3), key=lambda task: margins[task])
    assert learned == [(nearest,), *([(0, 1, 2)] if promising == 0 else [])]
    if promising == 0:
        alone = radius(model, region, "o-backward", attack=False)
        for ours, theirs in zip(best.tasks, alone.tasks, strict=True):
            assert ours.certified >= theirs.certified


def test_every_start_of_learning_can_be_searched_with():
    model, region = small_model(), LpBall(sentence(), [[0], [1]], 2)
    plain = radius(model, region, "baseline", attack=False)
    for start in STARTS:
        found = radius(model, region, method_named("o-buffet", start=start), attack=False)
        assert all(a.certified >= b.certified for a, b in zip(found.tasks, plain.tasks, strict=True))
