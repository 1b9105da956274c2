"""What an evaluation found, arranged as figures and tables ask for it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from buffet.data import Splits
from buffet.experiments import MethodSummary, Row, summarise
from buffet.lab.reproduce.jobs import Accuracy, Curve
from buffet.lab.reproduce.scales import COMPARED, CURVE_SHARE, REFERENCE, THOROUGH, Scale, Subject

METHODS = (*COMPARED, *THOROUGH)


@dataclass(frozen=True)
class DataSummary:
    """A dataset in a few numbers."""

    name: str  # of its folder
    title: str
    note: str
    train: int
    dev: int
    test: int
    words: float  # mean length of a test sentence
    positive: float  # share of the test sentences
    sha256: str

    @classmethod
    def of(cls, name: str, splits: Splits) -> DataSummary:
        known = splits.dataset
        return cls(
            name=name,
            title=known.title if known else name,
            note=known.note if known else "",
            train=len(splits.train),
            dev=len(splits.dev),
            test=len(splits.test),
            words=statistics.fmean(len(example.sentence.split()) for example in splits.test),
            positive=statistics.fmean(example.label == 1 for example in splits.test),
            sha256=splits.sha256,
        )


@dataclass(frozen=True)
class Pair:
    """The certified radius of a task, and the reference's."""

    row: Row
    reference: float
    certified: float


@dataclass(frozen=True)
class Results:
    """Everything that was found; `times` are CPU and wall seconds by stage."""

    scale: Scale
    data: Mapping[str, DataSummary]  # by the data of a preset
    accuracies: Mapping[str, Accuracy]  # by preset
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    times: Mapping[str, tuple[float, float]]

    @cached_property
    def subjects(self) -> tuple[Subject, ...]:
        """Those with rows."""
        known = {row.model for row in self.rows}
        return tuple(subject for subject in self.scale.subjects if subject.preset in known)

    @cached_property
    def lines(self) -> Mapping[tuple[str, str], MethodSummary]:
        """The comparison with the reference, by model and method."""
        known = any(row.method == REFERENCE for row in self.rows)
        return {(line.model, line.method): line for line in summarise(self.rows, REFERENCE)} if known else {}

    def methods(self, model: str) -> tuple[str, ...]:
        """Those with rows of a model, the reference first."""
        known = {row.method for row in self.rows if row.model == model}
        return tuple(method for method in METHODS if method in known)

    def number(self, model: str, sentence: str, words: tuple[int, ...]) -> int:
        """Which task of a model it is, from 1: data that is passed on names no sentences."""
        return self._numbers[model, sentence, words]

    @cached_property
    def _numbers(self) -> Mapping[tuple[str, str, tuple[int, ...]], int]:
        numbers: dict[tuple[str, str, tuple[int, ...]], int] = {}
        for subject in self.subjects:
            tasks = dict.fromkeys((r.sentence, r.words) for r in self.rows if r.model == subject.preset)
            numbers |= {(subject.preset, *task): place for place, task in enumerate(tasks, 1)}
        return numbers

    def pairs(self, model: str, method: str) -> tuple[Pair, ...]:
        """The radii of the tasks that a method and the reference answered."""
        ours, theirs = (
            {(r.sentence, r.words): r for r in self.rows if (r.model, r.method) == (model, name) and r.ok}
            for name in (method, REFERENCE)
        )
        return tuple(
            Pair(row, theirs[task].certified or 0.0, row.certified or 0.0)
            for task, row in ours.items()
            if task in theirs
        )

    def ratios(self, model: str, method: str) -> tuple[float, ...]:
        """Certified radii divided by the reference's, where that is above 0."""
        return tuple(p.certified / p.reference for p in self.pairs(model, method) if p.reference > 0)

    def learning(self, model: str) -> tuple[Curve, ...]:
        """The margin curves of a model that can be normalised: the reference has a margin below 0."""
        return tuple(
            curve
            for curve in self.curves
            if curve.model == model
            and curve.share == CURVE_SHARE
            and curve.steps
            and curve.reference is not None
            and curve.reference < 0
        )

    def margin_ratios(self, model: str, method: str, share: float) -> tuple[float, ...]:
        """Margins at a size divided by the reference's there, where that is above 0."""
        return tuple(
            (curve.margin or 0.0) / curve.reference
            for curve in self.curves
            if (curve.model, curve.method, curve.share) == (model, method, share)
            and curve.reference is not None
            and curve.reference > 0
        )
