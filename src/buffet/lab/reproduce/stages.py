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
from buffet.lab.reproduce import scales
from buffet.lab.reproduce.figures import check_drawing, figures
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
    workers = None if draw_only else fleet or LocalFleet(None, 1)
    check_drawing()
    data = {name: _summary(place, scale.about(name)[0]) for name in scale.data}
    place.directory("models")
    with _timed(place, "training", working=not draw_only):
        _train(place, scale, workers, report)
    with _timed(place, "accuracy", working=not draw_only):
        accuracies = _accuracies(place, scale, data, workers, report)
    with _timed(place, "radii", working=not draw_only):
        rows = _radii(place, scale, workers, report)
    with _timed(place, "margins", working=not draw_only):
        curves = _curves(place, scale, rows, workers, report)
    results = Results(scale, data, accuracies, tuple(rows), tuple(curves), _times(place))
    return _write(place, results, command)


def _train(place: Workspace, scale: Scale, fleet: Fleet[Any] | None, report: Callable[[Stage], None]) -> None:
    """Train the models that are neither given nor there."""
    missing = [subject for subject in scale.subjects if not place.model(subject).is_dir()]
    if missing and fleet is None:
        raise BuffetError(f"{place.model(missing[0])}: no model yet, so there is nothing to draw")
    jobs = [
        TrainJob(
            TrainSettings.of(
                preset=subject.preset,
                data=place.folder(subject),
                out=place.model(subject),
                seed=scale.seed,
                save_minutes=1.0,
                **scale.training,
            )
        )
        for subject in missing
    ]
    jobs.sort(key=lambda job: -job.settings.layers)  # the longest first, so that no core is idle at the end
    if jobs and fleet:
        _run(fleet, "training", jobs, len(scale.subjects), report)


def _accuracies(
    place: Workspace,
    scale: Scale,
    data: Mapping[str, DataSummary],
    fleet: Fleet[Any] | None,
    report: Callable[[Stage], None],
) -> dict[str, Accuracy]:
    jobs = {
        s.preset: AccuracyJob(place.model(s), place.folder(s), data[s.data].sha256) for s in scale.subjects
    }
    found = _remembered(place, "accuracy", list(jobs.values()), Accuracy, fleet, report)
    return {preset: found[job.key] for preset, job in jobs.items() if job.key in found}


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


def _radii(
    place: Workspace, scale: Scale, fleet: Fleet[Any] | None, report: Callable[[Stage], None]
) -> list[Row]:
    """The rows of all sweeps, in the order of their tasks."""
    wanted: dict[str, None] = {}
    configs = sweeps(place, scale)
    plans = [make_plan(config) for config in configs]
    total = sum(plan.tasks for plan in plans)
    for config, plan in zip(configs, plans, strict=True):
        if fleet is not None:
            before = len(wanted)

            def tell(now: SweepProgress, before: int = before) -> None:
                report(Stage("radii", before + now.before + now.done, total))

            sweep(config, place.rows, fleet, progress=tell)
        wanted |= dict.fromkeys(key for unit in plan.units for key in unit.keys)
    known = {row.key: row for row in read_rows(place.rows)} if place.rows.exists() else {}
    return [known[key] for key in wanted if key in known]


def _curves(
    place: Workspace,
    scale: Scale,
    rows: Sequence[Row],
    fleet: Fleet[Any] | None,
    report: Callable[[Stage], None],
) -> list[Curve]:
    """Margins at given sizes and margin curves, of the first tasks the reference certifies at all."""
    jobs: list[CurveJob] = []
    for subject in scale.subjects:
        tasks = [
            r for r in rows if r.model == subject.preset and r.method == scales.REFERENCE and r.certified
        ]
        asked = [
            (row, method, share, scale.margin_steps)
            for row in tasks[: subject.margins]
            for method in scales.AT_MARGINS
            for share in scales.MARGIN_SHARES
        ]
        asked += [(row, "o-buffet", scales.CURVE_SHARE, scale.curve_steps) for row in tasks[: subject.curves]]
        jobs += [
            CurveJob(
                model=place.model(subject),
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
    found = _remembered(place, "margins", jobs, Curve, fleet, report)
    return [found[job.key] for job in jobs if job.key in found]


def _remembered(
    place: Workspace,
    name: str,
    jobs: Sequence[Keyed],
    kind: type[A],
    fleet: Fleet[Any] | None,
    report: Callable[[Stage], None],
) -> dict[str, A]:
    """The answers of the jobs by their keys: those in the directory `name`, and after work all."""
    directory = place.directory(name)
    files = {job.key: directory / f"{job.key}.json" for job in jobs}
    open_jobs = {job.key: job for job in jobs if not files[job.key].exists()}
    if open_jobs and fleet is not None:

        def save(job: Job, answer: object) -> None:
            assert isinstance(answer, kind)
            write_atomically(files[job.key], answer.model_dump_json() + "\n")  # type: ignore[attr-defined]

        _run(fleet, name, list(open_jobs.values()), len(jobs), report, save)
    return {key: _read(path, kind) for key, path in files.items() if path.exists()}


def _read(path: Path, kind: Any) -> Any:
    """The content of a JSON file, which has to be of a type."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError:
        raise BuffetError(f"{path}: is not what was written there; remove it and run again") from None


def _run(
    fleet: Fleet[Any],
    name: str,
    jobs: Sequence[Job],
    total: int,
    report: Callable[[Stage], None],
    save: Callable[[Job, object], None] = lambda job, answer: None,
) -> None:
    """Do the jobs; `total` counts those that were done before too. One that fails ends the evaluation."""
    left = len(jobs)

    def settle(ticket: Ticket, result: Done | Failed) -> None:
        nonlocal left
        if isinstance(result, Failed):
            raise BuffetError(f"{name}: {result.reason}")
        save(ticket.job, result.answer)
        left -= 1
        report(Stage(name, total - left, total))

    report(Stage(name, total - left, total))
    dispatch(fleet, [Ticket(number, job) for number, job in enumerate(jobs)], settle)


# --- what people see --------------------------------------------------------------------------------------


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
    for figure in drawn:
        for suffix, content in figure.files().items():
            write_atomically(place.directory("figures") / f"{figure.name}.{suffix}", content)
    for table in made:
        for suffix, text in table.files().items():
            write_atomically(place.directory("tables") / f"{table.name}.{suffix}", text)
    path = place.out / "index.md"
    write_atomically(path, index_page(results, drawn, made, command))
    return path


# --- what it cost -----------------------------------------------------------------------------------------


@contextmanager
def _timed(place: Workspace, stage: str, *, working: bool) -> Iterator[None]:
    """Add the CPU seconds of a stage that works, those of its workers included, to what it took before."""
    if not working:
        yield
        return
    before = _cpu()
    start = time.monotonic()
    try:
        yield
    finally:
        times = dict(_times(place))
        cpu, wall = times.get(stage, (0.0, 0.0))
        times[stage] = (cpu + _cpu() - before, wall + time.monotonic() - start)
        write_atomically(place.out / "times.json", json.dumps(times, indent=2) + "\n")


def _cpu() -> float:
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in usage)


def _times(place: Workspace) -> Mapping[str, tuple[float, float]]:
    path = place.out / "times.json"
    if not path.exists():
        return {}
    times: dict[str, tuple[float, float]] = _read(path, dict[str, tuple[float, float]])
    return times
