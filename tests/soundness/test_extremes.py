"""The exact judge against mpmath and against known values; a few networks at the edges of floating point."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from torch import Tensor

from buffet.cli import main
from buffet.lab.random_models import RandomModel, model_of
from buffet.lab.soundness import EXTREME, CampaignState, campaign, cases, spans
from buffet.lab.soundness.cases import Case, random_case
from buffet.lab.soundness.exact_points import below, exact_points
from buffet.lab.soundness.exact_regions import exactly
from buffet.lab.soundness.extremes import THEMES, extreme_case
from buffet.lab.soundness.judge import BITS, FUNCTIONS, Judge
from buffet.lab.soundness.spans import Span, span_of
from buffet.loading import ModelConfig
from buffet.propagation import clean_run as clean_run
from buffet.propagation import walk as propagation
from buffet.propagation.rounding import Errors
from buffet.regions import Box, CandidateSet, LpBall
from engine_mutants.hunting import Patch, result
from extreme_certificates import ExtremeTally, Situation, extreme, hold, situation

HARD = [0.0, 1.0, -1.0, 0.3, -0.75, 5.0, -30.0, 2.0**-600, -(2.0**-1074), 700.0, -700.0, 2.0**61, -(2.0**61)]


def silent(**changes: object) -> tuple[ModelConfig, dict[str, Tensor]]:
    """A network that passes its first row on to the classifier, all of whose weights are 0."""
    config = ModelConfig(
        **{
            "vocab_size": 4,
            "hidden_size": 3,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 2,
            "hidden_act": "relu",
            "max_position_embeddings": 4,
            "layer_norm": "no_var",
            "norm_position": "pre",
            "head_act": "none",
            "embedding_norm": False,
            "final_norm": False,
            **changes,
        }
    )
    return config, {name: torch.zeros(shape) for name, shape in config.shapes().items()}


def summing() -> RandomModel:
    """Logits 1 and the sum of the row."""
    config, tensors = silent()
    tensors["classifier.weight"][1] = 1.0
    tensors["classifier.bias"][0] = 1.0
    return model_of(config, tensors)


def fractions_of(span: Span) -> list[tuple[Fraction, Fraction]]:
    ends = zip(span.lower.ravel(), span.upper.ravel(), strict=True)
    return [(Fraction(int(low), span.scale), Fraction(int(high), span.scale)) for low, high in ends]


def real(name: str, x: mpmath.mpf) -> mpmath.mpf:
    match name:
        case "relu":
            return max(x, mpmath.mpf(0))
        case "square":
            return x * x
        case "reciprocal":
            return 1 / x
        case "rsqrt":
            return 1 / mpmath.sqrt(x)
        case "tanh":
            return mpmath.tanh(x)
        case "gelu":
            return x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2
        case _:
            inner = mpmath.sqrt(8 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3)
            return x / (1 + mpmath.exp(-inner))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("bits", BITS)
def test_functions_hold_the_real_value_and_are_narrow(name: str, bits: int) -> None:
    points = [x for x in HARD if x > 0] if name in ("reciprocal", "rsqrt") else HARD
    found = fractions_of(FUNCTIONS[name](span_of(np.array(points)), bits))
    with mpmath.workprec(8000):
        for x, (low, high) in zip(points, found, strict=True):
            value = real(name, mpmath.mpf(x))
            slack = mpmath.mpf(2) ** -7000
            assert mpmath.mpf(low.numerator) / low.denominator <= value + slack
            assert mpmath.mpf(high.numerator) / high.denominator >= value - slack
            width = mpmath.mpf((high - low).numerator) / (high - low).denominator
            known = 2.0**-40 if name == "gelu_tanh" else mpmath.mpf(2) ** (8 - bits)
            assert width <= known * abs(value) + mpmath.mpf(2) ** (64 - spans.depth(bits))


@pytest.mark.parametrize("seed", [2, 3, 5, 8, 20, 28, 29, 37, 54, 57])
def test_the_judge_agrees_with_float64_on_ordinary_networks(seed: int) -> None:
    case = random_case(seed)
    x = case.region.center[case.mask].double()
    logits = Judge(case.model.program64).logits(span_of(x[None].numpy()), BITS[0])
    for value, (low, high) in zip(
        case.model.program64.evaluate(x).tolist(), fractions_of(logits), strict=True
    ):
        assert low <= high
        assert abs(value - float(low)) <= 1e-9 * (1 + abs(value))
        assert float(high - low) <= 1e-9 * (1 + abs(value))


def test_constants_are_the_real_numbers() -> None:
    """``1/3`` and the eps of a LayerNorm, ``1/√2`` of the scores: all to the last of many digits."""
    config, tensors = silent(embedding_norm=True, layer_norm="standard", layer_norm_eps=0.1)
    tensors["bert.embeddings.LayerNorm.weight"] += 1
    tensors["classifier.weight"][0, 2] = 1.0
    x = torch.tensor([[1.0, 2.0, 4.0]])
    found = Judge(model_of(config, tensors).program64).logits(span_of(x[None].double().numpy()), 2400)
    with mpmath.workprec(1000):
        mean = mpmath.mpf(7) / 3
        variance = sum((v - mean) ** 2 for v in (1, 2, 4)) / mpmath.mpf(3)
        assert _close(found, 0, (4 - mean) / mpmath.sqrt(variance + mpmath.mpf(0.1)))

    config, tensors = silent(hidden_size=2)
    own = "bert.encoder.layer.0.attention"
    for name in (f"{own}.self.query", f"{own}.self.key", f"{own}.self.value", f"{own}.output.dense"):
        tensors[f"{name}.weight"] += torch.eye(2)
    tensors["bert.encoder.layer.0.attention.output.LayerNorm.weight"] += 1
    tensors["classifier.weight"][0, 0] = 1.0
    x = torch.tensor([[2.0, -2.0], [6.0, -6.0]])  # centred as they are
    found = Judge(model_of(config, tensors).program64).logits(span_of(x[None].double().numpy()), 2400)
    with mpmath.workprec(1000):
        first, second = (mpmath.exp(mpmath.mpf(s) / mpmath.sqrt(2)) for s in (8, 24))
        assert _close(found, 0, 2 + (2 * first + 6 * second) / (first + second))


def _close(found: Span, place: int, value: mpmath.mpf) -> bool:
    """Whether an entry is the given number, to 900 bits."""
    low, high = fractions_of(found)[place]
    ends = [mpmath.mpf(v.numerator) / v.denominator for v in (low, high)]
    return all(abs(end - value) < mpmath.mpf(2) ** -900 for end in ends)


def test_what_float64_loses_is_seen() -> None:
    model, x = summing(), torch.zeros(1, 3)
    rows = torch.tensor([[2.0**60, 100.0, -(2.0**60)]], dtype=torch.float64)
    case = Case(0, "sum", model, Box(x, rows, rows), torch.ones(1, dtype=torch.bool), 0)
    points = exact_points(case, 10)
    assert points.count() == 1
    assert points.margin(0, 0) == -99
    wrong, undecided = points.violated(torch.tensor([-98.5]))
    assert wrong.all()
    assert undecided == 0
    assert not points.violated(torch.tensor([-99.0]))[0].any()
    assert points.violated(torch.tensor([math.nextafter(-99.0, 0)], dtype=torch.float64))[0].all()
    assert not points.violated(torch.tensor([math.nan]))[0].any()


def test_an_infinitesimal_move_is_not_lost() -> None:
    """A deviation far below the rounding of the row it is added to."""
    model, x = summing(), torch.tensor([[2.0**100, 0.0, -(2.0**100)]])
    case = Case(0, "sum", model, LpBall(x, [0], math.inf, 5e-324), torch.ones(1, dtype=torch.bool), 0)
    margins = exact_points(case, 20).margins
    least = min(low for low, _ in fractions_of(margins))
    assert least == 1 - 3 * Fraction(5e-324)


@pytest.mark.parametrize("p", [1, 2, 3, math.inf])
def test_membership_is_exact(p: float) -> None:
    ball = LpBall(torch.zeros(1, 2), [0], p, 5.0)
    edge = {1: (2.0, 3.0), 2: (3.0, 4.0), 3: (0.0, 5.0), math.inf: (5.0, 5.0)}[p]
    beyond = edge[0], math.nextafter(edge[1], 6)
    assert exactly(ball).contained(np.array([[edge], [beyond]])).tolist() == [True, False]


def test_membership_of_candidates() -> None:
    x = torch.zeros(2, 2)
    region = CandidateSet(x, [0, 1], [torch.ones(1, 2), torch.ones(1, 2)], budget=1)
    points = np.array([[[0, 0], [0, 0]], [[1, 1], [0, 0]], [[1, 1], [1, 1]], [[1, 0], [0, 0]]], dtype=float)
    assert exactly(region).contained(points).tolist() == [True, True, False, False]


def test_comparisons_know_what_is_undecided() -> None:
    low, high = np.array([[1, 5, 9]], object), np.array([[2, 7, 10]], object)
    wrong, undecided = below(Span(low, high, 1), torch.tensor([3.0, 6.0, 9.0]))
    assert wrong.tolist() == [[True, False, False]]
    assert undecided.tolist() == [[False, True, False]]


def test_every_theme_is_drawn_and_judged() -> None:
    seen = set()
    for seed in range(120):
        case = extreme_case(seed)
        seen.add(case.name.split(":")[0])
    assert seen == set(THEMES)


def test_a_network_depends_on_its_seed_alone() -> None:
    first, second = exact_points(extreme_case(7), 40), exact_points(extreme_case(7), 40)
    assert first.case.name == second.case.name
    assert (first.places == second.places).all()
    assert fractions_of(first.margins) == fractions_of(second.margins)


def final(networks: int, points: int, seed: int, method: str) -> CampaignState:
    *_, now = campaign(networks, points, seed, [method], EXTREME)
    return now


@pytest.mark.parametrize("method", ["lse", "backward, differences"])
def test_a_few_extreme_networks(method: str) -> None:
    now = final(20, 60, 0, method)
    assert now.networks == 20
    assert now.points > 300
    assert not now.violations


def test_the_command_tells_a_violation_with_what_shows_it_again(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against an engine that claims a little too much."""
    command = ["soundness", "--extreme", "--networks", "2", "--points", "12", "--method", "interval"]
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["undecided"] == 0
    honest = cases.verify

    def boastful(*args: Any, **kwargs: Any) -> Any:
        found = honest(*args, **kwargs)
        return replace(found, margins=found.margins + (1 + found.margins.abs()))

    monkeypatch.setattr(cases, "verify", boastful)
    assert main(command) == 1
    assert "buffet soundness --extreme --networks 1 --seed" in capsys.readouterr().out


def test_a_few_certificates_of_extreme_networks(tmp_path: Path) -> None:
    *_, tally = extreme(5, tmp_path, seed=0, per_network=2)
    assert tally.accepted >= 5
    assert tally.points > 20
    assert not tally.wrong


def test_a_certificate_that_proves_too_much_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a checker that accepts anything."""
    import extreme_certificates

    at: Situation = situation(3, tmp_path)
    margin = at.points.margin(0, 0)

    class Accepted:
        accepted = True
        proofs = (type("Proof", (), {"margins": (math.nextafter(margin, math.inf) + 1,)}),)

    monkeypatch.setattr(extreme_certificates, "judge", lambda *_: Accepted)
    tally = ExtremeTally()
    hold(at, b"", "forged", tally)
    assert len(tally.wrong) == 1


NOTHING = result(lambda error: 0 * error)
MUTANTS = {
    "underflow of rows": (Patch(Errors, "underflow", NOTHING), 188, "backward"),
    "underflow of clean values": (Patch(clean_run, "residual", NOTHING), 616, "interval"),
    "intervals rounded to nearest": (
        Patch(propagation, "outward", lambda _: lambda op, clean, residual, box, boxes, unit: box),
        776,
        "interval",
    ),
    "underflow of pushed forms": (Patch(Errors, "_vanished", NOTHING), 550, "forward"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_campaign_notices_what_only_extremes_show(name: str) -> None:
    patch, seed, method = MUTANTS[name]
    assert not final(1, 40, seed, method).violations
    with patch():
        assert final(1, 40, seed, method).violations
