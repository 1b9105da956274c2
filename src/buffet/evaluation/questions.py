"""What may be done to a sentence: its words moved in balls, or exchanged for others; at several levels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.errors import BuffetError
from buffet.evaluation.rows import Counterexample, LevelAnswer
from buffet.loading import Model
from buffet.methods import Method
from buffet.printing import norm_name
from buffet.properties import margin_of
from buffet.regions import LpBall
from buffet.search.policy import POLICY
from buffet.verdicts import Verdict
from buffet.verification.verify import verify
from buffet.words import LeftOut, NoSubstitutesError, Substitutions, substitutions
from buffet.words.reading import NOT_READ, Reading

LEAST_SECONDS = 1e-3
"""The budget of a level for which no time is left: it is answered with "unknown"."""
MOST_LEVELS = 100
EACH, TOGETHER = ("each",), ("all", "together")


@dataclass(frozen=True)
class Effort:
    """How hard to try on one sentence."""

    method: Method
    budget: float | None = None  # seconds
    seed: int = 0  # of attacks, and of misspellings


@dataclass(frozen=True, eq=False)
class Sentence:
    """A sentence that the model classifies correctly."""

    model: Model
    text: str
    label: int


@dataclass(frozen=True)
class Found:
    """What is known about one sentence at all levels."""

    levels: tuple[LevelAnswer, ...]
    counterexample: Counterexample | None
    sentences: int | None = None
    left_out: int = 0  # substitutes of which nothing is asked, as the tokenizer reads them otherwise


@dataclass(frozen=True)
class Level:
    """What was found at one level; its counterexample may already work at a smaller one."""

    verdict: Verdict
    margin: float | None = None
    reason: str | None = None
    counterexample: Counterexample | None = None


@runtime_checkable
class Question(Protocol):
    """What is asked of every sentence; it can be pickled."""

    @property
    def kind(self) -> str:
        """The name of its levels in rows, tables and JSON."""

    @property
    def axis(self) -> str:
        """What its levels measure, as a page names it."""

    @property
    def levels(self) -> tuple[float, ...]:
        """In rising order; what holds at one holds at all smaller ones."""

    def describe(self) -> str:
        """In a few words, without the levels."""

    def level_text(self, level: float) -> str:
        """A level as people read it."""

    def promise(self, level: float) -> str:
        """What is proven of an answer that is certified at a level, as the end of a sentence."""

    def concerning(self, model: Model, text: str) -> Question:
        """The part of it that concerns this sentence."""

    def facts(self) -> dict[str, object]:
        """All of it in plain types."""

    def ask(self, about: Sentence, effort: Effort) -> Found:
        """The answers at all levels."""


@dataclass(frozen=True)
class Balls:
    """Every word on its own, or all at once, move within a distance."""

    levels: tuple[float, ...]
    norm: float = 2.0
    together: bool = False
    kind: ClassVar[str] = "eps"
    axis: ClassVar[str] = "ε"

    def describe(self) -> str:
        which = "all words at once" if self.together else "each word on its own"
        return f"{which} moved within {norm_name(self.norm)} balls"

    def level_text(self, level: float) -> str:
        return repr(level)

    def promise(self, level: float) -> str:
        which = "all words at once" if self.together else "any one word"
        return f"no move of {which} by up to {self.level_text(level)} changes them"

    def concerning(self, model: Model, text: str) -> Balls:
        return self

    def facts(self) -> dict[str, object]:
        norm = "inf" if math.isinf(self.norm) else self.norm
        return {"eps": list(self.levels), "norm": norm, "words": TOGETHER[0] if self.together else EACH[0]}

    def ask(self, about: Sentence, effort: Effort) -> Found:
        moves = _Moves(self, about, effort)
        return settled(self.levels, moves.at, effort.budget)


class _Moves:
    """One sentence under balls; words that are proven at one size are not asked about at smaller ones."""

    def __init__(self, asked: Balls, about: Sentence, effort: Effort) -> None:
        self.norm, self.about, self.effort = asked.norm, about, effort
        encoding = about.model.encode(about.text)
        rows = [row for row, special in enumerate(encoding.special) if not special]
        self.x, self.tokens = about.model.embed(about.text), encoding.tokens
        self.open = [rows] if asked.together else [[row] for row in rows]
        self.least = math.inf  # margin of those that are proven

    def at(self, eps: float, seconds: float | None) -> Level:
        """All words at one size, a quick attack first: one word that breaks decides the sentence."""
        about, effort = self.about, self.effort
        end = None if seconds is None else time.perf_counter() + seconds
        region = LpBall(self.x, self.open, self.norm, eps)
        quick = attack(
            about.model.program64,
            region,
            about.label,
            replace(POLICY.quick_attack, seed=effort.seed),
            deadline=end,
        )
        for task in quick.success.nonzero()[:, 0].tolist():
            if (found := self._broken(eps, self.open[task], quick.points[task])) is not None:
                return Level("falsified", counterexample=found)
        left = None if end is None else max(end - time.perf_counter(), LEAST_SECONDS)
        thorough = AttackSettings(seed=effort.seed)
        done = verify(
            about.model, region, method=effort.method, label=about.label, budget=left, falsify=thorough
        )
        if done.interrupted:
            raise KeyboardInterrupt  # the sentence is asked about again by whoever continues
        least = done.margins.amin(-1).tolist()
        proven = [verdict == "certified" for verdict in done.verdicts]
        self.least = min([self.least, *(m for m, holds in zip(least, proven, strict=True) if holds)])
        for words, point in zip(self.open, done.counterexamples, strict=True):
            if point is not None and (found := self._broken(eps, words, point)) is not None:
                return Level("falsified", counterexample=found)
        self.open = [words for words, holds in zip(self.open, proven, strict=True) if not holds]
        return Level("unknown") if self.open else Level("certified", self.least)

    def _broken(self, eps: float, words: Sequence[int], point: Tensor) -> Counterexample | None:
        """A point with another answer, evaluated once more."""
        answer, margin = answered(self.about.model, point, self.about.label)
        named = tuple(self.tokens[row] for row in words)
        if not margin < 0:
            return None
        return Counterexample(level=eps, words=named, into=(), sentence=None, answer=answer, margin=margin)


@dataclass(frozen=True)
class Exchanges:
    """A number of words at once, exchanged for others."""

    levels: tuple[float, ...]  # infinite: all words
    synonyms: Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    typos: int = 0
    skip_unknown: bool = False
    kind: ClassVar[str] = "at_most"
    axis: ClassVar[str] = "words exchanged at once"

    def describe(self) -> str:
        of = [*(["synonyms"] * (self.synonyms is not None)), *([f"{self.typos} typos"] * (self.typos > 0))]
        known = " of the vocabulary" if self.skip_unknown else ""
        return f"words exchanged for {' and '.join(of)}{known}"

    def level_text(self, level: float) -> str:
        return "all" if math.isinf(level) else f"{level:g}"

    def promise(self, level: float) -> str:
        which = "words are" if math.isinf(level) else "word is" if level == 1 else f"{level:g} words are"
        return f"whichever {which} exchanged, they stay"

    def concerning(self, model: Model, text: str) -> Exchanges:
        """With the synonyms of its own words only, so that processes are not sent the whole table."""
        if self.synonyms is None:
            return self
        try:
            words = Reading.of(model, text, None).words()
        except BuffetError:  # which the answer will say
            return replace(self, synonyms={})
        keys = dict.fromkeys(word.text.lower() for word in words)
        return replace(self, synonyms={key: self.synonyms[key] for key in keys if key in self.synonyms})

    def facts(self) -> dict[str, object]:
        at_most = [None if math.isinf(level) else int(level) for level in self.levels]
        table = None if self.synonyms is None else {key: list(some) for key, some in self.synonyms.items()}
        rest = {"typos": self.typos, "skip_unknown": self.skip_unknown}
        return {"at_most": at_most, "synonyms": table, **rest}

    def ask(self, about: Sentence, effort: Effort) -> Found:
        try:
            whole = substitutions(
                about.model,
                about.text,
                synonyms=self.synonyms,
                typos=self.typos,
                skip_unknown=self.skip_unknown,
                seed=effort.seed,
            )
        except NoSubstitutesError as nothing:
            alone = self._alone(about)
            return Found(tuple(_answer(k, alone) for k in self.levels), None, 1, _not_read(nothing.left_out))
        except BuffetError as error:
            refused = Level("unknown", reason=str(error))
            return Found(tuple(_answer(k, refused) for k in self.levels), None)
        found = settled(
            self.levels, lambda k, seconds: self._at(whole, k, seconds, about, effort), effort.budget
        )
        count = _within(whole, self.levels[-1]).count
        return replace(found, sentences=count, left_out=_not_read(whole.left_out))

    @staticmethod
    def _at(
        whole: Substitutions, at_most: float, seconds: float | None, about: Sentence, effort: Effort
    ) -> Level:
        try:
            done = _within(whole, at_most).verify(
                effort.method, label=about.label, budget=seconds, seed=effort.seed
            )
        except BuffetError as error:
            return Level("unknown", reason=str(error))
        if done.flip is None:
            return Level(done.verdict, done.margin if done.verdict == "certified" else None)
        words, into = zip(*done.flip.changes, strict=True)
        flip = Counterexample(
            level=len(words),
            words=words,
            into=into,
            sentence=done.flip.sentence,
            answer=done.flip.answer,
            margin=done.flip.margin,
        )
        return Level("falsified", counterexample=flip)

    @staticmethod
    def _alone(about: Sentence) -> Level:
        """A sentence without substitutes: certified if its margin is larger than its rounding errors."""
        region = LpBall(about.model.embed(about.text), words=[0], eps=0.0)
        done = verify(about.model, region, method="baseline", label=about.label, falsify=False)
        if done.verdict == "certified":
            return Level("certified", done.margin)
        return Level("unknown", reason="its margin is within rounding")


def _not_read(left_out: Sequence[LeftOut]) -> int:
    return sum(one.reason == NOT_READ for one in left_out)


def _within(whole: Substitutions, at_most: float) -> Substitutions:
    """The same substitutes, with fewer words exchanged at once."""
    return replace(whole, at_most=int(min(at_most, whole.at_most)))


def answered(model: Model, x: Tensor, label: int) -> tuple[int, float]:
    """The class of the largest logit, and the margin of a class, in float64."""
    logits = model.program64.evaluate(x.double())
    return int(logits.argmax()), float(margin_of(logits, label))


def settled(
    levels: Sequence[float], ask: Callable[[float, float | None], Level], budget: float | None
) -> Found:
    """The verdicts of all levels, from the largest down, each with an even share of the time that is left.

    What is certified at one level is certified at all smaller ones; what breaks breaks at all larger ones.
    """
    end = None if budget is None else time.perf_counter() + budget
    known: dict[float, Level] = {}
    smallest: Counterexample | None = None
    for level in reversed(levels):
        if level in known:
            continue
        open_ones = sum(other not in known for other in levels)
        left = None if end is None else max((end - time.perf_counter()) / open_ones, LEAST_SECONDS)
        found = ask(level, left)
        known[level] = found
        if found.verdict == "certified":
            known |= {other: found for other in levels if other < level}
        elif found.counterexample is not None:
            smallest = found.counterexample
            known |= {other: found for other in levels if other >= _size(smallest)}
    return Found(tuple(_answer(level, known[level]) for level in levels), smallest)


def _size(found: Counterexample) -> float:
    return math.inf if found.level is None else found.level


def _answer(level: float, found: Level) -> LevelAnswer:
    return LevelAnswer(
        level=None if math.isinf(level) else level,
        verdict=found.verdict,
        margin=found.margin,
        reason=found.reason,
    )
