"""What the checker refuses before it checks anything: files that are none, models that it cannot judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load, save

import buffet
import buffet_checker
from buffet.certificates.certificate import Question, certify
from buffet.cli import main
from buffet.engine import proven
from buffet.network import Affine, Node, Program
from buffet_checker import storage
from buffet_checker.__main__ import main as check_alone
from buffet_checker.network import Checkpoint, read_checkpoint
from certificate_campaign import outcome, write_variant
from corruptions import Opened

SMALL: dict[str, object] = {"layer_norm": "no_var", "num_hidden_layers": 1}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(tmp_path_factory.mktemp("input") / "model", SMALL, 1)


@pytest.fixture(scope="module")
def content(directory: Path) -> bytes:
    model = buffet.load(directory)
    region = buffet.LpBall(model.embed("a gripping film"), [2], 2, 0.01)
    return certify(model, [Question.of(model, region)], buffet.METHODS["lse"])[1]


def copied(directory: Path, place: Path) -> Path:
    """The same checkpoint somewhere else, to be put wrong."""
    place.mkdir()
    for file in directory.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


# --- files --------------------------------------------------------------------------------------------------


def endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


SPECIAL: dict[str, Callable[[Path], None]] = {"endless": endless, "fifo": os.mkfifo, "directory": os.mkdir}
"""What a name may stand for instead of a file."""


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("name", ["proof", "config.json", "model.safetensors"])
def test_only_regular_files_are_read(
    name: str, kind: str, directory: Path, content: bytes, tmp_path: Path
) -> None:
    """In a process of its own, which ends at once: nothing is waited for, and nothing is read without end."""
    model, proof = copied(directory, tmp_path / "model"), tmp_path / "proof"
    proof.write_bytes(content)
    wrong = proof if name == "proof" else model / name
    wrong.unlink()
    SPECIAL[kind](wrong)
    script = "import sys; from buffet_checker.__main__ import main; sys.exit(main())"
    given = [sys.executable, "-c", script, str(proof), "--model", str(model)]
    done = subprocess.run(given, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "cannot be read: not a regular file" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert main(["check", str(proof), "--model", str(model)]) == 2
    if wrong is not proof:
        with pytest.raises(buffet.BuffetError, match=name):
            buffet.load(model)


def test_a_link_to_a_file_is_a_file(directory: Path, content: bytes, tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(content)
    (tmp_path / "proof").symlink_to(tmp_path / "real")
    assert buffet_checker.check(tmp_path / "proof", directory).accepted


def test_files_beyond_the_limit_are_not_read(directory: Path, content: bytes, tmp_path: Path) -> None:
    """A sparse file of any size costs nothing to make."""
    model, proof = copied(directory, tmp_path / "model"), tmp_path / "proof"
    proof.write_bytes(content)
    for path, limit in ((proof, storage.LARGEST_FILE), (model / "config.json", storage.LARGEST_TEXT)):
        kept = path.read_bytes()
        os.truncate(path, limit + 1)
        with pytest.raises(buffet_checker.BadInputError, match="larger than"):
            buffet_checker.check(proof, model)
        if path.name == "config.json":
            with pytest.raises(buffet.BuffetError, match="larger than"):
                buffet.load(model)
        path.write_bytes(kept)
    assert buffet_checker.check(proof, model).accepted


@pytest.mark.parametrize("where", ["read_bytes", "read_checkpoint", "judge"])
def test_too_little_memory_is_no_rejection(
    where: str,
    directory: Path,
    content: bytes,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def full(*_: object) -> None:
        raise MemoryError

    (tmp_path / "proof").write_bytes(content)
    monkeypatch.setattr(sys.modules["buffet_checker.check"], where, full)
    for run, start in ((check_alone, []), (main, ["check"])):
        assert run([*start, str(tmp_path / "proof"), "--model", str(directory)]) == 2
        told = capsys.readouterr()
        assert not told.out
        assert "not enough memory" in told.err
        assert "not judged" in told.err


# --- models -------------------------------------------------------------------------------------------------


def test_a_model_with_one_class_is_refused(directory: Path, content: bytes, tmp_path: Path) -> None:
    """It has no margins, so every one of them would be positive."""
    model = copied(directory, tmp_path / "model")
    tensors = load((model / "model.safetensors").read_bytes())
    for name in ("classifier.weight", "classifier.bias"):
        tensors[name] = tensors[name][:1].copy()
    (model / "model.safetensors").write_bytes(save(tensors))
    with pytest.raises(buffet_checker.BadInputError, match="1 class"):
        read_checkpoint(model)


def test_the_engine_proves_nothing_of_one_class(directory: Path) -> None:
    model = buffet.load(directory)

    def one_class(program: Program) -> Program:
        *body, last = program.nodes
        assert isinstance(last.op, Affine)
        return Program((*body, Node(Affine(last.op.weight[:1], last.op.bias[:1]), last.inputs)))

    class Single:
        program, program64 = one_class(model.program), one_class(model.program64)

    region = buffet.LpBall(model.embed("a gripping film"), [2], 2, 0.01)
    with pytest.raises(buffet.BuffetError, match="one output"):
        buffet.verify(Single(), region)
    assert not bool(proven(torch.zeros(1, 0)).any())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", True),
        ("num_attention_heads", True),
        ("layer_norm_eps", True),
        ("is_decoder", 0),
        ("embedding_norm", "no"),
        ("embedding_norm", 1),
        ("embedding_norm", None),
        ("final_norm", 0),
        ("final_norm", "false"),
        ("problem_type", "multi_label_classification"),
        ("id2label", {"0": "a"}),
        ("id2label", {"0": "a", "1": 2}),
        ("id2label", ["a", "b"]),
    ],
)
def test_configurations_say_what_they_mean(key: str, value: object, directory: Path, tmp_path: Path) -> None:
    """No number stands for yes or no, no yes or no for a number, and no text for either."""
    model = copied(directory, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(buffet_checker.BadInputError, match=key):
        read_checkpoint(model)
    with pytest.raises(buffet.BuffetError, match=key.replace("id2label", "label")):
        buffet.load(model)


# --- certificates -------------------------------------------------------------------------------------------


def put(*path: str | int) -> Callable[[dict[str, object], object], None]:
    """Sets one value of a nested document."""

    def change(head: dict[str, object], value: object) -> None:
        owner: object = head
        for key in path[:-1]:
            owner = owner[key]  # type: ignore[index]
        owner[path[-1]] = value  # type: ignore[index]

    return change


@pytest.mark.parametrize(
    ("change", "value"),
    [
        (put("schema"), True),
        (put("schema"), 2.0),
        (put("label"), False),
        (put("claims", 0, "margins", 0), True),
        (put("claims", 0, "region", "moved", 0), True),
        (put("claims", 0, "region", "eps"), False),
        (put("claims", 0, "region", "p"), True),
        (put("claims", 0, "derivations", 0, "nodes", 0), True),
        (put("claims", 0, "derivations", 0, "keep"), 0),
        (put("claims", 0, "region"), {"kind": "candidates", "moved": [2], "budget": True}),
    ],
)
def test_no_truth_value_is_a_number(
    change: Callable[[dict[str, object], object], None], value: object, directory: Path, content: bytes
) -> None:
    checkpoint: Checkpoint = read_checkpoint(directory)
    opened = Opened.of(content)
    if isinstance(value, dict):
        opened.tensors["0.region.rows"] = np.zeros((1, 1, checkpoint.width))
    change(opened.head, value)
    assert outcome(opened.close(), checkpoint) != "accepted"
