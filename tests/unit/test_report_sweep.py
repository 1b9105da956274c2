"""The page of a sweep, without a browser: its headline, its data, and the command that writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from buffet.cli import main
from buffet.errors import BuffetError
from buffet.experiments.summary import ratios, task_id
from buffet.report.headline import best_of, headline
from buffet.report.sweep import read_sources, sweep_page
from reports import HOSTILE, data_of, row, sweep_rows


def records(data: dict[str, Any], columns: str, rows: str) -> list[dict[str, Any]]:
    return [dict(zip(data[columns], values, strict=True)) for values in data[rows]]


def test_the_headline_says_what_is_proven_rounded_down() -> None:
    found = headline(
        [
            row("a", certified=0.2999, attacked=0.4),
            row("b", method="lse", certified=0.3599, attacked=0.4, task_seconds=199.0),
            row("c", certified=0.1, attacked=1.0, words=(0,)),
            row("d", method="lse", status="failed", certified=None, attacked=1.0, words=(0,)),
        ],
        "baseline",
    )
    assert found.sentence.startswith("For 2 of 2 tasks in 1 sentence (one word at a time, L2) it is proven")
    assert "changes the answer of m; on average that radius is at least 0.49 of" in found.sentence
    shown = {tile.meaning: tile.value for tile in found.tiles}
    assert shown["of the attacked radius is proven, on average"] == "0.49"  # (0.89975 + 0.1) / 2
    assert (
        shown["of tasks: at least 0.5 of the attacked radius (50\N{NO-BREAK SPACE}%: at least 0.8)"]
        == "50\N{NO-BREAK SPACE}%"
    )
    assert shown["lse against baseline, mean radius over 1 task (worst 1.20 ×)"] == "1.20 ×"
    assert shown["of proofs for 3 answers; 1 failed"] == "3 min"
    assert found.contradictions == 0


def test_the_headline_without_attacks_or_other_methods_stays_true() -> None:
    found = headline([row("a", certified=0.0), row("b", words=(0, 1))], "baseline")
    assert "For 1 of 2 tasks in 1 sentence (up to 2 words at a time, L2)" in found.sentence
    assert "on average" not in found.sentence
    assert [tile.value for tile in found.tiles] == ["1 of 2", "2.0 s"]


def test_a_proof_beyond_an_attack_is_not_passed_over() -> None:
    rows = [row("a", certified=0.5, attacked=0.6), row("b", method="lse", certified=0.7, attacked=0.6)]
    assert headline(rows, "baseline").contradictions == 1
    page = sweep_page(rows)
    assert 'role="alert"' in page
    assert 'role="alert"' not in sweep_page(rows[:1])


def test_the_best_of_a_task_is_any_proof_and_any_attack() -> None:
    found = best_of(
        [
            row("a", certified=0.2, attacked=None),
            row("b", method="lse", certified=0.1, attacked=0.5),
            row("c", method="x", status="timeout", certified=None, attacked=0.4),
        ]
    )
    assert [(task.certified, task.attacked, task.share) for task in found.values()] == [(0.2, 0.4, 0.5)]


def test_ratios_need_the_same_task_and_a_reference_above_zero() -> None:
    rows = [row("a", certified=0.0), row("b", method="lse"), row("c", norm="1", certified=0.4)]
    rows += [row("d", norm="1", method="lse", certified=0.6), row("e", norm="inf", method="lse")]
    against = {task_id(row): row for row in rows if row.method == "baseline"}
    assert ratios([row for row in rows if row.method == "lse"], against).values == (pytest.approx(1.5),)


def test_the_data_of_a_page_is_complete_and_rounded_to_its_side() -> None:
    rows = sweep_rows()
    data = data_of(sweep_page(rows))
    found = records(data, "columns", "rows")
    asked = [r for r in rows if r.ok]
    assert len(found) == len(asked)
    for shown, r in zip(found, asked, strict=True):
        sentence = data["sentences"][shown["sentence"]]
        assert (sentence["text"], data["models"][sentence["model"]]) == (r.sentence, r.model)
        assert data["methods"][shown["method"]] == r.method
        assert data["norms"][shown["norm"]] == {"2": "L2", "inf": "L∞"}[r.norm]
        assert (shown["certified"], shown["attacked"], tuple(shown["words"])) == (
            r.certified,
            r.attacked,
            r.words,
        )
        certified, attacked = shown["texts"]
        assert float(certified) <= r.certified
        assert attacked == "—" if r.attacked is None else float(attacked) >= r.attacked
        assert 0 <= shown["shade"] <= 6
    assert data["methods"][data["reference"]] == "baseline"
    failed = records(data, "failure_columns", "failures")
    assert [(f["status"], f["reason"]) for f in failed] == [("timeout", "took longer than 5 s <b>")]


def test_no_sentence_leaves_its_place_in_the_page() -> None:
    page = sweep_page(sweep_rows())
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    assert page.count("<script") == 2
    assert data_of(page)["sentences"][0]["text"] == HOSTILE


def test_of_two_rows_about_one_task_the_last_counts_as_in_the_summary() -> None:
    data = data_of(sweep_page([row("a", certified=0.1), row("b", certified=0.2, seed=1)]))
    assert [r["certified"] for r in records(data, "columns", "rows")] == [0.2]


def test_models_of_one_name_are_told_apart() -> None:
    page = sweep_page([row("a"), row("b", model_digest="1234567"), row("c", model="n", model_digest="2")])
    assert data_of(page)["models"] == ["m (0)", "m (123456)", "n"]


def test_the_reference_is_the_baseline_or_the_first_or_as_asked() -> None:
    rows = [row("a", method="lse"), row("b", method="dual")]

    def reference(*given: Any) -> str:
        data = data_of(sweep_page(*given))
        return data["methods"][data["reference"]]

    assert reference(rows) == "lse"
    assert reference([*rows, row("c")]) == "baseline"
    assert reference(rows, (), "dual") == "dual"
    with pytest.raises(BuffetError, match="no rows of the reference method 'x'; there are: lse, dual"):
        sweep_page(rows, (), "x")
    with pytest.raises(BuffetError, match="no rows to report on"):
        sweep_page([])


def test_a_sweep_that_proved_nothing_still_has_a_page() -> None:
    page = sweep_page([row("a", status="failed", reason="worker died", certified=None, task_seconds=None)])
    assert "For 0 of 1 tasks" in page
    assert data_of(page)["rows"] == []


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, *rows: Any) -> Path:
        path = tmp_path / name
        path.write_text("".join(r.line() for r in rows))
        return path

    return write


def test_the_command_writes_the_page(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one = written("one.ndjson", *sweep_rows())
    assert main(["report", str(one)]) == 0
    assert capsys.readouterr().out.startswith(f"{one.with_suffix('.html')}: {len(sweep_rows())} rows, ")
    other = written("other.ndjson", row("new", model="third", model_digest="3"), sweep_rows()[0])
    page = one.with_name("both.html")
    assert main(["report", str(one), str(other), "-o", str(page), "--reference", "lse"]) == 0
    data = data_of(page.read_text(encoding="utf-8"))
    assert data["models"] == ["small", "large", "third"]
    assert len(data["rows"]) == sum(r.ok and r.what == "radius" for r in sweep_rows()) + 1
    rows, sources = read_sources([one, other])
    assert len(rows) == len(sweep_rows()) + 1
    for source in sources:
        assert f"{source.name}: {source.rows} rows, sha256 {source.sha256}" in page.read_text(
            encoding="utf-8"
        )


def test_the_command_says_what_is_wrong(
    written: Callable[..., Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    empty, good = written("empty.ndjson"), written("good.ndjson", row("a"))
    for arguments, needle in (
        ([empty], "has no rows yet"),
        ([tmp_path / "none.ndjson"], "cannot be read"),
        ([good, "-o", tmp_path], "not a file"),
        ([good, "-o", good], "would replace the rows"),
        ([good, "-o", tmp_path / "no" / "page.html"], "no directory"),
        ([good, "--reference", "x"], "no rows of the reference method 'x'"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        assert needle in capsys.readouterr().err
    assert not list(tmp_path.glob("*.html"))
