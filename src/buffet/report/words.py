"""What `buffet certify` found about substitutions, as one plain structure: exactly what ``--json`` prints."""

from __future__ import annotations

from typing import Literal

from buffet.printing import round_down, round_up
from buffet.report.answer import Frozen, ModelInfo, Versions
from buffet.verdicts import Verdict


class Offer(Frozen):
    """A substitute of a word."""

    text: str
    source: str  # synonyms, swap or typos
    tokens: int  # how many it is for the model
    unknown: bool  # not in the vocabulary, at least in part


class WordResult(Frozen):
    """A word of the text, and what it may be exchanged for."""

    word: str
    rows: tuple[int, ...]
    substitutes: tuple[Offer, ...]


class Ignored(Frozen):
    """A substitute that adds no sentence, and why."""

    word: str
    text: str
    reason: str


class FlippedSentence(Frozen):
    """A sentence that the model answers otherwise."""

    sentence: str
    changes: tuple[tuple[str, str], ...]
    answer: int
    margin: float


class FewerWords(Frozen):
    """The answer if fewer words are exchanged at once; the fields are those of the whole answer."""

    at_most: int
    sentences: int
    shapes: int
    verdict: Verdict
    margin: float | None
    flip: FlippedSentence | None
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
    ignored: tuple[Ignored, ...]
    sentences: int  # different ones for the model, the text itself included
    shapes: int  # numbers and places of tokens that they have
    verdict: Verdict
    margin: float | None  # no sentence has a smaller one; None: no such bound is known
    flip: FlippedSentence | None
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
