"""Training: it learns, it repeats exactly, and what it writes loads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from buffet.datasets import Example, read_splits, read_tsv
from buffet.errors import BuffetError
from buffet.loading import load
from buffet.train import Progress, TrainSettings, train

GOOD, BAD = ("good", "fine", "great", "warm"), ("bad", "dull", "poor", "cold")
NOUNS = ("film", "story", "cast", "plot", "score", "scene")


def write_data(directory: Path) -> Path:
    """A toy language in which one word decides the label."""
    directory.mkdir()
    rows = [
        f"the {noun} is {'very ' * very}{word}\t{label}"
        for label, words in enumerate((BAD, GOOD))
        for word in words
        for noun in NOUNS
        for very in range(3)
    ]
    for name, part in (("train", rows), ("dev", rows[::5]), ("test", rows[2::7])):
        text = [row.replace("the ", "a ") for row in part] if name != "train" else part
        (directory / f"{name}.tsv").write_text("\n".join(["sentence\tlabel", *text, ""]))
    return directory


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_data(tmp_path / "toy")


def tiny(data: Path, out: str = "out", **changes: object) -> TrainSettings:
    small = {"layers": 1, "heads": 2, "width": 8, "inner": 8, "max_tokens": 12, "epochs": 6, "batch": 16}
    # Eight dimensions have nothing to spare for dropout, and a few dozen steps no time to grow.
    quick = {
        "rate": 0.03,
        "weight_decay": 0.0,
        "word_dropout": 0.1,
        "min_count": 1,
        "embedding_dropout": 0.0,
        "embedding_scale": 0.3,
    }
    values = {"data": data, "out": data.parent / out, **small, **quick, **changes}
    return TrainSettings.of(**values)


def test_it_learns_and_the_result_loads(data: Path) -> None:
    reports: list[Progress] = []
    summary = train(tiny(data, epochs=14, patience=14), reports.append)
    assert summary.losses[-1] < summary.losses[0] / 2
    assert summary.dev_accuracy > 0.9
    assert [report.dev_accuracy is not None for report in reports] == [True] * len(summary.losses)
    assert reports[-1].step <= reports[-1].steps
    model = load(summary.out)
    assert model.labels == ("negative", "positive")
    examples = read_tsv(data / "dev.tsv")
    right = [int(model.logits(model.embed(e.sentence)).argmax()) == e.label for e in examples]
    assert sum(right) / len(right) == pytest.approx(summary.dev_accuracy)
    assert hashlib.sha256((summary.out / "model.safetensors").read_bytes()).hexdigest() == summary.sha256


@pytest.mark.parametrize("layer_norm", ["standard", "no_var"])
@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_every_kind_of_network_trains(data: Path, layer_norm: str, norm_position: str, pooling: str) -> None:
    kind = {"layer_norm": layer_norm, "norm_position": norm_position, "pooling": pooling}
    summary = train(tiny(data, epochs=3, activation="gelu", layers=2, noise=0.1, **kind))
    assert summary.losses[-1] < summary.losses[0]
    assert load(summary.out).config.pooling == pooling


def test_the_seed_decides_the_weights(data: Path) -> None:
    state = torch.random.get_rng_state()
    first, again, other = (
        train(tiny(data, out=name, epochs=2, noise=0.1, seed=seed)).sha256
        for name, seed in (("one", 3), ("two", 3), ("three", 4))
    )
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), state)


def test_the_card_tells_how_to_repeat_it(data: Path) -> None:
    summary = train(tiny(data, epochs=1, word_dropout=0.25))
    card = (summary.out / "README.md").read_text()
    assert summary.sha256 in card
    assert f"{summary.dev_accuracy:.2%}" in card
    assert "buffet train --data DATA/toy --out out" in card
    assert "--word-dropout 0.25" in card
    assert "--warmup" not in card
    assert str(data.parent) not in card


def test_early_stopping_keeps_the_best_epoch(data: Path) -> None:
    summary = train(tiny(data, epochs=40, patience=2, rate=0.05))
    assert len(summary.losses) < 40
    assert summary.best_epoch == len(summary.losses) - 2


def test_nothing_is_left_behind_when_training_is_stopped(data: Path) -> None:
    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tiny(data), stop)
    assert [entry.name for entry in data.parent.iterdir()] == ["toy"]


def test_an_output_that_is_taken_is_refused_before_training(data: Path) -> None:
    (data.parent / "out").mkdir()
    (data.parent / "out" / "notes").write_text("mine")
    with pytest.raises(BuffetError, match="not empty"):
        train(tiny(data))
    with pytest.raises(BuffetError, match="notes"):
        train(tiny(data, overwrite=True))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"width": 10, "heads": 4}, "width 10 is not divisible by heads 4"),
        ({"layers": 0}, "layers is 0"),
        ({"rate": float("nan")}, "rate is nan"),
        ({"word_dropout": 1.5}, "word_dropout is 1.5"),
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_bad_settings_are_refused_in_one_line(data: Path, changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BuffetError, match=complaint) as caught:
        tiny(data, **changes)
    assert "\n" not in str(caught.value)


def test_divergence_is_an_error_and_not_a_model(data: Path) -> None:
    with pytest.raises(BuffetError, match="diverged"):
        train(tiny(data, rate=1e6, layers=6, epochs=30, warmup=0.0))
    assert not (data.parent / "out").exists()


# --- data --------------------------------------------------------------------------------------------------


def test_leaked_and_repeated_sentences_are_dropped(tmp_path: Path) -> None:
    parts = {
        "train": "good film\t1\nA  Dev one\t0\ngood film\t1\ngood film\t0\na test one\t1\n",
        "dev": "a dev one\t0\n",
        "test": "a test one\t1\n",
    }
    for name, text in parts.items():
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + text)
    splits = read_splits(tmp_path)
    assert splits.train == (Example("good film", 1), Example("good film", 0))
    assert (splits.leaked, splits.duplicates) == (2, 1)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "line 1"),
        (b"text,label\na,1\n", "line 1"),
        (b"sentence\tlabel\n", "no examples"),
        (b"sentence\tlabel\na film\t1\nno label here\n", "line 3"),
        (b"sentence\tlabel\na film\tpositive\n", "line 2"),
        (b"sentence\tlabel\na film\t-1\n", "line 2"),
        (b"sentence\tlabel\n  \t1\n", "line 2"),
        (b"sentence\tlabel\n\xff\t1\n", "not UTF-8"),
    ],
)
def test_bad_data_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(content)
    with pytest.raises(BuffetError, match=complaint) as caught:
        read_tsv(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(BuffetError, match=r"dev\.tsv|train\.tsv"):
        read_splits(tmp_path)
