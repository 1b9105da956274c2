"""The whole evaluation on tiny models and data: what it writes, that it continues, what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_sweep import Inline

from buffet.cli import main
from buffet.errors import BuffetError
from buffet.experiments import read_rows
from buffet.experiments.workers import Failed
from buffet.lab.reproduce import SCALES, Scale, Stage, Subject, Workspace, reproduce
from buffet.lab.reproduce.figures import figures
from buffet.lab.reproduce.records import Records
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.scales import COMPARED, CURVES, PUBLISHED
from buffet.lab.reproduce.stages import in_turn, pages
from buffet.lab.reproduce.tables import Table, ratio, tables
from buffet.training.presets import preset_values
from tiny_checkpoint import SENTENCES

TRAINING = {"width": 8, "inner": 8, "heads": 2, "epochs": 1, "batch": 4, "min_count": 1, "weight_decay": 0.0}
TINY = Scale(
    name="tiny",
    summary="as small as can be",
    subjects=(
        Subject("sst-small-1", tasks=1, thorough=1, curves=1, margins=1, curve_steps=4, training=TRAINING),
        Subject("yelp-small-1", tasks=1, thorough=0, curves=0, training=TRAINING),
    ),
    min_words=1,
    max_words=5,
    margin_steps=2,
    thorough=("backward",),
)


class InterruptionError(Exception):
    """What the impatient user does."""


class Impatient(Inline):
    """A fleet that is interrupted after some jobs."""

    def __init__(self, jobs: int) -> None:
        super().__init__()
        self.left = jobs

    def send(self, worker: str, job: Any) -> None:
        if not self.left:
            raise InterruptionError
        self.left -= 1
        super().send(worker, job)


def write_data(directory: Path) -> Path:
    """Two datasets of short sentences."""
    for name in ("sst2", "yelp"):
        (directory / name).mkdir(parents=True)
        for part, start in (("train", 0), ("dev", 1), ("test", 2)):
            chosen = [f"{s} {part}" if part == "train" else s for s in SENTENCES][start:]
            lines = [f"{sentence}\t{place % 2}" for place, sentence in enumerate(chosen)]
            (directory / name / f"{part}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return directory


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    home = tmp_path_factory.mktemp("reproduce")
    (home / "out").mkdir()
    return Workspace(write_data(home / "data"), home / "out")


@pytest.fixture(scope="module")
def page(place: Workspace) -> Path:
    """The page of an evaluation without interruption."""
    return reproduce(place, TINY, Inline(), command="buffet reproduce")


def copied(place: Workspace, home: Path) -> Workspace:
    """The same evaluation somewhere else."""
    shutil.copytree(place.out, home / "out")
    return Workspace(place.data, home / "out")


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (directory / "figures").iterdir()}


def test_it_writes_every_figure_and_table_and_a_page_that_shows_them(page: Path) -> None:
    names = {path.stem for path in page.parent.glob("figures/*.svg")}
    assert names == {"scatter-sst", "scatter-yelp", "boxes-sst", "boxes-yelp", "margin-curves"}
    text = page.read_text()
    made = tables(Results(Records.read(page.parent)))
    assert {table.name for table in made} >= {"datasets", "gains-sst", "ours-yelp", "times-sst", "margins"}
    assert all(table.markdown() in text for table in made)
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (page.parent / link).is_file(), link
    assert "buffet reproduce\n" in text
    assert "PyTorch" in text
    assert str(page.parent) not in text
    assert not any(sentence in text for sentence in SENTENCES)


def test_rows_and_margins_are_what_the_scale_asks_for(page: Path, place: Workspace) -> None:
    rows = read_rows(place.rows)
    assert len(rows) == 2 * len(COMPARED) + 1
    assert all(row.ok and row.gold == row.label for row in rows)
    margins = [json.loads(path.read_text()) for path in (place.out / "margins").iterdir()]
    curves = [m for m in margins if m["share"] == 1.1]
    assert [len(m["steps"]) for m in curves] == [4, 4]
    assert {(m["method"], m["against"]) for m in curves} == set(CURVES.items())
    assert len(margins) - len(curves) == 6
    for m in margins:
        assert m["margin"] >= m["reference"] - 1e-9 or m["method"] == "lse"
    radii = {(r.model, r.sentence, r.method): r.certified for r in rows}
    for m in margins:
        assert m["eps"] == pytest.approx(m["share"] * radii[m["model"], m["sentence"], m["against"]])


def test_what_was_lost_is_done_again_through_any_interruption(
    page: Path, place: Workspace, tmp_path: Path
) -> None:
    told: list[Stage] = []
    torn = copied(place, tmp_path)
    shutil.rmtree(torn.model(TINY.subjects[1]))
    lines = torn.rows.read_bytes().splitlines(keepends=True)
    torn.rows.write_bytes(b"".join([lines[0], *lines[3:], lines[1][:50]]))
    next((torn.out / "margins").iterdir()).unlink()
    runs = 0
    while True:
        try:
            runs += 1
            again = reproduce(torn, TINY, Impatient(jobs=2), command="buffet reproduce", report=told.append)
            break
        except InterruptionError:
            assert runs < 10
    assert runs == 2  # four jobs: a model, two rows, a margin
    assert contents(page.parent) == contents(again.parent)
    assert [s for s in told if s.name == "radii"][-1] == Stage("radii", 17, 17)


def test_a_finished_run_is_not_repeated_when_more_is_asked_for(
    page: Path, place: Workspace, tmp_path: Path
) -> None:
    first, second = TINY.subjects
    more = dataclasses.replace(TINY, subjects=(first, dataclasses.replace(second, curves=1, curve_steps=2)))
    fleet = Inline()
    reproduce(copied(place, tmp_path), more, fleet, command="buffet reproduce")
    assert fleet.jobs == len(CURVES)


def test_what_is_there_can_be_drawn(page: Path, place: Workspace, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    part = Workspace(place.data, tmp_path / "out", models=place.out / "models")
    lines = place.rows.read_bytes().splitlines(keepends=True)
    part.rows.write_bytes(b"".join(lines[:4]))
    drawn = reproduce(part, TINY, command="buffet reproduce", hours=0.0)
    assert "scatter-sst.svg" in drawn.read_text()
    assert "yelp-small-1 0 (of 1)" in drawn.read_text()


def test_everything_is_drawn_from_one_file_that_names_no_sentence(page: Path, tmp_path: Path) -> None:
    records = Records.read(page.parent)
    text = (page.parent / records.name).read_text()
    assert not any(sentence in text for sentence in SENTENCES)
    assert main(["reproduce", "--draw-from", str(page.parent), "--out", str(tmp_path)]) == 0
    assert contents(tmp_path) == contents(page.parent)
    for name in ("index.md", "claims.md"):
        assert (tmp_path / name).read_text() == (page.parent / name).read_text()


def test_radii_in_the_file_claim_no_more_than_was_proven(page: Path, place: Workspace) -> None:
    records = Records.read(page.parent)
    rows = {(r.model, r.method): r for r in read_rows(place.rows)}
    for task in records.tasks:
        for method, answer in task.answers.items():
            row = rows[task.model, method]
            assert row.certified
            assert answer.certified is not None
            assert row.certified * (1 - 1e-5) <= answer.certified <= row.certified
            assert task.attacked is None or task.attacked >= (row.attacked or 0)


def test_all_models_advance_alike(place: Workspace, page: Path) -> None:
    """So whatever is done when time is up is the beginning of a random order, for every model."""
    first, second = (
        dataclasses.replace(subject, tasks=tasks, first=early)
        for subject, tasks, early in zip(TINY.subjects, (2, 2), (1, 2), strict=True)
    )
    plan = in_turn(place, dataclasses.replace(TINY, subjects=(first, second)))
    turns = [u.setting.model.name for u in plan.units if u.title == PUBLISHED]
    assert turns == ["yelp-small-1", "sst-small-1", "yelp-small-1", "sst-small-1"][-len(turns) :]
    assert [u.title for u in plan.units if u.setting == plan.units[0].setting][: len(COMPARED)] == [*COMPARED]


def test_nothing_is_begun_when_the_time_is_up(place: Workspace, page: Path, tmp_path: Path) -> None:
    """What is left out is told, and the same command does it later."""
    torn, fleet = copied(place, tmp_path), Inline()
    torn.rows.unlink()
    shutil.rmtree(torn.model(TINY.subjects[1]))
    told = reproduce(torn, TINY, fleet, command="", trained_only=True, hours=0.0).read_text()
    assert fleet.jobs == 0
    assert "not trained yet: yelp-small-1" in told
    reproduce(torn, TINY, fleet, command="", trained_only=True, hours=1.0)
    assert {row.model for row in read_rows(torn.rows)} == {"sst-small-1"}


def test_without_time_a_page_says_that_nothing_is_there(place: Workspace, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    fleet = Inline()
    told = reproduce(Workspace(place.data, tmp_path / "out"), TINY, fleet, command="", hours=0.0).read_text()
    assert fleet.jobs == 0
    assert "0 radii of 0 tasks" in told


RESULTS = [path.parent for path in (Path(__file__).parents[2] / "docs" / "results").rglob("rows-*.ndjson")]


def test_there_are_committed_results() -> None:
    assert RESULTS


@pytest.mark.parametrize("directory", RESULTS, ids=lambda path: path.name)
def test_committed_pages_are_those_of_the_committed_rows(directory: Path) -> None:
    """`buffet reproduce --draw-from DIR --out DIR` makes them so."""
    results = Results(Records.read(directory))
    for name, content in pages(results).items():
        assert (directory / name).read_text() == content, f"{directory / name}: draw it anew"
    there = {path.name for path in (directory / "figures").iterdir()}
    assert there == {f"{figure.name}.svg" for figure in figures(results)}


def test_a_table_as_markdown() -> None:
    table = Table("t", "50 % of ε", ("model", "Δ a_b", "a|b"), (("m&m", ratio(1.239), ratio(None)),))
    assert table.markdown() == "| model | Δ a_b | a\\|b |\n| --- | ---: | ---: |\n| m&m | 1.23 | – |\n"


def test_the_scales_are_of_presets_and_the_paper_has_ten_models() -> None:
    for scale in SCALES.values():
        assert all(preset_values(subject.preset) for subject in scale.subjects)
    assert [s.tasks for s in SCALES["paper"].subjects] == [140] * 10
    assert all(scale.norm == 1 for scale in SCALES.values())


def test_what_users_can_do_wrong(
    place: Workspace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: str) -> str:
        data = ["--data", str(place.data)] if "--data" not in arguments else []
        assert main(["reproduce", *data, "--out", str(tmp_path / "out"), *arguments]) == 2
        message = capsys.readouterr().err
        assert message.count("\n") == 1
        return message

    assert "choose one of: small, paper" in refused("--scale", "large")
    assert "no such directory" in refused("--data", str(tmp_path / "nowhere"))
    assert "--workers" in refused("--workers", "0")
    assert "--models" in refused("--models", str(tmp_path / "nowhere"))
    assert "--hours" in refused("--hours", "-1")
    assert (
        "no such file" in refused("--draw-from", str(tmp_path / "nowhere"), "--data", str(place.data)).lower()
    )
    (tmp_path / "file").write_text("")
    assert "--out" in refused("--out", str(tmp_path / "file"))


class Failing(Inline):
    """A fleet that can do nothing."""

    def send(self, worker: str, job: Any) -> None:
        self.news.append((worker, Failed("no memory")))


def test_a_failure_ends_the_evaluation_with_its_reason(place: Workspace, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(BuffetError, match="training: no memory"):
        reproduce(Workspace(place.data, tmp_path / "out"), TINY, Failing(), command="")
