"""What `buffet certify` found about substitutions, as one plain structure: exactly what ``--json`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from buffet.printing import plural, round_down, round_up
from buffet.report.answer import Frozen, ModelInfo, Versions
from buffet.verdicts import Verdict
from buffet.words.answer import Flip
from buffet.words.reading import LeftOut

SHOWN = 8
"""Words that are named in a line; all of them are in the JSON."""


class Offer(Frozen):
    """A substitute of a word."""

    text: str
    source: str  # synonyms, swap or typos
    tokens: int  # how many it is for the model
    unknown: bool  # not in the vocabulary, at least in part

    def __str__(self) -> str:
        return f"{self.text} [UNK]" if self.unknown else self.text


class WordResult(Frozen):
    """A word of the text, and what it may be exchanged for."""

    word: str
    rows: tuple[int, ...]
    substitutes: tuple[Offer, ...]

    @property
    def some(self) -> str:
        """The first substitutes, and how many more there are."""
        named = ", ".join(map(str, self.substitutes[:SHOWN]))
        more = len(self.substitutes) - SHOWN
        return f"{named} … {more} more" if more > 0 else named


class FewerWords(Frozen):
    """The answer if fewer words are exchanged at once; the fields are those of the whole answer."""

    at_most: int
    sentences: int
    shapes: int
    verdict: Verdict
    margin: float | None
    flip: Flip | None
    unknown: int
    seconds: float


class WordsReport(Frozen):
    """The whole answer of `buffet certify` about substitutions."""

    format: Literal["buffet substitutions 1"] = "buffet substitutions 1"
    text: str
    pair: str | None
    model: ModelInfo
    method: str
    at_most: int  # words exchanged at once
    label: int  # the class that is defended
    answer: int  # the class the model gives the text
    clean_margin: float
    words: tuple[WordResult, ...]
    ignored: tuple[LeftOut, ...]
    sentences: int  # different ones for the model, the text itself included
    shapes: int  # numbers and places of tokens that they have
    verdict: Verdict
    margin: float | None  # no sentence has a smaller one; None: no such bound is known
    flip: Flip | None
    unknown: int  # sentences that are neither proven nor known to flip
    seconds: float
    fewer: tuple[FewerWords, ...] = ()  # the same for fewer words at once, where asked for
    command: str
    versions: Versions

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        label, count = self.model.labels[self.label], f"{self.sentences:,}"
        if self.flip is not None:
            other = self.model.labels[self.flip.answer]
            return f"{other}, margin {round_up(self.flip.margin)}: {self.flip.sentence}"
        if self.verdict == "certified":
            assert self.margin is not None
            return f"{label} is proven for all {count} sentences, margin at least {round_down(self.margin)}"
        return (
            f"unknown for {self.unknown:,} of {count} sentences: give it more time, or exchange fewer words"
        )

    @property
    def exchangeable(self) -> int:
        """How many words have substitutes."""
        return sum(bool(word.substitutes) for word in self.words)

    @property
    def scope(self) -> str:
        """What was asked about, in numbers."""
        many, words = f"{self.sentences:,} {plural(self.sentences, 'sentence')}", self.exchangeable
        return f"{many}, at most {self.at_most} of {words} {plural(words, 'word')} exchanged"

    def notes(self) -> Iterator[str]:
        """Remarks about the substitutes: which are unknown, of several tokens, or ignored."""
        offers = [(word, offer) for word in self.words for offer in word.substitutes]
        unknown = [offer.text for _, offer in offers if offer.unknown]
        if unknown:
            yield f"{len(unknown)} not in the vocabulary, which the model reads as unknown: {_named(unknown)}"
        several = [o.text for w, o in offers if not o.tokens == len(w.rows) == 1]
        if several:
            yield f"{len(several)} of several tokens, in {self.shapes:,} shapes: {_named(several)}"
        for reason in dict.fromkeys(_kind(one.reason) for one in self.ignored):
            some = [one.text for one in self.ignored if _kind(one.reason) == reason]
            yield f"{len(some)} left out ({reason}): {_named(some)}"


def _kind(reason: str) -> str:
    return "the same tokens as another, counted once" if reason.startswith("the same") else reason


def _named(texts: Sequence[str]) -> str:
    shown = ", ".join(texts[:SHOWN])
    return f"{shown}, …" if len(texts) > SHOWN else shown
