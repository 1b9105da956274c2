"""From text to token ids, and how a tokenizer of our own is made from sentences."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from buffet.errors import BuffetError, one_line

MOST_IDS = 10_000_000
SILENCE = threading.RLock()
# Steps of tokenizers that read a text piece by piece, as spaces separate it.
KEEPS_SPACES = frozenset({"BertNormalizer", "NFC", "NFD", "Lowercase", "StripAccents"})
SPLIT_AT_SPACES = frozenset({"WhitespaceSplit", "Whitespace", "BertPreTokenizer"})
ONLY_ADDS = frozenset({"TemplateProcessing", "BertProcessing"})
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

# Splits the words people type into the words of a treebank ("It's slow." -> it 's slow .) and leaves text
# that is already split as it is. Alternatives are tried from left to right on every space-separated piece.
_END = "(?=[^a-z0-9]*$)"  # only closing punctuation follows
WORD_SPLIT = "|".join(
    (
        r"^(?:mrs?|ms|dr|jr|vs|etc|inc|sept|bros)\.",  # abbreviations keep their full stop
        r"[?!]{2,}|\.{2,}|``|''|--",
        "n't" + _END,
        "'(?:s|re|ve|ll|d|m)" + _END,
        "[,;:?!]" + _END,
        r"(?<=[a-z0-9]{2})\." + _END,  # not in initials: "u.s."
        '[()"]',
    )
)


@dataclass(frozen=True)
class Span:
    """Where a word is: in which of the texts, 0 or 1 (the second of a pair), and from where to where."""

    text: int
    start: int
    end: int


@dataclass(frozen=True)
class Encoding:
    """A sentence as the network reads it; every field has one entry per token, special tokens included."""

    tokens: tuple[str, ...]
    ids: tuple[int, ...]
    types: tuple[int, ...]
    special: tuple[bool, ...]
    unknown: tuple[bool, ...]
    spans: tuple[Span | None, ...] = ()  # of the word that every token is of; None: of none

    @property
    def words(self) -> list[int]:
        """The rows of words of the vocabulary: neither special tokens nor unknown words."""
        return [i for i, skip in enumerate(map(max, self.special, self.unknown)) if not skip]

    @property
    def apart(self) -> bool:
        """Whether two texts have token types of their own, and a special token between them."""
        place = {span.text: i for i, span in reversed(list(enumerate(self.spans))) if span}  # of their first
        return len(place) == 2 and self.special[place[1] - 1] and self.types[place[1]] != self.types[place[0]]


@dataclass(frozen=True, eq=False)
class Tokenizer:
    """A tokenizer that never cuts or pads: what it returns is the whole sentence."""

    inner: tokenizers.Tokenizer
    unknown_id: int | None
    special_ids: frozenset[int]

    @classmethod
    def of(cls, inner: tokenizers.Tokenizer) -> Tokenizer:
        """Wrap a tokenizer of the `tokenizers` library, with truncation and padding switched off."""
        largest = max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= MOST_IDS:  # the library counts up to it when it writes
            raise BuffetError(f"has the token id {largest}; ids must be below {MOST_IDS}")
        inner = tokenizers.Tokenizer.from_str(inner.to_str())
        inner.no_truncation()
        inner.no_padding()
        model = json.loads(inner.to_str())["model"]
        unknown = model.get("unk_token")
        unknown_id = model.get("unk_id") if unknown is None else inner.token_to_id(unknown)
        added = inner.get_added_tokens_decoder()
        special = frozenset(index for index, token in added.items() if token.special)
        return cls(inner, unknown_id, special - {unknown_id})

    def encode(self, text: str, pair: str | None = None) -> Encoding:
        """The tokens of `text`, or of two texts; without a single known word they are refused.

        So are special tokens that are typed: a text that has them in it is not what the model was trained on.
        """
        for part in (text,) if pair is None else (text, pair):
            if not isinstance(part, str):
                raise BuffetError(f"the text must be a string, got {type(part).__name__}")
            try:
                part.encode("utf-8")
            except UnicodeEncodeError:
                raise BuffetError("the text is not valid Unicode: type it again, in UTF-8") from None
        raw = guarded(lambda: self.inner.encode(text, pair), "the tokenizer cannot take this text")
        # A word typed as "[SEP]" becomes the special token itself, though the template did not add it.
        special = [
            bool(added) or index in self.special_ids
            for added, index in zip(raw.special_tokens_mask, raw.ids, strict=True)
        ]
        unknown = [i == self.unknown_id and not added for i, added in zip(raw.ids, special, strict=True)]
        if all(special):
            raise BuffetError("the text has no words: give at least one word")
        tokens, ids, types = tuple(raw.tokens), tuple(raw.ids), tuple(raw.type_ids)
        for token, index, added in zip(tokens, ids, raw.special_tokens_mask, strict=True):
            if index in self.special_ids and not added:
                raise BuffetError(
                    f"the text has the special token {token} in it, which would be read as one: leave it out"
                    " (two sentences are given as a pair: --pair, or embed(text, pair=…))"
                )
        encoding = Encoding(tokens, ids, types, tuple(special), tuple(unknown), _spans(raw))
        if not encoding.words:
            raise BuffetError(f"no word of the text is in the model's vocabulary: {one_line(text, 60)!r}")
        return encoding

    @cached_property
    def by_pieces(self) -> bool:
        """Whether a text is certain to be read piece by piece, as spaces separate it: what is between two
        spaces becomes the same tokens in every text."""
        said = json.loads(self.inner.to_str())
        steps = _parts(said["pre_tokenizer"], "pretokenizers")
        added = (token["content"] for token in said["added_tokens"])
        return (
            all(map(_keeps_spaces, _parts(said["normalizer"], "normalizers")))
            and any(step["type"] in SPLIT_AT_SPACES for step in steps[:1])
            and not any(step.get("prepend_scheme") == "first" for step in steps)  # of the text
            and all(step["type"] in ONLY_ADDS for step in _parts(said["post_processor"], "processors"))
            and not any(" " in text for text in added)
            and not any(token["lstrip"] or token["rstrip"] for token in said["added_tokens"])
        )

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def _parts(step: Mapping[str, Any] | None, name: str) -> list[Mapping[str, Any]]:
    """The steps of a sequence, or the only one."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [one for part in step[name] for one in _parts(part, name)]


def _keeps_spaces(normalizer: Mapping[str, Any]) -> bool:
    """Whether it turns every space-separated piece into pieces that do not depend on the others."""
    if normalizer["type"] == "Replace":
        replaced = normalizer["pattern"].get("String", " ")
        return bool(replaced) and " " not in replaced + normalizer["content"]
    return normalizer["type"] in KEEPS_SPACES


def _spans(raw: tokenizers.Encoding) -> tuple[Span | None, ...]:
    """For every token the whole word that it is of."""
    ends: dict[tuple[int, int], tuple[int, int]] = {}
    pairs = zip(raw.sequence_ids, raw.word_ids, strict=True)
    keys = [None if text is None or word is None else (text, word) for text, word in pairs]
    for key, (start, end) in zip(keys, raw.offsets, strict=True):
        if key is not None:
            first, last = ends.get(key, (start, end))
            ends[key] = min(first, start), max(last, end)
    return tuple(None if key is None else Span(key[0], *ends[key]) for key in keys)


T = TypeVar("T")


def guarded(work: Callable[[], T], complaint: str) -> T:
    """The result of `work`, which calls the library; whatever goes wrong in there is one `BuffetError`.

    The library raises bare `Exception` for a malformed file, and where its author was sure that nothing can
    go wrong it panics: that is not even an `Exception`, and it is printed to standard error first.
    """
    try:
        with _silence():
            return work()
    except (BuffetError, KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise BuffetError(f"{complaint}: {one_line(error)}") from None


@contextmanager
def _silence() -> Iterator[None]:
    """Whatever the process writes to its standard error output is lost.

    That is file descriptor 2: a panic does not ask Python where to go. One thread at a time, or else the last
    one would put back what the first had put in place.
    """
    with SILENCE:
        sys.stderr.flush()
        try:
            kept = os.dup(2)
        except OSError:  # closed: as silent as can be
            kept = None
        if kept is None:
            yield
            return
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nothing)


def word_level(
    sentences: Iterable[str],
    size: int,
    min_count: int,
    more: Callable[[Sequence[str]], Iterable[str]] = lambda words: (),
) -> tokenizers.Tokenizer:
    """A lower-case word tokenizer: the `size` most frequent words that occur `min_count` times or more.

    `size` counts the special tokens. Ties are broken by spelling, so the same sentences give the same file.
    If there is room left, what `more` says goes with these words is known too, where it is a single word.
    """
    normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace("’", "'")]
    )
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(WORD_SPLIT), "isolated")]
    )
    counts: Counter[str] = Counter()
    for sentence in sentences:
        counts.update(word for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence)))
    ranked = sorted((-count, word) for word, count in counts.items() if count >= min_count)
    room = max(size - len(SPECIAL), 0)
    words = [word for _, word in ranked if word not in SPECIAL][:room]
    pieces = ((w, splitter.pre_tokenize_str(normalizer.normalize_str(w))) for w in more(words))
    others = [found[0][0] for w, found in pieces if len(found) == 1 and w not in SPECIAL]
    words = list(dict.fromkeys([*words, *others]))[:room]
    vocabulary = {word: index for index, word in enumerate((*SPECIAL, *words))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    return framed(tokenizer, SPECIAL)


def framed(
    tokenizer: tokenizers.Tokenizer,
    special: Sequence[str],
    first: str = "[CLS]",
    last: str = "[SEP]",
    pairs: bool = False,
) -> tokenizers.Tokenizer:
    """The tokenizer with its special tokens marked, and one put before and one after every sentence.

    The second sentence of a pair has token type 1, as BERT has it.
    """
    tokenizer.add_special_tokens(list(special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}",
        pair=f"{first} $A {last} $B:1 {last}:1" if pairs else None,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {first, last}],
    )
    return tokenizer
