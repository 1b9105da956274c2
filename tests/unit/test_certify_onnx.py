"""Certificates of networks in ONNX and of properties: written, checked, tied to a file, and what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import buffet
import buffet_checker
from buffet.certificates.certificate import Question, write_certificate
from buffet.loading.onnx.runtime import run_if_possible
from buffet.methods import METHODS
from buffet.vnncomp.instance import answer
from buffet_checker.check import judge
from buffet_checker.errors import RejectedError
from buffet_checker.properties import Property, finish, read_property
from buffet_checker.report import as_json, as_lines
from corruptions import Opened
from false_certificates import base, judged
from onnx_networks import Controller, export, shaken

QUICK = METHODS["lse"]


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 inputs, 2 outputs between −1 and 1."""
    return export(shaken(Controller()), torch.zeros(1, 4, 3), tmp_path_factory.mktemp("network") / "c.onnx")


def spec(path: Path, bound: float, boxes: tuple[float, ...] = (0.0,)) -> Path:
    names = [*(f"X_{i}" for i in range(12)), "Y_0", "Y_1"]
    inside = [
        "(and " + " ".join(f"(<= X_{i} {c + 0.01}) (>= X_{i} {c - 0.01})" for i in range(12)) + ")"
        for c in boxes
    ]
    asked = f"(or {' '.join(inside)})" if len(boxes) > 1 else inside[0]
    lines = [f"(declare-const {name} Real)" for name in names]
    path.write_text("\n".join([*lines, f"(assert {asked})", f"(assert (>= Y_0 {bound}))"]), encoding="utf-8")
    return path


def highest(network: Path, at: float = 0.0) -> float:
    return float(buffet.load(network).outputs_of(torch.full((12,), at))[0])


def test_an_unsat_is_certified_and_checked(network: Path, tmp_path: Path, run) -> None:
    given, path = spec(tmp_path / "a.vnnlib", highest(network) + 0.3), tmp_path / "proof.safetensors"
    outcome = run("vnncomp", str(network), str(given), "--certificate", str(path), "--method", "lse")
    assert outcome.code == 0
    assert "checked and written" in outcome.err
    outcome = run("check", str(path), "--model", str(network))
    assert outcome.code == 0
    said = " ".join(outcome.out.split())
    assert "leaves −y0 > " in said
    assert "as it is stored there" in said
    assert "as was measured, not proven" in said
    document = json.loads(run("check", str(path), "--model", str(network), "--json").out)
    assert document["label"] is None
    assert document["network"]["inputs"] == 12
    assert document["network"]["agreement"]["difference"] < 1e-5
    assert document["claims"][0]["float32"] is False
    alone = subprocess.run(
        [sys.executable, "-m", "buffet_checker", str(path), "--model", str(network)],
        capture_output=True,
        text=True,
    )
    assert alone.returncode == 0
    assert "was not measured" in alone.stdout


def test_every_box_of_a_file_is_proven(network: Path, tmp_path: Path) -> None:
    boxes = (0.0, 0.5)
    bound = max(highest(network, at) for at in boxes) + 0.3
    path = tmp_path / "proof.safetensors"
    found = answer(network, spec(tmp_path / "a.vnnlib", bound, boxes), 60.0, QUICK, certificate=path)
    assert found.result == "unsat"
    result = buffet_checker.check(path, network, run_if_possible)
    assert result.accepted
    assert len(result.proofs) == 2
    assert len({proof.rows for proof in result.proofs}) == 2
    opened = Opened.of(path.read_bytes())
    opened.head["claims"][1]["query"] = 0  # both claims about the first box
    model = buffet_checker.agreement.read_network_file(network)
    assert not judge(opened.close(), "forged", model).accepted


def test_no_certificate_is_written_where_time_is_up(network: Path, tmp_path: Path) -> None:
    path = tmp_path / "proof.safetensors"
    found = answer(network, spec(tmp_path / "a.vnnlib", highest(network) - 1), 60.0, QUICK, certificate=path)
    assert found.result == "sat"
    assert not path.exists()


def test_a_list_writes_a_file_for_each(network: Path, tmp_path: Path, run) -> None:
    spec(tmp_path / "a.vnnlib", highest(network) + 0.3)
    listing = tmp_path / "list.csv"
    listing.write_text(f"{network},a.vnnlib,60\n", encoding="utf-8")
    folder = tmp_path / "proofs"
    outcome = run("vnncomp", str(listing), "--certificate", str(folder), "--workers", "1", "--method", "lse")
    assert outcome.code == 0
    (written,) = folder.iterdir()
    assert written.name == "c-a.safetensors"


def test_a_certificate_is_about_one_kind_of_model(network: Path, tmp_path: Path) -> None:
    known = base("stored")
    with pytest.raises(buffet_checker.BadInputError, match="another kind of model"):
        judge(base("baseline").content, "certificate", known.checkpoint)
    with pytest.raises(buffet_checker.BadInputError, match="another kind of model"):
        judge(known.content, "certificate", base("baseline").checkpoint)
    other = replace(known.checkpoint, hashes={"onnx": "1" * 64})
    result = judge(known.content, "certificate", other)
    assert "onnx has another hash" in result.reason


def test_what_is_stored_says_so() -> None:
    result = base("stored").result
    assert "network that certificate sha256:" in "\n".join(as_lines(result))
    assert json.loads(as_json(result))["claims"][0]["property"]
    assert all(np.isinf(slack) for slack in result.proofs[0].slacks)


def test_a_property_of_a_checkpoint_is_certified(tmp_path: Path) -> None:
    model = buffet.load()
    text = "a gripping , moving film"
    region = buffet.LpBall(model.embed(text), words=[2]).with_eps(0.01)
    label = int(model.logits(model.embed(text)[None])[0].argmax())
    asked = buffet.Property(
        torch.tensor([[2.0, 0.0]]).double() * (1 - label) + torch.tensor([[0.0, 2.0]]).double() * label,
        torch.tensor([-0.5]),
        ((0,),),
    )
    path = tmp_path / "proof.safetensors"
    written = write_certificate(path, model, [Question.of(model, region, property=asked)], QUICK, text)
    assert model.directory is not None
    result = buffet_checker.check(path, model.directory)
    assert result.accepted
    assert result.proofs[0].deployed
    assert f"leaves 2·y{label} > 0.5 true" in "\n".join(as_lines(result))
    assert min(written.margins[0]) > 0


# --- what is malformed --------------------------------------------------------------------------------------

STEP = {
    "an unknown operation": lambda step: step.update(kind="conv"),
    "a step that reads itself": lambda step: step.update(inputs=[999]),
    "two inputs for one": lambda step: step.update(inputs=[0, 0]),
    "a key that is unknown": lambda step: step.update(least=0.0),
    "no kind": lambda step: step.pop("kind"),
}


@pytest.mark.parametrize("name", STEP)
def test_malformed_steps_are_rejected(name: str) -> None:
    known = base("stored")
    opened = Opened.of(known.content)
    STEP[name](opened.head["network"]["steps"][0])
    result = judged(opened.close(), known.checkpoint)
    assert result is not None
    assert not result.accepted
    assert "network.steps[0]" in result.reason


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [[1.0], [1.0, 2.0], [1.0]]},
        {"offsets": []},
        {"cases": []},
        {"cases": [[]]},
        {"cases": [[9]]},
        {"layer": 1},
        {"rows": [["1", 0.0, 0.0]]},
    ],
)
def test_malformed_properties_are_rejected(change: dict[str, object]) -> None:
    asked = {"rows": [[1.0, 0.0, 0.0]], "offsets": [0.5], "cases": [[0]], "layer": True}
    assert isinstance(read_property(asked, "property"), Property)
    with pytest.raises(RejectedError, match="property"):
        read_property({**asked, **change}, "property")


def test_rows_of_a_property_are_those_of_the_outputs() -> None:
    rng = np.random.default_rng(0)
    weight, bias, x = rng.normal(size=(3, 4)), rng.normal(size=3), rng.normal(size=(1, 4))
    rows = np.array([[1.0, -1.0, 0.0], [0.0, 0.0, -1.0]])
    for layer in (False, True):
        net = buffet_checker.graph.Builder(x, "plain")
        finish(net, 0, weight, bias, Property(rows, np.zeros(2), ((0,), (1,)), layer))
        assert net.values[-1][0] == pytest.approx(rows @ (weight @ x[0] + bias))
    with pytest.raises(RejectedError, match="no difference of two"):
        finish(net, 0, weight, bias, Property(np.ones((1, 3)), np.zeros(1), ((0,),), False))
