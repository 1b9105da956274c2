"""Files of synonyms: which words each word may be exchanged for."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

from buffet.errors import BuffetError, one_line, show
from buffet.system.files import read_text

Synonyms = Mapping[str, Sequence[str]]


def read_synonyms(path: str | Path, most: int | None = None) -> dict[str, list[str]]:
    """A file of synonyms: one JSON object, word → list of words; of each list the first `most`."""
    try:
        content = json.loads(read_text(Path(path)))
    except (ValueError, RecursionError) as error:
        raise BuffetError(f"{path}: not a JSON file: {one_line(error)}") from None
    return checked_synonyms(content, str(path), most)


def checked_synonyms(
    content: object, where: str, most: int | None = None, of: Container[str] | None = None
) -> dict[str, list[str]]:
    """A table word → list of words, with its words in lower case; of each list the first `most`.

    Only the words `of`, in lower case, are looked at and kept; by default all are.
    """
    if most is not None and most < 1:
        raise BuffetError(f"most synonyms is {most}: give a number of synonyms per word, 1 or more")
    if not isinstance(content, Mapping):
        raise BuffetError(f'{where}: expected one object, such as {{"good": ["fine", "great"]}}')
    found: dict[str, list[str]] = {}
    for word, some in content.items():
        if of is not None and isinstance(word, str) and word.lower() not in of:
            continue
        if not isinstance(word, str) or not _are_words(some):
            raise BuffetError(f"{where}: {show(word)} has {show(some)}; expected a list of words")
        found.setdefault(word.lower(), []).extend(some)
    return {word: some[:most] for word, some in found.items()}


def _are_words(some: object) -> bool:
    listed = isinstance(some, Iterable) and not isinstance(some, str | Mapping)
    return listed and all(isinstance(text, str) and text.strip() for text in some)  # type: ignore[attr-defined]
