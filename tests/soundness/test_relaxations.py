"""Every line that `relax` returns bounds its function: zero tolerance, in multiple precision arithmetic."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mpmath import mpf
from torch import Tensor

from buffet.network.functions import FUNCTIONS
from buffet.relaxations.elementwise import Lines, Side, default_slopes, relax, slope_range
from reference_functions import REFERENCE

NAMES = sorted(FUNCTIONS)
POSITIVE = [n for n in NAMES if FUNCTIONS[n].domain == 0]
MIXED = [n for n in NAMES if FUNCTIONS[n].curvature is None]
CURVED = [n for n in NAMES if FUNCTIONS[n].curvature is not None and n != "relu"]
DTYPES = [torch.float64, torch.float32]
Interval = tuple[float, float, float]
# the same examples every time; a failure names its interval, so shrinking would only cost minutes
QUICK = settings(deadline=None, derandomize=True, database=None, phases=[Phase.generate])


def real(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def columns(intervals: list[Interval]) -> tuple[Tensor, Tensor, Tensor]:
    center, lower, upper = (real(*column) for column in zip(*intervals, strict=True))
    return center, lower, upper


def gaps(name: str, interval: Interval, lines: Lines, i: int = 0) -> tuple[mpf, mpf]:
    """The smallest distances f − lower line and upper line − f over many points, exact to 1e-100."""
    f, reference = FUNCTIONS[name], REFERENCE[name]
    slopes = torch.stack([lines.lower_slope[i].double(), lines.upper_slope[i].double()])
    with mpmath.workprec(400):
        c, low, high = (mpf(v) for v in interval)
        points = [low + (high - low) * mpf(t) / 8 for t in range(9)]
        points += [mpf(float(s)) - c for p in f.stationary(slopes) for s in p if s.isfinite()]
        points += [mpf(0), f.valley - c if math.isfinite(f.valley) else -c]
        points = [a for a in points if low <= a <= high]
        clean = reference(c)
        b, k = mpf(float(lines.lower_intercept[i])), mpf(float(slopes[0]))
        t, m = mpf(float(lines.upper_intercept[i])), mpf(float(slopes[1]))
        rises = [reference(c + a) - clean for a in points]
        below = min(r - (k * a + b) for r, a in zip(rises, points, strict=True))
        above = min((m * a + t) - r for r, a in zip(rises, points, strict=True))
    return below, above


def check(name: str, intervals: list[Interval], lines: Lines) -> None:
    for i, interval in enumerate(intervals):
        if not all(float(v[i].detach()) - float(v[i].detach()) == 0 for v in vars(lines).values()):
            continue  # not finite: never a proof
        below, above = gaps(name, interval, lines, i)
        assert below >= 0, (name, interval, "lower", below)
        assert above >= 0, (name, interval, "upper", above)


@st.composite
def interval(draw: st.DrawFn, name: str) -> Interval:
    """A center and deviations: ordinary, degenerate, huge, one-sided, or touching the domain's border."""
    reach = {"exp": 700.0}.get(name, 1e6)
    size = draw(st.sampled_from([1e-9, 1e-3, 1.0, 10.0, reach]))
    center = draw(st.floats(-size, size))
    if name in POSITIVE:
        center = abs(center) + draw(st.sampled_from([1e-12, 1e-6, 0.1]))
    width = draw(st.sampled_from([0.0, 5e-324, 1e-300, 1e-15, 1e-12, 1e-6, 1e-2, 1.0, 5.0, reach]))
    a, b = (width * draw(st.floats(-1, 1)) for _ in range(2))
    lower, upper = min(a, b), max(a, b)
    if draw(st.booleans()):
        lower, upper = min(lower, 0.0), max(upper, 0.0)
    if name in POSITIVE:
        border = draw(st.sampled_from([0.0, 1e-12, 1e-3, 0.5]))
        lower = max(lower, -center * (1 - border))
        upper = max(upper, lower)
    if name == "exp":
        lower, upper = (min(max(v, -700 - center), 700 - center) for v in (lower, upper))
    return center, lower, upper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_default_lines_are_sound(name: str, dtype: torch.dtype) -> None:
    @settings(QUICK, max_examples=16)
    @given(st.lists(interval(name), min_size=4, max_size=10))
    def run(intervals: list[Interval]) -> None:
        check(name, intervals, relax(name, *columns(intervals), dtype=dtype))

    run()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_any_slope_is_sound(name: str, dtype: torch.dtype) -> None:
    @settings(QUICK, max_examples=14)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        intervals = data.draw(st.lists(interval(name), min_size=4, max_size=8))
        size = len(intervals)
        k, m = (
            real(*data.draw(st.lists(st.floats(-1.5, 1.5), min_size=size, max_size=size))) for _ in range(2)
        )
        check(name, intervals, relax(name, *columns(intervals), lower_slope=k, upper_slope=m, dtype=dtype))

    run()


def samples(name: str, count: int = 400, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Intervals of every size around the bends of the function."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(4, count, dtype=torch.float64, generator=generator)
    size = 10 ** (3 * noise[0] - 2)
    center = 6 * noise[1] - 3
    if name in POSITIVE:
        center = center.abs() + 0.1
    lower, upper = -size * noise[2], size * noise[3]
    if name in POSITIVE:
        lower = torch.maximum(lower, -0.95 * center)
    return center, lower, upper


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_lines_hold_on_dense_grids(name: str, dtype: torch.dtype) -> None:
    f = FUNCTIONS[name]
    center, lower, upper = samples(name, 500)
    generator = torch.Generator().manual_seed(1)
    a = torch.lerp(lower, upper, torch.linspace(0, 1, 301, dtype=torch.float64)[:, None])
    rise = f.value(center + a) - f.value(center)
    scale = f.value(center + a).abs() + f.value(center).abs() + center.abs() + a.abs()
    for _ in range(2):
        k, m = 3 * torch.rand(2, 500, dtype=torch.float64, generator=generator) - 1.5
        for lines in (
            relax(name, center, lower, upper, dtype=dtype),
            relax(name, center, lower, upper, lower_slope=k, upper_slope=m, dtype=dtype),
        ):
            tolerance = 1e-15 * (scale + (lines.lower_slope.abs() + lines.upper_slope.abs()) * a.abs())
            below = lines.lower_slope.double() * a + lines.lower_intercept.double()
            above = lines.upper_slope.double() * a + lines.upper_intercept.double()
            assert (rise - below + tolerance).min() >= 0
            assert (above - rise + tolerance).min() >= 0


@pytest.mark.parametrize("name", NAMES)
def test_every_line_touches_its_function(name: str) -> None:
    """So a line moved inward by 1e-6, or computed 1e-6 too tight, is unsound and `check` says so."""
    center, lower, upper = samples(name, 16, seed=2)
    lines = relax(name, center, lower, upper)
    for i, values in enumerate(zip(center.tolist(), lower.tolist(), upper.tolist(), strict=True)):
        below, above = gaps(name, values, lines, i)
        assert 0 <= below < 1e-9
        assert 0 <= above < 1e-9
    shifts = [{"lower_intercept": lines.lower_intercept + 1e-6}]
    shifts.append({"upper_intercept": lines.upper_intercept - 1e-6})
    for shift in shifts:
        moved = Lines(**(vars(lines) | shift))
        with pytest.raises(AssertionError):
            check(name, list(zip(center.tolist(), lower.tolist(), upper.tolist(), strict=True)), moved)


def ends(lines: Lines, lower: Tensor, upper: Tensor) -> dict[Side, Tensor]:
    """The values of the lines at the two ends."""
    a = torch.stack([lower, upper])
    return {
        "lower": lines.lower_slope * a + lines.lower_intercept,
        "upper": lines.upper_slope * a + lines.upper_intercept,
    }


@pytest.mark.parametrize("name", [*CURVED, "relu"])
def test_one_side_is_the_chord_and_the_other_a_tangent(name: str) -> None:
    f = FUNCTIONS[name]
    center, lower, upper = samples(name)
    lines = relax(name, center, lower, upper)
    chord, other = ("upper", "lower") if f.curvature == "convex" else ("lower", "upper")
    truth = f.value(center + torch.stack([lower, upper])) - f.value(center)
    torch.testing.assert_close(ends(lines, lower, upper)[chord], truth, rtol=1e-10, atol=1e-12)
    if name == "relu":
        return
    slope, intercept = getattr(lines, f"{other}_slope"), getattr(lines, f"{other}_intercept")
    at = 0.5 * (lower + upper)
    at = torch.minimum(at, lower + 0.99) if name == "exp" else at
    torch.testing.assert_close(slope, f.derivative(center + at), rtol=1e-9, atol=0)
    torch.testing.assert_close(
        slope * at + intercept, f.value(center + at) - f.value(center), rtol=1e-12, atol=1e-12
    )


def test_relu_is_exact_when_stable_and_the_triangle_otherwise() -> None:
    center, lower, upper = real(5, -5, 0, 0), real(-1, -1, -1, -2), real(2, 2, 3, 1)
    lines = relax("relu", center, lower, upper)
    torch.testing.assert_close(lines.lower_slope, real(1, 0, 1, 0))
    torch.testing.assert_close(lines.upper_slope, real(1, 0, 0.75, 1 / 3))
    torch.testing.assert_close(lines.lower_intercept, real(0, 0, 0, 0), rtol=0, atol=1e-14)
    torch.testing.assert_close(lines.upper_intercept, real(0, 0, 0.75, 2 / 3), rtol=0, atol=1e-14)


def test_exp_stays_positive() -> None:
    center, lower, upper = real(0, 3, -5), real(-1, -20, -0.1), real(30, 5, 100)
    lines = relax("exp", center, lower, upper)
    assert (ends(lines, lower, upper)["lower"][0] + center.exp() > 0).all()


def test_tanh_follows_crown() -> None:
    """Concave: chord and tangent at the middle. Across 0: tangent through the far end, or the chord."""
    f = FUNCTIONS["tanh"]
    zero = real(0, 0, 0, 0)
    lower, upper = real(0.5, -2, -1, -0.5), real(2, -0.5, 5, 0.1)
    lines = relax("tanh", zero, lower, upper)
    values, truth = ends(lines, lower, upper), f.value(torch.stack([lower, upper]))
    torch.testing.assert_close(values["lower"][:, 0], truth[:, 0], rtol=0, atol=1e-14)
    torch.testing.assert_close(lines.upper_slope[0], f.derivative(real(1.25))[0])
    torch.testing.assert_close(values["upper"][:, 1], truth[:, 1], rtol=0, atol=1e-14)
    torch.testing.assert_close(lines.lower_slope[1], f.derivative(real(-1.25))[0])
    # [-1, 5]: above, through the low end and tangent on the right; below, through the high end
    touch = f.maxima(lines.upper_slope)[0]
    assert 0 < touch[2] < 5
    torch.testing.assert_close(values["upper"][0, 2], truth[0, 2], rtol=0, atol=1e-9)
    torch.testing.assert_close(values["lower"][1, 2], truth[1, 2], rtol=0, atol=1e-9)
    # [-0.5, 0.1]: above, the chord
    torch.testing.assert_close(values["upper"][:, 3], truth[:, 3], rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", ["gelu", "gelu_tanh"])
def test_gelu_lines_have_the_least_area(name: str) -> None:
    """No slope of a fine grid gives a line nearer to the function at the middle of the interval."""
    center, lower, upper = samples(name, 300, seed=3)
    middle = 0.5 * (lower + upper)
    lines = relax(name, center, lower, upper)
    k = torch.linspace(-0.15, 1.15, 401, dtype=torch.float64)[:, None].expand(-1, 300)
    others = relax(name, center, lower, upper, lower_slope=k, upper_slope=k)
    best_lower = (k * middle + others.lower_intercept).amax(0)
    best_upper = (k * middle + others.upper_intercept).amin(0)
    assert (lines.lower_slope * middle + lines.lower_intercept >= best_lower - 1e-6).all()
    assert (lines.upper_slope * middle + lines.upper_intercept <= best_upper + 1e-6).all()


@pytest.mark.parametrize("side", ["lower", "upper"])
@pytest.mark.parametrize("name", NAMES)
def test_slopes_outside_the_range_are_dominated(name: str, side: Side) -> None:
    center, lower, upper = samples(name, 300, seed=4)
    least, most = slope_range(name, center, lower, upper, side)
    assert (least <= most + 1e-12 * most.abs()).all()
    default = default_slopes(name, center, lower, upper)[side == "upper"]
    assert ((default >= least - 1e-5 * (1 + least.abs())) & (default <= most + 1e-5 * (1 + most.abs()))).all()
    sign = 1 if side == "lower" else -1
    for shift in (-0.5, -0.01, 0.01, 0.5):
        slope = (least if shift < 0 else most) + shift
        far = relax(name, center, lower, upper, **{f"{side}_slope": slope})
        near = relax(name, center, lower, upper, **{f"{side}_slope": least if shift < 0 else most})
        gain = sign * (ends(near, lower, upper)[side] - ends(far, lower, upper)[side])
        assert gain.min() >= -1e-6 * (1 + ends(near, lower, upper)[side].abs().max())


def test_slope_range_of_relu() -> None:
    center, lower, upper = real(0, 3, -3), real(-1, -1, -1), real(2, 2, 2)
    least, most = slope_range("relu", center, lower, upper, "lower")
    assert least.tolist() == [0, 1, 0]
    assert most.tolist() == [1, 1, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_a_still_node_has_no_intercept(name: str, dtype: torch.dtype) -> None:
    center = real(0.5, 1, 2, 30)
    lines = relax(name, center, real(0), real(0), dtype=dtype)
    assert (lines.lower_intercept == 0).all()
    assert (lines.upper_intercept == 0).all()
    slope = FUNCTIONS[name].derivative(center).to(dtype)
    torch.testing.assert_close(lines.lower_slope, slope)
    torch.testing.assert_close(lines.upper_slope, slope)
    assert lines.lower_slope.dtype == lines.lower_intercept.dtype == dtype


@pytest.mark.parametrize("name", NAMES)
def test_narrow_intervals_have_sane_slopes(name: str) -> None:
    for width in (5e-324, 1e-300, 1e-16, 1e-12, 1e-8):
        center = real(0.3, 1.0, 1.7, 20.0)
        lines = relax(name, center, real(-width), real(width))
        slope = FUNCTIONS[name].derivative(center)
        for found in (lines.lower_slope, lines.upper_slope):
            torch.testing.assert_close(found, slope, rtol=1e-5, atol=1e-7)
        scale = FUNCTIONS[name].value(center).abs() + center
        assert (lines.lower_intercept.abs() <= 1e-14 * scale).all()
        assert (lines.upper_intercept.abs() <= 1e-14 * scale).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_undefined_or_overflows_is_never_finite(dtype: torch.dtype) -> None:
    bad: list[tuple[str, Interval]] = [
        ("exp", (0, -1, 800)),
        ("exp", (800, -900, 0)),
        ("square", (0, -1e200, 1e200)),
        ("sqrt", (1, -1.5, 0)),
        ("sqrt", (-1, 0, 0)),
        *((n, (1, -1, 1)) for n in ("reciprocal", "rsqrt")),
        *((n, (1, -2, 1)) for n in ("reciprocal", "rsqrt")),
        *((n, (-1, 0, 0)) for n in POSITIVE),
        *((n, (-1, 2, 3)) for n in POSITIVE),
        *((n, (0.5, math.nan, 1)) for n in NAMES),
        *((n, (0.5, -0.1, math.nan)) for n in NAMES),
        *((n, (math.nan, 0, 0)) for n in NAMES),
        *((n, (0.5, -0.1, math.inf)) for n in NAMES),
        *((n, (0.5, -math.inf, 0.1)) for n in NAMES),
    ]
    for name in NAMES:
        intervals = [values for n, values in bad if n == name]
        for slope in (None, real(0.5), real(0.0), real(-0.5)):
            lines = relax(name, *columns(intervals), lower_slope=slope, upper_slope=slope, dtype=dtype)
            low, high = lines.lower_intercept, lines.upper_intercept
            assert (low.isnan() | (low == -math.inf)).all(), (name, slope, low)
            assert (high.isnan() | (high == math.inf)).all(), (name, slope, high)


def test_an_overflow_of_float32_is_not_a_bound() -> None:
    lines = relax("exp", real(0), real(-1), real(600), dtype=torch.float32)
    assert not float(lines.upper_intercept) < math.inf
    lines = relax("square", real(1e25), real(-1e25), real(1e25), lower_slope=real(0.0), dtype=torch.float32)
    assert float(lines.lower_intercept) == -math.inf


def test_sqrt_may_touch_zero() -> None:
    lines = relax("sqrt", real(1), real(-1), real(3))
    check("sqrt", [(1, -1, 3)], lines)
    assert lines.lower_intercept.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_gradients(name: str) -> None:
    """In the slopes and in the interval; also through the default slopes."""
    center, lower, upper = samples(name, 8, seed=5)
    upper = upper + 0.3  # clear of the switch between quotient and derivative
    lower.requires_grad_()
    upper.requires_grad_()
    k = torch.linspace(-0.41, 1.4, 8, dtype=torch.float64)
    m = 0.87 - k

    def given_slopes(low: Tensor, high: Tensor, below: Tensor, above: Tensor) -> tuple[Tensor, ...]:
        lines = relax(name, center, low, high, lower_slope=below, upper_slope=above)
        return lines.lower_intercept, lines.upper_intercept

    def own_slopes(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
        return tuple(vars(relax(name, center, low, high)).values())

    inputs = (lower, upper, k.requires_grad_(), m.requires_grad_())
    assert torch.autograd.gradcheck(given_slopes, inputs, eps=1e-7, atol=1e-5, rtol=1e-4)
    assert torch.autograd.gradcheck(own_slopes, (lower, upper), eps=1e-6, atol=1e-3, rtol=1e-3)


def test_gradients_stay_finite_beside_degenerate_intervals() -> None:
    for name in NAMES:
        lower, upper = real(-0.2, 0, -1e-300).requires_grad_(), real(0.3, 0, 1e-300).requires_grad_()
        lines = relax(name, real(1, 1, 1), lower, upper, dtype=torch.float32)
        total = sum(v.double().sum() for v in vars(lines).values())
        for gradient in torch.autograd.grad(total, (lower, upper)):
            assert gradient.isfinite().all(), name


def test_a_relu_that_is_always_off_has_lines_of_exactly_0() -> None:
    """A step of single precision away from 0 would be a denormal number, and slow to multiply by."""
    center, lower, upper = columns([(-1.0, -0.5, 0.5), (-3e-7, -1.0, 2e-7), (-1.0, 0.0, 0.0)])
    for lines in (relax("relu", center, lower, upper, dtype=dtype) for dtype in DTYPES):
        assert not any(bool(v.any()) for v in vars(lines).values())
