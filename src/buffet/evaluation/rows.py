"""What is known about one sentence of a data set, at every level that was asked."""

from __future__ import annotations

import math
from typing import ClassVar

from buffet.experiments.store import StoredRow
from buffet.printing import counted
from buffet.report import Versions
from buffet.report.answer import Frozen
from buffet.verdicts import Verdict


class LevelAnswer(Frozen):
    """The verdict at one level."""

    level: float | None  # ε, or words exchanged at once; None: all words
    verdict: Verdict
    margin: float | None  # if certified: nothing that is allowed has a smaller one
    reason: str | None = None  # why nothing could be asked

    @property
    def size(self) -> float:
        return math.inf if self.level is None else self.level


class Counterexample(Frozen):
    """A change that flips the answer, at the smallest level at which one was found."""

    level: float | None
    words: tuple[str, ...]  # the words that are moved or exchanged
    into: tuple[str, ...]  # their substitutes; empty if the words are moved
    sentence: str | None  # None for moves, which need not lead to words
    answer: int  # the class that the model gives
    margin: float  # of the correct class; negative

    @property
    def change(self) -> str:
        """In a few words: gripping → dull."""
        if self.into:
            return ", ".join(f"{a} → {b}" for a, b in zip(self.words, self.into, strict=True))
        some = " + ".join(self.words) if len(self.words) <= 4 else counted(len(self.words), "word")
        return f"{some} moved by {self.level!r}"


class SentenceRow(StoredRow):
    """One sentence and its answers; numbers are exact."""

    work: ClassVar[str] = "evaluation"

    model: str
    model_digest: str
    sentence: str
    gold: int  # the class in the data
    refused: str | None  # why the model does not take the sentence
    answer: int | None  # the class that the model gives; None: refused, or failed
    clean_margin: float | None  # of the class in the data: negative if another is answered
    kind: str
    asked: str  # in a few words
    levels: tuple[LevelAnswer, ...]  # in rising order; empty if the sentence is misclassified
    counterexample: Counterexample | None
    sentences: int | None  # that substitutions make at the largest level
    left_out: int = 0  # substitutes of which nothing was asked, as the tokenizer reads them otherwise
    method: str
    parts: dict[str, str | int | float | None]
    budget: float | None
    seed: int
    seconds: float | None
    finished: str  # UTC
    versions: Versions

    @property
    def right(self) -> bool:
        """Whether the class of the data has the largest logit, strictly."""
        return self.clean_margin is not None and self.clean_margin > 0

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why something about it is not known."""
        some = [self.reason, self.refused, *(answer.reason for answer in self.levels)]
        return tuple(dict.fromkeys(reason for reason in some if reason is not None))

    def verdict_at(self, level: float) -> Verdict:
        """The verdict at a level; for sentences that are classified correctly."""
        return next((answer.verdict for answer in self.levels if answer.size == level), "unknown")
