"""The driver of a sweep: plans, hands out what is not done yet, and is the only one to write rows."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from buffet.experiments.config import Running, SweepConfig
from buffet.experiments.plan import Setting, SweepPlan, WorkUnit, make_plan, parts
from buffet.experiments.rows import Row, open_rows
from buffet.experiments.store import RowFile
from buffet.experiments.work import AttackAnswer, AttackJob, TaskAnswer, UnitAnswer, UnitJob, Workplace
from buffet.experiments.workers import Done, Failed, Fleet, LocalFleet, Ticket, dispatch
from buffet.printing import finite
from buffet.report import Versions

DESCRIBED = ("sentence", "sentence_tokens", "gold", "label", "label_name", "clean_margin", "seed")
"""What a row says about its setting, in the same words."""
ANSWERED = tuple(field.name for field in fields(TaskAnswer))


@dataclass(frozen=True)
class SweepProgress:
    """Where a sweep is; counts are rows."""

    total: int
    before: int  # were there already
    done: int  # written by this run
    failed: int  # of those
    seconds: float

    @property
    def rate(self) -> float:
        """Rows per second of this run."""
        return self.done / self.seconds if self.seconds > 0 else 0.0

    @property
    def left(self) -> float:
        """Estimated seconds to the end; infinite while nothing is known."""
        return (self.total - self.before - self.done) / self.rate if self.rate > 0 else math.inf


@dataclass(frozen=True)
class Outcome:
    """What a sweep did."""

    rows: Path
    tasks: int  # of the configuration
    already: int  # were in the file
    written: int
    failed: int  # rows of this configuration without an answer, whenever they were written
    reasons: tuple[tuple[str, int], ...]  # of those, the most frequent first
    seconds: float
    notes: tuple[str, ...]


def sweep(
    config: SweepConfig,
    out: Path,
    fleet: Fleet[Any] | None = None,
    *,
    retry_failed: bool = False,
    progress: Callable[[SweepProgress], None] | None = None,
) -> Outcome:
    """Answer every task of the configuration that has no row in `out` yet.

    The same call continues after any interruption. Rows of other configurations in the file stay and are
    used where they mean the same task.

    Args:
        fleet: who works; by default processes of this machine, as many as the configuration says.
        retry_failed: tasks whose row says failed or timeout are tried again.
    """
    fleet = fleet or LocalFleet(config.run.workers, config.run.threads)
    return carry_out(make_plan(config), out, fleet, config.run, retry_failed=retry_failed, progress=progress)


def carry_out(
    plan: SweepPlan,
    out: Path,
    fleet: Fleet[Any],
    running: Running,
    *,
    retry_failed: bool = False,
    progress: Callable[[SweepProgress], None] | None = None,
    until: float = math.inf,
) -> Outcome:
    """The same for a plan, in its order. Nothing is begun after `until`, on the clock of `time.monotonic`."""
    start = time.monotonic()
    with open_rows(out) as file:
        driver = _Driver(running, plan, file, retry_failed, progress or (lambda now: None), start)
        driver.report()
        dispatch(
            fleet, driver.queue, driver.settle, limit=running.limit, retries=running.retries, until=until
        )
    return driver.outcome()


class _Driver:
    """The state of one run: which units are open, and what is known about their settings."""

    def __init__(
        self,
        running: Running,
        plan: SweepPlan,
        file: RowFile[Row],
        retry_failed: bool,
        progress: Callable[[SweepProgress], None],
        start: float,
    ) -> None:
        self.running, self.plan, self.file, self.progress, self.start = running, plan, file, progress, start
        self.versions = Versions.current()
        self.place = Workplace(running.memory, running.device)
        self.rows = {row.key: row for row in file.rows}
        self.before = {key for unit in plan.units for key in unit.keys if key in self.rows}
        if retry_failed:
            self.before = {key for key in self.before if self.rows[key].ok}
        self.written = self.failed = 0
        self.queue: list[Ticket] = []
        self.waiting: dict[int, list[tuple[int, WorkUnit]]] = {}  # ticket of an attack → what waits for it
        self._fill()

    def _fill(self) -> None:
        """Queue the open units of every setting, or first the attack on it if that is still to be made."""
        number = 0
        for setting, group in groupby(self.plan.units, key=lambda unit: unit.setting):
            units = list(group)
            numbered = [(number + 1 + place, unit) for place, unit in enumerate(units)]
            pending = [(n, unit) for n, unit in numbered if not self.before.issuperset(unit.keys)]
            if pending:
                question = units[0].question
                attack = self._remembered(units) if question.attack else AttackAnswer()
                if attack is None:
                    self.waiting[number] = pending
                    heapq.heappush(self.queue, Ticket(number, AttackJob(setting, self.place)))
                else:
                    self._open(pending, attack)
            number += len(units) + 1

    def _open(self, pending: list[tuple[int, WorkUnit]], attack: AttackAnswer) -> None:
        for number, unit in pending:
            heapq.heappush(self.queue, Ticket(number, UnitJob(unit, attack, self.place)))

    def _remembered(self, units: list[WorkUnit]) -> AttackAnswer | None:
        """What an attack on a setting found, from the rows of a unit that has it for every set of words."""
        words = units[0].setting.words
        for unit in units:
            found = [self.rows.get(key) for key in unit.keys]
            rows = [row for row in found if row is not None and row.ok]
            if len(rows) == len(words) and rows[0].attack_seconds is not None:
                attacked = tuple(math.inf if r.attacked is None else r.attacked for r in rows)
                return AttackAnswer(attacked, rows[0].attack_seconds)
        return None

    def settle(self, ticket: Ticket, result: Done | Failed) -> None:
        """Write what a unit found; an attack lets the units begin that wait for it."""
        if isinstance(ticket.job, AttackJob):
            pending = self.waiting.pop(ticket.number)
            if isinstance(result, Done):
                assert isinstance(result.answer, AttackAnswer)
                self._open(pending, result.answer)
                return
            trouble = f"before any method: {result.reason}"
            self._open(pending, AttackAnswer(trouble=trouble))  # proofs do without an attack
            return
        assert isinstance(ticket.job, UnitJob)
        self._write(ticket.job.unit, ticket.job.attack, result)

    def _write(self, unit: WorkUnit, attack: AttackAnswer, result: Done | Failed) -> None:
        rows = [row for row in self._rows_of(unit, attack, result) if row.key not in self.before]
        self.file.append(rows)
        self.rows |= {row.key: row for row in rows}
        self.written += len(rows)
        self.failed += sum(not row.ok for row in rows)
        self.report()

    def _rows_of(self, unit: WorkUnit, attack: AttackAnswer, result: Done | Failed) -> list[Row]:
        answer = result.answer if isinstance(result, Done) else None
        assert answer is None or isinstance(answer, UnitAnswer)
        setting, tasks = unit.setting, unit.tasks
        seconds = answer.seconds if answer else None
        common = {
            **{name: getattr(setting, name) for name in DESCRIBED},
            "model": setting.model.name,
            "model_digest": setting.model.digest,
            "norm": setting.norm_name,
            "status": result.status if isinstance(result, Failed) else "ok",
            "reason": result.reason if isinstance(result, Failed) else attack.trouble,
            "method": unit.title,
            "parts": parts(unit.method),
            "seconds": seconds,
            "task_seconds": None if seconds is None else seconds / len(tasks),
            "attack_seconds": attack.attack_seconds,
            "batch": len(tasks),
            "threads": self.running.threads,
            "config": self.plan.digest,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "versions": self.versions,
        }
        answers = answer.tasks if answer else (None,) * len(tasks)
        broken = attack.attacked or (None,) * len(tasks)
        return [
            Row.model_validate({"key": key, **common, **_found(setting, words, found, attacked)})
            for key, words, found, attacked in zip(unit.keys, tasks, answers, broken, strict=True)
        ]

    def report(self) -> None:
        seconds = time.monotonic() - self.start
        self.progress(SweepProgress(self.plan.tasks, len(self.before), self.written, self.failed, seconds))

    def outcome(self) -> Outcome:
        keys = (key for unit in self.plan.units for key in unit.keys)
        rows = [self.rows[key] for key in keys if key in self.rows]
        reasons = Counter(row.reason for row in rows if row.reason is not None)
        return Outcome(
            rows=self.file.path,
            tasks=self.plan.tasks,
            already=len(self.before),
            written=self.written,
            failed=sum(not row.ok for row in rows),
            reasons=tuple(reasons.most_common()),
            seconds=time.monotonic() - self.start,
            notes=self.plan.notes,
        )


def _found(
    setting: Setting, words: tuple[int, ...], answer: TaskAnswer | None, attacked: float | None
) -> dict[str, object]:
    """What a row says about its task."""
    found = asdict(answer) if answer else dict.fromkeys(ANSWERED)
    return {
        **found,
        "margin": finite(found["margin"]),
        "words": words,
        "tokens": tuple(setting.sentence_tokens[i] for i in words),
        "attacked": finite(attacked),
    }
