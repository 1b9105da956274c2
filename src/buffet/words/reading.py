"""The words of a text, and what each may be exchanged for: as the model's tokenizer reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from buffet.errors import BuffetError, one_line
from buffet.loading import Encoding, Model
from buffet.loading.tokenizer import Span, guarded
from buffet.synonyms import Synonyms
from buffet.words.typos import typos

Ids = tuple[int, ...]
NOT_READ = "the tokenizer reads its neighbours otherwise, or no word"
"""Why a substitute is left out that is a sentence nevertheless, of which nothing is proven."""


@dataclass(frozen=True)
class Substitute:
    """What a word may be exchanged for."""

    text: str
    source: str  # synonyms, swap or typos
    ids: Ids
    unknown: bool  # whether a part of it is not in the vocabulary


@dataclass(frozen=True)
class Word:
    """A word of the text: where it is, the rows of its tokens, and its substitutes.

    No two substitutes have the same tokens, and none has those of the word.
    """

    text: str
    span: Span
    rows: tuple[int, ...]
    ids: Ids
    substitutes: tuple[Substitute, ...] = ()

    @property
    def choices(self) -> tuple[Ids, ...]:
        """The tokens of the word itself, then those of its substitutes."""
        return (self.ids, *(s.ids for s in self.substitutes))

    def named(self, choice: int) -> str:
        return self.text if choice == 0 else self.substitutes[choice - 1].text


@dataclass(frozen=True)
class LeftOut:
    """A substitute that was left out, and why."""

    word: str
    text: str
    reason: str


@dataclass(frozen=True, eq=False)
class Reading:
    """A text, or a pair of them, as a model reads it."""

    model: Model
    texts: tuple[str, ...]
    encoding: Encoding

    @classmethod
    def of(cls, model: Model, text: str, pair: str | None) -> Reading:
        return cls(model, (text,) if pair is None else (text, pair), model.encode(text, pair))

    def words(self) -> list[Word]:
        """The words of the text in their order: tokens that the tokenizer made of one word are one."""
        found: dict[Span, list[int]] = {}
        for row, span in enumerate(self.encoding.spans):
            if span is not None and not self.encoding.special[row]:
                found.setdefault(span, []).append(row)
        words = []
        for span, rows in found.items():
            tight = self._tight(span)
            ids = tuple(self.encoding.ids[row] for row in rows)
            words.append(Word(self.texts[span.text][tight.start : tight.end], tight, tuple(rows), ids))
        return words

    def _tight(self, span: Span) -> Span:
        """Without the spaces around it, which some tokenizers count."""
        part = self.texts[span.text][span.start : span.end]
        start = span.start + len(part) - len(part.lstrip())
        return Span(span.text, start, start + len(part.strip()))

    def exchanged(self, changes: Mapping[Span, str]) -> tuple[str, ...]:
        """The texts with other words in these places."""
        found = list(self.texts)
        for span in sorted(changes, key=lambda s: s.start, reverse=True):
            text = found[span.text]
            found[span.text] = text[: span.start] + changes[span] + text[span.end :]
        return tuple(found)

    def _piece(self, word: Word) -> tuple[tuple[int, int], range] | None:
        """What is between the spaces around a word: from where to where, and the rows of its tokens.

        None if these rows are not certain.
        """
        text, spans = self.texts[word.span.text], self.encoding.spans
        start, end = text.rfind(" ", 0, word.span.start) + 1, text.find(" ", word.span.end)
        end = len(text) if end < 0 else end
        rows = [
            row
            for row, span in enumerate(spans)
            if span is not None and span.text == word.span.text and span.start < end and span.end > start
        ]
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        if not rows or not set(word.rows) <= set(rows):
            return None
        alone = tokenizer.inner.encode(text[start:end], add_special_tokens=False).ids
        at = range(rows[0], rows[-1] + 1)
        return ((start, end), at) if tuple(alone) == self.encoding.ids[at.start : at.stop] else None

    def tokens_of(self, word: Word, texts: Sequence[str]) -> list[Ids | None]:
        """What each of these texts becomes in the place of a word; None if its neighbours change too."""
        tokenizer = self.model.tokenizer
        assert tokenizer is not None
        piece = self._piece(word) if tokenizer.by_pieces else None
        rows = range(len(self.encoding.ids)) if piece is None else piece[1]
        every = self.encoding.ids[rows.start : rows.stop]
        before, after = every[: word.rows[0] - rows.start], every[word.rows[-1] + 1 - rows.start :]
        inputs: list[Any]
        if piece is None:
            sentences = [self.exchanged({word.span: text}) for text in texts]
            inputs = [pair if len(pair) > 1 else pair[0] for pair in sentences]
        else:
            whole, (start, end) = self.texts[word.span.text], piece[0]
            inputs = [whole[start : word.span.start] + text + whole[word.span.end : end] for text in texts]
        raws = guarded(
            lambda: tokenizer.inner.encode_batch(inputs, add_special_tokens=piece is None),
            "the tokenizer cannot take a substitute",
        )
        found: list[Ids | None] = []
        for raw in raws:
            ids = tuple(raw.ids)
            middle = ids[len(before) : len(ids) - len(after)]
            same = ids[: len(before)] == before and ids[len(ids) - len(after) :] == after
            typed = bool(tokenizer.special_ids & set(middle))
            found.append(middle if same and middle and not typed else None)
        return found


def substitutes_of(
    reading: Reading, word: Word, offered: Mapping[str, Sequence[str]], *, skip_unknown: bool
) -> tuple[tuple[Substitute, ...], list[LeftOut]]:
    """The substitutes of a word among those offered by every source, and those that are none."""
    texts = [(text, source) for source, some in offered.items() for text in some]
    tokens = reading.tokens_of(word, [text for text, _ in texts]) if texts else []
    unknown_id = reading.model.tokenizer.unknown_id if reading.model.tokenizer else None
    seen = {word.ids: word.text}
    kept, left = list[Substitute](), list[LeftOut]()
    for (text, source), ids in zip(texts, tokens, strict=True):
        if ids is None:
            left.append(LeftOut(word.text, text, NOT_READ))
            continue
        unknown = unknown_id in ids
        if unknown and skip_unknown:
            left.append(LeftOut(word.text, text, "not in the vocabulary"))
        elif ids in seen:
            left.append(LeftOut(word.text, text, f"the same tokens as {seen[ids]!r}"))
        else:
            seen[ids] = text
            kept.append(Substitute(text, source, ids, unknown))
    return tuple(kept), left


def offers(
    words: Sequence[Word], synonyms: Synonyms | None, swap: Synonyms | None, variants: int, seed: int
) -> Callable[[Word], dict[str, list[str]]]:
    """What every source has for a word; a swap of a word that the text does not have is refused."""
    lower = {key.lower(): list(some) for key, some in (swap or {}).items()}
    if missing := sorted(lower.keys() - {word.text.lower() for word in words}):
        found = one_line(" ".join(word.text for word in words), 100)
        raise BuffetError(f"swap: the text has no word {missing[0]!r}; its words are: {found}")

    def of(word: Word) -> dict[str, list[str]]:
        key = word.text.lower()
        return {
            "swap": lower.get(key, []),
            "synonyms": list((synonyms or {}).get(key, [])),
            "typos": typos(word.text, variants, seed) if variants else [],
        }

    return of
