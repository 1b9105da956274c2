"""The command line but for `certify`: help, lists, training, and how options are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from buffet.cli.app import COMMANDS
from buffet.cli.models import card_accuracy
from buffet.cli.options import parse_memory
from buffet.cli.train import HELP, OPTION_NAMES
from buffet.errors import BuffetError
from buffet.methods import METHODS
from buffet.training import TrainSettings
from buffet.training.presets import ARCHITECTURES, DATA, NAMED, VARIANTS
from command_line import Run, one_line


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Tiny tensors gain nothing from threads, and lose much when tests run side by side."""
    torch.set_num_threads(1)


def test_help_teaches_with_examples(run: Run) -> None:
    for arguments in ([], ["--help"], ["certify", "--help"], ["train", "-h"]):
        outcome = run(*arguments)
        assert outcome.code == 0
        assert "Examples" in outcome.out
    for name in COMMANDS:
        assert run(name, "--help").code == 0
        assert name in run().out


def test_version(run: Run) -> None:
    assert re.fullmatch(r"buffet \d+\.\d+\.\d+\S*\n", run("--version").out)


def test_models_lists_what_is_embedded(run: Run) -> None:
    assert "sst2-small (default)" in run("models").out
    described = json.loads(run("models", "--json").out)
    assert [model["name"] for model in described if model["default"]] == ["sst2-small"]
    assert all(model["bytes"] < 8e6 for model in described)


def test_card_accuracy_is_what_the_card_states(tmp_path: Path) -> None:
    card = tmp_path / "README.md"
    assert card_accuracy(card, "dev") is None
    card.write_text("| dev accuracy | 80.73% (epoch 1) |\n| test accuracy | 79.00% (once) |\n")
    assert (card_accuracy(card, "dev"), card_accuracy(card, "test")) == (0.8073, 0.79)
    assert card_accuracy(card, "other") is None


def test_methods_lists_all(run: Run) -> None:
    table = run("methods").out
    assert all(name in table for name in METHODS)
    assert json.loads(run("methods", "--json").out).keys() == METHODS.keys()


def test_train_has_an_option_for_every_setting(run: Run) -> None:
    assert HELP.keys() == TrainSettings.model_fields.keys()
    text = run("train", "--help").out
    for name in TrainSettings.model_fields.keys() - {"preset"}:
        assert OPTION_NAMES.get(name, f"--{name.replace('_', '-')}") in text
    for table in (DATA, ARCHITECTURES, VARIANTS, NAMED):
        assert all(f"{name}: " in text for name in table)


def test_train_writes_a_model_that_certifies(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "toy"
    data.mkdir()
    rows = [
        f"the {noun} is {word}\t{label}"
        for noun in ("film", "plot")
        for label, word in enumerate(("bad", "good"))
    ]
    for part, start in (("train", "the"), ("dev", "a"), ("test", "this")):
        lines = [row.replace("the", start) for row in rows]
        (data / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines, ""]))
    out = tmp_path / "model"
    small = [
        "--layers",
        "1",
        "--heads",
        "1",
        "--width",
        "4",
        "--inner",
        "4",
        "--epochs",
        "1",
        "--min-count",
        "1",
    ]
    arguments = ["train", "--data", str(data), "--out", str(out), "--max-tokens", "8", *small]
    done = run(*arguments, "--json")
    assert done.code == 0
    assert json.loads(done.out)["rows"] == 4
    assert run("certify", "the film is good", "--model", str(out), "--eps", "0", "--no-attack").code in (0, 1)
    one_line(run(*arguments), "not empty")
    one_line(run(*arguments, "--activation", "swish"), "activation", "swish")
    one_line(
        run("train", "--data", str(tmp_path / "none"), "--out", str(tmp_path / "x")), "no such directory"
    )


@pytest.mark.parametrize(
    ("memory", "expected"),
    [("123", 123), ("2GB", 2 << 30), ("1.5 g", 3 << 29), ("512MiB", 512 << 20), ("64k", 64 << 10)],
)
def test_memory_sizes(memory: str, expected: int) -> None:
    assert parse_memory(memory) == expected


@pytest.mark.parametrize("memory", ["", "GB", "-1GB", "1e3", "nan", "2 GB free", "9" * 40])
def test_bad_memory_sizes(memory: str) -> None:
    with pytest.raises(BuffetError, match="--memory"):
        parse_memory(memory)
