"""Verdicts: what counts as a proof, what as a counterexample, and which queries are refused."""

from __future__ import annotations

import math
import sys
from functools import cache

import pytest
import torch
from torch import Tensor

from buffet import verify as public_verify
from buffet.engine import Engine, bound_margins, proven
from buffet.errors import BuffetError
from buffet.lab.random_models import RandomModel, random_model
from buffet.loading import ModelConfig
from buffet.methods import METHODS, Method, method_named
from buffet.network import Builder, Mean
from buffet.query import clean_answer
from buffet.regions import Box, CandidateSet, LpBall
from buffet.results import Subject, Verification
from buffet.verification.verify import verify

WIDTH = 8
NAN, INF = math.nan, math.inf


@cache
def model(classes: int = 2, pooling: str = "cls", seed: int = 0) -> RandomModel:
    config = ModelConfig(
        vocab_size=2,
        hidden_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=6,
        hidden_act="relu",
        layer_norm="no_var",
        pooling=pooling,
        num_labels=classes,
    )
    return random_model(config, torch.Generator().manual_seed(seed))


@cache
def sentence(tokens: int = 4) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(1))


def answer(network: RandomModel, x: Tensor) -> int:
    return int(network.program64.evaluate(x.double()).argmax())


def with_margins(monkeypatch: pytest.MonkeyPatch, margins: list[list[float]]) -> Verification:
    """`verify` of as many tasks as there are rows, with these bounds instead of the method's."""
    module = sys.modules["buffet.verification.verify"]  # the package's attribute of that name is the function
    monkeypatch.setattr(module, "bound_margins", lambda *_, **__: torch.tensor(margins, dtype=torch.float64))
    region = LpBall(sentence(), [[1]] * len(margins), 2, 1e-6)
    return verify(model(len(margins[0]) + 1), region, method="baseline")


# --- what is a proof ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [NAN, INF, -INF, 0.0, -0.0, -1e-300, -1.0])
def test_only_finite_positive_margins_prove(bad, monkeypatch):
    rows = [[1.0, bad], [bad, 1.0], [1e-300, 1.0]]
    assert proven(torch.tensor(rows, dtype=torch.float64)).tolist() == [False, False, True]
    assert with_margins(monkeypatch, [[bad]]).verdict == "unknown"
    assert with_margins(monkeypatch, [[1.0, bad]]).verdict == "unknown"
    mixed = with_margins(monkeypatch, [[1.0], [bad], [1e-300]])
    assert mixed.verdicts == ("certified", "unknown", "certified")
    assert mixed.verdict == "unknown"


def test_margins_that_prove(monkeypatch):
    found = with_margins(monkeypatch, [[0.5, 2.0], [0.25, 1.0]])
    assert found.verdict == "certified"
    assert found.margin == 0.25
    assert found.counterexamples == (None, None)
    assert math.isnan(with_margins(monkeypatch, [[NAN], [1.0]]).margin)


def test_the_verdict_of_all_tasks_together():
    def together(*verdicts: str) -> str:
        margins = torch.ones(len(verdicts), 1).double()
        about = Subject.of(model(), LpBall(sentence(), [[1]] * len(verdicts)), METHODS["baseline"])
        return Verification(0, verdicts, margins, 1.0, (None,) * len(verdicts), 0.0, about).verdict

    assert together("certified", "certified") == "certified"
    assert together("certified", "unknown") == "unknown"
    assert together("unknown", "falsified") == "falsified"
    assert together("certified", "falsified") == "falsified"


def huge_model() -> RandomModel:
    """Weights so large that scores have no digits left and linear bounds overflow."""
    return random_model(model(pooling="mean").config, torch.Generator().manual_seed(3), scale=1e30)


@pytest.mark.parametrize("method", ["forward", "baseline", "r-buffet", "lse", "backward"])
def test_overflow_is_never_a_proof(method):
    found = verify(huge_model(), LpBall(sentence(), [1], 2, 1.0), method=method, falsify=False)
    assert found.verdict == "unknown"


def test_no_bound_is_above_the_clean_margin():
    found = verify(huge_model(), LpBall(sentence(), [1], 2, 1.0), method="interval", falsify=False)
    assert not found.margin > found.clean_margin


def test_cancelling_weights_in_single_precision_are_no_proof():
    """``w·(x − mean x) + b`` with nearly equal weights: only their last bits decide."""
    last_bits = torch.tensor([2.0, 2, 3, 0, 3, 3, 3, 3])
    net = Builder()
    centered = net.layer_norm(net.input, torch.ones(8), torch.zeros(8), eps=None)
    weight = torch.stack([torch.zeros(8), 1 + last_bits * 2.0**-23])
    net.affine(net.add(Mean(), centered), weight, torch.tensor([0.0, 6.1e-7]))
    network = RandomModel(model().config, net.build(), net.build().to(torch.float64))
    corner = torch.where(last_bits > last_bits.mean(), -1.0, 1.0).double()
    assert answer(network, torch.zeros(1, 8)) == 1
    assert answer(network, corner[None]) == 0
    region = LpBall(torch.zeros(1, 8), [0], "inf", 1.0)
    assert verify(network, region, method="backward").verdict != "certified"
    assert verify(network, region, method="baseline").verdict != "certified"


# --- clean answers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("falsify", [True, False])
def test_a_wrong_label_is_falsified_at_any_size(falsify):
    wrong = 1 - answer(model(), sentence())
    for eps in (0.0, 1e-9, 0.1):
        found = verify(
            model(), LpBall(sentence(), [[1], [2]], 2, eps), method="baseline", label=wrong, falsify=falsify
        )
        assert found.verdicts == ("falsified", "falsified")
        assert found.clean_margin < 0
        assert found.label == wrong


@pytest.mark.parametrize("method", METHODS)
def test_radius_zero_is_certified_with_the_clean_margin(method):
    found = verify(model(3), LpBall(sentence(), [[1], [2]], 2), 0.0, method)
    assert found.verdict == "certified"
    assert found.margin == pytest.approx(found.clean_margin, rel=1e-6)


def test_a_tie_between_classes_is_never_certified():
    network = model()
    *body, last = network.program64.nodes
    same = type(last.op)(last.op.weight[:1].repeat(2, 1), last.op.bias[:1].repeat(2))
    program = type(network.program64)((*body, type(last)(same, last.inputs)))
    tied = RandomModel(network.config, program.to(torch.float32), program)
    for label in (None, 0, 1):
        assert (
            verify(tied, LpBall(sentence(), [1], 2, 0.0), method="baseline", label=label).verdict == "unknown"
        )


@pytest.mark.parametrize("classes", [2, 3, 5])
def test_margins_of_every_other_class(classes):
    network, x = model(classes), sentence()
    logits = network.program64.evaluate(x.double())
    label = int(logits.argmax())
    found = verify(network, LpBall(x, [[0], [1]], 2, 1e-4), method="backward")
    assert found.margins.shape == (2, classes - 1)
    others = torch.cat([logits[:label], logits[label + 1 :]])
    assert (found.margins <= logits[label] - others).all()
    torch.testing.assert_close(found.margins, (logits[label] - others).expand(2, -1), rtol=0.05, atol=0.01)
    assert found.clean_margin == pytest.approx(float(logits[label] - others.max()))
    assert clean_answer(network, LpBall(x, [0], 2, 0.0), None) == (label, found.clean_margin)


# --- counterexamples ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, INF])
@pytest.mark.parametrize("classes", [2, 3])
def test_counterexamples_flip_and_lie_in_the_region(classes, p):
    network, x = model(classes), sentence()
    region = LpBall(x, [[0], [1], [3]], p, [50.0, 1e-6, 50.0])
    found = verify(network, region, method="interval")
    assert found.verdicts[1] != "falsified"
    assert "falsified" in found.verdicts
    for task, (verdict, point) in enumerate(zip(found.verdicts, found.counterexamples, strict=True)):
        assert (verdict == "falsified") == (point is not None)
        if point is not None:
            assert answer(network, point) != found.label
            assert int(network.program.evaluate(point.float()).argmax()) != found.label
            delta = point - x.double()
            moved = int(region.moved[task, 0])
            assert not delta[[i for i in range(len(x)) if i != moved]].any()
            assert region.select([task]).contains(delta[moved][None, None], slack=1e-9).all()


def test_counterexamples_of_boxes_and_candidates():
    network, x = model(), sentence()
    wide = verify(network, Box(x, x - 30, x + 30, [1]), method="interval")
    rows = 20 * torch.randn(30, WIDTH, generator=torch.Generator().manual_seed(5))
    choices = verify(network, CandidateSet(x, [1], [rows]), method="interval")
    for found in (wide, choices):
        assert found.verdict == "falsified"
        assert answer(network, found.counterexamples[0]) != found.label
    assert ((wide.counterexamples[0] - x).abs() <= 30 + 1e-9).all()
    assert any(torch.equal(choices.counterexamples[0][1].float(), row) for row in rows)


def test_without_falsification_a_failure_is_unknown():
    found = verify(model(), LpBall(sentence(), [[0], [1]], 2, 50.0), method="baseline", falsify=False)
    assert found.verdicts == ("unknown", "unknown")
    assert found.counterexamples == (None, None)


def test_the_same_seed_gives_the_same_answer():
    region = LpBall(sentence(), [[0], [1]], 2, 5.0)
    a, b = (verify(model(), region, method="baseline", seed=3) for _ in range(2))
    assert a.verdicts == b.verdicts
    assert torch.equal(a.margins.nan_to_num(), b.margins.nan_to_num())


# --- padding ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("keep", [[1, 1, 1, 1, 0, 0], [1, 0, 1, 1, 0, 1]])
def test_a_masked_sentence_is_the_sentence_without_padding(pooling, keep):
    network, x, mask = model(3, pooling), sentence(6), torch.tensor(keep).bool()
    kept = mask.nonzero()[:, 0].tolist()
    for method in ("interval", "baseline"):
        padded = verify(network, LpBall(x, [[w] for w in kept], 2, 0.01), method=method, mask=mask)
        short = verify(network, LpBall(x[mask], [[i] for i in range(4)], 2, 0.01), method=method)
        torch.testing.assert_close(padded.margins, short.margins, rtol=0, atol=0, equal_nan=True)
        assert padded.verdicts == short.verdicts
    # The model itself agrees, and what stands in the padding does not matter.
    other = torch.where(mask[:, None], x, 100 * x)
    logits = [network.program64.evaluate(v.double(), mask) for v in (x, other)]
    torch.testing.assert_close(logits[0], network.program64.evaluate(x[mask].double()))
    torch.testing.assert_close(logits[0], logits[1])
    again = verify(network, LpBall(other, [[w] for w in kept], 2, 0.01), method="baseline", mask=mask)
    torch.testing.assert_close(
        again.margins,
        verify(network, LpBall(x[mask], [[0], [1], [2], [3]], 2, 0.01), method="baseline").margins,
    )


def test_other_regions_drop_padding_too():
    network, x, mask = model(), sentence(6), torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    short = x[mask]
    box = verify(network, Box(x, x - 0.01, x + 0.01, [2, 5]), method="baseline", mask=mask)
    plain = verify(network, Box(short, short - 0.01, short + 0.01, [1, 3]), method="baseline")
    torch.testing.assert_close(box.margins, plain.margins)
    rows = [x[[1]] * 0.1 + x[[2]], x[[1]] * 0.1 + x[[5]]]
    some = verify(network, CandidateSet(x, [2, 5], rows, budget=1), method="baseline", mask=mask)
    same = verify(network, CandidateSet(short, [1, 3], rows, budget=1), method="baseline")
    torch.testing.assert_close(some.margins, same.margins)


def test_a_full_mask_changes_nothing():
    region = LpBall(sentence(), [[0], [2]], 2, 0.01)
    masked = verify(model(), region, method="baseline", mask=torch.ones(4).bool())
    assert torch.equal(masked.margins, verify(model(), region, method="baseline").margins)


# --- refused queries ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"label": 2}, "label 2 is not a class of the model"),
        ({"label": -1}, "label -1 is not a class of the model"),
        ({"method": "magic"}, "unknown method 'magic'"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eps": NAN}, "eps is nan"),
        ({"eps": [0.1, 0.2, 0.3]}, "eps has shape"),
        ({"mask": torch.tensor([False, True, True, True])}, "row 0"),
        ({"mask": torch.tensor([True, False, True, True])}, "moved word is padding"),
        ({"mask": torch.tensor([True, True])}, "mask has 2 entries"),
    ],
)
def test_bad_queries_are_one_line(arguments, message):
    with pytest.raises(BuffetError, match=message) as caught:
        verify(model(), LpBall(sentence(), [1], 2, 0.1), **arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"propagation": "sideways"}, "unknown propagation 'sideways'"),
        ({"product": "sum"}, "unknown product 'sum'"),
        ({"softmax": "hard"}, "unknown softmax 'hard'"),
        ({"optimise": "hope"}, "unknown optimise 'hope'"),
        ({"steps": -1}, "steps -1"),
        ({"window": 1}, "window 1"),
        ({"propagation": "backward", "window": 0}, "window 0"),
    ],
)
def test_an_unknown_part_of_a_method_is_one_line(part, message):
    for refused in (lambda: Method(**part), lambda: method_named("lse", **part)):
        with pytest.raises(BuffetError, match=message) as caught:
            refused()
        assert "\n" not in str(caught.value)


def test_rows_of_another_width_are_refused():
    with pytest.raises(BuffetError, match="5 wide, the model expects 8"):
        verify(model(), LpBall(torch.zeros(3, 5), [1], 2, 0.1))


def test_a_ball_needs_a_size_and_nothing_else_takes_one():
    x = sentence()
    with pytest.raises(BuffetError, match="no size yet"):
        verify(model(), LpBall(x, [1], 2))
    with pytest.raises(BuffetError, match="Box has no size"):
        verify(model(), Box(x, x - 1, x + 1), eps=0.1)
    with pytest.raises(BuffetError, match="CandidateSet has no size"):
        verify(model(), CandidateSet(x, [1], [x[:2]]), eps=0.1)


def test_eps_of_the_query_replaces_that_of_the_ball():
    region = LpBall(sentence(), [[0], [1]], 2, 1e9)
    sizes = [1e-3, 2e-3]
    found = public_verify(model(), region, sizes, "baseline")
    plain = verify(model(), LpBall(sentence(), [[0], [1]], 2, torch.tensor(sizes)), method="baseline")
    torch.testing.assert_close(found.margins, plain.margins)
    assert found.verdict == "certified"


# --- the engine ---------------------------------------------------------------------------------------------


def test_little_memory_only_means_smaller_batches():
    region = LpBall(sentence(), [[i] for i in range(4)], 2, 0.01)
    label = answer(model(), sentence())
    whole = bound_margins(model(), region, METHODS["baseline"], label, Engine())
    clean_run = METHODS["baseline"].clean_run(model().program64, sentence(), label)
    little = Engine(memory=Engine(chunk=1).need(clean_run, METHODS["baseline"], region).one, chunk=1)
    pieces = bound_margins(model(), region, METHODS["baseline"], label, little)
    torch.testing.assert_close(whole, pieces, rtol=1e-5, atol=1e-6)
