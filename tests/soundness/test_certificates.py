"""Certificates of every method and kind of network: accepted, and true of points of the region."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import buffet
from buffet.certificates.certificate import Question, certify, certify_to
from buffet.cli import main
from buffet.methods import method_named
from buffet_checker import Result
from buffet_checker.check import judge
from certificate_campaign import VARIANTS, Tally, run, small_tasks, write_variant

TEXT = "a gripping film"
PLAIN: dict[str, object] = {"layer_norm": "no_var", "num_hidden_layers": 1}


def checked(model: buffet.Model, region: buffet.Region, method: buffet.Method) -> Result:
    _, content, checkpoint = certify(model, [Question.of(model, region)], method)
    result = judge(content, "certificate", checkpoint)
    assert result.accepted, result.reason
    return result


def holds(model: buffet.Model, region: buffet.Region, result: Result) -> None:
    """Sampled points are above the proven margins, in float64 and, less the slack, in float32."""
    assert result.label is not None
    delta = region.sample(60, torch.Generator().manual_seed(0))[:, 0]
    points = region.center.double().expand(60, -1, -1).clone()
    points[:, region.moved[0]] += delta
    points = points.float().double() if isinstance(region, buffet.LpBall) else points
    others = [c for c in range(len(model.labels)) if c != result.label]
    proven, slack = (
        torch.tensor(v, dtype=torch.float64) for v in (result.proofs[0].margins, result.proofs[0].slacks)
    )
    for rows in (points, points.float()):
        logits = model.logits(rows).double()
        margins = logits[:, result.label, None] - logits[:, others]
        assert bool((margins >= proven - (slack if rows.dtype == torch.float32 else 1e-6)).all())
    exact, deployed = (model.logits(points[:, :, :].to(t)).double() for t in (torch.float64, torch.float32))
    lead = [(v[:, result.label, None] - v[:, others]) for v in (exact, deployed)]
    assert bool(((lead[0] - lead[1]).abs() <= slack + 1e-12).all())


METHODS = {
    **{name: method for name, method in buffet.METHODS.items() if method.optimise == "none"},
    "o-buffet": method_named("o-buffet", steps=2),
    "o-backward": method_named("o-backward", steps=2),
    "final": method_named("lse", optimise="final", steps=2),
    "window": method_named("backward", window=1),
    "buffet": method_named("buffet", steps=2, optimise="tuned"),
}


@pytest.mark.parametrize("name", METHODS)
def test_certificates_of_every_method(name: str, tmp_path: Path) -> None:
    model = buffet.load(write_variant(tmp_path / "model", PLAIN, 1))
    eps = 1e-6 if name == "interval" else 1e-3 if name == "forward" else 0.01
    region = buffet.LpBall(model.embed(TEXT), [2], 2, eps)
    holds(model, region, checked(model, region, METHODS[name]))


@pytest.mark.parametrize("place", range(len(VARIANTS)))
def test_certificates_of_every_kind_of_network_and_region(place: int, tmp_path: Path) -> None:
    layers = 2 if place == 0 else 1
    model = buffet.load(
        write_variant(tmp_path / "model", {**VARIANTS[place], "num_hidden_layers": layers}, place)
    )
    x = model.embed(TEXT)
    noise = 1e-3 * torch.randn(2, 3, x.shape[1], generator=torch.Generator().manual_seed(1))
    regions = (
        buffet.LpBall(x, [1, 2], np.inf, 5e-4),
        buffet.LpBall(x, [2], 1.5, 2e-3),
        buffet.Box(x, x - 5e-4, x + 3e-4, words=[1, 2]),
        buffet.CandidateSet(x, [1, 2], [x[1] + noise[0], x[2] + noise[1, :1]], budget=1),
    )
    # every network with two of them, every region with several networks
    for region, name in list(zip(regions, ("lse", "backward", "baseline", "lse"), strict=True))[
        place % 2 :: 2
    ]:
        holds(model, region, checked(model, region, buffet.METHODS[name]))


def test_margins_that_no_box_is_known_of(tmp_path: Path) -> None:
    """With mean pooling the classifier reads no bounded node."""
    changes = {"layer_norm": "no_var", "pooling": "mean", "num_hidden_layers": 1}
    model = buffet.load(write_variant(tmp_path / "model", changes, 1))
    region = buffet.LpBall(model.embed(TEXT), [2], 2, 1e-3)
    holds(model, region, checked(model, region, buffet.METHODS["backward"]))


def test_learned_choices_are_used_where_they_are_needed(tmp_path: Path) -> None:
    """At a size where only the learned proof holds, the certificate is that proof."""
    model = buffet.load(write_variant(tmp_path / "model", PLAIN, 1))
    ball = buffet.LpBall(model.embed(TEXT), [2], 2)
    size = buffet.radius(model, ball, "lse", attack=False).certified * 1.005
    for method in (method_named("lse", optimise="final", steps=20), method_named("lse+o-buffet", steps=10)):
        assert buffet.verify(model, ball, size, method.plain(), falsify=False).verdict != "certified"
        holds(model, ball.with_eps(size), checked(model, ball.with_eps(size), method))


@pytest.mark.parametrize("propagation", ["backward", "baf+backward"])
def test_choices_learned_end_to_end_are_used_where_they_are_needed(propagation: str, tmp_path: Path) -> None:
    """The same for margins that are substituted to the input."""
    model = buffet.load(write_variant(tmp_path / "model", PLAIN, 1))
    method = method_named("o-backward", propagation=propagation, steps=15)
    ball = buffet.LpBall(model.embed(TEXT), [2], 2)
    size = buffet.radius(model, ball, method.plain(), attack=False).certified * 1.005
    assert buffet.verify(model, ball, size, method.plain(), falsify=False).verdict != "certified"
    holds(model, ball.with_eps(size), checked(model, ball.with_eps(size), method))


@pytest.mark.parametrize("words", [[4, 2], [3, 0, 4, 2, 1]])
def test_regions_keep_the_order_of_their_words(words: list[int], tmp_path: Path) -> None:
    """The rows of a box or of candidates belong to the words in the order in which these are given."""
    model = buffet.load(write_variant(tmp_path / "model", PLAIN, 1))
    x, order = model.embed(TEXT).double(), sorted(range(len(words)), key=lambda place: words[place])
    reach = torch.rand(
        len(words), x.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    reach *= 1e-3 * 4.0 ** -torch.arange(len(words))[:, None]  # no two rows reach equally far
    low, high, moved = x[words] - reach, x[words] + 0.5 * reach, sorted(words)
    pairs: list[tuple[buffet.Region, buffet.Region]] = [
        (
            buffet.Box(x, low[None], high[None], words=words),
            buffet.Box(x, low[order][None], high[order][None], words=moved),
        ),
        (
            buffet.CandidateSet(x, words, [row[None] for row in low], budget=1),
            buffet.CandidateSet(x, moved, [row[None] for row in low[order]], budget=1),
        ),
    ]
    for given, ordered in pairs:
        results = [checked(model, region, buffet.METHODS["lse"]) for region in (given, ordered)]
        holds(model, given, results[0])
        assert results[0].proofs[0].margins == pytest.approx(results[1].proofs[0].margins, abs=1e-9)
        assert results[0].proofs[0].moved == tuple(words)


def test_a_small_campaign(tmp_path: Path) -> None:
    tally, rng = Tally(), np.random.default_rng(0)
    for _, task in zip(range(5), small_tasks(tmp_path), strict=False):
        run(task, tally, 2, rng)
    assert not tally.misses
    assert tally.accepted == 5
    assert tally.rejected == tally.altered == 10


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = str(write_variant(tmp_path / "model", PLAIN, 1))
    proof = str(tmp_path / "proof.safetensors")
    ask = ["certify", TEXT, "--model", directory, "--method", "lse", "--no-attack"]
    assert main([*ask, "--certificate", proof]) == 2
    assert "give it with --eps" in capsys.readouterr().err
    assert main([*ask, "--eps", "100", "--certificate", proof]) == 1
    assert "not written" in capsys.readouterr().err
    assert not Path(proof).exists()
    assert main([*ask, "--eps", "0.01", "--words", "1,2+3", "--certificate", proof]) == 0
    assert main(["check", proof, "--model", directory]) == 0
    assert capsys.readouterr().out.count("holds in float32 too") == 2
    assert main(["check", proof]) == 1  # the embedded model is another one
    assert "another model" in capsys.readouterr().out
    assert main(["check", directory + "/config.json", "--model", directory]) == 2


def test_a_model_in_memory_has_no_certificate(tmp_path: Path) -> None:
    model = buffet.load(write_variant(tmp_path / "model", {}, 1))
    bare = replace(model, directory=None)
    with pytest.raises(buffet.BuffetError, match="in memory only"):
        certify_to(tmp_path / "proof", bare, buffet.LpBall(model.embed(TEXT), [2], 2), 0.01)
