"""All of an evaluation in order. Every stage remembers what it has done, so the same call continues."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from buffet.data import read_splits
from buffet.errors import BuffetError
from buffet.experiments import Row, SweepConfig, SweepProgress, read_rows, sweep
from buffet.experiments.plan import make_plan
from buffet.experiments.workers import Done, Failed, Fleet, Job, LocalFleet, Ticket, dispatch
from buffet.lab.drawing import check_drawing
from buffet.lab.reproduce import scales
from buffet.lab.reproduce.figures import figures
from buffet.lab.reproduce.index import index_page
from buffet.lab.reproduce.jobs import Accuracy, AccuracyJob, Curve, CurveJob, TrainJob
from buffet.lab.reproduce.results import DataSummary, Results
from buffet.lab.reproduce.scales import Scale, Subject
from buffet.lab.reproduce.tables import tables
from buffet.system.files import write_atomically
from buffet.training import TrainSettings

A = TypeVar("A", bound=BaseModel)


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
    draw_only: bool = False,
    report: Callable[[Stage], None] = lambda stage: None,
) -> Path:
    """Evaluate what `scale` says and write figures, tables and an index page, whose path is returned.

    Args:
        fleet: who works; by default a process per core.
        command: what the index page gives as the command.
        draw_only: do no work, and draw what is there.
    """
    check_drawing()
    data = {name: _summary(place, scale.about(name)[0]) for name in scale.data}
    place.directory("models")
    work = Evaluation(place, scale, None if draw_only else fleet or LocalFleet(None, 1), report)
    with work.timed("training"):
        work.train()
    with work.timed("accuracy"):
        accuracies = work.accuracies(data)
    with work.timed("radii"):
        rows = work.radii()
    with work.timed("margins"):
        curves = work.curves(rows)
    return _write(place, Results(scale, data, accuracies, tuple(rows), tuple(curves), _times(place)), command)


@dataclass(frozen=True)
class Evaluation:
    """The stages of an evaluation; without a fleet, they find what is there and do no work."""

    place: Workspace
    scale: Scale
    fleet: Fleet[Any] | None
    report: Callable[[Stage], None]

    def train(self) -> None:
        """Train the models that are neither given nor there."""
        missing = [subject for subject in self.scale.subjects if not self.place.model(subject).is_dir()]
        if missing and self.fleet is None:
            raise BuffetError(f"{self.place.model(missing[0])}: no model yet, so there is nothing to draw")
        jobs = [
            TrainJob(
                TrainSettings.of(
                    preset=subject.preset,
                    data=self.place.folder(subject),
                    out=self.place.model(subject),
                    seed=self.scale.seed,
                    save_minutes=1.0,
                    **self.scale.training,
                )
            )
            for subject in missing
        ]
        jobs.sort(key=lambda job: -job.settings.layers)  # the longest first: no core is idle at the end
        self._run("training", jobs, len(self.scale.subjects))

    def accuracies(self, data: Mapping[str, DataSummary]) -> dict[str, Accuracy]:
        """How often every model is right."""
        jobs = {
            s.preset: AccuracyJob(self.place.model(s), self.place.folder(s), data[s.data].sha256)
            for s in self.scale.subjects
        }
        found = self._remembered("accuracy", list(jobs.values()), Accuracy)
        return {preset: found[job.key] for preset, job in jobs.items() if job.key in found}

    def radii(self) -> list[Row]:
        """The rows of all sweeps, in the order of their tasks."""
        wanted: dict[str, None] = {}
        plans = [(config, make_plan(config)) for config in sweeps(self.place, self.scale)]
        total = sum(plan.tasks for _, plan in plans)
        for config, plan in plans:
            if self.fleet is not None:
                before = len(wanted)

                def tell(now: SweepProgress, before: int = before) -> None:
                    self.report(Stage("radii", before + now.before + now.done, total))

                sweep(config, self.place.rows, self.fleet, progress=tell)
            wanted |= dict.fromkeys(key for unit in plan.units for key in unit.keys)
        known = {row.key: row for row in read_rows(self.place.rows)} if self.place.rows.exists() else {}
        return [known[key] for key in wanted if key in known]

    def curves(self, rows: Sequence[Row]) -> list[Curve]:
        """Margins at given sizes and margin curves, of the first tasks the reference certifies at all."""
        scale, jobs = self.scale, list[CurveJob]()
        for subject in scale.subjects:
            own = [r for r in rows if (r.model, r.method) == (subject.preset, scales.REFERENCE)]
            tasks = [row for row in own if row.certified]
            asked = [
                (row, method, share, scale.margin_steps)
                for row in tasks[: subject.margins]
                for method in scales.AT_MARGINS
                for share in scales.MARGIN_SHARES
            ]
            for row in tasks[: subject.curves]:
                asked.append((row, "o-buffet", scales.CURVE_SHARE, scale.curve_steps))
            jobs += [
                CurveJob(
                    model=self.place.model(subject),
                    sentence=row.sentence,
                    label=row.label,
                    word=row.words[0],
                    norm=scale.norm,
                    method=method,
                    share=share,
                    radius=row.certified or 0.0,
                    steps=steps,
                )
                for row, method, share, steps in asked
            ]
        found = self._remembered("margins", jobs, Curve)
        return [found[job.key] for job in jobs if job.key in found]

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
        """Do the jobs, if someone works; `total` counts those that were done before too.

        One that fails ends the evaluation.
        """
        if self.fleet is None or not jobs:
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
        dispatch(self.fleet, [Ticket(number, job) for number, job in enumerate(jobs)], settle)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the CPU and wall seconds of a stage, its workers' included, to what it took before."""
        before = _clocks()
        try:
            yield
        finally:
            if self.fleet is not None:
                times = dict(_times(self.place))
                spent = (now - then for now, then in zip(_clocks(), before, strict=True))
                cpu, wall = (a + b for a, b in zip(times.get(stage, (0.0, 0.0)), spent, strict=True))
                times[stage] = cpu, wall
                write_atomically(self.place.out / "times.json", json.dumps(times, indent=2) + "\n")


def sweeps(place: Workspace, scale: Scale) -> list[SweepConfig]:
    """The sweeps of an evaluation: every model with the methods of the paper, then with the thorough ones."""
    asked = [(s, scales.COMPARED, s.tasks) for s in scale.subjects]
    asked += [(s, scale.thorough, s.thorough) for s in scale.subjects if s.thorough]
    return [
        SweepConfig.model_validate(
            {
                "models": [str(place.model(subject))],
                "methods": methods,
                "norms": [scale.norm],
                "sentences": {
                    "file": place.folder(subject) / "test.tsv",
                    "count": count,
                    "min_words": scale.min_words,
                    "max_words": scale.max_words,
                },
                "words": {"count": 1},
                "seed": scale.seed,
            }
        )
        for subject, methods, count in asked
    ]


def _read(path: Path, kind: Any) -> Any:
    """The content of a JSON file, which has to be of a type."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError:
        raise BuffetError(f"{path}: is not what was written there; remove it and run again") from None


def _summary(place: Workspace, subject: Subject) -> DataSummary:
    folder = place.folder(subject)
    if not folder.is_dir():
        wanted = ", ".join(scales.FOLDERS.values())
        raise BuffetError(
            f"{folder}: no such directory; --data wants folders ({wanted}) with train.tsv, dev.tsv, test.tsv"
        )
    return DataSummary.of(scales.FOLDERS[subject.data], read_splits(folder))


def _write(place: Workspace, results: Results, command: str) -> Path:
    """The figures with their data, the tables, and the page that ties them together."""
    drawn, made = figures(results), tables(results)
    for folder, things in (("figures", drawn), ("tables", made)):
        for thing in things:
            for suffix, content in thing.files.items():
                write_atomically(place.directory(folder) / f"{thing.name}.{suffix}", content)
    path = place.out / "index.md"
    write_atomically(path, index_page(results, drawn, made, command))
    return path


def _clocks() -> tuple[float, float]:
    """CPU seconds of this process and of those it waited for, and seconds on the wall."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage), time.monotonic()


def _times(place: Workspace) -> Mapping[str, tuple[float, float]]:
    path = place.out / "times.json"
    found: dict[str, tuple[float, float]] = {}
    return _read(path, dict[str, tuple[float, float]]) if path.exists() else found
