"""Lines whose slope is one at which something happens: a tangent point appears, vanishes, or goes to ∞.

Also of an activation that the table does not have, a SiLU, whose entry is made as that of a GELU is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import mpmath
import pytest
import torch
from mpmath import mpf
from test_relaxations import NAMES, Interval, check, columns, samples
from torch import Tensor

from buffet.network.functions import FUNCTIONS, _gelu_entry
from buffet.relaxations.elementwise import default_slopes, relax, slope_range
from reference_functions import REFERENCE

TINY = [0.0, 5e-324, 1e-320, 2.2250738585072014e-308, 1e-300, 1e-280, 1e-20]
HUGE = [1e20, 1e150, 1.7976931348623157e308, math.inf]
STEPS = 3
"""So many floats on either side of a critical slope."""
BATCHES = (1, 5, 37)
"""Vectors of different lengths: a library may round their last entries, or all of them, in another way."""
SPREAD = 1e-9
"""Rounding moves a point where f' = k by so much: f' is known to 1e-16, and flat where f'' is 0."""


def _silu_slopes(x: Tensor) -> tuple[Tensor, Tensor]:
    """With s = σ(x): ``f' = s + x·s(1−s)``, ``f'' = s(1−s)(2 + x(1−2s))``."""
    s = torch.sigmoid(x)
    bell = s * torch.sigmoid(-x)
    return s + x * bell, bell * (2 + x * (1 - 2 * s))


@pytest.fixture
def silu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with a SiLU, ``x·σ(x)``."""
    entry = _gelu_entry(lambda x: x * torch.sigmoid(x), _silu_slopes)
    monkeypatch.setitem(FUNCTIONS, "silu", entry)
    monkeypatch.setitem(REFERENCE, "silu", lambda x: x / (1 + mpmath.exp(-x)))


def _near(value: float) -> Iterator[float]:
    """A number and the floats around it."""
    yield value
    for outward in (-math.inf, math.inf):
        near = value
        for _ in range(STEPS):
            near = math.nextafter(near, outward)
            yield near


def critical(name: str) -> Tensor:
    """Slopes at and around all that are special for a function, and those far beyond them."""
    f = FUNCTIONS[name]
    special = {sign * value for value in (*TINY, 0.5, 1.0, *HUGE) for sign in (-1.0, 1.0)}
    for point in (*f.inflections, f.valley):
        for length in BATCHES if math.isfinite(point) else ():
            at = torch.full((length,), point, dtype=torch.float64)
            slopes = f.derivative(at)
            special |= {float(v) for v in torch.cat([slopes, 1 - slopes])}
    slopes = sorted({k for value in special for k in _near(value)})
    return torch.tensor([*slopes, math.nan], dtype=torch.float64)


def intervals_of(name: str) -> list[Interval]:
    """Wide and narrow ones around inflections and the valley, and far out."""
    f = FUNCTIONS[name]
    places = [p for p in (*f.inflections, f.valley, 0.3, 30.0) if math.isfinite(p) and p > f.domain]
    found = [(p, -w, 2 * w) for p in places for w in (1e-9, 1e-3, 0.4, 6.0) if p - w > f.domain]
    return found if f.domain == 0 else [*found, (-30.0, -60.0, 5.0), (0.0, -700.0, 600.0)]


def check_points(name: str) -> None:
    """Whatever `minima` and `maxima` call a point has f' = k; where there is none, they say NaN."""
    f, slopes = FUNCTIONS[name], critical(name)
    for length in BATCHES:
        for part in slopes.split(length):
            for point in (*f.minima(part), *f.maxima(part)):
                known = ~point.isnan()
                bend = f.derivative(torch.stack([point - SPREAD, point + SPREAD])) - part
                reached = (bend.abs().amin(0) <= 1e-11 * (1 + part.abs())) | (
                    bend.amin(0) * bend.amax(0) <= 0
                )
                assert bool(reached[known].all()), (name, part[known & ~reached], point[known & ~reached])


def check_lines(name: str) -> None:
    """Lines with these slopes bound the function, exactly."""
    slopes = critical(name)
    slopes = slopes[slopes.abs() < 1e3]
    intervals = intervals_of(name)
    if name == "exp":
        intervals = [i for i in intervals if i[0] + i[2] < 300]
    # every slope meets some interval, and neighbours of a slope the same one
    chosen = [intervals[i // (2 * STEPS + 1) % len(intervals)] for i in range(len(slopes))]
    lines = relax(name, *columns(chosen), lower_slope=slopes, upper_slope=slopes)
    check(name, chosen, lines)
    finite = lines.lower_intercept.isfinite() & lines.upper_intercept.isfinite()
    assert finite.float().mean() > 0.9


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_critical_slopes_are_met_where_they_are(name: str) -> None:
    check_points(name)


@pytest.mark.parametrize("name", NAMES)
def test_lines_of_critical_slopes_are_sound(name: str) -> None:
    check_lines(name)


@pytest.mark.usefixtures("silu")
def test_a_new_activation_is_one_entry() -> None:
    """A SiLU: its points, its lines of any slope, its default lines and its range of useful slopes."""
    check_points("silu")
    check_lines("silu")
    center, lower, upper = samples("silu", 40, seed=3)
    intervals = list(zip(center.tolist(), lower.tolist(), upper.tolist(), strict=True))
    check("silu", intervals, relax("silu", center, lower, upper))
    for k in default_slopes("silu", center, lower, upper):
        assert bool((k.abs() < 1.2).all())
    least, most = slope_range("silu", center, lower, upper, "lower")
    check("silu", intervals, relax("silu", center, lower, upper, lower_slope=least, upper_slope=most))
    with mpmath.workprec(200):
        for i, (c, low, high) in enumerate(intervals[:10]):
            image = FUNCTIONS["silu"].image((center + torch.stack([lower, upper]))[:, i])
            for share in range(9):
                value = REFERENCE["silu"](mpf(c) + mpf(low) + (mpf(high) - mpf(low)) * share / 8)
                assert mpf(float(image[0])) - mpf(1e-15) <= value <= mpf(float(image[1])) + mpf(1e-15)
