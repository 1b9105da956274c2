"""Goes through a data set: workers ask about every sentence without a row, and every answer becomes a row."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from buffet.data import Example
from buffet.errors import BuffetError, show
from buffet.evaluation.examples import Examples
from buffet.evaluation.questions import Effort, Question
from buffet.evaluation.result import Evaluation
from buffet.evaluation.rows import SentenceRow
from buffet.evaluation.work import NOTHING, SentenceAnswer, SentenceJob, Where, digest_of
from buffet.experiments.plan import digest, parts
from buffet.experiments.store import RowFile, open_store
from buffet.experiments.sweep import SweepProgress
from buffet.experiments.workers import Done, Failed, Fleet, Ticket, dispatch
from buffet.loading import Model
from buffet.report import Versions

Report = Callable[[SweepProgress], None]


@dataclass(frozen=True, eq=False)
class Setup:
    """Which question is asked about which model, and with how much effort."""

    model: Model
    where: Where  # where jobs find it
    question: Question
    effort: Effort
    method: str  # what it is called

    @cached_property
    def digest(self) -> str:
        return digest_of(self.model)

    def job(self, example: Example) -> SentenceJob:
        question = self.question.concerning(self.model, example.sentence)
        return SentenceJob(self.where, example, question, self.effort)

    def key(self, job: SentenceJob) -> str:
        """A name for an example and everything that is asked about it: the same name, the same answer."""
        return digest(
            {
                "model": self.digest,
                "sentence": job.example.sentence,
                "gold": job.example.label,
                "kind": job.question.kind,
                **job.question.facts(),
                "parts": parts(job.effort.method),
                "budget": job.effort.budget,
                "seed": job.effort.seed,
            }
        )


def run(
    setup: Setup,
    data: Examples,
    fleet: Fleet[Any],
    *,
    out: Path | None = None,
    retry_failed: bool = False,
    progress: Report | None = None,
) -> Evaluation:
    """Answer all examples that have no row in `out` yet; the same call continues after any interruption.

    Args:
        fleet: who works.
        retry_failed: examples whose row says failed are tried again.
    """
    _check_labels(setup.model, data)
    begin = time.monotonic()
    jobs = [setup.job(example) for example in data.examples]
    keys = [setup.key(job) for job in jobs]
    with _store(out) as file:
        driver = _Driver(setup, file, dict(zip(keys, jobs, strict=True)), retry_failed, progress)
        dispatch(fleet, driver.queue, driver.settle)
    rows = tuple(driver.rows[key] for key in keys)
    return Evaluation(
        setup.question, setup.model.labels, data.source, data.total, rows, time.monotonic() - begin
    )


def _check_labels(model: Model, data: Examples) -> None:
    classes = len(model.labels)
    for example in data.examples:
        if example.label >= classes:
            raise BuffetError(
                f"{data.source}: {show(example.sentence)} has the label {example.label}, and {model.name} has"
                f" {classes} classes (0 to {classes - 1}): give the data that the model is for"
            )


def _store(out: Path | None) -> AbstractContextManager[RowFile[SentenceRow] | None]:
    return nullcontext() if out is None else open_store(out, SentenceRow)


class _Driver:
    """The state of one run: what has its row, and what is open."""

    def __init__(
        self,
        setup: Setup,
        file: RowFile[SentenceRow] | None,
        jobs: dict[str, SentenceJob],
        retry_failed: bool,
        progress: Report | None,
    ) -> None:
        self.setup, self.file, self.jobs, self.progress = setup, file, jobs, progress
        self.rows = {row.key: row for row in (file.rows if file else ())}
        open_ones = [key for key in jobs if key not in self.rows or (retry_failed and not self.rows[key].ok)]
        self.keys = dict(enumerate(open_ones))
        self.queue = [Ticket(number, jobs[key]) for number, key in self.keys.items()]
        heapq.heapify(self.queue)
        self.begin, self.done, self.failed, self.versions = time.monotonic(), 0, 0, Versions.current()
        self.report()

    def settle(self, ticket: Ticket, result: Done | Failed) -> None:
        row = self._row(self.keys[ticket.number], result)
        if self.file:
            self.file.append([row])
        self.rows[row.key] = row
        self.done, self.failed = self.done + 1, self.failed + (not row.ok)
        self.report()

    def _row(self, key: str, result: Done | Failed) -> SentenceRow:
        job, setup = self.jobs[key], self.setup
        answer = result.answer if isinstance(result, Done) else SentenceAnswer(NOTHING)
        assert isinstance(answer, SentenceAnswer)
        trouble = result.reason if isinstance(result, Failed) else None
        return SentenceRow(
            key=key,
            status="failed" if trouble else "ok",
            reason=trouble,
            model=setup.model.name,
            model_digest=setup.digest,
            sentence=job.example.sentence,
            gold=job.example.label,
            refused=answer.refused,
            answer=answer.answer,
            clean_margin=answer.clean_margin,
            kind=setup.question.kind,
            asked=setup.question.describe(),
            levels=answer.found.levels,
            counterexample=answer.found.counterexample,
            sentences=answer.found.sentences,
            left_out=answer.found.left_out,
            method=setup.method,
            parts=parts(setup.effort.method),
            budget=setup.effort.budget,
            seed=setup.effort.seed,
            seconds=answer.seconds,
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            versions=self.versions,
        )

    def report(self) -> None:
        if self.progress:
            total, seconds = len(self.jobs), time.monotonic() - self.begin
            before = total - len(self.keys)
            self.progress(SweepProgress(total, before, self.done, self.failed, seconds))
