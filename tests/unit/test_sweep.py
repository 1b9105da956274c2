"""Sweeps end to end on a tiny model: rows, resuming, failures, the command line, the comparison."""

from __future__ import annotations

import json
import math
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from test_sweep_rows import row

from buffet import LpBall, load, radius
from buffet.attack import AttackSettings, attacked_radius
from buffet.errors import BuffetError
from buffet.experiments import Row, SweepConfig, SweepProgress, read_rows, summarise, sweep
from buffet.experiments.summary import cells
from buffet.experiments.workers import Failed, LocalFleet, LocalWorker, News, Ready, ThisProcess
from command_line import Run
from tiny_checkpoint import write_model, write_sentences


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sweep")
    write_model(directory / "tiny")
    write_sentences(directory / "data.tsv")
    return directory


def configured(home: Path, **changes: Any) -> SweepConfig:
    values = {
        "models": [str(home / "tiny")],
        "methods": ["interval", "baseline"],
        "sentences": {"texts": ["good film", "no heart"]},
        "attack": False,
        "run": {"workers": 1},
    }
    return SweepConfig.model_validate(values | changes)


class Inline(ThisProcess):
    """Counts its jobs."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs = 0

    def send(self, worker: str, job: Any) -> None:
        self.jobs += 1
        super().send(worker, job)


QUICK = {"radius": {"tolerance": 0.5}}
"""A search that is soon done."""


def test_rows_hold_what_the_library_answers(home: Path, tmp_path: Path) -> None:
    texts = {"texts": ["no great heart"]}
    asked = {"norms": [math.inf], "attack": True, "radius": {"tolerance": 0.2}}
    config = configured(home, sentences=texts, words={"count": 2}, **asked)
    out = tmp_path / "rows.ndjson"
    outcome = sweep(config, out, Inline())
    assert (outcome.tasks, outcome.written, outcome.already, outcome.failed) == (4, 4, 0, 0)
    rows = read_rows(out)
    assert len({r.key for r in rows}) == len(rows) == 4
    model = load(home / "tiny")
    chosen = [r for r in rows if r.method == "baseline"]
    region = LpBall(model.embed(chosen[0].sentence), [list(r.words) for r in chosen], math.inf)
    broken = attacked_radius(model.program64, region, chosen[0].label, AttackSettings()).tolist()
    expected = radius(model, region, "baseline", attacked=broken, tolerance=0.2)
    assert [r.certified for r in chosen] == [task.certified for task in expected.tasks]
    assert [r.attacked for r in chosen] == broken
    assert [r.margin for r in chosen] == [task.margin for task in expected.tasks]
    for r in rows:
        assert r.clean_margin > 0
        assert r.tokens == tuple(r.sentence_tokens[i] for i in r.words)
        assert r.task_seconds == pytest.approx((r.seconds or 0) / 2)
        assert (r.status, r.batch, r.gold, r.norm) == ("ok", 2, None, "inf")


def test_the_attack_is_made_once_for_all_methods_and_remembered(home: Path, tmp_path: Path) -> None:
    out, first, second, third = tmp_path / "rows.ndjson", Inline(), Inline(), Inline()
    both = configured(home, attack=True, **QUICK)
    sweep(configured(home, methods=["interval"], attack=True, **QUICK), out, first)
    assert first.jobs == 4  # an attack and a method per sentence
    outcome = sweep(both, out, second)
    assert second.jobs == 2  # only the new method
    assert (outcome.already, outcome.written) == (4, 4)
    fresh = tmp_path / "fresh.ndjson"
    sweep(both, fresh, Inline())
    assert numbers(out) == numbers(fresh)
    assert all(r.attacked for r in read_rows(fresh))
    assert sweep(both, out, third).written == third.jobs == 0


class Vandal(Inline):
    """Spoils one of its jobs."""

    def __init__(self, spoilt: int) -> None:
        super().__init__()
        self.spoilt = spoilt

    def send(self, worker: str, job: Any) -> None:
        super().send(worker, job)
        if self.jobs == self.spoilt:
            self.news[-1] = worker, Failed("RuntimeError: no")


def test_a_failure_is_a_row_with_its_reason_and_can_be_tried_again(home: Path, tmp_path: Path) -> None:
    config, out = configured(home, **QUICK), tmp_path / "rows.ndjson"
    outcome = sweep(config, out, Vandal(2))
    assert (outcome.written, outcome.failed, outcome.reasons) == (8, 2, (("RuntimeError: no", 2),))
    failed = [r for r in read_rows(out) if not r.ok]
    assert {r.status for r in failed} == {"failed"}
    assert all(r.certified is None and r.method == "baseline" for r in failed)
    assert sweep(config, out, Inline()).written == 0
    again = sweep(config, out, Inline(), retry_failed=True)
    assert (again.already, again.written, again.failed) == (6, 2, 0)
    assert len(read_rows(out)) == 8
    assert len(out.read_text().splitlines()) == 10


def test_proofs_go_on_without_an_attack(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.ndjson"
    outcome = sweep(configured(home, attack=True, **QUICK), out, Vandal(1))
    assert outcome.failed == 0
    assert outcome.reasons == (("before any method: RuntimeError: no", 4),)
    assert [r.attacked for r in read_rows(out) if r.reason] == [None] * 4


def test_a_model_that_changed_under_way_is_noticed(home: Path, tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "rows.ndjson"
    write_model(model)

    class Swapper(Inline):
        def send(self, worker: str, job: Any) -> None:
            (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + "\n")
            super().send(worker, job)

    outcome = sweep(configured(home, models=[str(model)], **QUICK), out, Swapper())
    assert outcome.failed == outcome.tasks
    assert "not the model the sweep began with" in outcome.reasons[0][0]


# ------------------------------------------------------------------------------------------ processes


class Watched(LocalFleet):
    """Remembers the processes that reported."""

    def __init__(self, workers: int) -> None:
        super().__init__(workers, 1)
        self.processes: list[int] = []

    def hear(self, workers: Any, timeout: float) -> list[tuple[LocalWorker, News]]:
        found = super().hear(workers, timeout)
        self.processes += [news.process for _, news in found if isinstance(news, Ready)]
        return found


def test_work_goes_on_when_the_workers_are_killed(home: Path, tmp_path: Path) -> None:
    config, out = configured(home, norms=[1.0, 2.0], **QUICK), tmp_path / "rows.ndjson"
    fleet, seen = Watched(2), list[SweepProgress]()

    def kill(now: SweepProgress) -> None:
        seen.append(now)
        if now.done == 4:
            for process in fleet.processes:
                os.kill(process, signal.SIGKILL)

    assert sweep(config, out, fleet, progress=kill).failed == 0
    assert len(fleet.processes) >= 2  # none of those that were there at the kill
    assert [now.done for now in seen] == list(range(0, 17, 2))
    alone = tmp_path / "alone.ndjson"
    sweep(config, alone, Inline())
    assert numbers(out) == numbers(alone)
    for process in fleet.processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


class Cursed(LocalFleet):
    """Kills every worker that gets a job."""

    def send(self, worker: LocalWorker, job: Any) -> None:
        worker.process.kill()
        super().send(worker, job)


def test_a_job_that_kills_its_workers_is_given_up(home: Path, tmp_path: Path) -> None:
    config = configured(home, methods=["baseline"], sentences={"texts": ["good film"]}, run={"retries": 1})
    outcome = sweep(config, tmp_path / "rows.ndjson", Cursed(1, 1))
    ((reason, count),) = outcome.reasons
    assert count == outcome.failed == outcome.tasks == 2
    assert "its worker died 2 times: killed by SIGKILL" in reason


def test_a_time_limit_kills_and_is_a_row(home: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.ndjson"
    run = {"workers": 1, "limit": 1e-4}
    config = configured(home, run=run, methods=["baseline"], sentences={"texts": ["good film"]})
    outcome = sweep(config, out)
    assert outcome.failed == outcome.tasks == 2
    for r in read_rows(out):
        assert (r.status, r.reason) == ("timeout", "not done within the time limit of 0.0001 s")


def numbers(path: Path) -> dict[str, tuple[float | None, ...]]:
    """What must not depend on how the work was done."""
    return {r.key: (r.certified, r.attacked, r.margin, r.clean_margin) for r in read_rows(path)}


# ------------------------------------------------------------------------------------------- commands


CONFIG = """
models = ["tiny"]
methods = ["interval", "baseline"]
[sentences]
file = "data.tsv"
count = 1
[words]
count = 2
[run]
workers = 1
"""


def test_sweep_and_summary_commands(run: Run, home: Path) -> None:
    path = home / "small.toml"
    path.write_text(CONFIG)
    code, out, _ = run("sweep", path, "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["tasks"] == 4
    code, out, err = run("sweep", path, "--json")
    assert (code, err) == (0, "")
    outcome = json.loads(out)
    assert outcome["rows"] == str(home / "small.ndjson")
    assert (outcome["tasks"], outcome["written"], outcome["failed"]) == (4, 4, 0)
    code, out, _ = run("sweep", path)
    assert code == 0
    assert "4 tasks, 0 rows written now, 0 failed" in out
    code, out, _ = run("summary", home / "small.ndjson", "--json")
    assert code == 0
    assert [line["method"] for line in json.loads(out)] == ["interval", "baseline"]
    code, out, _ = run("summary", home / "small.ndjson")
    assert re.search(r"tiny +L2 +baseline +2 +0 +1\.000", out)


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        (("--workers", "0"), "--workers: got 0"),
        (("--threads", "9999"), "--threads: got 9999"),
        (("--limit", "-1"), "--limit: got -1"),
        (("--backend", "slurm"), "--backend: unknown backend 'slurm'"),
        (("--address", "auto"), "--backend ray"),
        (("--gpus", "-1"), "--gpus: got -1"),
        (("--out", "nowhere/rows.ndjson"), "no directory nowhere"),
    ],
)
def test_mistakes_in_options(run: Run, home: Path, options: tuple[str, ...], needle: str) -> None:
    path = home / "small.toml"
    path.write_text(CONFIG)
    code, out, err = run("sweep", path, *options)
    assert (code, out) == (2, "")
    assert re.fullmatch(r"error: .*\n", err)
    assert needle in err


def test_failures_are_told_by_the_exit_code(run: Run, home: Path, tmp_path: Path) -> None:
    path = home / "hasty.toml"
    path.write_text("attack = false\n" + CONFIG.replace('"interval", ', ""))
    code, out, err = run("sweep", path, "--limit", "0.0001", "--out", tmp_path / "rows.ndjson")
    assert code == 1
    assert "2 failed" in out
    assert "2 rows: not done within the time limit" in err


# -------------------------------------------------------------------------------------------- summary


def rows_of(method: str, certified: list[float | None], seconds: float, **changes: Any) -> list[Row]:
    return [
        row(
            f"{method}{place}{changes.get('norm', '')}",
            method=method,
            words=(place + 1,),
            certified=value,
            attacked=1.0,
            task_seconds=seconds,
            status="failed" if value is None else "ok",
            **changes,
        )
        for place, value in enumerate(certified)
    ]


def test_methods_are_compared_task_by_task() -> None:
    rows = rows_of("baseline", [0.5, 0.4, 0.0, 0.2, None], 1.0)
    rows += rows_of("better", [0.9, 0.6, 0.3, None, 0.7], 2.0)
    rows += rows_of("baseline", [0.5], 1.0, norm="inf")
    ours = {(line.norm, line.method): line for line in summarise(rows)}
    line = ours["2", "better"]
    assert (line.tasks, line.failed, line.compared, line.bracketed) == (4, 1, 2, 4)
    assert line.mean_ratio == pytest.approx((0.9 / 0.5 + 0.6 / 0.4) / 2)
    assert line.median_ratio == pytest.approx(1.65)
    assert line.worst_ratio == pytest.approx(1.5)
    assert line.mean_bracket == pytest.approx((0.9 + 0.6 + 0.3 + 0.7) / 4)
    assert (line.good_share, line.fair_share) == (0.25, 0.75)
    assert line.seconds_ratio == 2.0
    assert ours["2", "baseline"].mean_ratio == 1.0
    assert ours["inf", "baseline"].tasks == 1
    table = [cells(line) for line in summarise(rows)]
    assert len(table) == 3
    assert table[-1][:6] == ("m", "L∞", "baseline", "1", "0", "1.000")


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(BuffetError, match="'lse'; there are: baseline"):
        summarise([row("a")], "lse")
    with pytest.raises(BuffetError, match="no rows to summarise"):
        summarise([])
    (line,) = summarise([row("a", certified=0.0)])
    assert (line.mean_ratio, line.mean_bracket, line.seconds_ratio) == (None, None, 1.0)
    assert "–" in cells(line)
