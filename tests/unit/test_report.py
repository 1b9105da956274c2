"""The report: safe rounding, a page that holds everything, escapes everything and loads nothing."""

from __future__ import annotations

import math
import os
import re
from decimal import Decimal
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffet.errors import BuffetError
from buffet.report import (
    DARK_INK_STEPS,
    RAMP,
    Axis,
    CertifyReport,
    ModelInfo,
    Query,
    TaskResult,
    Token,
    Versions,
    bars,
    check_writable,
    render_html,
    shades,
    shown,
    together,
    write_atomically,
)
from buffet.rounding import round_down, round_up


@pytest.mark.parametrize(
    ("value", "down", "up"),
    [
        (0.0, "0", "0"),
        (1.0, "1", "1"),
        (0.25, "0.25", "0.25"),
        (0.12999999, "0.1299", "0.1300"),
        (0.1, "0.1000", "0.1001"),  # the float 0.1 is a little above one tenth
        (0.99999, "0.9999", "1.000"),
        (123456.0, "123400", "123500"),
        (-0.12345, "-0.1235", "-0.1234"),
        (1.23456e-7, "1.234e-7", "1.235e-7"),
        (1e4, "10000", "10000"),
        (math.inf, "inf", "inf"),
        (-math.inf, "-inf", "-inf"),
        (math.nan, "nan", "nan"),
    ],
)
def test_rounding_examples(value: float, down: str, up: str) -> None:
    assert (round_down(value), round_up(value)) == (down, up)


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(1, 12))
def test_rounding_stays_on_its_side_and_close(value: float, digits: int) -> None:
    down, up = Decimal(round_down(value, digits)), Decimal(round_up(value, digits))
    exact = Decimal(value)
    assert down <= exact <= up
    assert up - down <= abs(exact) * Decimal(10) ** (1 - digits) * Decimal("1.0000001")


def task(words: tuple[int, ...], certified: float, attacked: float | None, **changes: object) -> TaskResult:
    names = ("[CLS]", "a", "<script>alert(1)</script>", "film", "[SEP]")
    values = {
        "words": words,
        "tokens": tuple(names[i] for i in words),
        "verdict": "certified" if certified > 0 else "unknown",
        "certified": certified,
        "attacked": attacked,
        "margin": 0.5 if certified > 0 else None,
        "margins": None,
        "counterexample": None,
        "evaluations": 7,
    }
    return TaskResult.model_validate({**values, **changes})


def make(*tasks: TaskResult, eps: float | None = None, **changes: object) -> CertifyReport:
    """A report about the sentence `a <script>… film`."""
    names = ("[CLS]", "a", "<script>alert(1)</script>", "film", "[SEP]")
    attacked = [t.attacked for t in tasks if t.attacked is not None]
    values = {
        "text": 'a <script>alert(1)</script> "film" & co',
        "tokens": [
            Token(index=i, token=name, special=i in (0, 4), unknown=False) for i, name in enumerate(names)
        ],
        "model": ModelInfo(name="tiny", labels=("negative", "positive"), layers=3, width=8),
        "query": Query(
            norm=2.0,
            eps=eps,
            method="baseline",
            propagation="baf",
            product="zero",
            softmax="decomposed",
            optimise="none",
            steps=None,
            rate=None,
            start=None,
            window=None,
            search="secant",
            budget=None,
            label=1,
            attack=True,
            seed=0,
            threads=1,
            memory=1 << 30,
        ),
        "answer": 1,
        "logits": (-1.0, 1.0),
        "clean_margin": 2.0,
        "verdict": together([t.verdict for t in tasks]),
        "certified": min(t.certified for t in tasks),
        "attacked": min(attacked, default=None),
        "tasks": tasks,
        "evaluations": 9,
        "seconds": 0.5,
        "attack_seconds": 0.1,
        "command": "buffet certify --method baseline 'a <b>'",
        "versions": Versions(buffet="0", torch="1", python="2"),
    }
    return CertifyReport.model_validate({**values, **changes})


RADII = make(task((1,), 0.30001, 0.4), task((2,), 0.1, None), task((3,), 0.2, 0.29999))
AT_EPS = make(
    task((1,), 0.05, None, margins={"negative": 0.5}),
    task((2,), 0.0, 0.05, verdict="falsified", margins={"negative": -3.0}, margin=-3.0),
    task((3,), 0.0, None, margins={"negative": None}),
    eps=0.05,
    attack_seconds=None,
)


class _Parsed(HTMLParser):
    """The tags, attributes and visible text of a page; unclosed elements are an error."""

    VOID = ("meta", "link", "img", "br", "rect", "path")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("report", [RADII, AT_EPS], ids=["radii", "eps"])
def test_the_page_escapes_everything_and_loads_nothing(report: CertifyReport) -> None:
    page = render_html(report)
    parsed = _Parsed(page)
    assert "<script>alert(1)" not in page
    assert [tag for tag, _ in parsed.tags].count("script") == 1  # our own, which sorts the table
    assert "<script>alert(1)</script>" in parsed.text
    assert "buffet certify --method baseline 'a <b>'" in parsed.text
    assert not re.search(r"https?://|@import|url\(", page)
    assert not any({"src", "href", "onclick", "srcset"} & attrs.keys() for _, attrs in parsed.tags)


def test_the_page_shows_every_number_rounded_to_its_side() -> None:
    text = _Parsed(render_html(RADII)).text
    for expected in ("0.3000", "0.4001", "0.1000", "0.2000", "0.3000", "0.50 s", "tiny", "positive", "L2"):
        assert expected in text
    assert "0.3000 … 0.4001" in text  # 0.30001 down, the float 0.4 up
    assert "0.1000 … —" in text


def test_a_page_at_a_given_size_shows_verdicts() -> None:
    text = _Parsed(render_html(AT_EPS)).text
    assert "falsified" in text
    assert "unknown" in text
    assert "certified, margin 0.5" in text
    assert "1 of 3 certified; all together: falsified" in text
    assert "L2 move up to 0.05?" in text
    assert "0.05001" not in text


def test_a_wrong_label_is_said_in_the_headline() -> None:
    wrong = make(task((1,), 0.0, 0.0, verdict="falsified"), answer=0, clean_margin=-2.0)
    assert "answers “negative”, so there is no “positive” to defend" in _Parsed(render_html(wrong)).text


@pytest.mark.parametrize(
    "report",
    [
        make(task((1,), 0.0, None)),
        make(task((1,), 1e4, None)),
        make(task((1,), 1e-12, 1e3), task((2,), 1e-9, 2e3)),
        make(task((1, 3), 0.1, 0.2), task((3,), 0.3, 0.4)),
        make(task((1,), 0.0, None, margin=None), eps=0.0),
    ],
)
def test_extreme_reports_still_make_a_chart(report: CertifyReport) -> None:
    chart, axis = bars(report)
    for bar in chart:
        assert 0 <= bar.solid <= bar.open <= 100
    assert all(0 <= place <= 100 for place, _ in axis.ticks())
    _Parsed(render_html(report))


def test_colours_are_relative_and_a_word_takes_its_weakest_task() -> None:
    assert shades(RADII) == {1: len(RAMP) - 1, 2: 0, 3: 4}
    alike = make(task((1,), 0.300, None), task((2,), 0.301, None), task((3,), 0.302, None))
    assert shades(alike) == {1: 3, 2: 3, 3: 3}
    both = make(task((1,), 0.3, None), task((1, 3), 0.1, None))
    assert shades(both) == {1: 3, 3: 3}
    assert shades(make(task((1,), 0.0, None))) == {1: 0}
    assert shades(AT_EPS) == {1: 3, 2: 0, 3: 0}


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_ramp_darkens_steadily_and_its_letters_can_be_read() -> None:
    lights = [_luminance(colour) for colour in RAMP]
    assert lights == sorted(lights, reverse=True)
    for step, light in enumerate(lights):
        ink = _luminance("#10131a" if step < DARK_INK_STEPS else "#ffffff")
        assert (max(light, ink) + 0.05) / (min(light, ink) + 0.05) >= 4.5


@given(st.lists(st.floats(1e-9, 1e4), min_size=1, max_size=5))
def test_axis_ticks_are_few_and_cover_the_data(values: list[float]) -> None:
    axis = Axis.over(values)
    places = [place for place, _ in axis.ticks()]
    assert 1 <= len(places) <= 8
    assert places == sorted(set(places))
    assert places[0] >= 0
    assert places[-1] <= 100
    order = sorted(values)
    assert [axis.place(v) for v in order] == sorted(axis.place(v) for v in order)
    assert axis.place(order[-1]) < 100


def test_an_axis_is_logarithmic_when_radii_differ_much() -> None:
    assert not Axis.over([0.1, 1.0]).log
    assert Axis.over([0.01, 1.0]).log
    assert Axis.over([0.0]).place(0.0) == 0.0


def test_missing_numbers_are_shown_as_a_dash() -> None:
    cells = shown(task((1, 3), 0.0, None), None)
    assert (cells.words, cells.text) == ("1+3", "a + film")
    assert (cells.certified, cells.attacked, cells.margin) == ("0", "—", "—")


def test_verdicts_together() -> None:
    assert together(["certified", "certified"]) == "certified"
    assert together(["certified", "unknown"]) == "unknown"
    assert together(["certified", "unknown", "falsified"]) == "falsified"
    assert together([]) == "unknown"


def test_writing_is_all_or_nothing(tmp_path: Path) -> None:
    target = tmp_path / "page.html"
    check_writable(target)
    assert list(tmp_path.iterdir()) == []
    write_atomically(target, "one")
    write_atomically(target, "two ∞")
    assert target.read_text(encoding="utf-8") == "two ∞"
    with pytest.raises(UnicodeEncodeError):
        write_atomically(target, "broken \ud800")
    assert target.read_text(encoding="utf-8") == "two ∞"
    link = tmp_path / "link.html"
    link.symlink_to(target)
    write_atomically(link, "three")
    assert link.is_symlink()
    assert target.read_text() == "three"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.html", "page.html"]


def test_paths_that_cannot_be_written_are_refused_early(tmp_path: Path) -> None:
    with pytest.raises(BuffetError, match="not a file"):
        check_writable(tmp_path)
    with pytest.raises(BuffetError, match="no directory"):
        check_writable(tmp_path / "missing" / "page.html")
    with pytest.raises(BuffetError, match="not a file"):
        check_writable(Path(os.devnull))
