"""What an evaluation found, arranged as figures and tables ask for it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from buffet.lab.reproduce.records import DataRecord, MarginRecord, ModelRecord, Records, TaskRecord
from buffet.lab.reproduce.scales import COMPARED, CURVE_SHARE, PUBLISHED, THOROUGH

METHODS = (*COMPARED, *THOROUGH)


@dataclass(frozen=True)
class Pair:
    """The certified radius of a task by a method and by a reference, and the seconds they took."""

    task: int
    certified: float
    reference: float
    seconds: float
    reference_seconds: float


@dataclass(frozen=True)
class Results:
    """Records by model, method and task."""

    records: Records

    @cached_property
    def data(self) -> Mapping[str, DataRecord]:
        return {record.data: record for record in self.records.data}

    @cached_property
    def models(self) -> tuple[ModelRecord, ...]:
        """Those with tasks."""
        return tuple(model for model in self.records.models if self.tasks(model.model))

    @cached_property
    def _tasks(self) -> Mapping[str, tuple[TaskRecord, ...]]:
        found: dict[str, list[TaskRecord]] = {}
        for task in self.records.tasks:
            found.setdefault(task.model, []).append(task)
        return {model: tuple(tasks) for model, tasks in found.items()}

    def about(self, data: str) -> tuple[ModelRecord, ...]:
        """The models with tasks of one dataset."""
        return tuple(model for model in self.models if model.model.partition("-")[0] == data)

    def tasks(self, model: str) -> tuple[TaskRecord, ...]:
        return self._tasks.get(model, ())

    def answered(self, model: str, method: str) -> dict[int, TaskRecord]:
        """The tasks that a method has answered."""
        return {
            task.task: task
            for task in self.tasks(model)
            if method in task.answers and task.answers[method].certified is not None
        }

    def methods(self, model: str) -> tuple[str, ...]:
        """Those that have answered tasks of a model, the paper's baseline first."""
        return tuple(method for method in METHODS if self.answered(model, method))

    def pairs(self, model: str, method: str, reference: str = PUBLISHED) -> tuple[Pair, ...]:
        """The tasks that a method and a reference have answered."""
        theirs = self.answered(model, reference)
        return tuple(
            Pair(
                number,
                task.answers[method].certified or 0.0,
                task.answers[reference].certified or 0.0,
                task.answers[method].seconds or 0.0,
                task.answers[reference].seconds or 0.0,
            )
            for number, task in self.answered(model, method).items()
            if number in theirs
        )

    def ratios(self, model: str, method: str, reference: str = PUBLISHED) -> tuple[float, ...]:
        """Certified radii divided by a reference's, where that is above 0."""
        return tuple(p.certified / p.reference for p in self.pairs(model, method, reference) if p.reference)

    def mean_ratio(self, model: str, method: str, reference: str = PUBLISHED) -> float | None:
        values = self.ratios(model, method, reference)
        return statistics.fmean(values) if values else None

    def time_ratio(self, model: str, method: str) -> float | None:
        """The time of a method on all tasks that both have answered, divided by that of `PUBLISHED`."""
        pairs = self.pairs(model, method)
        theirs = sum(pair.reference_seconds for pair in pairs)
        return sum(pair.seconds for pair in pairs) / theirs if theirs > 0 else None

    def bracket(self, model: str, method: str) -> float | None:
        """The mean share of the attacked radius, where one is known, that a method certifies."""
        shares = [
            (task.answers[method].certified or 0.0) / task.attacked
            for task in self.answered(model, method).values()
            if task.attacked
        ]
        return statistics.fmean(shares) if shares else None

    def learning(self, model: str, method: str) -> tuple[MarginRecord, ...]:
        """Margin curves of a model that can be normalised: what they start from has a margin below 0."""
        return tuple(
            record
            for record in self.records.margins
            if (record.model, record.method, record.share) == (model, method, CURVE_SHARE)
            and record.steps
            and record.reference is not None
            and record.reference < 0
        )

    def margin_ratios(self, model: str, method: str, share: float) -> tuple[float, ...]:
        """Margins at a size divided by the reference's there, where that is above 0."""
        return tuple(
            (record.margin or 0.0) / record.reference
            for record in self.records.margins
            if (record.model, record.method, record.share) == (model, method, share)
            and record.reference is not None
            and record.reference > 0
        )
