"""Certificates of trees: cuts prove more, leaves cover the region, and whatever is wrong is rejected."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import buffet
import buffet_checker
from buffet.cli import main
from buffet_checker import certificate as stored
from buffet_checker.balls import Array
from buffet_checker.certificate import Cut
from buffet_checker.check import judge
from buffet_checker.errors import BadInputError
from buffet_checker.graph import evaluate
from buffet_checker.network import build
from buffet_checker.report import as_lines
from buffet_checker.substitution import Claimed
from buffet_checker.trees import clipped, covers, leaf_margins
from corruptions import Opened
from false_certificates import base
from tiny_checkpoint import write_model

TEXT = "good film , bad plot"
WORD, EPS = 2, 41.0
"""A ball that no walk proves, but a few cuts do."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> buffet.Model:
    return buffet.load(write_model(tmp_path_factory.mktemp("trees") / "model"), check=False)


def test_what_only_cuts_prove_is_certified_and_checked(
    model: buffet.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "proof.safetensors"
    region = buffet.LpBall(model.embed(TEXT), words=[WORD])
    with pytest.raises(buffet.BuffetError, match="not proven"):
        buffet.certify_to(path, model, region, eps=EPS, method="backward")
    written = buffet.certify_to(path, model, region, eps=EPS, text=TEXT)
    assert written.size == path.stat().st_size < 1 << 18
    assert main(["check", str(path), "--model", str(model.directory)]) == 0
    out = capsys.readouterr().out
    assert "leaves · margin" in out
    assert f"L2 norm up to {EPS}" in " ".join(out.split())

    assert model.directory is not None
    result = buffet_checker.check(path, model.directory)
    (proof,) = result.proofs
    assert 2 <= proof.leaves <= 100
    assert result.seconds < 30
    ball = region.with_eps(EPS)
    delta = ball.sample(500, torch.Generator().manual_seed(0))[:, 0].double()
    points = model.embed(TEXT).double().repeat(len(delta), 1, 1)
    points[:, ball.moved[0]] += delta
    logits = model.program64.evaluate(points).flatten(1)
    assert result.label is not None
    margins = logits[:, result.label] - logits[:, 1 - result.label]
    assert float(margins.min()) >= proof.margins[0]


def test_a_budget_is_kept(model: buffet.Model, tmp_path: Path) -> None:
    region = buffet.LpBall(model.embed(TEXT), words=[WORD])
    begin = time.perf_counter()
    with pytest.raises(buffet.BuffetError, match="not proven"):
        buffet.certify_to(tmp_path / "proof", model, region, eps=10 * EPS, budget=0.5)
    assert time.perf_counter() - begin < 30  # a busy machine
    assert not (tmp_path / "proof").exists()
    buffet.certify_to(tmp_path / "proof", model, region, eps=EPS, budget=600.0)


def test_what_the_checker_derives_for_a_leaf_holds_in_it() -> None:
    known = base("tree")
    opened = Opened.of(known.content)
    rows = opened.tensors["center"].astype(np.float64)
    nodes, values = build(known.checkpoint, rows, opened.head["label"], opened.claim["graph"])
    found = stored.read_certificate(known.content, "certificate")
    (claim,) = found.claims
    whole = Claimed(nodes, values, stored.region_of(claim, rows, found.tensors), claim, found.tensors)
    whole.margins()
    leaves = claim.trees[0]
    proven = [leaf_margins(whole, leaf, f"0.leaf.0.{k}")[0] for k, leaf in enumerate(leaves)]
    rng, seen = np.random.default_rng(0), set()
    for _ in range(600):
        delta = rng.normal(size=rows.shape[1])
        point = rows.copy()
        point[1] += 1.4 * rng.random() ** 0.2 * delta / np.linalg.norm(delta)
        run = [point]
        for node in nodes[1:]:
            run.append(evaluate(node, [run[i] for i in node.inputs]))
        inside = [k for k, leaf in enumerate(leaves) if all(_holds(cut, run, values) for cut in leaf.cuts)]
        assert inside
        seen |= set(inside)
        assert all((run[-1][0] >= proven[k]).all() for k in inside)
    assert len(seen) > 1


def _holds(cut: Cut, run: list[Array], values: list[Array]) -> bool:
    deviation = (run[cut.node] - values[cut.node]).reshape(-1)[cut.entry]
    return bool(deviation >= cut.threshold if cut.above else deviation <= cut.threshold)


# --- coverage -----------------------------------------------------------------------------------------------


def _paths(depth: int, rng: np.random.Generator, path: tuple[Cut, ...] = ()) -> list[tuple[Cut, ...]]:
    """The leaves of a random tree."""
    if depth == 0 or rng.random() < 0.2:
        return [path]
    at = int(rng.integers(3)), int(rng.integers(4)), float(rng.normal())
    return [p for side in (False, True) for p in _paths(depth - 1, rng, (*path, Cut(*at, side)))]


def test_trees_cover_the_region_and_nothing_less_does() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        paths = _paths(6, rng)
        rng.shuffle(paths)  # type: ignore[arg-type]
        assert covers([tuple(path) for path in paths])
        points = rng.normal(size=(200, 3, 4))
        count = np.zeros(len(points), int)
        for path in paths:
            sides = [(points[:, c.node, c.entry] >= c.threshold) == c.above for c in path]
            count += np.all([np.ones(len(points), bool), *sides], 0)
        assert (count == 1).all()
        lost = [path for k, path in enumerate(paths) if k != seed % len(paths)]
        assert not covers(lost)
        assert not covers([*paths, paths[0]])
    assert not covers([])
    assert covers([()])


@pytest.mark.parametrize(
    ("above", "threshold", "low", "high"),
    [
        (False, 0.5, 0.0, 0.5),
        (True, 0.5, 0.5, 1.0),
        (False, 2.0, 0.0, 1.0),
        (True, -2.0, 0.0, 1.0),
        (False, -2.0, -2.0, -2.0),  # nothing is left: no run is there
        (True, 2.0, 2.0, 2.0),
    ],
)
def test_boxes_end_at_cuts(above: bool, threshold: float, low: float, high: float) -> None:
    box = np.zeros((2, 3)), np.ones((2, 3))
    found = clipped(box, Cut(0, 4, threshold, above))
    assert (found[0][1, 1], found[1][1, 1]) == (low, high)
    assert found[0].sum() == low
    assert found[1].sum() == 5 + high
    assert box[0].sum() == 0  # untouched


# --- what is malformed --------------------------------------------------------------------------------------


def _cut(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    """Both sides of the first cut of all leaves altered, so that they still cover the region."""

    def change(claim: dict[str, Any]) -> None:
        for leaf in claim["trees"][0]:
            leaf["cuts"][0][place] = value

    return change


def _leaf(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda claim: claim["trees"][0][0].update({key: value})


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no list": (lambda claim: claim.update(trees={}), "no list"),
    "a tree that is none": (lambda claim: claim.update(trees=[3]), "no list"),
    "a tree without leaves": (lambda claim: claim["trees"].append([]), "do not add up"),
    "an unknown node": (_cut(0, 10**6), "which no function reads"),
    "a node that no function reads": (_cut(0, 0), "which no function reads"),
    "an entry out of range": (_cut(1, 10**6), "which has fewer"),
    "a negative entry": (_cut(1, -1), "whole number"),
    "true for an entry": (_cut(1, True), "whole number"),
    "NaN": (_cut(2, math.nan), ""),
    "infinity": (_cut(2, math.inf), ""),
    "a text": (_cut(2, "0.5"), "expected a number"),
    "a side that is none": (_cut(3, "beside"), "a cut is"),
    "a list for a side": (_cut(3, ["above"]), "a cut is"),
    "a short cut": (lambda claim: claim["trees"][0][0]["cuts"][0].pop(), "a cut is"),
    "a key that is unknown": (_leaf("region", {}), "unknown key"),
    "cuts that are none": (_leaf("cuts", None), "no list"),
    "another node": (_leaf("derivations", [{"nodes": [3]}]), "derives margins only"),
    "no derivation": (_leaf("derivations", []), ""),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_trees_are_rejected(name: str) -> None:
    change, reason = MALFORMED[name]
    known = base("tree")
    opened = Opened.of(known.content)
    change(opened.claim)
    try:
        result = judge(opened.close(), "certificate", known.checkpoint)
    except BadInputError:
        assert name in ("NaN", "infinity")  # no JSON
        return
    assert not result.accepted
    assert reason in result.reason


def test_trees_with_too_many_leaves_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "MOST_LEAVES", 3)
    known = base("tree")
    result = judge(known.content, "certificate", known.checkpoint)
    assert not result.accepted
    assert "leaves; at most 3" in result.reason


def test_arrays_of_a_leaf_that_nothing_reads_are_rejected() -> None:
    known = base("tree")
    opened = Opened.of(known.content)
    opened.tensors["0.leaf.0.99.0.3.lower"] = np.zeros(2, np.float32)
    result = judge(opened.close(), "certificate", known.checkpoint)
    assert not result.accepted
    assert "nothing refers to" in result.reason


def test_the_report_names_leaves() -> None:
    known = base("tree")
    assert f"{known.result.proofs[0].leaves} leaves" in "\n".join(as_lines(known.result))
