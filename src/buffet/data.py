"""Labelled sentences: readers with every check.

Data is a directory with `train.tsv`, `dev.tsv` and `test.tsv` (`sentence<TAB>label`), or a dataset of the
Hugging Face hub (``hf:NAME`` or ``hf:NAME:CONFIGURATION``, with the extra ``buffet[data]``).
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from buffet.errors import BuffetError, one_line, optional
from buffet.system.files import read_text

HEADER = "sentence\tlabel"
HUB = "hf:"
# What datasets of the hub call their parts and columns; the first name that is there counts.
HUB_PARTS = {"train": ("train",), "dev": ("validation", "dev"), "test": ("test",)}
HUB_SENTENCES = ("sentence", "text")
HELD_OUT = 2_000  # training rows that become dev where a dataset of the hub has none


@dataclass(frozen=True)
class Example:
    """A sentence and its class, counted from 0."""

    sentence: str
    label: int


@dataclass(frozen=True)
class Splits:
    """Training data and the two sets it is measured on; no sentence of `train` is in `dev` or `test`."""

    train: tuple[Example, ...]
    dev: tuple[Example, ...]
    test: tuple[Example, ...]  # empty if its labels are kept secret
    duplicates: int  # rows of the training file that repeat an earlier row
    leaked: int  # rows of the training file whose sentence is in dev or test

    @property
    def classes(self) -> int:
        return 1 + max(example.label for part in (self.train, self.dev, self.test) for example in part)

    @cached_property
    def sha256(self) -> str:
        """The hash of every sentence and label, in order."""
        return _hash(self.train, self.dev, self.test)

    @cached_property
    def held_out(self) -> str:
        """The hash of dev and test."""
        return _hash(self.dev, self.test)

    @cached_property
    def dataset(self) -> Dataset | None:
        """Which known dataset this is, recognised by its dev and test sentences, not by its name."""
        return next((known for known in DATASETS.values() if known.held_out == self.held_out), None)


@dataclass(frozen=True)
class Dataset:
    """A dataset that results are reported on."""

    title: str
    note: str  # what has to be said wherever results are shown
    held_out: str  # the hash of dev and test


DATASETS: Mapping[str, Dataset] = {
    "sst2": Dataset(
        title="SST-2",
        note="SST-2: the training phrases and dev sentences of the GLUE benchmark, and the labelled test "
        "sentences of the Stanford Sentiment Treebank; the text has no explicit licence.",
        held_out="bd3baa957ed2ca21ff5e262d33efe608570a928ef909687a128c50dbb3b44f19",
    ),
    "yelp": Dataset(
        title="Yelp sentences",
        note="This is the Yelp *sentence* set of Shen et al. (2017), de-duplicated and split again. It is "
        "not the Yelp Polarity set of Zhang et al. (2015), which has whole reviews: accuracies are not "
        "comparable with results on that set. The sentences are under Yelp's terms.",
        held_out="86a603f47dec07f16e938f3650ee022bf6284ec7dc05ff98b723650e2632df3f",
    ),
}


def read_data(source: str | Path) -> Splits:
    """The data in a directory, or of the Hugging Face hub when `source` starts with ``hf:``."""
    text = str(source)
    return read_hub(text.removeprefix(HUB)) if text.startswith(HUB) else read_splits(source)


# --- files -------------------------------------------------------------------------------------------------


def read_tsv(path: Path, *, empty: bool = False) -> tuple[Example, ...]:
    """The examples of a UTF-8 file with the header ``sentence<TAB>label`` and whole labels from 0.

    An `empty` sentence is an example only where that is said to be fine.
    """
    if not os.path.exists(path):
        raise BuffetError(f"{path}: no such file; expected a TSV file with the header {HEADER!r}")
    lines = read_text(path).split("\n")
    if lines[0].rstrip("\r") != HEADER:
        raise BuffetError(f"{path}: line 1 is {lines[0][:60]!r}, expected the header {HEADER!r}")
    examples = tuple(
        _example(path, number, line.rstrip("\r"), empty)
        for number, line in enumerate(lines[1:], 2)
        if line.strip()
    )
    if not examples:
        raise BuffetError(f"{path}: has no examples after its header")
    return examples


def _example(path: Path, number: int, line: str, empty: bool) -> Example:
    sentence, tab, label = line.partition("\t")
    if not (tab and (empty or sentence.strip()) and label.isascii() and label.isdigit() and len(label) < 6):
        raise BuffetError(
            f"{path}: line {number} is {line[:60]!r}, expected a sentence, a tab and a label 0, 1, …"
        )
    return Example(sentence.strip(), int(label))


def read_splits(directory: str | Path) -> Splits:
    """`train.tsv`, `dev.tsv` and `test.tsv` of a directory, the training part cleaned.

    A training row is dropped when its sentence is also in dev or test (compared without case and spacing),
    or when it repeats an earlier row with the same label.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise BuffetError(f"{directory}: no such directory; expected train.tsv, dev.tsv and test.tsv in it")
    train, dev, test = (read_tsv(directory / f"{part}.tsv") for part in ("train", "dev", "test"))
    return _cleaned(train, dev, test, str(directory))


def _cleaned(raw: Sequence[Example], dev: Sequence[Example], test: Sequence[Example], source: str) -> Splits:
    held_out = {_key(example) for example in (*dev, *test)}
    clean = [example for example in raw if _key(example) not in held_out]
    unique = tuple({(_key(example), example.label): example for example in reversed(clean)}.values())[::-1]
    if not unique:
        raise BuffetError(f"{source}: every sentence of train is also in dev or test")
    leaked, duplicates = len(raw) - len(clean), len(clean) - len(unique)
    return Splits(unique, tuple(dev), tuple(test), duplicates=duplicates, leaked=leaked)


def _key(example: Example) -> str:
    return " ".join(example.sentence.lower().split())


def _hash(*parts: Sequence[Example]) -> str:
    lines = (
        f"{example.sentence}\t{example.label}\n" for part in parts for example in (*part, Example("", -1))
    )
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line.encode())
    return digest.hexdigest()


# --- Hugging Face hub --------------------------------------------------------------------------------------


def read_hub(name: str) -> Splits:
    """The dataset ``NAME`` or ``NAME:CONFIGURATION`` of the hub, cleaned as `read_splits` does."""
    datasets = optional("datasets", "data", f"{HUB}{name}: needs the package datasets")
    repository, _, configuration = name.partition(":")
    try:
        parts = datasets.load_dataset(repository, configuration or None)
    except Exception as error:  # the library raises whatever the network, the cache or the hub ran into
        reason = f"cannot be loaded (no such dataset, or no connection?): {one_line(error, 200)}"
        raise BuffetError(f"{HUB}{name}: {reason}") from None
    return hub_splits(parts, f"{HUB}{name}")


def hub_splits(parts: Mapping[str, Iterable[Mapping[str, Any]]], source: str) -> Splits:
    """The splits in the parts of a hub dataset: rows with a sentence (or text) and a label.

    A dataset without a dev set gives up `HELD_OUT` random training rows (at most a tenth); a test set whose
    labels are kept secret (−1) is left out.
    """
    found = {
        ours: next((tuple(_hub_rows(parts[n], f"{source}, {n}")) for n in names if n in parts), ())
        for ours, names in HUB_PARTS.items()
    }
    train, dev, test = found["train"], found["dev"], found["test"]
    if any(example.label < 0 for example in (*train, *dev)) or len(train) < 2:
        raise BuffetError(f"{source}: expected labelled parts called train and validation")
    if any(example.label < 0 for example in test):
        test = ()
    if not dev:
        chosen = set(random.Random(0).sample(range(len(train)), min(HELD_OUT, -(-len(train) // 10))))
        dev = tuple(example for i, example in enumerate(train) if i in chosen)
        train = tuple(example for i, example in enumerate(train) if i not in chosen)
    return _cleaned(train, dev, test, source)


def _hub_rows(rows: Iterable[Mapping[str, Any]], source: str) -> Iterator[Example]:
    for row in rows:
        column = next((name for name in HUB_SENTENCES if name in row), None)
        if column is None or not isinstance(row.get("label"), int):
            raise BuffetError(
                f"{source}: has the columns {', '.join(row)}; expected {' or '.join(HUB_SENTENCES)},"
                " and label, a whole number"
            )
        if sentence := " ".join(str(row[column]).split()):
            yield Example(sentence, row["label"])
