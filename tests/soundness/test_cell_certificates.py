"""Certificates of balls that are proven in cells: whatever does not cover the ball is rejected."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import buffet
from buffet.certificates.certificate import Question, certify
from buffet.cli import main
from buffet.methods import method_named
from buffet_checker.check import judge
from certificate_campaign import write_variant
from corruptions import Opened

TEXT = "a gripping film"


@pytest.fixture(scope="module", params=[2.0, 1.0, math.inf])
def proven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, object]:
    """A certificate of a ball that is proven by cells only."""
    path = tmp_path_factory.mktemp("cells") / "model"
    model = buffet.load(write_variant(path, {"layer_norm": "no_var", "num_hidden_layers": 2}, 1))
    ball = buffet.LpBall(model.embed(TEXT), [2], p=request.param)
    methods = (buffet.METHODS["lse"], method_named("lse", cells=6))
    whole, cells = (buffet.radius(model, ball, m, tolerance=0.01, attack=False).certified for m in methods)
    assert cells > 1.02 * whole
    region = ball.with_eps(0.2 * whole + 0.8 * cells)
    _, content, checkpoint = certify(model, [Question.of(model, region)], method_named("lse", cells=6))
    return content, checkpoint


def test_a_certificate_of_cells_is_accepted(proven: tuple[bytes, object]) -> None:
    result = judge(proven[0], "certificate", proven[1])
    assert result.accepted, result.reason
    assert [proof.cells for proof in result.proofs] == [len(Opened.of(proven[0]).head["claims"])]
    assert result.proofs[0].cells > 1


def _drop(opened: Opened) -> None:
    opened.head["claims"].pop()
    number = len(opened.head["claims"])
    opened.tensors = {k: v for k, v in opened.tensors.items() if not k.startswith(f"{number}.")}


def _twice(opened: Opened) -> None:
    """The last claim is a copy of another."""
    claims, last = opened.head["claims"], len(opened.head["claims"]) - 1
    claims[last] = copy.deepcopy(claims[0])
    same = {k: v for k, v in opened.tensors.items() if k.startswith("0.")}
    opened.tensors = {k: v for k, v in opened.tensors.items() if not k.startswith(f"{last}.")}
    opened.tensors |= {f"{last}.{k.removeprefix('0.')}": v for k, v in same.items()}


def _shrink(opened: Opened) -> None:
    cell = next(c for c in opened.head["claims"] if c["region"]["upper"][0] is not None)
    cell["region"]["upper"][0] -= 1e-3


def _close(opened: Opened) -> None:
    cell = next(c for c in opened.head["claims"] if c["region"]["upper"][0] is None)
    cell["region"]["upper"][0] = 1e6


def _smaller(opened: Opened) -> None:
    opened.claim["region"]["eps"] *= 0.9


def _rounder(opened: Opened) -> None:
    opened.claim["region"]["p"] = 1.5


def _apart(opened: Opened) -> None:
    opened.claim["region"]["cuts"] = 77
    opened.tensors["cuts.77"] = opened.tensors["cuts.0"]


def _turned(opened: Opened) -> None:
    opened.tensors["cuts.0"] = -opened.tensors["cuts.0"][:, ::-1].copy()


def _empty(opened: Opened) -> None:
    region = opened.claim["region"]
    region["lower"], region["upper"], region["rows"] = [], [], []


def _no_list(opened: Opened) -> None:
    for claim in opened.head["claims"]:
        claim["region"]["rows"] = 5


def _no_size(opened: Opened) -> None:
    opened.head["claims"] = opened.head["claims"][:1]
    region = opened.claim["region"]
    opened.claim["region"] = {"kind": "ball", "moved": region["moved"], "p": region["p"]}


def _reversed(opened: Opened) -> None:
    region = opened.claim["region"]
    region["lower"][0], region["upper"][0] = 1.0, -1.0


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (_drop, "do not add up"),
        (_twice, "do not add up"),
        (_shrink, "do not add up"),
        (_close, "do not add up"),
        (_smaller, "another eps"),
        (_rounder, "another p"),
        (_apart, "do not add up"),
        (_turned, "node"),
        (_empty, "another rows"),
        (_reversed, "not below"),
        (_no_list, "rows"),
        (_no_size, "eps"),
    ],
)
def test_cells_that_prove_nothing_are_rejected(
    proven: tuple[bytes, object], corrupt: Callable[[Opened], None], reason: str
) -> None:
    opened = Opened.of(proven[0])
    corrupt(opened)
    result = judge(opened.close(), "certificate", proven[1])
    assert not result.accepted
    assert re.search(reason, result.reason), result.reason


def test_the_command_writes_and_checks_cells(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    path = tmp_path / "proof.safetensors"
    command = ["certify", "a gripping , moving film", "--words", "3", "--method", "lse", "--no-attack"]
    assert main([*command, "--eps", "0.7", "--cells", "4", "--certificate", str(path)]) == 0
    assert "4 cells" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0
    told = capsys.readouterr().out
    assert "row 3 · L2 ball of 0.7 · 3 cells" in told
    assert 'the embedding of "," (row 3) by any vector of L2 norm up to 0.7 never changes the answer' in told
