"""The checker at the edges of floating point: what underflows is accounted for, in float64 and in float32."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from buffet_checker.errors import RejectedError
from buffet_checker.network import Checkpoint
from handmade import checkpoint, claimed, derived, exact_margin

LAYER = "bert.encoder.layer"


def amplified() -> tuple[Checkpoint, np.ndarray]:
    """64 products of 2⁻¹⁰⁷⁵ that all round to 0, and weights that make their sum, 2⁻¹⁰⁶⁹, a logit of 4."""
    width, big = 66, 2.0**126
    signs = np.array([0, 0, *([1, -1] * 32)])
    tensors = {"classifier.bias": np.array([1.0, 0.0])}
    value = np.zeros((width, width))
    value[0], value[1] = signs * 2.0**-126, -signs * 2.0**-126
    pair = np.zeros((width, width))
    pair[0, 0] = pair[1, 1] = big
    gate, back = np.zeros((2, width)), np.zeros((width, 2))
    gate[0, 0], gate[1, 1] = big, big
    back[0, 0], back[0, 1], back[1, 0], back[1, 1] = big, -big, -big, big
    for layer in range(3):
        tensors[f"{LAYER}.{layer}.attention.self.value.weight"] = value if layer == 0 else pair
        tensors[f"{LAYER}.{layer}.attention.output.dense.weight"] = pair if layer < 2 else pair * 2.0**-65
        tensors[f"{LAYER}.{layer}.intermediate.dense.weight"] = gate if layer < 2 else 0 * gate
        tensors[f"{LAYER}.{layer}.output.dense.weight"] = back if layer < 2 else 0 * back
    classifier = np.zeros((2, width))
    classifier[1, 0] = 4.0
    tensors["classifier.weight"] = classifier
    config = {"num_hidden_layers": 3, "norm_position": "pre", "embedding_norm": False, "final_norm": False}
    return checkpoint(width, tensors, inner=2, **config), (signs * 2.0**-949)[None]


def test_products_that_round_to_0_are_accounted_for() -> None:
    model, rows = amplified()
    margin = exact_margin(model, rows, 0)
    assert margin < 0
    for derive in (False, True):
        assert not claimed(model, rows, 0, 0.0, 0.5, derive).accepted


def faded() -> tuple[Checkpoint, np.ndarray]:
    """Norms whose weights multiply to 2⁻¹⁰⁹⁷: the margin's coefficients underflow, its values do not."""
    names = [
        "bert.embeddings",
        *(f"{LAYER}.{i}.{at}" for i in range(4) for at in ("attention.output", "output")),
    ]
    tensors = {f"{name}.LayerNorm.weight": np.full(2, 2.0**-122) for name in names}
    tensors[f"{names[-1]}.LayerNorm.weight"] = np.full(2, 2.0**-121)
    tensors["classifier.weight"] = np.array([[1.0, 0.0], [0.0, 0.0]])
    return checkpoint(2, tensors, num_hidden_layers=4), 2.0**300 * np.array([[1.0, -1.0]])


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, "inf", "box"])
def test_coefficients_that_underflow_are_accounted_for(p: float | str) -> None:
    model, rows = faded()
    clean = exact_margin(model, rows, 0)
    moved = rows - np.array([[2.0**301, 0.0]])
    assert clean == Fraction(2) ** -797
    assert exact_margin(model, moved, 0) == 0
    for eps in (2.0**301, 2.0**302):
        assert not claimed(model, rows, 0, eps, float(clean / 2), True, p).accepted


def random_magnitudes(seed: int) -> tuple[Checkpoint, np.ndarray, float, str | float]:
    """A network of one or two layers whose tensors have sizes of their own, from 2⁻¹⁴⁰ to 2¹²⁰.

    Rows and ε are from 2⁻¹⁰⁷⁰ on; some entries are 0, some the same but for their sign.
    """
    random = np.random.default_rng(seed)
    layers, width, inner, tokens = (int(random.integers(1, high)) for high in (3, 4, 3, 3))
    small = random.integers(4) > 0  # mostly shrinking, so that what is lost is not hidden by what is not

    def draw(shape: tuple[int, ...], least: int, most: int) -> np.ndarray:
        size = 2.0 ** random.integers(least, 20 if small else most)
        signs = random.choice([-1.0, 0.0, 1.0, 1.0], shape)
        return signs * size * random.choice([1.0, 1.0, 1.5, 2.0**-20], shape)

    zero = checkpoint(width, {}, inner, num_hidden_layers=layers)
    tensors = {
        name: draw(value.shape, -140, 120) if "query" not in name else value
        for name, value in zero.tensors.items()
        if random.integers(5) and "position" not in name
    }
    config = {
        "num_hidden_layers": layers,
        "norm_position": str(random.choice(["post", "pre"])),
        "embedding_norm": bool(random.integers(2)),
        "final_norm": False,
    }
    rows = draw((tokens, width), -1070, 120)
    p: str | float = [1.0, 2.0, 3.0, "inf", "box"][int(random.integers(5))]
    return checkpoint(width, tensors, inner, **config), rows, float(2.0 ** random.integers(-1070, 20)), p


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_margins_at_all_magnitudes_are_below_the_exact_ones(first: int) -> None:
    finite = 0
    for seed in range(first, first + 100):
        model, rows, eps, p = random_magnitudes(seed)
        points = [np.vectorize(Fraction, otypes=[object])(rows) for _ in range(2 * rows.shape[1] + 1)]
        for place in range(rows.shape[1]):
            points[2 * place][0, place] += Fraction(eps)
            points[2 * place + 1][0, place] -= Fraction(eps)
        exact = min(exact_margin(model, point, 0) for point in points)
        for derive in (False, True):
            try:
                found, _ = derived(model, rows, 0, eps, derive, p)
            except RejectedError:
                continue
            finite += 1
            assert Fraction(found) <= exact, f"seed {seed}, {p}, derive {derive}"
    assert finite > 80


# --- as deployed, in float32 --------------------------------------------------------------------------------

STANDARD = {"layer_norm": "standard"}
HEAD = {"classifier.weight": np.array([[1.0, 0.0], [0.0, 1.0]])}
FADING = {
    "bert.embeddings.LayerNorm.weight": np.full(2, 1e-25),
    f"{LAYER}.0.attention.output.LayerNorm.weight": np.full(2, 1e-25),
    f"{LAYER}.0.output.LayerNorm.weight": np.full(2, 1e25),
    "classifier.weight": np.array([[1e25, 0.0], [0.0, 1e25]]),
}
DEPLOYED = {
    "ordinary": (HEAD, STANDARD, 1.0, True),
    "a variance overflows": (HEAD, STANDARD, 1e20, False),
    "a variance and its eps vanish": (HEAD, {**STANDARD, "layer_norm_eps": 1e-52}, 1e-25, False),
    "an eps that float32 has not": (HEAD, {**STANDARD, "layer_norm_eps": 1e-40}, 1.0, False),
    "a small eps": (HEAD, {**STANDARD, "layer_norm_eps": 1e-30}, 1.0, True),
    "products of weights vanish": (FADING, {}, 1.0, False),
}


@pytest.mark.parametrize("name", DEPLOYED)
@pytest.mark.parametrize("derive", [False, True])
def test_float32_is_covered_only_within_its_range(name: str, derive: bool) -> None:
    tensors, config, scale, covered = DEPLOYED[name]
    rows = scale * np.array([[1.0, -1.0]])
    found = claimed(checkpoint(2, tensors, **config), rows, 0, 0.0, 1e-3, derive)
    assert found.accepted, found.reason
    assert found.proofs[0].deployed == covered, found.proofs[0]
