"""Search strategies on made-up margin functions, and certified radii of real models."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import pytest
import torch

import buffet
from buffet.errors import BuffetError
from buffet.loading import ModelConfig
from buffet.random_models import RandomModel, random_model
from buffet.regions import Box, LpBall
from buffet.search import LARGEST_RADIUS, radius
from buffet.strategies import SMALLEST_RADIUS, STRATEGIES, Bracket, Curve, secant, straight
from buffet.verify import Engine, verify

Margin = Callable[[float], float]
TOLERANCE = 1e-3
NAN = math.nan

# Every function is 1 at ε = 0. Name -> (margin, true radius).
SMOOTH: dict[str, tuple[Margin, float]] = {
    "linear": (lambda e: 1 - e / 0.37, 0.37),
    "concave": (lambda e: 1 - (e / 0.05) ** 2, 0.05),
    "convex": (lambda e: 2 * math.exp(-e / 0.2) - 1, 0.2 * math.log(2)),
    "steep": (lambda e: 1 - math.expm1(min(e / 0.01, 700)), 0.01 * math.log(2)),
    "like a verifier": (lambda e: 1 - 3 * e - (e / 0.15) ** 3, 0.12769316727738),
    "tiny": (lambda e: 1 - e / 3e-7, 3e-7),
    "large": (lambda e: 1 - e / 800.0, 800.0),
}
ROUGH: dict[str, tuple[Margin, float]] = {
    "kinked": (lambda e: 1 - e if e < 0.3 else 0.7 - 50 * (e - 0.3), 0.314),
    "jumping": (lambda e: 0.5 if e < 0.123 else -1e6, 0.123),
    "jumping to minus infinity": (lambda e: 1 - e if e < 0.2 else -math.inf, 0.2),
    "no bound beyond": (lambda e: 1 - e if e < 0.2 else NAN, 0.2),
    "no bound right away": (lambda e: 1.0 if e < 1e-6 else NAN, 1e-6),
    "flat then falling": (lambda e: 1.0 if e < 2.0 else 1 - 5 * (e - 2.0), 2.2),
    "huge negative": (lambda e: 1 - (e / 0.1) ** 40 if e < 1 else -1e300, 0.1),
    "zero beyond": (lambda e: max(0.0, 1 - e / 0.4), 0.4),
}
GUESSES = [1e-12, 0.01, 0.4, 1e9, math.inf, NAN]
MOST = 420  # evaluations, from any guess for any function


def run(
    name: str,
    margin: Margin,
    guess: float = 0.1,
    tolerance: float = TOLERANCE,
    largest: float = LARGEST_RADIUS,
) -> tuple[Bracket, list[float]]:
    """The result of a strategy and the sizes it asked for; fails if it does not come to an end."""
    search = STRATEGIES[name](1.0, guess, tolerance, largest, None)
    asked: list[float] = []
    try:
        eps = next(search)
        while len(asked) < MOST:
            asked.append(eps)
            eps = search.send(margin(eps))
    except StopIteration as stop:
        return stop.value, asked
    raise AssertionError(f"{name} is not finished after {MOST} evaluations, last at {asked[-3:]}")


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("function", [*SMOOTH, *ROUGH])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_returns_what_it_has_seen_proven(strategy, function, guess):
    margin, true = (SMOOTH | ROUGH)[function]
    bracket, asked = run(strategy, margin, guess)
    assert bracket.certified in asked
    assert bracket.margin == margin(bracket.certified) > 0
    if strategy == "bisection" or math.isfinite(bracket.failed):
        assert bracket.failed in asked
        assert not margin(bracket.failed) > 0
    assert bracket.certified < bracket.failed
    assert all(0 < eps <= LARGEST_RADIUS for eps in asked)
    assert bracket.certified <= true * (1 + 1e-9) <= bracket.failed * (1 + 2e-9)
    if strategy == "secant":
        assert bracket.certified >= true * (1 - TOLERANCE) * (1 - 1e-6)
        assert len(asked) <= 80


@pytest.mark.parametrize("tolerance", [0.3, 1e-2, 1e-6, 1e-12])
@pytest.mark.parametrize("function", [*SMOOTH, *ROUGH])
def test_secant_reaches_any_tolerance(function, tolerance):
    margin, true = (SMOOTH | ROUGH)[function]
    bracket, asked = run("secant", margin, tolerance=tolerance)
    assert bracket.certified >= true * (1 - tolerance) * (1 - 1e-6)
    assert len(asked) <= 80 + 3 * abs(math.log2(tolerance))


def test_secant_needs_few_evaluations():
    """From the first-order guess (0.4 × the linear extrapolation) a smooth margin takes a handful."""
    counts = []
    for name, (margin, true) in SMOOTH.items():
        if name in ("tiny", "large"):
            continue
        slope = (1 - margin(1e-9)) / 1e-9
        bracket, asked = run("secant", margin, guess=0.4 / slope if slope > 1e-6 else 0.4 * true)
        assert bracket.certified >= true * (1 - TOLERANCE)
        counts.append(len(asked))
    assert sum(counts) / len(counts) <= 9, counts
    assert max(counts) <= 12, counts


def test_what_a_method_learns_gives_failures_another_chance():
    """A method whose margins grow with every question is not held back by where it failed first."""
    asked = 0

    def margin(eps: float) -> float:
        nonlocal asked
        asked += 1
        return 1 - eps / min(0.5 + 0.1 * asked, 1.0)

    bracket, _ = run("secant", margin, guess=0.7)
    assert bracket.certified > 0.99


def test_secant_ends_even_below_the_resolution_of_numbers():
    bracket, _ = run("secant", SMOOTH["linear"][0], tolerance=1e-17)
    assert bracket.certified == pytest.approx(0.37)


@pytest.mark.parametrize("largest", [1e-3, 0.01, 5.0, LARGEST_RADIUS])
@pytest.mark.parametrize("guess", [1e-12, 1e-4, 0.4, 1e9])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_always_proven_ends_at_the_cap(strategy, guess, largest):
    for margin in (lambda e: 1.0, lambda e: 1 + e, lambda e: math.exp(-e / largest), lambda e: 1 / (1 + e)):
        bracket, asked = run(strategy, margin, guess, largest=largest)
        assert bracket.certified == largest
        assert max(asked) == largest
        assert bracket.failed == math.inf


def test_secant_without_a_guess_stays_below_the_cap():
    bracket, asked = run("secant", lambda e: 1.0, guess=math.inf, largest=1e-3)
    assert max(asked) <= 1e-3
    assert bracket.certified == 1e-3


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_never_proven_is_radius_zero(strategy, guess):
    for margin in (lambda e: -1.0, lambda e: NAN, lambda e: 0.0, lambda e: -math.inf, lambda e: -1e-300):
        bracket, asked = run(strategy, margin, guess)
        assert bracket.certified == 0.0
        assert bracket.margin == 1.0
        assert bracket.failed <= SMALLEST_RADIUS
        assert len(asked) <= 60


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_margin_that_jumps_about_still_ends(strategy, seed):
    """No order at all: the answer is still a size that was proven, above it one that was not."""

    def margin(eps: float) -> float:
        drawn = torch.rand(2, generator=torch.Generator().manual_seed(hash((seed, eps)) % 2**31))
        return NAN if drawn[0] < 0.1 else float(2 * drawn[1] - 1)

    bracket, asked = run(strategy, margin, guess=10.0 ** (seed % 7 - 4))
    if bracket.certified > 0:
        assert margin(bracket.certified) == bracket.margin > 0
        assert bracket.certified in asked
    assert bracket.certified < bracket.failed


@pytest.mark.parametrize(("true", "doublings"), [(0.37, 5), (0.0101, 0), (0.0099, 0), (0.001, -3)])
def test_bisection_is_the_one_of_the_paper(true, doublings):
    """From 0.01: double (or halve) until the radius lies between two sizes, then halve ten times."""
    bracket, asked = run("bisection", lambda e: 1 - e / true, guess=123.0)
    phase = asked[:-10]
    assert phase[0] == 0.01
    factor = 2 if true > 0.01 else 0.5
    assert phase == pytest.approx([0.01 * factor**i for i in range(len(phase))])
    outer = (phase[-2], phase[-1]) if true > 0.01 else (phase[-1], phase[-2])
    assert outer[0] < true < outer[1]
    assert len(phase) == 2 + abs(doublings)
    assert bracket.failed - bracket.certified == pytest.approx((outer[1] - outer[0]) / 2**10)


# --- the driver and real models -----------------------------------------------------------------------------


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


@pytest.mark.parametrize("search", STRATEGIES)
def test_one_task_leads_and_the_others_are_asked_in_one_call(search, monkeypatch):
    """After the first task one engine call per round, for unfinished tasks only; radii as one by one."""
    from buffet import driver as module

    sizes: list[int] = []
    original = module.bound_margins

    def counted(model, region, *rest):
        sizes.append(region.tasks)
        return original(model, region, *rest)

    monkeypatch.setattr(module, "bound_margins", counted)
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


def test_a_margin_is_learned_for_all_tasks_at_once_after_one_was_asked_without_learning(monkeypatch):
    from buffet import driver as module

    asked: list[tuple[str, int]] = []
    original = module.bound_margins

    def seen(model, region, method, *rest):
        asked.append((method.optimise, region.tasks))
        return original(model, region, method, *rest)

    monkeypatch.setattr(module, "bound_margins", seen)
    ball = LpBall(sentence(), [[0], [1], [3]], 2)
    learned = radius(small_model(), ball, "baseline", optimise="final", attack=False)
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
    right = radius(model, region, attack=False).label
    found = radius(model, region, label=1 - right, attack=False)
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
    found = radius(model, LpBall(sentence(), [1], 2), largest=0.5)
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
        ({"tolerance": NAN}, "tolerance"),
        ({"largest": math.inf}, "largest"),
        ({"largest": 0.0}, "largest"),
        ({"label": 2}, "label 2"),
        ({"window": 1}, "window"),
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
    words = [[i] for i, special in enumerate(model.special(text)) if not special]
    region = LpBall(model.embed(text), words, 2)
    found = radius(model, region, engine=Engine())
    for task in found.tasks:
        assert 0 < task.certified <= task.attacked < math.inf
        assert task.margin > 0
        assert task.evaluations <= 15
    assert verify(model, region, found.certified).verdict == "certified"
    assert verify(model, region, [t.attacked for t in found.tasks]).verdict != "certified"


def test_words_side_by_side_have_the_radii_they_have_one_after_the_other():
    """What is learned for a word does not depend on which other word came first."""
    model, x = small_model(), sentence()
    region = LpBall(x, [[0], [1], [2], [3]], 2)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            result = radius(model, region, "buffet", steps=5, attack=False)
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


def test_the_steepness_of_a_power_is_that_power():
    curve = Curve(2.0)
    assert math.isnan(curve.steepness())
    for eps in (0.1, 0.2, 0.21):
        curve = curve.after(eps, 2.0 * (1 - (eps / 0.25) ** 3))
    assert curve.steepness() == pytest.approx(3.0)


def test_what_is_close_by_the_shape_of_another_search_ends_it_at_once():
    """The least of the powers seen counts, and a distance by it a quarter more."""
    shape = straight([5.0, NAN, 4.0])
    assert shape is not None
    assert shape(-0.4) == pytest.approx(-0.1)
    assert straight([NAN]) is None

    def after(deficit: float) -> Generator[float, float, Bracket]:
        search = secant(1.0, 0.1, 0.02, 1.0, shape)
        assert next(search) == 0.1
        search.send(1 - deficit)
        return search

    with pytest.raises(StopIteration):  # the root is 1.3 % further, by the fourth power
        after(0.95)
    assert after(0.9)  # 2.7 %


def test_rivals_are_first_asked_in_single_precision_only(monkeypatch):
    """Where it is too narrow for a rival, its bounds are wide: no second try in double precision."""
    from buffet import driver

    widened: list[bool] = []
    original = driver.bound_margins

    def seen(model, region, method, label, engine, *rest):
        widened.append(engine.widen)
        return original(model, region, method, label, engine, *rest)

    monkeypatch.setattr(driver, "bound_margins", seen)
    monkeypatch.setattr(driver, "side_by_side", lambda work, items, done=None: [work(i) for i in items])
    found = radius(small_model(), LpBall(sentence(), [[0]], 2), "buffet", steps=5, attack=False)
    assert found.certified > 0
    assert widened[0]
    assert not all(widened)


def test_a_rival_that_gains_by_learning_is_asked_on_one_layer_however_far_it_is_before(monkeypatch):
    """alpha-CROWN's way of learning may prove a fifth more than the same bounds without it."""
    from buffet import driver

    asked: list[str] = []
    original = driver.Prover.learn_from

    def seen(self, tasks, eps):
        asked.append(self.method.propagation)
        return original(self, tasks, eps)

    monkeypatch.setattr(driver.Prover, "learn_from", seen)
    monkeypatch.setattr(driver, "CLOSE", -math.inf)  # nobody comes near without learning
    radius(small_model(), LpBall(sentence(), [[0], [1]], 2), "buffet", attack=False)
    assert "backward" in asked


@pytest.mark.parametrize("promising", [0.0, math.inf])
def test_a_rival_that_learns_searches_on_its_own_if_it_promises_something(monkeypatch, promising):
    """It is asked about the task that it comes nearest to without learning."""
    from buffet import driver

    learned: list[tuple[int, ...]] = []
    margins: list[float] = []
    ask, learn_from = driver.Prover.__call__, driver.Prover.learn_from

    def asked(self, tasks, eps):
        found = ask(self, tasks, eps)
        if self.method == buffet.METHODS["o-backward"].plain() and not self.query.engine.widen:
            margins[:] = found
        return found

    def seen(self, tasks, eps):
        if self.method == buffet.METHODS["o-backward"]:
            learned.append(tuple(tasks))
        return learn_from(self, tasks, eps)

    monkeypatch.setattr(driver.Prover, "__call__", asked)
    monkeypatch.setattr(driver.Prover, "learn_from", seen)
    monkeypatch.setattr(driver, "PROMISING", promising)
    model, region = small_model(), LpBall(sentence(), [[0], [1], [2]], 2)
    flagship = radius(model, region, "buffet", steps=5, attack=False)
    nearest = max(range(3), key=lambda task: margins[task])
    assert learned == [(nearest,), *([(0,), (1, 2)] if promising == 0 else [])]
    if promising == 0:
        alone = radius(model, region, "o-backward", attack=False)
        for ours, theirs in zip(flagship.tasks, alone.tasks, strict=True):
            assert ours.certified >= theirs.certified
