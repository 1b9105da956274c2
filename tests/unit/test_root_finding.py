"""Root finders on made-up margin functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

import pytest
import torch

from buffet.search.policy import POLICY
from buffet.search.radius import LARGEST_RADIUS
from buffet.search.root_finding import ROOT_FINDERS, Bracket, Curve, secant, straight

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
    """The result of a finder and the sizes it asked for; fails if it does not come to an end."""
    search = ROOT_FINDERS[name](1.0, guess, tolerance, largest, None)
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
@pytest.mark.parametrize("finder", ROOT_FINDERS)
def test_returns_what_it_has_seen_proven(finder, function, guess):
    margin, true = (SMOOTH | ROUGH)[function]
    bracket, asked = run(finder, margin, guess)
    assert bracket.certified in asked
    assert bracket.margin == margin(bracket.certified) > 0
    if finder == "bisection" or math.isfinite(bracket.failed):
        assert bracket.failed in asked
        assert not margin(bracket.failed) > 0
    assert bracket.certified < bracket.failed
    assert all(0 < eps <= LARGEST_RADIUS for eps in asked)
    assert bracket.certified <= true * (1 + 1e-9) <= bracket.failed * (1 + 2e-9)
    if finder == "secant":
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
@pytest.mark.parametrize("finder", ROOT_FINDERS)
def test_always_proven_ends_at_the_cap(finder, guess, largest):
    for margin in (lambda e: 1.0, lambda e: 1 + e, lambda e: math.exp(-e / largest), lambda e: 1 / (1 + e)):
        bracket, asked = run(finder, margin, guess, largest=largest)
        assert bracket.certified == largest
        assert max(asked) == largest
        assert bracket.failed == math.inf


def test_secant_without_a_guess_stays_below_the_cap():
    bracket, asked = run("secant", lambda e: 1.0, guess=math.inf, largest=1e-3)
    assert max(asked) <= 1e-3
    assert bracket.certified == 1e-3


@pytest.mark.parametrize("guess", GUESSES)
@pytest.mark.parametrize("finder", ROOT_FINDERS)
def test_never_proven_is_radius_zero(finder, guess):
    for margin in (lambda e: -1.0, lambda e: NAN, lambda e: 0.0, lambda e: -math.inf, lambda e: -1e-300):
        bracket, asked = run(finder, margin, guess)
        assert bracket.certified == 0.0
        assert bracket.margin == 1.0
        assert bracket.failed <= POLICY.smallest
        assert len(asked) <= 60


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("finder", ROOT_FINDERS)
def test_a_margin_that_jumps_about_still_ends(finder, seed):
    """No order at all: the answer is still a size that was proven, above it one that was not."""

    def margin(eps: float) -> float:
        drawn = torch.rand(2, generator=torch.Generator().manual_seed(hash((seed, eps)) % 2**31))
        return NAN if drawn[0] < 0.1 else float(2 * drawn[1] - 1)

    bracket, asked = run(finder, margin, guess=10.0 ** (seed % 7 - 4))
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
