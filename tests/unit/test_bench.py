"""`buffet bench`: counts, cases, limits and comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from buffet.cli import main
from buffet.errors import BuffetError
from buffet.lab.bench import (
    BenchCase,
    BenchLimits,
    BenchRow,
    Measurement,
    measure,
    run_cases,
    selection,
)
from buffet.lab.bench.cases import FIXED, USUAL
from buffet.lab.bench.comparison import Change, compare
from buffet.lab.bench.counting import count
from buffet.lab.bench.measuring import M_FLOPS, prepare
from buffet.lab.bench.running import document, read_document
from buffet.methods import METHODS

TINY = BenchCase("baseline", 1, tokens=4, width=8, inner=8, heads=2)
CPU = torch.device("cpu")


def _measured(units: float, spread: float = 0.0, peak: float = 10.0) -> Measurement:
    samples = tuple(float(units) * (1 + spread * step) for step in (-1, -0.5, 0, 0.5, 1))
    return Measurement(1.0, 1.0, float(units), samples, 1.0, peak, 10**9, 10**9, 0.5)


def test_matrix_products_are_counted_with_and_without_gradients() -> None:
    a, b = torch.randn(3, 5), torch.randn(5, 7)
    batch = torch.randn(2, 3, 5)
    expected = 2 * 3 * 5 * 7 + 2 * (2 * 3 * 5 * 7)
    products = 4 * (3 * 5 + 5 * 7 + 3 * 7 + 2 * 3 * 5 + 5 * 7 + 2 * 3 * 7)  # bytes read and written

    def run() -> None:
        a @ b
        torch.einsum("bij,jk->bik", batch, b)
        a.mul(2).unsqueeze(0)

    assert count(run).flops == expected
    with torch.inference_mode():
        counted = count(run)
    assert counted.flops == expected
    assert 4 * (3 * 5 + 3 * 5) <= counted.moved_bytes - products < 4 * 500


def test_a_value_repeated_along_an_axis_is_read_once() -> None:
    row = torch.randn(1, 100).expand(50, 100)
    assert count(lambda: row.sum()).moved_bytes == 4 * (100 + 1)


def test_every_method_is_measured_at_the_usual_size_besides_the_fixed_cases() -> None:
    cases = selection()
    assert cases[: len(FIXED)] == list(FIXED)
    assert {c.method for c in cases[len(FIXED) :]} == set(METHODS)
    assert {c.shape for c in cases[len(FIXED) :]} == {USUAL}
    assert {c.method for c in selection(methods=["baseline"])} == {"baseline"}


def test_sizes_that_are_given_are_combined() -> None:
    cases = selection([1, 2], [], [8, 12], ["backward/2"], words=3)
    assert [c.shape for c in cases] == [(1, 16, 8), (1, 16, 12), (2, 16, 8), (2, 16, 12)]
    assert {(c.window, c.words, c.inner // c.width) for c in cases} == {(2, 3, 2)}


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": [0]},
        {"widths": [6]},
        {"tokens": [4], "words": 5},
        {"methods": ["guess"]},
        {"methods": ["backward/x"]},
        {"methods": ["baseline/2"]},
    ],
)
def test_what_cannot_be_measured_is_refused(wrong: dict[str, list]) -> None:
    with pytest.raises(BuffetError):
        selection(**wrong)


def test_a_case_is_measured_in_all_its_quantities() -> None:
    found = measure(TINY)
    assert found.cpu_seconds > 0
    assert found.flops > 1000
    assert found.best <= found.units
    assert found.fraction == pytest.approx(found.flops / (found.units * M_FLOPS))
    assert found.margin is not None
    learned = prepare(replace(TINY, method="o-buffet", steps=3, eps=1e-6), CPU)
    assert count(learned.run).flops > 3 * found.flops  # all steps, though the first margin is a proof


def test_cases_run_in_processes_of_their_own_within_limits() -> None:
    rows = list(run_cases([TINY], BenchLimits(60.0, 1 << 30)))
    assert rows[0].measurement is not None
    (slow,) = run_cases([replace(TINY, method="buffet", layers=3, steps=100000)], BenchLimits(1.0, 1 << 30))
    assert slow.reason == "more than 1 s"
    (large,) = run_cases([replace(TINY, tokens=512, width=64, heads=4)], BenchLimits(60.0, 1 << 26))
    assert large.reason == "more than 0.0625 GB"
    text = json.dumps(document([*rows, slow], "cpu"), allow_nan=False)
    assert read_document(text, "here") == [*rows, slow]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', '{"format": "buffet bench 1"}'])
def test_other_files_are_no_measurements(text: str) -> None:
    with pytest.raises(BuffetError, match=r"^file\.json: "):
        read_document(text, "file.json")


@pytest.mark.parametrize(
    ("old", "new", "real"),
    [
        (_measured(10), _measured(13), True),
        (_measured(10), _measured(7), True),
        (_measured(10), _measured(10.3), False),
        (_measured(10, spread=0.3), _measured(13, spread=0.3), False),
    ],
)
def test_changes_are_told_from_noise(old: Measurement, new: Measurement, real: bool) -> None:
    assert Change(TINY, old, new).real is real


def test_cases_are_compared_with_the_same_cases() -> None:
    other = replace(TINY, layers=2)
    old = [BenchRow(TINY, _measured(10)), BenchRow(other, _measured(10))]
    changes, notes = compare(old, [BenchRow(TINY, _measured(12)), BenchRow(other, reason="more than 1 s")])
    assert [c.ratio for c in changes] == [pytest.approx(1.2)]
    assert notes == ["baseline (2, 4, 8): was measured, now more than 1 s"]


def test_the_command_measures_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    small = ["bench", "--layers", "1,2", "--tokens", "4", "--width", "8", "--methods", "baseline"]
    assert main([*small, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["case"]["layers"] for row in found["rows"]] == [1, 2]
    for row in found["rows"]:
        row["measurement"]["units"] /= 100
        row["measurement"]["samples"] = [s / 100 for s in row["measurement"]["samples"]]
    before = tmp_path / "before.json"
    before.write_text(json.dumps(found))
    small[2] = "1"
    assert main([*small, "--against", str(before), "--fail-above", "1.2"]) == 1
    assert "slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "one"], "--layers"),
        (["--methods", "nothing"], "unknown method"),
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used"),
        (["--limit", "0"], "--limit"),
        (["--fail-above", "2"], "--against"),
        (["--against", "missing.json"], "missing.json"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_fixed_cases_are_cases() -> None:
    assert len(set(FIXED)) == len(FIXED)
    assert all(case.chosen for case in FIXED)
