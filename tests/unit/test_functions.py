"""The table of functions: values, derivatives, stationary points and images."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from torch import Tensor

from buffet.network.functions import FUNCTIONS
from reference_functions import REFERENCE

NAMES = sorted(FUNCTIONS)


def grid(name: str, reach: float = 12.0, points: int = 4001) -> Tensor:
    low = 1e-3 if FUNCTIONS[name].domain == 0 else -reach
    return torch.linspace(low, reach, points, dtype=torch.float64)


@pytest.mark.parametrize("name", NAMES)
def test_value_is_within_its_rounding_bound(name: str) -> None:
    f = FUNCTIONS[name]
    x = torch.cat([grid(name, 12.0, 151), grid(name, 300.0, 50), grid(name, 1e-3, 20)])
    x = x[x > f.domain]
    value = f.value(x)
    bound = f.rounding(x, value)
    with mpmath.workprec(200):
        for xi, vi, bi in zip(x.tolist(), value.tolist(), bound.tolist(), strict=True):
            assert abs(mpmath.mpf(vi) - REFERENCE[name](mpmath.mpf(xi))) <= bi


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_value_keeps_dtype_and_shape(name: str, dtype: torch.dtype) -> None:
    x = torch.rand(2, 3, 4, dtype=dtype) + 0.5
    for result in (FUNCTIONS[name].value(x), FUNCTIONS[name].derivative(x)):
        assert result.dtype == dtype
        assert result.shape == x.shape


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_agrees_with_torch(name: str) -> None:
    x = grid(name)
    expected = torch.nn.functional.gelu(x, approximate="none" if name == "gelu" else "tanh")
    torch.testing.assert_close(FUNCTIONS[name].value(x), expected, rtol=0, atol=5e-15)


@pytest.mark.parametrize("name", NAMES)
def test_derivative_is_that_of_value(name: str) -> None:
    x = grid(name).requires_grad_()
    f = FUNCTIONS[name]
    (gradient,) = torch.autograd.grad(f.value(x).sum(), x)
    torch.testing.assert_close(f.derivative(x.detach()), gradient, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", [n for n in NAMES if FUNCTIONS[n].second is not None])
def test_second_derivative_and_inflections(name: str) -> None:
    f = FUNCTIONS[name]
    x = grid(name).requires_grad_()
    (gradient,) = torch.autograd.grad(f.derivative(x).sum(), x)
    assert f.second is not None
    torch.testing.assert_close(f.second(x.detach()), gradient, rtol=1e-9, atol=1e-13)
    for t in f.inflections:
        assert f.second(torch.tensor(t, dtype=torch.float64)).abs() < 1e-15


@pytest.mark.parametrize("name", [n for n in NAMES if n != "relu"])
def test_stationary_finds_every_root_of_the_derivative(name: str) -> None:
    """Between neighbours of a fine grid, f' − k changes sign exactly where `stationary` reports a root."""
    f = FUNCTIONS[name]
    x = grid(name, 12.0, 12001)
    slopes = f.derivative(x)
    for k in [*(slopes[:: len(x) // 60] + 1e-7).tolist(), -0.128, -0.05, -1e-9, 0.3, 1.0 + 1e-9, 1.05, 1.128]:
        target = torch.tensor(k, dtype=torch.float64)
        signs = torch.sign(slopes - target)
        crossings = x[1:][signs[1:] != signs[:-1]].tolist()
        roots = sorted(float(r) for r in f.stationary(target) if x[0] < r < x[-1])
        assert len(roots) == len(crossings), (k, roots, crossings)
        for root, crossing in zip(roots, crossings, strict=True):
            assert crossing - 1.001 * float(x[1] - x[0]) <= root <= crossing
            found = f.derivative(torch.tensor(root, dtype=torch.float64))
            torch.testing.assert_close(found, target, rtol=1e-13, atol=2e-15)


@pytest.mark.parametrize("name", NAMES)
def test_minima_and_maxima_are_what_they_say(name: str) -> None:
    f = FUNCTIONS[name]
    x = grid(name)
    k = f.derivative(x)
    for points, sign in ((f.minima(k), 1.0), (f.maxima(k), -1.0)):
        for p in points:
            near = p + 1e-3 * p.abs().clamp(min=1e-3) * torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
            gap = sign * ((f.value(near) - k * near) - (f.value(p) - k * p))
            assert gap[:, p.isfinite()].min() >= -1e-13 * f.value(x).abs().max()


def test_stationary_is_nan_where_there_is_none() -> None:
    none = {"tanh": [-0.1, 1.1, 0.0], "exp": [-1.0, 0.0], "reciprocal": [0.0, 1.0], "rsqrt": [0.0, 1.0]}
    none |= {"sqrt": [0.0, -1.0], "gelu": [-0.13, 1.13], "gelu_tanh": [-0.13, 1.13]}
    for name, slopes in none.items():
        for points in FUNCTIONS[name].stationary(torch.tensor([*slopes, math.nan], dtype=torch.float64)):
            assert points.isnan().all(), name


@pytest.mark.parametrize("name", NAMES)
def test_image_is_the_range(name: str) -> None:
    f = FUNCTIONS[name]
    generator = torch.Generator().manual_seed(0)
    ends = 4 * torch.randn(2, 500, dtype=torch.float64, generator=generator)
    ends = ends.abs() + 1e-3 if f.domain == 0 else ends
    lower, upper = ends.amin(0), ends.amax(0)
    upper[:20] = lower[:20]
    low, high = f.image(torch.stack([lower, upper]))
    t = torch.linspace(0, 1, 2001, dtype=torch.float64)[:, None]
    values = f.value(torch.lerp(lower, upper, t))
    assert (low <= values.amin(0)).all()
    assert (high >= values.amax(0)).all()
    torch.testing.assert_close(low, values.amin(0), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(high, values.amax(0), rtol=1e-14, atol=1e-14)


def test_image_at_the_valley() -> None:
    for name, least in (("square", 0.0), ("gelu", -0.16997120747990366), ("gelu_tanh", -0.17004075057125406)):
        low, high = FUNCTIONS[name].image(torch.tensor([-3.0, 2.0], dtype=torch.float64))
        assert float(low) == pytest.approx(least, abs=1e-14)
        assert float(low) <= least
        top = FUNCTIONS[name].value(torch.tensor(-3.0 if name == "square" else 2.0, dtype=torch.float64))
        assert high >= top


def test_image_outside_the_domain_is_never_finite() -> None:
    def image(name: str, *ends: float) -> Tensor:
        return FUNCTIONS[name].image(torch.tensor(ends, dtype=torch.float64))

    for name in ("reciprocal", "sqrt", "rsqrt"):
        low, high = image(name, -1, 1)
        assert low.isnan()
        assert high.isnan()
        low, high = image(name, math.nan, 1)
        assert high.isnan()
    assert image("reciprocal", 0, 1)[1] == math.inf
    assert image("sqrt", 0, 1)[0] == 0
    assert image("exp", 1, 1000)[1] == math.inf
