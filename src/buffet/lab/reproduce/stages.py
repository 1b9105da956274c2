"""All of an evaluation in order. Every stage remembers what it has done, so the same call continues."""

from __future__ import annotations

import json
import math
import resource
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from buffet.data import read_splits
from buffet.errors import BuffetError
from buffet.experiments import Row, SweepConfig, SweepProgress, read_rows
from buffet.experiments.config import Running
from buffet.experiments.plan import SweepPlan, WorkUnit, make_plan, model_digest
from buffet.experiments.sweep import carry_out
from buffet.experiments.workers import Done, Failed, Fleet, Job, LocalFleet, Ticket, dispatch
from buffet.lab.reproduce import scales
from buffet.lab.reproduce.claims import claims_page
from buffet.lab.reproduce.drawing import check_drawing
from buffet.lab.reproduce.figures import figures
from buffet.lab.reproduce.index import index_page
from buffet.lab.reproduce.jobs import Accuracy, AccuracyJob, Curve, CurveJob, TrainJob
from buffet.lab.reproduce.records import DataRecord, ModelRecord, Records, Run, margin_record, task_records
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.scales import Scale, Subject
from buffet.lab.reproduce.tables import tables
from buffet.report import Versions
from buffet.system.files import write_atomically
from buffet.training import TrainSettings
from buffet.training.card import trained_minutes

A = TypeVar("A", bound=BaseModel)
RADII = 0.75
"""The share of the given hours after which no radius is searched any more: margin curves take the rest."""


class Keyed(Job, Protocol):
    """A job whose answer is remembered under a name."""

    @property
    def key(self) -> str: ...


@dataclass(frozen=True)
class Stage:
    """Where an evaluation is: `done` of `total` models, rows or margins."""

    name: str
    done: int
    total: int


@dataclass(frozen=True)
class Workspace:
    """Where everything is. `models` is a directory of models that are already trained."""

    data: Path
    out: Path
    models: Path | None = None

    def folder(self, subject: Subject) -> Path:
        """The directory with the data of a subject."""
        return self.data / scales.FOLDERS[subject.data]

    def model(self, subject: Subject) -> Path:
        """The checkpoint of a subject, whether or not it is there yet."""
        given = self.models / subject.preset if self.models else None
        return given if given and given.is_dir() else self.out / "models" / subject.preset

    @property
    def rows(self) -> Path:
        return self.out / "rows.ndjson"

    def directory(self, name: str) -> Path:
        path = self.out / name
        path.mkdir(parents=True, exist_ok=True)
        return path


def reproduce(
    place: Workspace,
    scale: Scale,
    fleet: Fleet[Any] | None = None,
    *,
    command: str,
    trained_only: bool = False,
    hours: float | None = None,
    report: Callable[[Stage], None] = lambda stage: None,
) -> Path:
    """Evaluate what `scale` says and write figures, tables and an index page, whose path is returned.

    Args:
        fleet: who works; by default a process per core.
        command: what the index page gives as the command.
        trained_only: train nothing: models that are not there yet are left out.
        hours: begin nothing after that, and finish what was begun; 0 draws what is there. Radii get `RADII`
            of the time, if they need it.
    """
    check_drawing()
    begin, seconds = time.monotonic(), math.inf if hours is None else 3600 * hours
    data = {name: _summary(place, scale.about(name)[0]) for name in scale.data}
    place.directory("models")
    there = tuple(s for s in scale.subjects if place.model(s).is_dir() or not trained_only)
    absent = tuple(s.preset for s in scale.subjects if s not in there)
    scale = replace(scale, subjects=there)
    ends = begin + RADII * seconds, begin + seconds
    work = Evaluation(place, scale, fleet or LocalFleet(None, 1), report, *ends)
    with work.timed("training"):
        work.train()
    with work.timed("accuracy"):
        accuracies = work.accuracies(data)
    with work.timed("radii"):
        rows = work.radii()
    with work.timed("margins"):
        curves = work.curves(rows)
    tasks, numbers = task_records(rows)
    run = Run(
        scale=scale.name,
        summary=scale.summary,
        norm=f"{scale.norm:g}",
        seed=scale.seed,
        margin_steps=scale.margin_steps,
        command=command,
        versions=Versions.current(),
        absent=absent,
        cpu_minutes={stage: round(cpu / 60, 1) for stage, (cpu, _) in _times(place).items()},
    )
    margins = tuple(margin_record(curve, numbers) for curve in curves)
    records = Records(run, tuple(data.values()), _models(place, scale, accuracies), tuple(tasks), margins)
    records.write(place.out)
    return draw(records, place.out)


def draw(records: Records, out: Path) -> Path:
    """Write the figures, the page that shows them with all tables, and that of the paper's claims."""
    results = Results(records)
    (out / "figures").mkdir(exist_ok=True)
    for figure in figures(results):
        write_atomically(out / "figures" / f"{figure.name}.svg", figure.svg())
    for name, content in pages(results).items():
        write_atomically(out / name, content)
    return out / "index.md"


def pages(results: Results) -> dict[str, str]:
    """The pages about some results, by the names of their files."""
    index = index_page(results, figures(results), tables(results))
    return {"index.md": index, "claims.md": claims_page(results)}


def _models(place: Workspace, scale: Scale, accuracies: Mapping[str, Accuracy]) -> tuple[ModelRecord, ...]:
    return tuple(
        ModelRecord(
            model=subject.preset,
            digest=model_digest(str(place.model(subject))),
            accuracy=accuracies.get(subject.preset),
            minutes=trained_minutes(place.model(subject)),
            tasks=subject.tasks,
            first=subject.tasks if subject.first is None else subject.first,
        )
        for subject in scale.subjects
        if place.model(subject).is_dir()
    )


@dataclass(frozen=True)
class Evaluation:
    """The stages of an evaluation."""

    place: Workspace
    scale: Scale
    fleet: Fleet[Any]
    report: Callable[[Stage], None]
    radii_until: float = math.inf
    until: float = math.inf

    def train(self) -> None:
        """Train the models that are neither given nor there."""
        missing = [subject for subject in self.scale.subjects if not self.place.model(subject).is_dir()]
        jobs = [
            TrainJob(
                TrainSettings.of(
                    preset=subject.preset,
                    data=self.place.folder(subject),
                    out=self.place.model(subject),
                    seed=self.scale.seed,
                    save_minutes=1.0,
                    **subject.training,
                )
            )
            for subject in missing
        ]
        jobs.sort(key=lambda job: -job.settings.layers)  # the longest first: no core is idle at the end
        self._run("training", jobs, len(self.scale.subjects))

    def accuracies(self, data: Mapping[str, DataRecord]) -> dict[str, Accuracy]:
        """How often every model that is there classifies correctly."""
        jobs = {
            s.preset: AccuracyJob(self.place.model(s), self.place.folder(s), data[s.data].sha256)
            for s in self.scale.subjects
            if self.place.model(s).is_dir()
        }
        found = self._remembered("accuracy", list(jobs.values()), Accuracy)
        return {preset: found[job.key] for preset, job in jobs.items() if job.key in found}

    def radii(self) -> list[Row]:
        """The rows of all models, in the order in which they are due."""
        plan = in_turn(self.place, self.scale)

        def tell(now: SweepProgress) -> None:
            self.report(Stage("radii", now.before + now.done, plan.tasks))

        carry_out(plan, self.place.rows, self.fleet, Running(), progress=tell, until=self.radii_until)
        known = {row.key: row for row in read_rows(self.place.rows)}
        return [known[key] for unit in plan.units for key in unit.keys if key in known]

    def curves(self, rows: Sequence[Row]) -> list[Curve]:
        """Margins at given sizes and margin curves, of the first tasks that the reference certifies."""
        scale, jobs = self.scale, list[tuple[float, CurveJob]]()
        for subject in scale.subjects:
            own = [row for row in rows if row.model == subject.preset and row.certified]
            asked = [
                (scales.OURS, method, share, subject.margins, scale.margin_steps)
                for method in scales.AT_MARGINS
                for share in scales.MARGIN_SHARES
            ]
            asked += [
                (against, method, scales.CURVE_SHARE, subject.curves, subject.curve_steps)
                for method, against in scales.CURVES.items()
            ]
            for against, method, share, count, steps in asked:
                for place, row in enumerate([r for r in own if r.method == against][:count]):
                    jobs.append(
                        (
                            place / count,
                            CurveJob(
                                model=self.place.model(subject),
                                sentence=row.sentence,
                                label=row.label,
                                word=row.words[0],
                                norm=scale.norm,
                                method=method,
                                against=against,
                                share=share,
                                radius=row.certified or 0.0,
                                steps=steps,
                            ),
                        )
                    )
        ordered = [job for _, job in sorted(jobs, key=lambda entry: entry[0])]
        found = self._remembered("margins", ordered, Curve)
        return [found[job.key] for _, job in jobs if job.key in found]

    def _remembered(self, name: str, jobs: Sequence[Keyed], kind: type[A]) -> dict[str, A]:
        """The answers of the jobs by their keys: those in the directory `name`, and after work all."""
        directory = self.place.directory(name)
        files = {job.key: directory / f"{job.key}.json" for job in jobs}

        def save(job: Any, answer: Any) -> None:
            assert isinstance(answer, kind)
            write_atomically(files[job.key], answer.model_dump_json() + "\n")

        left = {job.key: job for job in jobs if not files[job.key].exists()}
        self._run(name, list(left.values()), len(jobs), save)
        return {key: _read(path, kind) for key, path in files.items() if path.exists()}

    def _run(
        self,
        name: str,
        jobs: Sequence[Job],
        total: int,
        save: Callable[[Job, object], None] = lambda job, answer: None,
    ) -> None:
        """Do the jobs; `total` counts those that were done before too. One that fails ends the evaluation."""
        if not jobs:
            return
        done = total - len(jobs)

        def settle(ticket: Ticket, result: Done | Failed) -> None:
            nonlocal done
            if isinstance(result, Failed):
                raise BuffetError(f"{name}: {result.reason}")
            save(ticket.job, result.answer)
            done += 1
            self.report(Stage(name, done, total))

        self.report(Stage(name, done, total))
        tickets = [Ticket(number, job) for number, job in enumerate(jobs)]
        dispatch(self.fleet, tickets, settle, until=self.until)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the CPU and wall seconds of a stage, its workers' included, to what it took before."""
        before = _clocks()
        try:
            yield
        finally:
            times = dict(_times(self.place))
            spent = (now - then for now, then in zip(_clocks(), before, strict=True))
            cpu, wall = (a + b for a, b in zip(times.get(stage, (0.0, 0.0)), spent, strict=True))
            times[stage] = cpu, wall
            write_atomically(self.place.out / "times.json", json.dumps(times, indent=2) + "\n")


def in_turn(place: Workspace, scale: Scale) -> SweepPlan:
    """All tasks in the order in which they are worked on.

    The tasks of a model are drawn at random, and all models advance alike (`Subject.turn`): whenever the work
    ends, what is done are the first tasks of every model, a fair sample of them.
    """
    due: list[tuple[float, tuple[WorkUnit, ...]]] = []
    notes: list[str] = []
    for subject in scale.subjects:
        if not place.model(subject).is_dir():
            continue
        plan = make_plan(sweep_of(place, scale, subject))
        notes += plan.notes
        settings = [tuple(units) for _, units in groupby(plan.units, key=lambda unit: unit.setting)]
        for task, units in enumerate(settings):
            due.append((subject.turn(task), tuple(u for u in units if u.title in scales.COMPARED)))
            if task < subject.thorough:
                thorough = tuple(u for u in units if u.title in scale.thorough)
                due.append((subject.thorough_turn(task), thorough))
    due.sort(key=lambda entry: entry[0])
    return SweepPlan(tuple(unit for _, units in due for unit in units), tuple(notes))


def sweep_of(place: Workspace, scale: Scale, subject: Subject) -> SweepConfig:
    """One word of every sentence of a subject, asked to all methods."""
    return SweepConfig.model_validate(
        {
            "models": [str(place.model(subject))],
            "methods": (*scales.COMPARED, *scale.thorough),
            "norms": [scale.norm],
            "sentences": {
                "file": place.folder(subject) / "test.tsv",
                "count": subject.tasks,
                "min_words": scale.min_words,
                "max_words": scale.max_words,
            },
            "words": {"count": 1},
            "seed": scale.seed,
        }
    )


def _read(path: Path, kind: Any) -> Any:
    """The content of a JSON file, which has to be of a type."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError:
        raise BuffetError(f"{path}: is not what was written there; remove it and run again") from None


def _summary(place: Workspace, subject: Subject) -> DataRecord:
    """A dataset in a few numbers."""
    folder = place.folder(subject)
    if not folder.is_dir():
        wanted = ", ".join(scales.FOLDERS.values())
        raise BuffetError(
            f"{folder}: no such directory; --data wants folders ({wanted}) with train.tsv, dev.tsv, test.tsv"
        )
    splits = read_splits(folder)
    known = splits.dataset
    return DataRecord(
        data=subject.data,
        folder=folder.name,
        title=known.title if known else folder.name,
        note=known.note if known else "",
        train=len(splits.train),
        dev=len(splits.dev),
        test=len(splits.test),
        words=statistics.fmean(len(example.sentence.split()) for example in splits.test),
        positive=statistics.fmean(example.label == 1 for example in splits.test),
        sha256=splits.sha256,
    )


def _clocks() -> tuple[float, float]:
    """CPU seconds of this process and of those it waited for, and seconds on the wall."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage), time.monotonic()


def _times(place: Workspace) -> Mapping[str, tuple[float, float]]:
    path = place.out / "times.json"
    found: dict[str, tuple[float, float]] = {}
    return _read(path, dict[str, tuple[float, float]]) if path.exists() else found
