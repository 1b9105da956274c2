"""The oracle is right by itself: relaxations on grids, sampled points, exact cases, first order."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oracle
from tiny_encoders import logits, random_weights

MODES = ("baf", "backward")
NORMS = (1.0, 2.0, math.inf)


def network(seed, layers=2, pooling="cls", tokens=4, classes=2, gain=1.0):
    generator = np.random.default_rng(seed)
    weights = random_weights(
        generator, layers=layers, width=8, inner=12, pooling=pooling, classes=classes, gain=gain
    )
    config = {"layers": layers, "heads": 2, "pooling": pooling}
    x = generator.normal(0, 1, (tokens, 8))
    return weights, config, x, int(logits(weights, config, x).argmax())


def ball_points(generator, x, words, eps, p, count):
    """Points of the ball: a third vertices, a third on the sphere, a third inside."""
    shape = (count, len(words), x.shape[1])
    delta = generator.normal(0, 1, shape)
    vertices = (
        np.sign(delta) if math.isinf(p) else np.eye(x.shape[1])[generator.integers(0, x.shape[1], shape[:2])]
    )
    vertices = vertices * generator.choice([-1, 1], (*shape[:2], 1))
    delta[: count // 3] = vertices[: count // 3]
    delta /= np.linalg.norm(delta, ord=p, axis=-1, keepdims=True)
    delta[2 * count // 3 :] *= generator.uniform(0, 1, (count - 2 * count // 3, len(words), 1))
    points = np.repeat(x[None], count, axis=0)
    points[:, words] += eps * delta
    return points


def margins_at(weights, config, points, label):
    values = logits(weights, config, points)
    return values[..., [label]] - np.delete(values, label, axis=-1)


@pytest.mark.parametrize("name", sorted(oracle.FUNCTIONS))
def test_lines_enclose_their_function_and_touch_it(name):
    value, lines = oracle.FUNCTIONS[name]
    generator = np.random.default_rng(0)
    for width in (0.0, 1e-12, 1e-7, 1e-5, 1e-2, 1.0, 6.0):
        for _ in range(60):
            lo = generator.normal(0, 3)
            lo = abs(lo) + 1e-3 if name == "reciprocal" else lo
            hi = lo + width * generator.uniform(0.5, 1)
            lower, upper = lines(lo, hi)
            grid = np.linspace(lo, hi, 501)
            low, high, exact = lower[0] * grid + lower[1], upper[0] * grid + upper[1], value(grid)
            scale = 1e-12 * (1 + abs(exact).max() + abs(lower[0] * lo) + abs(upper[0] * lo))
            assert (low <= exact + scale).all()
            assert (high >= exact - scale).all()
            if width >= 1e-2:  # every line of every table touches its function
                assert (exact - low).min() <= 1e-3 * width
                assert (high - exact).min() <= 1e-3 * width


def test_lines_are_the_published_ones():
    (slope, _), (above, _) = oracle.exp_lines(-1.0, 4.0)
    assert slope == pytest.approx(math.exp(-0.01))
    assert above == pytest.approx((math.exp(4) - math.exp(-1)) / 5)
    lower, _ = oracle.exp_lines(-1.0, 4.0)
    assert lower[0] * -1.0 + lower[1] > 0
    assert oracle.exp_lines(0.0, 1.0)[0][0] == pytest.approx(math.exp(0.5))
    assert oracle.reciprocal_lines(1.0, 3.0) == (
        pytest.approx((-0.25, 1.0)),
        pytest.approx((-1 / 3, 4 / 3)),
    )
    assert oracle.relu_lines(-1.0, 3.0) == ((1.0, 0.0), (0.75, 0.75))
    assert oracle.relu_lines(-3.0, 1.0) == ((0.0, 0.0), (0.25, 0.75))
    (slope, intercept), _ = oracle.tanh_lines(-2.0, 2.0)  # through (2, tanh 2), tangent at some d < 0
    assert 2 * slope + intercept == pytest.approx(math.tanh(2.0))
    with pytest.raises(oracle.DomainError):
        oracle.reciprocal_lines(0.0, 1.0)


def test_planes_enclose_the_product_and_touch_two_edges():
    generator = np.random.default_rng(1)
    for _ in range(200):
        (lx, ux), (ly, uy) = np.sort(generator.normal(0, 2, (2, 2)))
        x, y = np.meshgrid(np.linspace(lx, ux, 21), np.linspace(ly, uy, 21), indexing="ij")
        (a, b, c), (d, e, f) = oracle.product_planes(lx, ux, ly, uy)
        below, above = x * y - (a * x + b * y + c), d * x + e * y + f - x * y
        assert min(below.min(), above.min()) >= -1e-12
        assert max(abs(below[0]).max(), abs(below[:, 0]).max()) <= 1e-12  # L1: exact on x = lx and y = ly
        assert max(abs(above[0]).max(), abs(above[:, -1]).max()) <= 1e-12  # U1: on x = lx and y = uy


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("layers", [1, 3])
def test_nodes_compute_the_network(layers, pooling):
    weights, config, x, label = network(2, layers, pooling, tokens=5, classes=3)
    net = oracle.build(weights, config, 5, label)
    assert net.values(x.ravel())[-1] == pytest.approx(margins_at(weights, config, x, label), abs=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize(("layers", "eps", "words"), [(1, 0.5, [1]), (2, 0.1, [3]), (2, 0.05, [0, 2])])
def test_no_sampled_point_leaves_the_bounds(mode, p, layers, eps, words):
    for pooling in ("cls", "mean") if layers == 1 else ("cls",) if words == [3] else ("mean",):
        weights, config, x, label = network(layers, layers, pooling, classes=3)
        bounds = oracle.oracle_bounds(weights, config, x, words, eps, p, label, mode)
        points = ball_points(np.random.default_rng(0), x, words, eps, p, 3000)
        margins = margins_at(weights, config, points, label)
        last = len(bounds.net.nodes) - 1
        A, b = bounds.substitute(last, np.eye(2))
        flat = points.reshape(len(points), -1)
        assert (flat @ A.T + b <= margins + 1e-10).all()  # the form is below at every single point
        assert (bounds.boxes[last][0] <= margins.min(0) + 1e-10).all()
        assert oracle.oracle_margin(weights, config, x, words, eps, p, label, mode) == min(
            bounds.boxes[last][0]
        )
        for point in flat[::60]:
            values = bounds.net.values(point)
            for index, (lower, upper) in bounds.boxes.items():
                assert (lower <= values[index] + 1e-9).all()
                assert (values[index] <= upper + 1e-9).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("p", NORMS)
def test_first_order_in_eps(mode, p):
    """margin(ε) = clean − ε Σ_d ‖∇_d margin‖_q + O(ε²)."""
    q = {1.0: math.inf, 2.0: 2, math.inf: 1}[p]
    for layers, pooling in ((1, "mean"), (2, "cls")):
        weights, config, x, label = network(5, layers, pooling)
        words = [1, 2]
        shifts = np.zeros((2, 2, 8, 4, 8))
        for place, word in enumerate(words):
            for c in range(8):
                shifts[0, place, c, word, c], shifts[1, place, c, word, c] = 1e-5, -1e-5
        ends = margins_at(weights, config, x + shifts, label)[..., 0]
        slope = np.linalg.norm((ends[0] - ends[1]) / 2e-5, ord=q, axis=-1).sum()
        clean = margins_at(weights, config, x, label)[0]
        margin = oracle.oracle_margin(weights, config, x, words, 1e-7, p, label, mode)
        assert (clean - margin) / 1e-7 == pytest.approx(slope, rel=2e-3)
        assert oracle.oracle_margin(weights, config, x, words, 0.0, p, label, mode) == pytest.approx(
            clean, abs=1e-9
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("frozen", ["query", "value"])
@pytest.mark.parametrize("p", NORMS)
def test_exact_where_the_network_is_affine(mode, frozen, p):
    """Zero queries average the values, zero values drop attention; positive ReLU inputs: all is affine."""
    weights, config, x, label = network(7, layers=2, pooling="mean")
    for layer in range(2):
        for part in ("weight", "bias"):
            weights[f"encoder.layer.{layer}.attention.self.{frozen}.{part}"] *= 0
            weights[f"encoder.layer.{layer}.attention.self.key.{part}"] *= 1e-3  # no overflow of exp
        weights[f"encoder.layer.{layer}.intermediate.dense.bias"] += 200
    label = int(logits(weights, config, x).argmax())
    words, eps = [0, 2], 0.7
    clean = margins_at(weights, config, x, label)[0]
    shifts = np.zeros((2, 8, 4, 8))
    for place, word in enumerate(words):
        shifts[place, range(8), word, range(8)] = 1.0
    form = margins_at(weights, config, x + shifts, label)[..., 0] - clean
    q = {1.0: math.inf, 2.0: 2, math.inf: 1}[p]
    exact = clean - eps * np.linalg.norm(form, ord=q, axis=-1).sum()
    assert oracle.oracle_margin(weights, config, x, words, eps, p, label, mode) == pytest.approx(
        exact, abs=1e-8
    )


def test_backward_is_tighter_than_baf_and_a_hopeless_ball_has_no_bound():
    weights, config, x, label = network(3, layers=2, pooling="mean")
    baf, backward = (oracle.oracle_margin(weights, config, x, [1], 0.1, 2, label, mode) for mode in MODES)
    assert baf < backward
    assert oracle.oracle_margin(weights, config, x, [1], 1e4, 2, label, "baf") == -math.inf
