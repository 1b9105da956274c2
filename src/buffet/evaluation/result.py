"""The answer: accuracies at every level, and what is known of every sentence."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

from buffet.errors import optional
from buffet.evaluation.accuracy import Accuracy
from buffet.evaluation.questions import Question
from buffet.evaluation.rows import SentenceRow
from buffet.printing import counted, html_table
from buffet.words.reading import NOT_READ

if TYPE_CHECKING:
    import polars

CORNERS = ("clean", "certified", "attacked", "open")


@dataclass(frozen=True, repr=False, eq=False)
class Evaluation:
    """How much of a data set is classified correctly, proven, broken and open.

    ``certified ≤ true robust accuracy ≤ attacked ≤ clean``. Where several levels were asked, `certified`,
    `attacked` and `open` are those at the largest; `curve` has them all.
    """

    question: Question
    labels: tuple[str, ...]
    source: str  # of the data
    total: int  # sentences in it
    sentences: tuple[SentenceRow, ...]  # those that were asked about, in the order of the data
    seconds: float

    @property
    def sampled(self) -> bool:
        return len(self.sentences) < self.total

    @cached_property
    def curve(self) -> tuple[Accuracy, ...]:
        """The accuracies at every level, in rising order."""
        return tuple(Accuracy.at(level, self.sentences, self.sampled) for level in self.question.levels)

    @property
    def worst(self) -> Accuracy:
        """The accuracies at the largest level."""
        return self.curve[-1]

    @property
    def clean(self) -> float:
        """The share of sentences that are classified correctly, unchanged."""
        return self.worst.clean.value

    @property
    def certified(self) -> float:
        """The share that are classified correctly and proven."""
        return self.worst.certified.value

    @property
    def attacked(self) -> float:
        """The share that are classified correctly and have no known counterexample."""
        return self.worst.attacked.value

    @property
    def open(self) -> float:
        """The share that are classified correctly and neither proven nor broken."""
        return self.worst.open.value

    @property
    def failed(self) -> tuple[SentenceRow, ...]:
        """Sentences without an answer because their worker died; they count as misclassified."""
        return tuple(row for row in self.sentences if not row.ok)

    @property
    def refused(self) -> tuple[SentenceRow, ...]:
        """Sentences that the model cannot take; they count as misclassified."""
        return tuple(row for row in self.sentences if row.refused is not None)

    @property
    def unasked(self) -> tuple[SentenceRow, ...]:
        """Sentences that could not be asked about at some level; they count as not certified."""
        return tuple(row for row in self.sentences if any(answer.reason for answer in row.levels))

    @property
    def asked(self) -> str:
        """Model, question, method and data, in a few words."""
        first = self.sentences[0]
        many = f"{len(self.sentences):,} of {self.total:,}" if self.sampled else f"{self.total:,}"
        return (
            f"{first.model} · {self.question.describe()} · {first.method} · {many} sentences of {self.source}"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """How many sentences have no answer, and why, and what no answer is about; with one example each."""
        kinds = (
            ("failed, counted as wrong", self.failed),
            ("refused, counted as wrong", self.refused),
            ("not asked at some level, counted as not certified", self.unasked),
        )
        lines = []
        for name, rows in kinds:
            for reason, count in Counter(row.reasons[0][:60] for row in rows).most_common():
                row = next(row for row in rows if row.reasons[0][:60] == reason)
                lines.append(f"{count} {name}: {row.sentence[:60]!r}: {row.reasons[0]}")
        if some := [row for row in self.sentences if row.left_out]:
            lines.append(
                f"{counted(sum(row.left_out for row in some), 'substitute')} of"
                f" {counted(len(some), 'sentence')} left out, as {NOT_READ}: {some[0].sentence[:60]!r}"
            )
        return tuple(lines)

    def table(self) -> list[tuple[str, ...]]:
        """The curve as it is printed: level, clean, certified, attacked, open.

        Certified is rounded down; all others, which are upper bounds of the true robust accuracy, up.
        """
        return [
            (
                self.question.level_text(at.level),
                at.clean.text(up=True),
                at.certified.text(up=False),
                at.attacked.text(up=True),
                at.open.text(up=True),
            )
            for at in self.curve
        ]

    def __repr__(self) -> str:
        level, clean, certified, attacked, _ = self.table()[-1]
        at = f"{self.question.kind}={level}"
        return f"Evaluation(clean {clean}, {at}: certified {certified}, attacked {attacked}, {self.asked})"

    def _repr_html_(self) -> str:
        """A small table for notebooks."""
        names = (self.question.kind, *CORNERS)
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(self.asked)}</p>{html_table(names, self.table())}{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain JSON types; numbers are not rounded."""
        first, facts = self.sentences[0], self.question.facts()
        facts.pop("synonyms", None)  # as large as a book
        return {
            "format": "buffet evaluation 1",
            "model": first.model,
            "model_digest": first.model_digest,
            "labels": list(self.labels),
            "data": self.source,
            "total": self.total,
            "count": len(self.sentences),
            "sampled": self.sampled,
            "asked": self.question.describe(),
            "question": facts,
            "method": first.method,
            "budget": first.budget,
            "seed": first.seed,
            **{name: getattr(self, name) for name in CORNERS},
            "curve": [self._point(at) for at in self.curve],
            "failed": len(self.failed),
            "refused": len(self.refused),
            "unasked": len(self.unasked),
            "seconds": self.seconds,
            "sentences": [row.model_dump(mode="json") for row in self.sentences],
        }

    def _point(self, at: Accuracy) -> dict[str, Any]:
        level = None if at.level == float("inf") else at.level
        return {self.question.kind: level, **{name: getattr(at, name).to_dict() for name in CORNERS}}

    def records(self) -> Iterator[dict[str, Any]]:
        """Every sentence at every level, in plain types."""
        for place, row in enumerate(self.sentences):
            broken = row.counterexample
            for at in self.curve:
                answer = next((answer for answer in row.levels if answer.size == at.level), None)
                flipped = broken is not None and answer is not None and answer.verdict == "falsified"
                yield {
                    "place": place,
                    "sentence": row.sentence,
                    "label": row.gold,
                    "answer": row.answer,
                    "clean_margin": row.clean_margin,
                    self.question.kind: self.question.level_text(at.level),
                    "verdict": answer.verdict if answer else None,
                    "margin": answer.margin if answer else None,
                    "change": broken.change if broken and flipped else None,
                    "counterexample": broken.sentence if broken and flipped else None,
                    "counterexample_margin": broken.margin if broken and flipped else None,
                    "reason": "; ".join(row.reasons) or None,
                    "seconds": row.seconds,
                }

    def to_csv(self) -> str:
        """One line per sentence and level."""
        rows = list(self.records())
        text = io.StringIO()
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def to_frame(self) -> polars.DataFrame:
        """The same as a table of polars (extra ``tables``)."""
        polars = optional("polars", "tables", "tables need polars")
        return polars.DataFrame(list(self.records()), infer_schema_length=None)
