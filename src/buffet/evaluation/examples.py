"""The sentences that are evaluated: from a file, the hub, or memory; all of them, or a random sample."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffet.data import HUB, HUB_SENTENCES, Example, read_hub, read_tsv
from buffet.errors import BuffetError, show

PARTS = ("test", "dev")
"""The parts of a directory or of a dataset of the hub; the first is the default."""


@dataclass(frozen=True)
class Examples:
    """Sentences with their labels, in the order of the data; a sentence may occur several times."""

    source: str
    examples: tuple[Example, ...]
    total: int  # of which these are a sample, unless they are all

    @property
    def sampled(self) -> bool:
        return len(self.examples) < self.total

    def sample(self, count: int | None, seed: int) -> Examples:
        """A random sample of this size; with the same seed, a larger one contains it."""
        if count is not None and count < 1:
            raise BuffetError(f"count: got {count}; give a number of sentences from 1")
        if count is None or count >= self.total:
            return self
        ranked = sorted(range(self.total), key=lambda place: _rank(seed, place, self.examples[place]))
        chosen = sorted(ranked[:count])
        return Examples(self.source, tuple(self.examples[place] for place in chosen), self.total)


def _rank(seed: int, place: int, example: Example) -> bytes:
    return hashlib.sha256(f"{seed} {place} {example.sentence}".encode(errors="replace")).digest()


def read_examples(data: object, part: str = PARTS[0]) -> Examples:
    """The examples of a TSV file, of a part of a directory or of the hub, or of something in memory.

    That is a list of (sentence, label), or a `datasets` data set with sentence (or text) and label.
    """
    if part not in PARTS:
        raise BuffetError(f"part: got {part!r}; choose one of: {', '.join(PARTS)}")
    if isinstance(data, str | Path):
        source, examples = _stored(str(data), part)
    elif isinstance(data, Mapping):
        raise BuffetError(f"the data has the parts {', '.join(map(str, data))}: give one of them")
    elif isinstance(data, Iterable):
        source = type(data).__name__
        examples = tuple(_in_memory(data))
    else:
        raise BuffetError(f"the data is a {type(data).__name__}; give a path, a list of (sentence, label), …")
    if not examples:
        raise BuffetError(f"{source}: has no sentences")
    return Examples(source, examples, len(examples))


def _stored(name: str, part: str) -> tuple[str, tuple[Example, ...]]:
    if name.startswith(HUB):
        splits = read_hub(name.removeprefix(HUB))
        found = splits.test if part == "test" else splits.dev
        if not found:
            raise BuffetError(f"{name}: has no labels for its part {part}; choose --part dev")
        return f"{name}, {part}", found
    path = Path(name)
    path = path / f"{part}.tsv" if path.is_dir() else path
    return path.name, read_tsv(path, empty=True)


def _in_memory(data: Iterable[object]) -> Iterator[Example]:
    for place, entry in enumerate(data):
        if isinstance(entry, Example):
            yield entry
        elif isinstance(entry, Mapping):
            column = next((name for name in HUB_SENTENCES if name in entry), None)
            if column is None or "label" not in entry:
                wanted = f"{' or '.join(HUB_SENTENCES)}, and label"
                raise BuffetError(f"the data has the columns {', '.join(map(str, entry))}; expected {wanted}")
            yield Example(_text(entry[column], place), _label(entry["label"], place))
        elif isinstance(entry, Sequence) and not isinstance(entry, str) and len(entry) == 2:
            yield Example(_text(entry[0], place), _label(entry[1], place))
        else:
            raise BuffetError(f"entry {place} of the data is {show(entry)}; expected (sentence, label)")


def _text(value: object, place: int) -> str:
    if not isinstance(value, str):
        raise BuffetError(f"entry {place} of the data: the sentence is {show(value)}; expected a text")
    return value


def _label(value: object, place: int) -> int:
    try:
        label = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        label = -1
    if label < 0:
        raise BuffetError(f"entry {place} of the data: the label is {show(value)}; expected 0, 1, …")
    return label
