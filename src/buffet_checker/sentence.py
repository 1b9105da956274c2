"""What a certificate is about: a sentence of token ids, whose rows the checker looks up itself.

    row i = (word[id_i] + type[t_i]) + position[i]    in float32, in this order, as `transformers` adds them

A vocabulary file of the model says how ids are spelled; no text of a certificate is ever believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffet_checker.balls import Array
from buffet_checker.errors import BadInputError, RejectedError
from buffet_checker.network import Checkpoint
from buffet_checker.storage import parse_json

TABLES = tuple(f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "token_type", "position"))
SPECIAL = ("[CLS]", "[SEP]")
"""Special tokens of a vocabulary that does not mark them."""


@dataclass(frozen=True)
class Vocabulary:
    """How the ids of a model are spelled, and which are special tokens."""

    tokens: Mapping[int, str]
    special: frozenset[int]


@dataclass(frozen=True)
class Sentence:
    """Token ids and types, one per row; without a vocabulary nothing is known of their spelling."""

    ids: tuple[int, ...]
    types: tuple[int, ...]
    vocabulary: Vocabulary | None = None

    @property
    def tokens(self) -> tuple[str, ...] | None:
        return None if self.vocabulary is None else tuple(self.vocabulary.tokens[i] for i in self.ids)

    @property
    def text(self) -> str | None:
        """The tokens with spaces between them, but for a special one at either end."""
        if self.vocabulary is None or self.tokens is None:
            return None
        first = int(self.ids[0] in self.vocabulary.special)
        last = len(self.ids) - int(self.ids[-1] in self.vocabulary.special)
        return " ".join(self.tokens[first:last])


def rows_of(
    checkpoint: Checkpoint, ids: Sequence[int], types: Sequence[int], positions: Sequence[int], where: str
) -> Array:
    """The embedding rows of tokens at some positions, float32 numbers in float64."""
    rows = np.zeros((len(ids), checkpoint.width), np.float32)
    for name, places in zip(TABLES, (ids, types, positions), strict=True):
        table = checkpoint.tensors.get(name)
        if table is None or table.ndim != 2 or table.shape[1] != checkpoint.width:
            raise BadInputError(f"tensor {name} is missing or of another width, so no sentence has rows")
        if max(places, default=0) >= len(table):
            raise RejectedError(f"{where}: {max(places)} is not a row of {name} ({len(table)} rows)")
        rows = rows + table[list(places)].astype(np.float32)
    return rows.astype(np.float64)


def check_rows(sentence: Sentence, rows: Array, checkpoint: Checkpoint) -> None:
    """The rows are those of the sentence, to the last bit."""
    if not len(sentence.ids) == len(sentence.types) == len(rows):
        raise RejectedError(f"sentence: ids and types must be one each for the {len(rows)} rows of center")
    found = rows_of(checkpoint, sentence.ids, sentence.types, range(len(rows)), "sentence")
    wrong = (found != rows).any(1)
    if wrong.any():
        raise RejectedError(f"sentence: row {int(wrong.argmax())} of center is not that of its token id")
    if sentence.vocabulary is not None:
        _check_spelled(sentence.ids, sentence.vocabulary, "sentence")


def check_substitutes(
    named: Any,
    moved: Sequence[int],
    rows: Array,
    sentence: Sentence | None,
    checkpoint: Checkpoint,
    where: str,
) -> tuple[tuple[int, ...], ...]:
    """The token ids of the candidates of every moved row, each once and without the row's own.

    `named` are those of all ``rows[moved, choices, width]``, which must be their rows.
    """
    if sentence is None:
        raise RejectedError(f"{where}: names tokens, but the certificate names no sentence")
    if not isinstance(named, list) or len(named) != len(moved):
        raise RejectedError(f"{where}: expected a list of token ids for every moved row")
    found = []
    for ids, row, given in zip(named, moved, rows, strict=True):
        if not isinstance(ids, list) or len(ids) != len(given) or not all(_is_id(i) for i in ids):
            raise RejectedError(f"{where}: expected {len(given)} token ids for row {row}")
        same = rows_of(checkpoint, ids, [sentence.types[row]] * len(ids), [row] * len(ids), where)
        if not (same == given).all():
            raise RejectedError(f"{where}: a candidate of row {row} is not the row of its token id")
        if sentence.vocabulary is not None:
            _check_spelled(ids, sentence.vocabulary, where)
        found.append(tuple(i for i in dict.fromkeys(ids) if i != sentence.ids[row]))
    return tuple(found)


def _is_id(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 31


def _check_spelled(ids: Sequence[int], vocabulary: Vocabulary, where: str) -> None:
    if missing := [i for i in ids if i not in vocabulary.tokens]:
        raise RejectedError(f"{where}: token id {missing[0]} is not in the vocabulary")


def read_vocabulary(name: str, content: bytes, where: str) -> Vocabulary:
    """The vocabulary in a tokenizer.json or a vocab.txt; one that spells an id in two ways is refused."""
    if name == "vocab.txt":
        try:
            lines = content.decode("utf-8").removesuffix("\n").split("\n")
        except UnicodeDecodeError:
            raise BadInputError(f"{where}: not UTF-8") from None
        words = {number: line.rstrip() for number, line in enumerate(lines)}
        return Vocabulary(words, frozenset(i for i, token in words.items() if token in SPECIAL))
    raw = parse_json(content, where)
    model = raw.get("model") if isinstance(raw, dict) else None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):  # words, word pieces, byte pairs
        entries = [(number, token) for token, number in vocabulary.items()]
    elif isinstance(vocabulary, list) and all(isinstance(entry, list) and entry for entry in vocabulary):
        entries = [(number, entry[0]) for number, entry in enumerate(vocabulary)]  # unigrams
    else:
        raise BadInputError(f"{where}: has no model.vocab, so nothing says how token ids are spelled")
    added = raw.get("added_tokens") or []
    if not isinstance(added, list) or not all(isinstance(token, dict) for token in added):
        raise BadInputError(f"{where}: added_tokens is no list of tokens")
    entries += [(token.get("id"), token.get("content")) for token in added]
    tokens: dict[int, str] = {}
    for number, token in entries:
        if not _is_id(number) or not isinstance(token, str):
            raise BadInputError(f"{where}: {token!r:.40} has the token id {number!r:.40}")
        if tokens.setdefault(number, token) != token:
            raise BadInputError(f"{where}: token id {number} is spelled in two ways")
    special = frozenset(token["id"] for token in added if token.get("special") is True)
    return Vocabulary(tokens, special)
