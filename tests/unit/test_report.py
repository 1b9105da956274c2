"""The report: safe rounding, a page that holds everything, escapes everything and loads nothing."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from decimal import Decimal
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffet.printing import round_down, round_up
from buffet.report import (
    RAMP,
    CertifyReport,
    render_html,
    shades,
    shown,
    together,
)
from buffet.report.scale import ColourScale, ink
from reports import AT_EPS, IMAGE, RADII, answer, data_of, task


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


def test_an_image_is_spoken_of_in_patches() -> None:
    page = render_html(IMAGE)
    text = _Parsed(page).text
    assert "How far can the pixels of a patch move" in text
    assert "every one of the 2 patches on its own" in text
    assert "distance of the patch’s pixels" in text
    assert "also below 0 and above 1" in text
    assert not re.search(r"\b(word|words|embedding|sentence)\b", text.partition('{"')[0])
    data = data_of(page)
    assert (data["unit"], data["picture"]["side"]) == ("patch", 2)
    boxed = answer(*IMAGE.tasks, eps=0.3, picture=IMAGE.picture)
    boxed = boxed.model_copy(update={"query": boxed.query.model_copy(update={"norm": "inf"})})
    assert "place of pixels, from 0 to 1." in _Parsed(render_html(boxed)).text


@pytest.mark.parametrize("report", [RADII, AT_EPS], ids=["radii", "eps"])
def test_the_page_escapes_everything_and_loads_nothing(report: CertifyReport) -> None:
    page = render_html(report)
    parsed = _Parsed(page)
    assert "<script>alert(1)" not in page
    assert [tag for tag, _ in parsed.tags].count("script") == 2  # our data and our script
    assert "<script>alert(1)</script>" in parsed.text
    assert "buffet certify --method baseline 'a <b>'" in parsed.text
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)
    assert not any({"src", "onclick", "srcset", "style"} & attrs.keys() for _, attrs in parsed.tags)
    assert [attrs["href"] for _, attrs in parsed.tags if "href" in attrs] == ["data:,"]


def test_a_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    page = render_html(RADII)
    policies = [attrs["content"] for tag, attrs in _Parsed(page).tags if attrs.get("http-equiv")]
    assert len(policies) == 1
    assert policies[0] is not None
    assert policies[0].startswith("default-src 'none'; ")
    assert "unsafe" not in policies[0]
    for tag in ("script", "style"):
        content = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert len(content) == 1
        digest = base64.b64encode(hashlib.sha256(content[0].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policies[0]


def test_the_page_shows_every_number_rounded_to_its_side() -> None:
    page = render_html(RADII)
    texts = [task["texts"] for task in data_of(page)["tasks"]]
    assert [t["certified"] for t in texts] == ["0.3000", "0.1000", "0.2000"]  # 0.30001 down
    assert [t["attacked"] for t in texts] == ["0.4001", "—", "0.3000"]  # the float 0.4 is a little above it
    text = _Parsed(page).text
    for expected in ("0.1000", "0.3000", "0.50 s", "tiny", "positive", "L2"):
        assert expected in text


def test_a_page_at_a_given_size_shows_verdicts() -> None:
    page = render_html(AT_EPS)
    text = _Parsed(page).text
    assert [task["verdict"] for task in data_of(page)["tasks"]] == ["certified", "falsified", "unknown"]
    assert "1 of 3 certified; all together: falsified" in text
    assert "L2 move up to 0.05?" in text
    assert "0.05001" not in page


def test_a_wrong_label_is_said_in_the_headline() -> None:
    wrong = answer(task((1,), 0.0, 0.0, verdict="falsified"), answer=0, clean_margin=-2.0)
    assert "answers “negative”, so there is no “positive” to defend" in _Parsed(render_html(wrong)).text


def test_colours_are_relative_and_a_word_takes_its_weakest_task() -> None:
    assert shades(RADII) == {1: len(RAMP) - 1, 2: 0, 3: 4}
    alike = answer(task((1,), 0.300, None), task((2,), 0.301, None), task((3,), 0.302, None))
    assert shades(alike) == {1: 3, 2: 3, 3: 3}
    both = answer(task((1,), 0.3, None), task((1, 3), 0.1, None))
    assert shades(both) == {1: 3, 3: 3}
    assert shades(answer(task((1,), 0.0, None))) == {1: 0}
    assert shades(AT_EPS) == {1: 3, 2: 0, 3: 0}


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_ramp_darkens_steadily_and_its_letters_can_be_read() -> None:
    lights = [_luminance(colour) for colour in RAMP]
    assert lights == sorted(lights, reverse=True)
    for step, light in enumerate(lights):
        letters = _luminance(ink(step))
        assert (max(light, letters) + 0.05) / (min(light, letters) + 0.05) >= 4.5


@given(st.lists(st.floats(1e-9, 1e4), min_size=1, max_size=200))
def test_a_scale_spans_its_values_in_equal_factors(values: list[float]) -> None:
    scale = ColourScale.over(values)
    assert scale is not None
    order = sorted(values)
    assert [scale.step(v) for v in order] == sorted(scale.step(v) for v in order)
    assert scale.high / scale.low >= 2 * (1 - 1e-9)
    assert scale.low <= order[len(order) // 50] * (1 + 1e-9)
    edges = scale.edges()
    assert len(edges) == len(RAMP) - 1
    for step, edge in enumerate(edges):
        assert (scale.step(edge * (1 - 1e-9)), scale.step(edge * (1 + 1e-9))) == (step, step + 1)
    assert scale.step(0.0) == 0
    assert ColourScale.over([0.0]) is None


def test_missing_numbers_are_shown_as_a_dash() -> None:
    cells = shown(task((1, 3), 0.0, None), None)
    assert (cells.words, cells.text) == ("1+3", "a + film")
    assert (cells.certified, cells.attacked, cells.margin) == ("0", "—", "—")


def test_very_many_rows_are_not_all_named() -> None:
    rows = tuple(range(1, 197))
    cells = shown(task((1,), 0.1, None).model_copy(update={"words": rows, "tokens": rows}), None)
    assert (cells.words, cells.text) == ("1+2+3+…+196", "1 + 2 + 3 + … + 196")


def test_verdicts_together() -> None:
    assert together(["certified", "certified"]) == "certified"
    assert together(["certified", "unknown"]) == "unknown"
    assert together(["certified", "unknown", "falsified"]) == "falsified"
    assert together([]) == "unknown"
