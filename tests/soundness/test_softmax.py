"""Softmax bounds: valid everywhere in the box, tangent where they should touch, exact without width."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from buffet.bounds.forms import Form, Rows
from buffet.bounds.intervals import Box, interval
from buffet.network import Softmax
from buffet.relaxations.softmax import softmax_enclosure

HEADS, QUERIES, TASKS = 2, 3, 2


def random_box(seed: int, keys: int, scale: float, width: float) -> tuple[torch.Tensor, Box]:
    g = torch.Generator().manual_seed(seed)
    clean = scale * torch.randn(QUERIES, HEADS * keys, generator=g, dtype=torch.float64)
    reach = width * torch.rand(2, TASKS, QUERIES, HEADS * keys, generator=g, dtype=torch.float64)
    return clean, Box(-reach[0], reach[1])


def deviations(box: Box, seed: int, count: int = 150) -> torch.Tensor:
    """Interior points and corners of the box."""
    g = torch.Generator().manual_seed(seed)
    inside = torch.rand(count, *box.lower.shape, generator=g, dtype=torch.float64)
    corners = torch.randint(2, inside.shape, generator=g).double()
    return box.lower + (box.upper - box.lower) * torch.cat([inside, corners])


def weights(scores: torch.Tensor) -> torch.Tensor:
    return scores.unflatten(-1, (HEADS, -1)).softmax(-1).flatten(-2)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    keys=st.integers(1, 6),
    scale=st.sampled_from([0.0, 0.01, 1.0, 5.0, 30.0, 300.0]),
    width=st.sampled_from([0.0, 1e-300, 1e-12, 1e-3, 0.3, 2.0, 10.0, 40.0]),
    point=st.floats(0, 1),
    mixed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_lines_hold_everywhere_in_the_box(seed, keys, scale, width, point, mixed, dtype):
    clean, box = random_box(seed, keys, scale, width)
    mixture = None
    if mixed:
        mixture = torch.rand(TASKS, QUERIES, HEADS, keys, dtype=torch.float64)
    enclosure = softmax_enclosure(Softmax(HEADS), clean, box, point=point, mixture=mixture, dtype=dtype)
    a = deviations(box, seed + 1)
    p = weights(clean + a) - weights(clean)
    move = a.unflatten(-1, (HEADS, -1)).unsqueeze(-1)
    lower = (enclosure.lower_slope.double() @ move).flatten(-3) + enclosure.lower.double()
    upper = (enclosure.upper_slope.double() @ move).flatten(-3) + enclosure.upper.double()
    assert (lower <= p + 1e-14).all()
    assert (p <= upper + 1e-14).all()


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    keys=st.integers(2, 6),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    width=st.sampled_from([1e-12, 1e-3, 0.3, 2.0, 10.0, 40.0]),
    common=st.sampled_from([0.0, 1.0, 20.0]),
    mixed=st.booleans(),
)
def test_lines_and_intervals_hold_with_direct_bounds_of_the_differences(
    seed, keys, scale, width, common, mixed
):
    """Scores that move together have differences far narrower than their boxes say."""
    g = torch.Generator().manual_seed(seed)
    clean = scale * torch.randn(QUERIES, HEADS, keys, generator=g, dtype=torch.float64)
    own = torch.randn(60, TASKS, QUERIES, HEADS, keys, generator=g, dtype=torch.float64)
    shared = torch.randn(60, TASKS, QUERIES, HEADS, 1, generator=g, dtype=torch.float64)
    a = width * (own + common * shared)
    a = torch.cat([a, 0.5 * (a + a.flip(0)), torch.zeros_like(a[:1])])
    first, second = torch.triu_indices(keys, keys, 1)
    apart = a[..., second] - a[..., first]
    box, direct = (Box(v.amin(0).flatten(2), v.amax(0).flatten(2)) for v in (a, apart))
    mixture = torch.rand(TASKS, QUERIES, HEADS, keys, generator=g, dtype=torch.float64) if mixed else None
    point = torch.rand(TASKS, QUERIES, HEADS, keys, keys, generator=g, dtype=torch.float64)
    enclosure = softmax_enclosure(Softmax(HEADS), clean.flatten(1), box, direct, point=point, mixture=mixture)
    p = (clean + a).softmax(-1) - clean.softmax(-1)
    move = a.unsqueeze(-1)
    lower = (enclosure.lower_slope @ move).squeeze(-1) + enclosure.lower.unflatten(-1, (HEADS, keys))
    upper = (enclosure.upper_slope @ move).squeeze(-1) + enclosure.upper.unflatten(-1, (HEADS, keys))
    # Scores so far apart that exp overflows have no bound, which is NaN.
    assert not (lower > p + 1e-13).any()
    assert not (p > upper + 1e-13).any()
    if width * common < 100:
        assert lower.isfinite().all()
        assert upper.isfinite().all()
    enclosure = interval(Softmax(HEADS), (clean.flatten(1),), box, direct)
    assert (enclosure.lower <= p.flatten(3) + 1e-15).all()
    assert (p.flatten(3) <= enclosure.upper + 1e-15).all()


def test_without_width_the_bounds_are_the_value():
    clean, _ = random_box(0, 4, 3.0, 0.0)
    still = torch.zeros(TASKS, *clean.shape, dtype=torch.float64)
    enclosure = softmax_enclosure(Softmax(HEADS), clean, Box(still, still))
    assert enclosure.lower.abs().max() < 1e-13
    assert enclosure.upper.abs().max() < 1e-13


def test_the_upper_bound_touches_where_the_weight_is_extreme():
    """With two keys the weight is a function of one difference: the chord of U_LSE meets it at an end."""
    clean = torch.zeros(1, 2, dtype=torch.float64)
    box = Box(-torch.ones(1, 1, 2, dtype=torch.float64), torch.ones(1, 1, 2, dtype=torch.float64))
    enclosure = softmax_enclosure(
        Softmax(1), clean, box, point=torch.tensor([1.0, 0.0], dtype=torch.float64).expand(1, 1, 1, 1, 2)
    )
    top = torch.tensor([1.0, -1.0], dtype=torch.float64)
    value = enclosure.upper_slope[0, 0, 0, 0] @ top + enclosure.upper[0, 0, 0]
    assert value == pytest.approx(float(torch.softmax(top, 0)[0]) - 0.5, abs=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_pull_and_push_bound_linear_forms_of_the_weights(seed):
    """Rows of the weights are bounded through the scores, with and without the shift by their median."""
    clean, box = random_box(seed, 5, 2.0, 1.0)
    enclosure = softmax_enclosure(Softmax(HEADS), clean, box)
    g = torch.Generator().manual_seed(seed)
    features = clean.shape[-1]
    coefs = torch.randn(TASKS, QUERIES, features, 7, generator=g, dtype=torch.float64)
    (pulled,), bias = enclosure.pull(Rows(coefs, 1, diagonal=False))
    a = deviations(box, seed)
    p = weights(clean + a) - weights(clean)
    truth = torch.einsum("btqf,tqfr->btr", p, coefs)
    bound = torch.einsum("btqf,tqfr->btr", a, pulled.coefs) + bias.squeeze(1)
    assert (bound <= truth + 1e-12).all()

    direction = torch.randn(TASKS, QUERIES, features, 1, generator=g, dtype=torch.float64)
    direction = direction * torch.minimum(-box.lower, box.upper).unsqueeze(-1) / direction.abs()
    form = enclosure.push(Form.exactly(torch.cat([direction, torch.zeros_like(direction)], -1)))
    for t in (-1.0, -0.3, 0.4, 1.0):
        p = weights(clean + t * direction.squeeze(-1)) - weights(clean)
        at = torch.tensor([t, 1.0], dtype=torch.float64)
        assert (form.lower @ at <= p + 1e-12).all()
        assert (p <= form.upper @ at + 1e-12).all()
