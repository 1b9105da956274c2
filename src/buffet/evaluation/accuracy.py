"""Shares of a data set, and how far the share of the whole may be from that of a random sample."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from buffet.evaluation.rows import SentenceRow

MISS = 0.05
"""The probability that an interval misses the share of the whole set: 95 % confidence."""
HALVINGS = 60
SCALE = 10_000
"""Shares are printed in units of 1 / `SCALE`."""


@dataclass(frozen=True)
class Share:
    """A count out of a number of sentences, which are a random sample or all there are."""

    count: int
    of: int
    sampled: bool

    @property
    def value(self) -> float:
        return self.count / self.of

    @cached_property
    def interval(self) -> tuple[float, float] | None:
        """Clopper and Pearson's interval, which contains the share of the whole set with 95 % confidence.

        None for a whole set. It assumes draws with replacement; ours are without, so it is a little too wide.
        """
        return clopper_pearson(self.count, self.of) if self.sampled else None

    def to_dict(self) -> dict[str, object]:
        return {"count": self.count, "share": self.value, "interval": self.interval and list(self.interval)}

    def text(self, *, up: bool) -> str:
        """The share as it is printed, rounded up or down; with its interval, rounded outward."""
        scaled = self.count * SCALE
        text = f"{(-(-scaled // self.of) if up else scaled // self.of) / SCALE:.4f}"
        return text if self.interval is None else f"{text} {interval_text(self.interval)}"


def interval_text(interval: tuple[float, float]) -> str:
    """[0.71, 0.86], rounded outward."""
    low, high = math.floor(100 * interval[0]) / 100, math.ceil(100 * interval[1]) / 100
    return f"[{low:.2f}, {high:.2f}]"


def clopper_pearson(count: int, of: int) -> tuple[float, float]:
    """The exact confidence interval of a binomial share, with `MISS` / 2 in either tail."""
    low = 0.0 if count == 0 else _root(lambda p: _at_least(count, of, p) - MISS / 2)[0]
    high = 1.0 if count == of else _root(lambda p: MISS / 2 - (1 - _at_least(count + 1, of, p)))[1]
    return low, high


def _root(rising: object) -> tuple[float, float]:
    """A tight bracket around where a rising function of [0, 1] crosses 0."""
    assert callable(rising)
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < 0 else (low, middle)
    return low, high


def _at_least(count: int, of: int, p: float) -> float:
    """The probability of `count` or more successes in `of` draws."""
    if p <= 0 or p >= 1:
        return float(p >= 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, of + 1)))])
    k = np.arange(count, of + 1)
    logs = factorials[of] - factorials[k] - factorials[of - k] + k * math.log(p) + (of - k) * math.log1p(-p)
    return float(np.exp(logs).sum())


@dataclass(frozen=True)
class Accuracy:
    """The accuracies at one level: one ε, or one number of words exchanged at once.

    ``certified ≤ true robust accuracy ≤ attacked``: what lies between is open.
    """

    level: float  # infinite: all words
    clean: Share  # classified correctly
    certified: Share  # and proven
    attacked: Share  # and no counterexample found

    @property
    def open(self) -> Share:
        """Classified correctly, neither proven nor broken."""
        return Share(self.attacked.count - self.certified.count, self.clean.of, self.clean.sampled)

    @classmethod
    def at(cls, level: float, rows: Iterable[SentenceRow], sampled: bool) -> Accuracy:
        """The accuracies of some rows, one per sentence; one without an answer counts as misclassified."""
        listed = list(rows)
        verdicts = [row.verdict_at(level) for row in listed if row.right]
        counts = len(verdicts), verdicts.count("certified"), len(verdicts) - verdicts.count("falsified")
        clean, certified, attacked = (Share(count, len(listed), sampled) for count in counts)
        return cls(level, clean, certified, attacked)
