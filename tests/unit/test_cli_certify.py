"""`buffet certify` as a user meets it: answers, exit codes, and one clear line for whatever is wrong."""

from __future__ import annotations

import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from buffet.cli import request
from buffet.methods import METHODS
from buffet.report import CertifyReport
from command_line import Outcome, Run, one_line
from tiny_checkpoint import write_model

TEXT = "good film , bad plot"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer with fixed weights, proven in milliseconds."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def certify(run: Run, tiny: Path, *options: str, text: str = TEXT) -> Outcome:
    return run("certify", text, "--model", str(tiny), *options)


# ------------------------------------------------------------------------------------------- answers


def test_the_table_has_every_word_with_its_bracket(run: Run, tiny: Path) -> None:
    outcome = certify(run, tiny)
    assert outcome.code == 0
    assert outcome.err == ""
    assert "\x1b" not in outcome.out
    lines = [line.split() for line in outcome.out.splitlines()]
    assert ["#", "word", "certified", "attacked", "margin", "nearest", "words"] in lines
    rows = {line[1]: line for line in lines if len(line) >= 5 and line[0].isdigit()}
    assert list(rows) == ["good", "film", ",", "bad", "plot"]
    for row in rows.values():
        assert 0 < float(row[2]) <= float(row[3])
        assert float(row[4]) > 0
    assert re.search(
        r"tiny · (positive|negative) \(margin .* baseline \(baf\) · L2 · .* evaluations", outcome.out
    )


def test_json_is_complete_and_alone(run: Run, tiny: Path) -> None:
    outcome = certify(run, tiny, "--json", "--words", "1,2+4", "--norm", "inf", "--seed", "5", "--no-attack")
    assert outcome.code == 0
    assert outcome.err == ""
    report = CertifyReport.model_validate_json(outcome.out, strict=False)
    assert report.text == TEXT
    assert [t.token for t in report.tokens] == ["[CLS]", "good", "film", ",", "bad", "plot", "[SEP]"]
    assert [t.special for t in report.tokens] == [True, *[False] * 5, True]
    assert [t.words for t in report.tasks] == [(1,), (2, 4)]
    assert report.tasks[1].tokens == ("film", "bad")
    assert (report.query.norm, report.query.eps, report.query.seed) == ("inf", None, 5)
    assert (report.query.method, report.query.propagation, report.query.search) == (
        "baseline",
        "baf",
        "secant",
    )
    assert report.query.label == report.answer
    assert report.clean_margin == pytest.approx(abs(report.logits[0] - report.logits[1]))
    assert report.certified == min(t.certified for t in report.tasks)
    assert report.evaluations > 0
    assert report.versions.torch.startswith(torch.__version__.split("+")[0])
    again = run(*shlex.split(report.command)[1:], "--json")
    repeated = CertifyReport.model_validate_json(again.out, strict=False)
    assert [t.certified for t in repeated.tasks] == [t.certified for t in report.tasks]
    assert repeated.command == report.command


def test_at_a_given_size_the_exit_code_is_the_verdict(run: Run, tiny: Path) -> None:
    small = certify(run, tiny, "--eps", "1e-6", "--json")
    report = json.loads(small.out)
    assert (small.code, report["verdict"]) == (0, "certified")
    assert all(task["certified"] == 1e-6 and task["margin"] > 0 for task in report["tasks"])
    best = json.loads(certify(run, tiny, "--eps", "1e-6", "--best", "--json").out)
    assert best["command"].endswith(f"--best {shlex.quote(TEXT)}")
    for first, largest in zip(report["tasks"], best["tasks"], strict=True):
        assert largest["margin"] >= first["margin"]
    large = certify(run, tiny, "--eps", "1000", "--json")
    report = json.loads(large.out)
    assert large.code == 1
    assert report["verdict"] == "falsified"
    broken = next(task for task in report["tasks"] if task["verdict"] == "falsified")
    assert (broken["certified"], broken["attacked"]) == (0.0, 1000.0)
    assert len(broken["counterexample"][0]) == 8
    silent = certify(run, tiny, "--eps", "1000", "--no-attack")
    assert silent.code == 1
    assert "unknown" in silent.out
    assert "falsified" not in silent.out


def test_a_label_the_model_does_not_give_is_not_certified(run: Run, tiny: Path) -> None:
    answer = json.loads(certify(run, tiny, "--eps", "0", "--json").out)["answer"]
    wrong = ("negative", "positive")[1 - answer]
    for options in (["--label", wrong.upper()], ["--label", str(1 - answer), "--eps", "0.01"]):
        outcome = certify(run, tiny, *options)
        assert outcome.code == 1
        assert f"not {wrong}: there is nothing to certify" in outcome.out
    outcome = certify(run, tiny, "--label", wrong, "--json")
    report = json.loads(outcome.out)
    assert report["verdict"] == "falsified"
    assert report["certified"] == 0.0
    assert report["clean_margin"] < 0


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs(run: Run, tiny: Path, method: str) -> None:
    options = ["--words", "2", "--no-attack", "--json", "--steps", "2"]
    outcome = certify(run, tiny, "--method", method, *options)
    report = json.loads(outcome.out)
    assert (outcome.code, report["query"]["method"]) == (0, method)
    assert report["tasks"][0]["attacked"] is None


def test_options_reach_the_engine(run: Run, tiny: Path) -> None:
    options = ["--propagation", "backward", "--window", "1", "--search", "bisection", "--threads", "1"]
    outcome = certify(run, tiny, *options, "--memory", "64MB", "--norm", "1.5", "--words", "2", "--json")
    query = json.loads(outcome.out)["query"]
    assert outcome.code == 0
    assert (query["propagation"], query["window"], query["search"]) == ("backward", 1, "bisection")
    assert (query["threads"], query["memory"], query["norm"]) == (1, 64 << 20, 1.5)


@pytest.mark.parametrize(
    ("options", "threads"),
    [
        (["--method", "lse"], 1),
        (["--method", "backward"], 3),
        (["--method", "backward", "--words", "1"], 1),
        (["--method", "backward", "--memory", "64MB"], 1),
        (["--method", "backward", "--threads", "2"], 2),
    ],
)
def test_all_cores_are_used_where_words_can_be_worked_on_apart(run, tiny, monkeypatch, options, threads):
    monkeypatch.setattr(request, "cores", lambda: 64)
    outcome = certify(run, tiny, "--words", "1,2,3", *options, "--no-attack", "--json")
    assert json.loads(outcome.out)["query"]["threads"] == threads


def test_special_tokens_move_only_when_asked(run: Run, tiny: Path) -> None:
    outcome = certify(run, tiny, "--special", "--no-attack", "--json")
    assert [task["words"] for task in json.loads(outcome.out)["tasks"]] == [[i] for i in range(7)]
    one_line(certify(run, tiny, "--words", "0"), "row 0 is the special token [CLS]", "--special")
    one_line(certify(run, tiny, "--words", "2+6"), "row 6 is the special token [SEP]")


def test_the_page_is_written_and_escapes_the_text(run: Run, tiny: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    outcome = certify(
        run, tiny, "--html", str(page), "--no-attack", text="good <script>alert(1)</script> film"
    )
    assert outcome.code == 0
    assert f"report: {page}" in outcome.out
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "good &lt;script&gt;alert(1)&lt;/script&gt; film" in text
    assert list(tmp_path.iterdir()) == [page]


def test_colours_appear_on_a_terminal_only(run: Run, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ("--eps", "0.001", "--no-attack")
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = certify(run, tiny, *options)
    assert "\x1b[38;2;" in coloured.out
    assert "fragile" in coloured.out
    monkeypatch.setenv("NO_COLOR", "1")
    plain = certify(run, tiny, *options)
    assert "\x1b[38" not in plain.out
    assert "\x1b[48" not in plain.out


# ----------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "needle"),
    [
        ("", "no words"),
        ("   ", "no words"),
        ("[CLS] [SEP]", "no words"),
        ("zxq vwk", "vocabulary"),
        ("good " * 11, "has 13 tokens"),
        ("good \udcff film", "Unicode"),
    ],
)
def test_bad_texts(run: Run, tiny: Path, tmp_path: Path, text: str, needle: str) -> None:
    page = tmp_path / "page.html"
    one_line(certify(run, tiny, "--html", str(page), text=text), needle)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "needles"),
    [
        (["--words", "7"], ["no row 7", "1:good"]),
        (["--words", "-1"], ["--words"]),
        (["--words", "good"], ["counted from 0"]),
        (["--words", ""], ["counted from 0"]),
        (["--words", "2,,3"], ["counted from 0"]),
        (["--words", "2+2"], ["twice"]),
        (["--words", "²"], ["counted from 0"]),
        (["--eps", "-0.1"], ["--eps", "-0.1"]),
        (["--eps", "nan"], ["--eps", "nan"]),
        (["--eps", "inf"], ["--eps", "inf"]),
        (["--eps", "small"], ["--eps", "small"]),
        (["--norm", "0.5"], ["--norm", "0.5"]),
        (["--norm", "nan"], ["--norm"]),
        (["--norm", "two"], ["--norm", "two"]),
        (["--method", "magic"], ["magic", *METHODS]),
        (["--propagation", "sideways"], ["sideways", "baf"]),
        (["--window", "2"], ["window", "backward"]),
        (["--propagation", "backward", "--window", "0"], ["window"]),
        (["--search", "guess"], ["guess", "secant, bisection"]),
        (["--label", "neutral"], ["neutral", "0 negative, 1 positive"]),
        (["--label", "2"], ["0 negative, 1 positive"]),
        (["--memory", "lots"], ["lots", "2GB"]),
        (["--memory", "0"], ["--memory"]),
        (["--threads", "0"], ["--threads"]),
        (["--seed", "-1"], ["--seed"]),
        (["--seed", str(2**63)], ["--seed"]),
        (["--colour", "red"], ["--colour", "buffet certify --help"]),
        (["second", "third"], ["second"]),
    ],
)
def test_bad_options(run: Run, tiny: Path, tmp_path: Path, options: list[str], needles: list[str]) -> None:
    page = tmp_path / "page.html"
    one_line(certify(run, tiny, "--html", str(page), *options), *needles)
    assert list(tmp_path.iterdir()) == []


def test_bad_outputs_are_refused_before_the_work(run: Run, tiny: Path, tmp_path: Path) -> None:
    one_line(certify(run, tiny, "--html", str(tmp_path)), "not a file")
    one_line(certify(run, tiny, "--html", str(tmp_path / "no" / "page.html")), "no directory")
    assert list(tmp_path.iterdir()) == []


def test_no_text_and_no_command(run: Run) -> None:
    one_line(run("certify"), "TEXT", "buffet certify --help")
    one_line(run("prove"), "prove", "buffet --help")


def _config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _weights(directory: Path, value: float) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["classifier.weight"][0, 0] = value
    save_file(tensors, path)


def _pickle(directory: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return Path.touch, (Path(directory / "executed"),)  # type: ignore[return-value]

    torch.save({"weight": Bomb()}, directory / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "needle"),
    [
        (lambda d: (d / "model.safetensors").unlink(), "no such file"),
        (lambda d: (d / "config.json").unlink(), "no such file"),
        (lambda d: (d / "tokenizer.json").unlink(), "no such file"),
        (lambda d: (d / "config.json").write_text("{"), "JSON"),
        (_truncate, "truncated"),
        (lambda d: _weights(d, math.nan), "non-finite"),
        (lambda d: _weights(d, math.inf), "non-finite"),
        (lambda d: _config(d, num_hidden_layers=2), "missing tensors"),
        (lambda d: _config(d, intermediate_size=16), "shape"),
        (lambda d: _config(d, hidden_act="swish"), "relu, gelu"),
        (lambda d: _config(d, model_type="gpt2"), "supported: bert"),
        (_pickle, "pickle"),
        (shutil.rmtree, "no such directory"),
    ],
)
def test_bad_checkpoints(
    run: Run, tiny: Path, tmp_path: Path, damage: Callable[[Path], object], needle: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    damage(broken)
    one_line(run("certify", TEXT, "--model", str(broken), "--html", str(tmp_path / "page.html")), needle)
    assert not (tmp_path / "page.html").exists()
    assert not (broken / "executed").exists()


def test_unknown_models_are_answered_with_the_known_ones(run: Run) -> None:
    one_line(run("certify", TEXT, "--model", "no-such-model"), "no-such-model", "sst2-small")


def test_options_without_effect_are_remarked_on(run: Run, tiny: Path) -> None:
    options = ("--words", "1+2,2+1", "--eps", "-0", "--method", "baseline", "--steps", "5")
    outcome = certify(run, tiny, *options, "--search", "bisection", "--best", "--json")
    assert outcome.err.splitlines() == [
        f"--{name}: has no effect here" for name in ("steps", "search", "best")
    ]
    found = json.loads(outcome.out)
    assert [task["words"] for task in found["tasks"]] == [[1, 2]]
    assert str(found["query"]["eps"]) == "0.0"


def test_every_file_has_a_name_of_its_own(run: Run, tiny: Path, tmp_path: Path) -> None:
    same = str(tmp_path / "same")
    outcome = certify(run, tiny, "--eps", "0.01", "--html", same, "--certificate", same)
    one_line(outcome, "--html", "--certificate", "a file of its own")
    assert not Path(same).exists()


def test_a_rate_beyond_reason_is_refused(run: Run, tiny: Path) -> None:
    one_line(certify(run, tiny, "--optimise", "final", "--rate", "1e300"), "rate 1e+300", "at most")
