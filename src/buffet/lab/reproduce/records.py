"""What an evaluation found, in one small file that may be passed on: it names no sentence.

`rows-SCALE.ndjson` has one JSON object per line: first the run, then datasets, models, tasks and margins.
Every figure, table and page is a function of it. A task is known by its number among those of its model.
Certified numbers are rounded down, attacked ones up, to six digits.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from buffet.errors import BuffetError, explain
from buffet.experiments import Row
from buffet.lab.reproduce.jobs import Accuracy, Curve
from buffet.report import Versions
from buffet.system.files import read_text, write_atomically

DIGITS = 6


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Run(_Record):
    """What was asked for, with what, and how long it took."""

    kind: Literal["run"] = "run"
    scale: str
    summary: str
    norm: Annotated[str, Field(pattern=r"^(\d+(\.\d+)?|inf)$")]
    seed: int
    margin_steps: int
    command: str
    versions: Versions
    absent: tuple[str, ...]  # models of the scale that were not there
    cpu_minutes: dict[str, float]  # of every stage, all runs of the command together


class DataRecord(_Record):
    """A dataset in a few numbers."""

    kind: Literal["data"] = "data"
    data: str  # of a preset
    folder: str
    title: str
    note: str
    train: int
    dev: int
    test: int
    words: float  # mean length of a test sentence
    positive: float  # share of the test sentences
    sha256: str


class ModelRecord(_Record):
    """A model: its size, its accuracy, and which it is."""

    kind: Literal["model"] = "model"
    model: str
    digest: str
    accuracy: Accuracy | None  # None: not measured yet
    minutes: float | None  # of training, as its card says
    tasks: int  # asked for
    first: int  # of them, those that come before the rest of any model


class Answer(_Record):
    """What one method said of a task."""

    certified: float | None  # None: failed
    seconds: float | None  # of the processor, for the search


class TaskRecord(_Record):
    """One word of one sentence, and the radii that methods certify."""

    kind: Literal["task"] = "task"
    model: str
    task: int  # from 1
    tokens: int  # of the sentence
    attacked: float | None  # a move of this size changes the answer
    answers: dict[str, Answer]  # by method


class MarginRecord(_Record):
    """Lower bounds of the margin of one task at one size."""

    kind: Literal["margin"] = "margin"
    model: str
    task: int
    method: str
    against: str
    share: float
    eps: float
    reference: float | None
    margin: float | None
    steps: tuple[float | None, ...]


Record = Annotated[Run | DataRecord | ModelRecord | TaskRecord | MarginRecord, Field(discriminator="kind")]


@dataclass(frozen=True)
class Records:
    """All of them."""

    run: Run
    data: tuple[DataRecord, ...]
    models: tuple[ModelRecord, ...]
    tasks: tuple[TaskRecord, ...]
    margins: tuple[MarginRecord, ...]

    @property
    def name(self) -> str:
        return f"rows-{self.run.scale}.ndjson"

    def write(self, directory: Path) -> None:
        records: list[_Record] = [self.run, *self.data, *self.models, *self.tasks, *self.margins]
        lines = (
            json.dumps(r.model_dump(mode="json"), ensure_ascii=False, separators=(",", ":")) for r in records
        )
        write_atomically(directory / self.name, "".join(f"{line}\n" for line in lines))

    @classmethod
    def read(cls, path: Path) -> Records:
        """The records in a file, or in the one such file of a directory."""
        if path.is_dir():
            found = sorted(path.glob("rows-*.ndjson"))
            if len(found) != 1:
                raise BuffetError(
                    f"{path}: {len(found)} files rows-*.ndjson, one was expected; name the file itself"
                )
            (path,) = found
        adapter: TypeAdapter[Any] = TypeAdapter(Record)
        records: dict[type, list[Any]] = {}
        for number, line in enumerate(read_text(path).splitlines(), 1):
            try:
                record = adapter.validate_json(line)
            except ValidationError as error:
                raise BuffetError(
                    f"{path}: line {number} is not a record of an evaluation: {explain(error)}; let"
                    " `buffet reproduce` write the file again"
                ) from None
            records.setdefault(type(record), []).append(record)
        if len(records.get(Run, [])) != 1:
            raise BuffetError(
                f"{path}: has no run: it is not a file of `buffet reproduce` (rows-SCALE.ndjson)"
            )

        def of(kind: type) -> tuple[Any, ...]:
            return tuple(records.get(kind, ()))

        return cls(of(Run)[0], of(DataRecord), of(ModelRecord), of(TaskRecord), of(MarginRecord))


def task_records(rows: Sequence[Row]) -> tuple[list[TaskRecord], Mapping[tuple[str, str], int]]:
    """The tasks of the rows of a sweep with one task per sentence, and their numbers by model and sentence.

    Tasks are numbered in the order of their first rows.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.sentence), []).append(row)
    numbers: dict[tuple[str, str], int] = {}
    counts: dict[str, int] = {}
    found = []
    for (model, sentence), own in groups.items():
        numbers[model, sentence] = counts[model] = counts.get(model, 0) + 1
        attacked = [row.attacked for row in own if row.attacked is not None]
        found.append(
            TaskRecord(
                model=model,
                task=counts[model],
                tokens=len(own[0].sentence_tokens),
                attacked=_up(min(attacked)) if attacked else None,
                answers={
                    row.method: Answer(
                        certified=_down(row.certified or 0.0) if row.ok else None,
                        seconds=None if row.task_seconds is None else round(row.task_seconds, 3),
                    )
                    for row in own
                },
            )
        )
    return found, numbers


def margin_record(curve: Curve, numbers: Mapping[tuple[str, str], int]) -> MarginRecord:
    """A curve under the number of its task."""
    return MarginRecord(
        model=curve.model,
        task=numbers[curve.model, curve.sentence],
        method=curve.method,
        against=curve.against,
        share=curve.share,
        eps=_down(curve.eps),
        reference=None if curve.reference is None else _down(curve.reference),
        margin=None if curve.margin is None else _down(curve.margin),
        steps=tuple(None if step is None else _down(step) for step in curve.steps),
    )


def _rounded(value: float, towards: Callable[[float], int]) -> float:
    if value == 0 or not math.isfinite(value):
        return value
    scale = 10.0 ** (DIGITS - 1 - math.floor(math.log10(abs(value))))
    return towards(value * scale) / scale


def _down(value: float) -> float:
    found = _rounded(value, math.floor)
    return found if found <= value else math.nextafter(value, -math.inf)


def _up(value: float) -> float:
    found = _rounded(value, math.ceil)
    return found if found >= value else math.nextafter(value, math.inf)
