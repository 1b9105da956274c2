"""Instances of the competition: answers, counterexamples, lists of instances."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from buffet.errors import BuffetError
from buffet.loading.onnx.model import read_onnx, run_onnx
from buffet.vnncomp import instance
from buffet.vnncomp.instance import answer, representable
from buffet.vnncomp.listing import COLUMNS, Instance, read_instances, read_results, run_list
from command_line import one_line
from onnx_networks import Controller, export, shaken


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """12 inputs, 2 outputs between −1 and 1."""
    path = tmp_path_factory.mktemp("network") / "controller.onnx"
    return export(shaken(Controller()), torch.zeros(1, 4, 3), path)


def spec(path: Path, unsafe: str, half: float = 0.01, boxes: tuple[float, ...] = (0.0,)) -> Path:
    """All inputs within `half` of one of the `boxes`, and what is unsafe."""
    names = [*(f"X_{i}" for i in range(12)), "Y_0", "Y_1"]
    inside = [
        "(and " + " ".join(f"(<= X_{i} {c + half}) (>= X_{i} {c - half})" for i in range(12)) + ")"
        for c in boxes
    ]
    lines = [f"(declare-const {name} Real)" for name in names]
    lines += [f"(assert (or {' '.join(inside)}))" if len(boxes) > 1 else f"(assert {inside[0]})"]
    path.write_text("\n".join([*lines, f"(assert {unsafe})"]), encoding="utf-8")
    return path


def outputs(network: Path, at: float = 0.0) -> list[float]:
    model = read_onnx(network)
    return model.outputs_of(torch.full((12,), at)).tolist()


def above(bound: float) -> str:
    return f"(>= Y_0 {bound})"


def test_what_is_proven_is_unsat(network, tmp_path):
    found = answer(network, spec(tmp_path / "a.vnnlib", above(outputs(network)[0] + 0.3)), 60.0)
    assert found.result == "unsat"
    assert found.counterexample is None
    assert found.seconds > 0


def test_a_counterexample_is_in_the_box_and_unsafe_for_onnxruntime(network, tmp_path):
    bound = outputs(network)[0]
    found = answer(network, spec(tmp_path / "a.vnnlib", above(bound)), 60.0)
    assert found.result == "sat"
    point = found.counterexample
    assert point is not None
    assert bool((point.inputs.abs() <= 0.01).all())
    assert torch.equal(point.inputs.float().double(), point.inputs)
    (again,) = run_onnx(read_onnx(network), point.inputs[None])
    assert float(again[0]) >= bound
    words = re.findall(r"\(([XY]_\d+) ([^()]+)\)", point.text())
    assert [name for name, _ in words] == [*(f"X_{i}" for i in range(12)), "Y_0", "Y_1"]
    assert point.text().startswith("((X_0 ")
    assert point.text().endswith("))")
    assert [float(value) for _, value in words[:12]] == point.inputs.tolist()


def test_all_boxes_of_a_file_have_to_be_safe(network, tmp_path):
    highest = max(outputs(network, at)[0] for at in (0.0, 0.5))
    lowest = min(outputs(network, at)[0] for at in (0.0, 0.5))
    assert highest - lowest > 0.01
    safe = spec(tmp_path / "safe.vnnlib", above(highest + 0.3), boxes=(0.0, 0.5))
    assert answer(network, safe, 60.0).result == "unsat"
    one = spec(tmp_path / "one.vnnlib", above((highest + lowest) / 2), 0.001, boxes=(0.0, 0.5))
    assert answer(network, one, 60.0).result == "sat"


def test_a_counterexample_that_onnxruntime_does_not_confirm_is_none(network, tmp_path, monkeypatch):
    monkeypatch.setattr(instance, "run_onnx", lambda model, flat: torch.zeros(1, 2) - 5)
    found = answer(network, spec(tmp_path / "a.vnnlib", above(outputs(network)[0])), 60.0, "baseline")
    assert found.result == "unknown"
    assert found.reason == "a counterexample is none for onnxruntime"


def test_the_time_limit_is_kept(network, tmp_path):
    hard = spec(tmp_path / "a.vnnlib", above(outputs(network)[0] + 0.5), 0.5)
    begin = time.perf_counter()
    assert answer(network, hard, 0.01).result == "timeout"
    assert time.perf_counter() - begin < 5
    with pytest.raises(BuffetError, match="seconds"):
        answer(network, hard, 0.0)


def test_numbers_of_float32_stay_in_the_box():
    lower, upper = torch.tensor([0.1, 0.1, -0.3]).double() + 1e-12, torch.tensor([0.2, 0.1, -0.1]).double()
    upper = torch.maximum(upper, lower)
    found = representable(torch.tensor([0.1, 0.1, 7.0]).double(), lower, upper)
    assert bool(((lower <= found) & (found <= upper)).all())
    assert torch.equal(found[[0, 2]].float().double(), found[[0, 2]])


# --- lists --------------------------------------------------------------------------------------------------


@pytest.fixture
def listed(network, tmp_path) -> Path:
    bound = outputs(network)[0]
    spec(tmp_path / "safe.vnnlib", above(bound + 0.3))
    spec(tmp_path / "broken.vnnlib", above(bound))
    text = spec(tmp_path / "packed.vnnlib", above(bound + 0.4)).read_bytes()
    (tmp_path / "packed.vnnlib.gz").write_bytes(gzip.compress(text))
    names = ("safe.vnnlib", "broken.vnnlib", "packed.vnnlib.gz", "gone.vnnlib")
    path = tmp_path / "instances.csv"
    path.write_text("".join(f"{network},{name},60\n" for name in names))
    return path


@pytest.mark.parametrize("workers", [1, 2])
def test_a_list_is_answered_and_continued(listed, workers, tmp_path):
    instances, out = read_instances(listed), tmp_path / "results.csv"

    def go(some):
        return run_list(some, listed.parent, out, method="baseline", workers=workers, threads=1)

    rows = go(instances)
    assert [row.result for row in rows] == ["unsat", "sat", "unsat", "error"]
    assert "gone.vnnlib" in rows[3].reason
    assert sorted(read_results(out), key=str) == sorted(rows, key=str)
    before = out.read_text()
    assert go(instances) == rows
    assert out.read_text() == before
    lines = before.splitlines(keepends=True)
    out.write_text("".join(lines[:3]) + lines[3][:10])  # interrupted
    assert [row.result for row in go(instances)] == [row.result for row in rows]
    assert out.read_text().startswith("".join(lines[:3]))


def test_answers_about_a_file_that_was_written_since_are_not_reused(listed, tmp_path):
    instances, out = read_instances(listed)[:1], tmp_path / "results.csv"
    how = {"method": "baseline", "workers": 1, "threads": 1}
    run_list(instances, listed.parent, out, **how)
    before, name = out.read_text(), instances[0].vnnlib
    spec(tmp_path / name, above(-100.0))
    os.utime(tmp_path / name, (out.stat().st_mtime + 1,) * 2)
    with pytest.raises(BuffetError, match=f"{name} was written after it"):
        run_list(instances, listed.parent, out, **how)
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no instances"),
        ("a.onnx\n", "line 1: expected onnx,vnnlib,timeout"),
        ("a.onnx,b.vnnlib,soon\n", "line 1: no time limit"),
        ("a.onnx,b.vnnlib\n", "line 1: no time limit"),
        ("a.onnx,b.vnnlib,-1\n", "line 1: no time limit"),
    ],
)
def test_lists_that_are_none(text, complaint, tmp_path):
    path = tmp_path / "list.csv"
    path.write_text(text)
    with pytest.raises(BuffetError, match=complaint):
        read_instances(path)


@pytest.mark.parametrize(
    "text", ["", "onnx,vnnlib\n", ",".join(COLUMNS) + "\na,b,1,maybe,1,\n", "a" * 200_000 + "\n"]
)
def test_other_files_are_not_overwritten(text, tmp_path):
    path = tmp_path / "results.csv"
    path.write_text(text)
    with pytest.raises(BuffetError, match="result"):
        run_list([Instance("a", "b", 1.0)], tmp_path, path, method="baseline", workers=1, threads=1)
    assert path.read_text() == text


# --- the command --------------------------------------------------------------------------------------------


def test_the_command_prints_what_the_competition_wants(run, network, tmp_path):
    bound = outputs(network)[0]
    safe, broken = spec(tmp_path / "a.vnnlib", above(bound + 0.3)), spec(tmp_path / "b.vnnlib", above(bound))
    assert run("vnncomp", network, safe, "--timeout", 60, "--threads", 1) == (0, "unsat\n", "")
    found = run("vnncomp", network, broken, "--timeout", 60, "--threads", 1)
    assert found.code == 1
    assert found.out.splitlines()[0] == "sat"
    assert len(found.out.splitlines()) == 15
    told = json.loads(run("vnncomp", network, broken, "--threads", 1, "--json").out)
    assert told["result"] == "sat"
    assert len(told["counterexample"]["X"]) == 12


def test_the_command_runs_a_list(run, listed, tmp_path):
    options = ("--workers", 1, "--threads", 1, "--method", "baseline")
    found = run("vnncomp", listed, "-o", tmp_path / "r.csv", *options)
    assert found.code == 1
    assert "4 instances" in found.out
    told = json.loads(run("vnncomp", listed, "-o", tmp_path / "r.csv", *options, "--json").out)
    assert told["counts"] == {"unsat": 2, "sat": 1, "error": 1}


def test_complaints_are_one_line(run, network, tmp_path):
    safe = spec(tmp_path / "a.vnnlib", above(2.0))
    one_line(run("vnncomp", network, safe, "--workers", 2), "--workers goes with a list")
    one_line(run("vnncomp", network, tmp_path / "gone.vnnlib"), "gone.vnnlib")
    one_line(run("vnncomp", tmp_path / "gone.csv"), "gone.csv")
    one_line(run("vnncomp", network, safe, "--method", "best"), "unknown method")
    one_line(run("vnncomp", network, safe, "--timeout", "0"), "seconds")


# --- the competition's scripts ------------------------------------------------------------------------------

SCRIPTS = Path(__file__).parents[2] / "vnncomp"


@pytest.fixture
def tool(tmp_path) -> Path:
    """The command as a script of its own."""
    path = tmp_path / "buffet"
    code = "import sys; from buffet.cli import main; sys.exit(main())"
    path.write_text(f'#!/bin/bash\nexec {sys.executable} -c "{code}" "$@"\n')
    path.chmod(0o755)
    return path


def script(name: str, tool: Path, *arguments: object) -> int:
    environment = {**os.environ, "BUFFET": str(tool), "OMP_NUM_THREADS": "1"}
    command = [str(SCRIPTS / name), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, check=False).returncode


def test_the_scripts_write_what_the_competition_reads(network, tool, tmp_path):
    bound, results = outputs(network)[0], tmp_path / "results.txt"
    broken = spec(tmp_path / "b.vnnlib", above(bound))
    assert script("prepare_instance.sh", tool, "v1", "some", network, broken) == 0
    assert script("prepare_instance.sh", tool, "v1", "some", network, tmp_path / "gone.vnnlib") == 1
    assert script("run_instance.sh", tool, "v2", "some", network, broken, results, 60) == 1
    assert script("run_instance.sh", tool, "v1", "some", network, broken, results, 60) == 0
    assert results.read_text().startswith("sat\n((X_0 ")
    assert script("run_instance.sh", tool, "v1", "some", network, tmp_path / "gone", results, 60) == 0
    assert results.read_text() == "error\n"


@pytest.mark.parametrize("name", ["install_tool.sh", "prepare_instance.sh", "run_instance.sh"])
def test_the_scripts_are_bash_and_refuse_another_version(name: str) -> None:
    script = str(SCRIPTS / name)
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    refused = subprocess.run(["bash", script, "v2"], capture_output=True, text=True)
    assert refused.returncode == 1
    assert "expected version v1, got 'v2'" in refused.stderr


def test_the_tool_is_installed_into_an_environment_of_its_own(tmp_path: Path) -> None:
    """Everything but the download: a `python3` that takes down what it and its pip are asked for."""
    tree, told = tmp_path / "buffet" / "vnncomp", tmp_path / "told"
    tree.mkdir(parents=True)
    (tree / "install_tool.sh").write_bytes((SCRIPTS / "install_tool.sh").read_bytes())
    fake = tmp_path / "bin" / "python3"
    fake.parent.mkdir()
    say = f'#!/bin/bash\nprintf "%s\\n" "$@" >> {told}\n'
    pip = tmp_path / "pip"
    pip.write_text(say)
    fake.write_text(f'{say}mkdir -p "$3/bin"\ncp {pip} "$3/bin/pip"\n')
    for script in (fake, pip):
        script.chmod(0o755)
    path = {**os.environ, "PATH": f"{fake.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(tree / "install_tool.sh"), "v1"], env=path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    asked = told.read_text().split("\n")[:-1]
    assert asked[:2] == ["-m", "venv"]
    assert asked[3] == "install"
    assert asked[4].endswith("[onnx]")
    assert Path(asked[4].removesuffix("[onnx]")).resolve() == tree.parent.resolve()
