"""`buffet evaluate`: what it prints and writes, its exit codes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from buffet.evaluation import SentenceRow
from buffet.experiments.store import read_store
from command_line import Run, one_line
from reports import HOSTILE, data_of
from tiny_checkpoint import write_model

SYNONYMS = {"good": ["great", "warm"], "plot": ["story", "cast"], "warm": ["cold"], "mess": ["film"]}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluate")
    write_model(directory / "tiny", seed=1, scale=0.8)
    rows = [("good film , bad plot", 0), ("a warm and funny story", 1), ("not a bad film", 1), ("", 0)]
    rows.append((f"film {HOSTILE}".replace("\u2028", " "), 0))
    text = "".join(f"{sentence}\t{label}\n" for sentence, label in rows)
    (directory / "data.tsv").write_text(f"sentence\tlabel\n{text}", encoding="utf-8")
    (directory / "synonyms.json").write_text(json.dumps(SYNONYMS))
    return directory


@pytest.fixture(scope="module")
def given(home: Path) -> tuple[object, ...]:
    """A command line whose rows are there from its first run on, so that others take no time."""
    asked = ("--synonyms", home / "synonyms.json", "--at-most", "1,all", "--out", home / "rows.ndjson")
    return ("evaluate", "--data", home / "data.tsv", "--model", home / "tiny", "--workers", 1, *asked)


def test_what_is_printed_and_written(run: Run, home: Path, given: tuple[object, ...]) -> None:
    page, table = home / "page.html", home / "table.csv"
    code, out, err = run(*given, "--html", page, "--csv", table)
    assert (code, err) == (0, "")
    assert "tiny · words exchanged for synonyms · buffet · 5 sentences of data.tsv" in out
    assert "1 refused, counted as wrong: '': the text has no words" in out
    code, out, _ = run(*given, "--json")
    found = json.loads(out)
    assert code == 0
    assert found["certified"] <= found["attacked"] <= found["clean"]
    assert found["refused"] == 2
    assert len(read_store(home / "rows.ndjson", SentenceRow)) == 5
    assert len(table.read_text().splitlines()) == 1 + 5 * 2
    content = page.read_text()
    data = data_of(content)
    assert data["levels"] == ["1", "all"]
    assert [at["certified"]["share"] for at in data["curve"]] == [
        at["certified"]["share"] for at in found["curve"]
    ]
    assert "<img src=x" not in content
    assert f"--data {home / 'data.tsv'} --model {home / 'tiny'}" in content


def test_the_exit_code_says_whether_enough_is_proven(run: Run, home: Path, given: tuple[object, ...]) -> None:
    certified = json.loads(run(*given, "--json").out)["certified"]
    code, out, _ = run(*given, "--min", certified)
    assert code == 0
    assert f"reaches {certified}" in out
    code, out, _ = run(*given, "--min", certified + 1e-3)
    assert code == 1
    assert "is below" in out
    assert "sample" not in out
    code, out, _ = run(*given, "--min", 1, "--count", 4)
    assert code == 1
    assert "that is the share of the sample; that of all 5 sentences may be as low as 0.0" in out
    assert run(*given, "--min", 1, "--json").code == 1


@pytest.mark.parametrize(
    ("options", "needle"),
    [
        ((), "give either eps"),
        (("--eps", "0.1", "--typos", "2"), "give either eps"),
        (("--eps", "0.1,x"), "--eps: got 'x'"),
        (("--eps", "0.1", "--at-most", "2"), "at most and skip unknown go with"),
        (("--eps", "0.1", "--min", "1.5"), "--min: got 1.5"),
        (("--eps", "0.1", "--workers", "0"), "--workers: got 0"),
        (("--eps", "0.1", "--budget", "0"), "budget 0"),
        (("--eps", "0.1", "--words", "some"), "give each"),
        (("--eps", "0.1", "--method", "magic"), "magic"),
        (("--eps", "0.1", "--gpus", "1"), "--backend ray"),
        (("--eps", "0.1", "--html", "nowhere/page.html"), "no directory nowhere"),
        (("--eps", "0.1", "-o", "nowhere/rows.ndjson"), "no directory nowhere"),
        (("--typos", "1", "--at-most", "1,two"), "--at-most: got '1,two'"),
        (("--typos", "1", "--norm", "1"), "norm and words go with eps"),
        (("--synonyms", "nowhere.json"), "nowhere.json"),
    ],
)
def test_mistakes_in_options(run: Run, home: Path, options: tuple[str, ...], needle: str) -> None:
    one_line(run("evaluate", "--data", home / "data.tsv", "--model", home / "tiny", *options), needle)


def test_mistakes_in_data(run: Run, home: Path, tmp_path: Path) -> None:
    asked = ("--model", home / "tiny", "--eps", 0.1)
    one_line(run("evaluate", "--data", tmp_path / "no.tsv", *asked), "no such file")
    one_line(run("evaluate", "--data", tmp_path, *asked), "test.tsv: no such file")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfilm\tgood\n")
    one_line(run("evaluate", "--data", tmp_path, "--part", "dev", *asked), "line 2 is 'film\\tgood'")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nfilm\t7\n")
    one_line(run("evaluate", "--data", tmp_path / "dev.tsv", *asked), "'film' has the label 7")
