"""Labelled sentences: `sentence<TAB>label` files, read with every check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from buffet.errors import BuffetError

HEADER = "sentence\tlabel"


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
    test: tuple[Example, ...]
    duplicates: int  # rows of the training file that repeat an earlier row
    leaked: int  # rows of the training file whose sentence is in dev or test

    @property
    def classes(self) -> int:
        return 1 + max(example.label for part in (self.train, self.dev, self.test) for example in part)


def read_tsv(path: Path) -> tuple[Example, ...]:
    """The examples of a UTF-8 file with the header ``sentence<TAB>label`` and whole labels from 0."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except FileNotFoundError:
        raise BuffetError(f"{path}: no such file; expected a TSV file with the header {HEADER!r}") from None
    except UnicodeDecodeError as error:
        raise BuffetError(f"{path}: not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None
    if lines[0].rstrip("\r") != HEADER:
        raise BuffetError(f"{path}: line 1 is {lines[0][:60]!r}, expected the header {HEADER!r}")
    examples = tuple(
        _example(path, number, line.rstrip("\r")) for number, line in enumerate(lines[1:], 2) if line.strip()
    )
    if not examples:
        raise BuffetError(f"{path}: has no examples after its header")
    return examples


def _example(path: Path, number: int, line: str) -> Example:
    sentence, tab, label = line.partition("\t")
    if not (tab and sentence.strip() and label.isascii() and label.isdigit() and len(label) < 6):
        raise BuffetError(
            f"{path}: line {number} is {line[:60]!r}, expected a sentence, a tab and a label 0, 1, …"
        )
    return Example(sentence.strip(), int(label))


def read_splits(directory: Path) -> Splits:
    """`train.tsv`, `dev.tsv` and `test.tsv` of a directory, the training part cleaned.

    A training row is dropped when its sentence is also in dev or test (compared without case and spacing),
    or when it repeats an earlier row with the same label.
    """
    if not directory.is_dir():
        raise BuffetError(f"{directory}: no such directory; expected train.tsv, dev.tsv and test.tsv in it")
    raw, dev, test = (read_tsv(directory / f"{part}.tsv") for part in ("train", "dev", "test"))
    held_out = {_key(example) for example in (*dev, *test)}
    clean = [example for example in raw if _key(example) not in held_out]
    unique = tuple({(_key(example), example.label): example for example in reversed(clean)}.values())[::-1]
    if not unique:
        raise BuffetError(f"{directory}: every sentence of train.tsv is also in dev.tsv or test.tsv")
    return Splits(unique, dev, test, duplicates=len(clean) - len(unique), leaked=len(raw) - len(clean))


def _key(example: Example) -> str:
    return " ".join(example.sentence.lower().split())
