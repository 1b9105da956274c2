"""Datasets: every row is checked, and nothing leaks."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from buffet.data import (
    DATASETS,
    Example,
    Splits,
    hub_splits,
    read_data,
    read_splits,
    read_tsv,
)
from buffet.errors import BuffetError


def test_leaked_and_repeated_sentences_are_dropped(tmp_path: Path) -> None:
    parts = {
        "train": "good film\t1\nA  Dev one\t0\ngood film\t1\ngood film\t0\na test one\t1\n",
        "dev": "a dev one\t0\n",
        "test": "a test one\t1\n",
    }
    for name, text in parts.items():
        (tmp_path / f"{name}.tsv").write_text("sentence\tlabel\n" + text)
    splits = read_splits(str(tmp_path))
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


def test_a_dataset_is_known_by_its_held_out_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    examples = tuple(Example(f"sentence {i}", i % 2) for i in range(6))
    splits = Splits(examples[:2], examples[2:4], examples[4:], duplicates=0, leaked=0)
    same = replace(splits, train=examples[:1])
    assert splits.sha256 != same.sha256
    known = replace(DATASETS["sst2"], held_out=splits.held_out)
    monkeypatch.setattr("buffet.data.DATASETS", {"known": known})
    assert same.dataset is known
    assert replace(splits, dev=examples[3:4]).dataset is None


def test_yelp_is_said_not_to_be_polarity() -> None:
    assert "not the Yelp Polarity set of Zhang et al." in DATASETS["yelp"].note
    assert "Shen et al. (2017)" in DATASETS["yelp"].note


# --- Hugging Face hub --------------------------------------------------------------------------------------


def rows(*labels: int, column: str = "sentence") -> list[dict[str, object]]:
    return [{"idx": i, column: f" sentence {i} of {len(labels)} ", "label": y} for i, y in enumerate(labels)]


def test_parts_of_the_hub_become_splits() -> None:
    whole = hub_splits(
        {"train": rows(0, 1, 1, 0), "validation": rows(1, 0), "test": rows(-1, -1, -1)}, "hf:glue:sst2"
    )
    assert whole.train[1] == Example("sentence 1 of 4", 1)
    assert (len(whole.train), len(whole.dev), whole.test) == (4, 2, ())
    two = hub_splits(
        {"train": rows(*[0, 1] * 20, column="text"), "test": rows(0, 1, 1, column="text")}, "hf:x"
    )
    assert (len(two.train), len(two.dev), len(two.test)) == (36, 4, 3)
    assert not set(two.train) & set(two.dev)


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ({"train": [{"premise": "a", "label": 1}]}, "has the columns premise, label"),
        ({"train": [{"text": "a", "label": "good"}]}, "label, a whole number"),
        ({"test": rows(0, 1)}, "expected labelled parts"),
        ({"train": rows(-1, -1), "validation": rows(1, 0)}, "expected labelled parts"),
    ],
)
def test_parts_without_sentences_and_labels_are_refused(parts: dict[str, Any], complaint: str) -> None:
    with pytest.raises(BuffetError, match=complaint):
        hub_splits(parts, "hf:x")


def test_without_the_extra_the_message_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BuffetError, match=r"hf:stanfordnlp/sst2: needs .*pip install 'buffet\[data\]'"):
        read_data("hf:stanfordnlp/sst2")
