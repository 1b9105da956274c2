"""The pages in a real browser: what is drawn, filtered, sorted and shown on demand, and what must not be."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from buffet.experiments.summary import FAIR, GOOD, cells, summarise
from buffet.report import render_html, render_substitutions
from buffet.report.evaluation import evaluation_page
from buffet.report.sweep import sweep_page
from reports import (
    AT_EPS,
    FLIPPED,
    HOSTILE,
    IMAGE,
    RADII,
    answer,
    evaluation,
    row,
    swaps,
    sweep_rows,
    task,
)

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
expect = playwright.expect

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
ROWS = sweep_rows()


@dataclass
class Seen:
    """What a page did besides being looked at."""

    trouble: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    if PROGRAM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=PROGRAM, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every page that is looked at here."""
    long = answer(task((1,), 0.1, 0.2, tokens=("x" * 300,)), text="x" * 300)
    pages = {
        "sweep": sweep_page(ROWS),
        "certify": render_html(RADII),
        "evaluation": evaluation_page(evaluation(), "buffet evaluate --data data.tsv"),
        "eps": render_html(AT_EPS),
        "pairs": render_html(answer(task((1, 3), 0.1, 0.2), task((3,), 0.3, 1e3), task((2,), 1e-12, None))),
        "image": render_html(IMAGE),
        "swaps": render_substitutions(swaps()),
        "flipped": render_substitutions(FLIPPED),
        "zero": render_html(answer(task((1,), 0.0, None))),
        "long": render_html(long),
        "nothing": sweep_page([row("a", status="failed", reason="worker died", certified=None)]),
        "bare": sweep_page([row("a", attacked=None), row("b", method="lse", certified=0.0)]),
    }
    directory = tmp_path_factory.mktemp("pages")
    for name, content in pages.items():
        (directory / f"{name}.html").write_text(content, encoding="utf-8")
    return {name: directory / f"{name}.html" for name in pages}


@contextmanager
def opened(browser: playwright.Browser, file: Path, **context: object) -> Iterator[playwright.Page]:
    """A page in a browser of its own; that it is well-behaved is checked at the end."""
    with browser.new_context(viewport={"width": 1200, "height": 800}, **context) as window:
        page = window.new_page()
        seen = Seen()
        page.on("console", lambda message: seen.trouble.append(message.text))
        page.on("pageerror", lambda error: seen.trouble.append(str(error)))
        page.on("dialog", lambda dialog: (seen.trouble.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: seen.requests.append(request.url))
        page.goto(file.as_uri())
        yield page
        assert seen.trouble == []
        outside = [url for url in seen.requests if url != file.as_uri() and not url.startswith("data:")]
        assert outside == []


def texts(page: playwright.Page, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def column(page: playwright.Page, section: str, number: int) -> list[str]:
    return texts(page, f"#{section} tbody td:nth-child({number})")


@pytest.mark.parametrize(
    "name",
    [
        "sweep",
        "certify",
        "evaluation",
        "image",
        "eps",
        "swaps",
        "flipped",
        "pairs",
        "zero",
        "long",
        "bare",
        "nothing",
    ],
)
def test_pages_render_quietly_and_fit_the_window(
    browser: playwright.Browser, files: dict[str, Path], name: str
) -> None:
    with opened(browser, files[name]) as page:
        for width in (1200, 360):
            page.set_viewport_size({"width": width, "height": 800})
            page.evaluate("() => new Promise(requestAnimationFrame)")
            assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert page.locator("h1").is_visible()
            assert name in ("nothing", "evaluation") or page.locator(".words").first.is_visible()
            assert "NaN" not in page.content()
            # Nothing is drawn outside of the window, except in tables, which scroll by themselves.
            boxes = "[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, svg'))"
            right = f"Math.max(...{boxes}.map(e => e.getBoundingClientRect().right))"
            assert page.evaluate(right) <= width + 1


@pytest.mark.parametrize("name", ["sweep", "certify", "image", "eps", "swaps"])
def test_everything_has_a_name_for_those_who_cannot_see_it(
    browser: playwright.Browser, files: dict[str, Path], name: str
) -> None:
    with opened(browser, files[name]) as page:
        assert page.locator("table").count() == page.locator("table > caption").count() > 0
        assert page.locator("th").count() == page.locator("th[scope=col]").count()
        assert page.locator("svg:not([aria-label])").count() == 0
        assert page.evaluate("[...document.querySelectorAll('select, input')].every(e => e.labels.length)")
        assert page.locator("section").count() == page.locator("section[aria-labelledby]").count()
        names = page.locator(".chip").evaluate_all("chips => chips.map(chip => chip.ariaLabel)")
        assert names
        assert all(": " in name for name in names)


def test_a_hostile_sentence_is_only_text(browser: playwright.Browser, files: dict[str, Path]) -> None:
    with opened(browser, files["sweep"]) as page:
        assert page.locator("script").count() == 2
        assert page.locator("img").count() == 0
        assert HOSTILE.split()[0] in texts(page, ".chip")
        page.fill("[name=text]", "onerror=")
        expect(page.locator(".card")).to_have_count(2)
        for chip in page.locator(".chip").all()[:4]:
            chip.hover()
        assert HOSTILE.split()[3] in "".join(texts(page, "#sentences"))
        page.click("[type=reset]")
        expect(page.locator("#failures")).to_contain_text("took longer than 5 s <b>")


def test_the_table_of_methods_says_what_the_summary_says(
    browser: playwright.Browser, files: dict[str, Path]
) -> None:
    with opened(browser, files["sweep"]) as page:
        heads = page.locator("#methods th").evaluate_all("heads => heads.map(head => head.textContent)")
        shown = {
            tuple(line[:3]): dict(zip(heads, line, strict=True))
            for line in page.locator("#methods tbody tr").evaluate_all(
                "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
            )
        }
    lines = summarise(ROWS)
    assert len(shown) == len(lines) == 16
    names = ("model", "norm", "method", "tasks", "failed", "mean ×", "median ×", "worst ×", "cert./att.")
    for line in lines:
        expected = dict(
            zip((*names, f"≥ {GOOD}", f"≥ {FAIR}", "seconds", "time ×"), cells(line), strict=True)
        )
        expected.pop("seconds")
        found = shown[expected["model"], expected["norm"], expected["method"]]
        assert {name: found[name] for name in expected} == expected


def test_filters_reach_every_section(browser: playwright.Browser, files: dict[str, Path]) -> None:
    with opened(browser, files["sweep"]) as page:
        everything = sum(r.ok and r.what == "radius" for r in ROWS)
        expect(page.locator("#status")).to_have_text(f"{everything} of {everything} answers")
        page.select_option("[name=norm]", label="L∞")
        half = sum(r.ok and r.what == "radius" and r.norm == "inf" for r in ROWS)
        expect(page.locator("#status")).to_have_text(f"{half} of {everything} answers")
        assert set(column(page, "methods", 2)) == {"L∞"}
        assert set(texts(page, ".norm")) == {"L∞"}
        page.select_option("[name=model]", label="large")
        page.select_option("[name=method]", label="lse")
        expect(page.locator("#scatters figure")).to_have_count(1)
        assert set(column(page, "methods", 1)) == {"large"}
        assert set(column(page, "weakest", 4)) == {"lse"}
        assert "(lse)" in page.inner_text("#sentences >> xpath=..")
        page.fill("[name=text]", "NUMBER 2")
        expect(page.locator(".card")).to_have_count(1)
        assert "number 2" in page.locator(".card .words").first.inner_text()
        page.fill("[name=text]", "no such sentence")
        expect(page.locator("#status")).to_have_text(f"0 of {everything} answers")
        assert "Nothing to show" in page.inner_text("#sentences")
        page.click("[type=reset]")
        expect(page.locator("#status")).to_have_text(f"{everything} of {everything} answers")


def test_an_evaluation_is_filtered_by_level_and_outcome(
    browser: playwright.Browser, files: dict[str, Path]
) -> None:
    with opened(browser, files["evaluation"]) as page:
        expect(page.locator("#status")).to_have_text("30 of 30 sentences")
        assert texts(page, "#curve tbody td:nth-child(1)") == ["1", "2", "all"]
        assert len(column(page, "hardest", 1)) == 10
        assert column(page, "hardest", 3) == ["1"] * 5 + ["2"] * 5
        assert len(column(page, "open", 1)) == 5
        page.select_option("[name=level]", label="1")
        assert len(column(page, "hardest", 1)) == 5
        assert "Nothing to show" in page.inner_text("#open")
        page.select_option("[name=outcome]", label="refused")
        expect(page.locator("#status")).to_have_text("5 of 30 sentences")
        assert set(column(page, "all", 4)) == {"refused"}
        page.click("[type=reset]")
        expect(page.locator("#status")).to_have_text("30 of 30 sentences")
        assert len(column(page, "hardest", 1)) == 10
        assert HOSTILE.split()[0] in page.inner_text("#hardest")


def test_tables_sort_by_a_click_or_a_key(browser: playwright.Browser, files: dict[str, Path]) -> None:
    with opened(browser, files["sweep"]) as page:
        head = page.locator("#methods th", has_text="worst ×")
        head.locator("button").click()
        assert head.get_attribute("aria-sort") == "descending"
        place = 1 + page.locator("#methods th").all_inner_texts().index("worst ×")
        values = [float(text) for text in column(page, "methods", place)]
        assert values == sorted(values, reverse=True)
        head.locator("button").press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert column(page, "methods", place) == [f"{value:.3f}" for value in reversed(values)]
        assert page.locator("#methods th[aria-sort]").count() == 1
        shares = [float(text) for text in column(page, "weakest", 7)]
        assert len(shares) == 10
        assert shares == sorted(shares)
        page.click("#weakest .more")
        assert len(column(page, "weakest", 7)) > 10


def test_numbers_of_a_word_on_hover_focus_and_tap(
    browser: playwright.Browser, files: dict[str, Path]
) -> None:
    with opened(browser, files["certify"], has_touch=True) as page:
        tip, chips = page.locator("#tooltip"), page.locator(".chip")
        chips.nth(0).hover()
        assert " ".join(tip.inner_text().split()) == "a certified 0.3000 attacked 0.4001 margin 0.5"
        box, chip = tip.bounding_box(), chips.nth(0).bounding_box()
        assert box
        assert chip
        assert not (box["y"] < chip["y"] + chip["height"] and chip["y"] < box["y"] + box["height"])
        page.mouse.move(0, 0)
        assert tip.is_hidden()
        page.keyboard.press("Tab")  # one stop for the whole sentence
        assert "0.3000" in tip.inner_text()
        page.keyboard.press("ArrowRight")
        assert "0.1000" in tip.inner_text()
        page.keyboard.press("Escape")
        assert tip.is_hidden()
        page.keyboard.press("End")
        assert "0.2000" in tip.inner_text()
        page.keyboard.press("Tab")
        assert tip.is_hidden()
        chips.nth(1).tap()
        assert "0.1000" in tip.inner_text()
        page.locator("h1").tap()
        assert tip.is_hidden()
        assert (
            chips.nth(1).get_attribute("aria-label")
            == "<script>alert(1)</script>: certified 0.1000, attacked —, margin 0.5"
        )


def test_a_word_of_a_sweep_lists_its_methods_and_a_dot_its_task(
    browser: playwright.Browser, files: dict[str, Path]
) -> None:
    with opened(browser, files["sweep"]) as page:
        page.locator(".card").nth(1).locator(".chip").first.hover()
        tip = page.locator("#tooltip")
        lines = tip.inner_text().split("\n")
        start = lines.index("certified by")
        radii = [float(line) for line in lines[start:] if line[0].isdigit()]
        assert {"baseline", "lse", "o-buffet", "interval"} <= set(lines[start:])
        assert "attacked" in lines[:start]
        assert len(radii) == 4
        assert radii == sorted(radii, reverse=True)
        page.mouse.move(0, 0)
        plot = page.locator("#scatters svg").first
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        assert box
        first = plot.locator(".dots").get_attribute("d").split("h0")[0].removeprefix("M").split()
        scale = box["width"] / float(plot.get_attribute("viewBox").split()[2])
        page.mouse.move(box["x"] + float(first[0]) * scale, box["y"] + float(first[1]) * scale)
        assert "baseline" in tip.inner_text()
        assert "attacked" in tip.inner_text()


@pytest.mark.parametrize("name", ["sweep", "certify"])
def test_dark_mode_and_print(browser: playwright.Browser, files: dict[str, Path], name: str) -> None:
    def paper(page: playwright.Page) -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, colour.removeprefix("rgb(").removesuffix(")").split(",")))

    with opened(browser, files[name], color_scheme="light") as page:
        assert paper(page) > 700
    with opened(browser, files[name], color_scheme="dark") as page:
        assert paper(page) < 100
        letters = "e => getComputedStyle(e).color"
        assert page.locator("h1").evaluate(letters) != page.locator(".chip").first.evaluate(letters)
        page.emulate_media(media="print")
        assert paper(page) == 765
        page.set_viewport_size({"width": 680, "height": 960})  # A4 within its margins
        assert page.evaluate("document.documentElement.scrollWidth") <= 680
        assert page.locator(".filter").count() == 0 or page.locator(".filter").is_hidden()


READABLE = """() => {
    const channel = value => (value /= 255) <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4;
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
    const behind = node => {
        const colour = numbers(getComputedStyle(node).backgroundColor);
        return colour.length === 3 ? colour : behind(node.parentElement);
    };
    const texts = [...document.querySelectorAll("main *:not(svg *)")].filter(node => node.offsetParent
        && [...node.childNodes].some(child => child.nodeType === 3 && child.textContent.trim()));
    return texts.map(node => {
        const [a, b] = [light(numbers(getComputedStyle(node).color)), light(behind(node))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.outerHTML];
    });
}"""


@pytest.mark.parametrize("name", ["sweep", "eps", "flipped"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_can_be_read(
    browser: playwright.Browser, files: dict[str, Path], name: str, scheme: str
) -> None:
    with opened(browser, files[name], color_scheme=scheme) as page:
        found = page.evaluate(READABLE)
        assert len(found) > 30
        assert [text for contrast, text in found if contrast < 4.5] == []


def test_an_image_is_drawn_patch_by_patch(browser: playwright.Browser, files: dict[str, Path]) -> None:
    with opened(browser, files["image"]) as page:
        colours = page.locator(".patches canvas").evaluate_all(
            "faces => faces.map(face => [...face.getContext('2d').getImageData(0, 0, 1, 1).data])"
        )
        assert colours == [[255, 0, 0, 255], [0, 255, 0, 255], [0, 0, 255, 255], [128, 128, 128, 255]]
        boxes = [face.bounding_box() for face in page.locator(".patches canvas").all()]
        assert boxes[0]["y"] == boxes[1]["y"] < boxes[2]["y"]
        assert boxes[0]["x"] == boxes[2]["x"] < boxes[1]["x"]
        assert min(box["width"] for box in boxes) > 100
        chips = page.locator(".patches .chip")
        assert chips.evaluate_all("chips => chips.map(chip => chip.ariaLabel.split(':')[0])") == [
            "(0,0)",
            "(1,1)",
        ]
        chips.first.focus()
        assert "(0,0)" in page.inner_text("#tooltip")
        page.keyboard.press("ArrowDown")  # nothing moved below it
        assert "(0,0)" in page.inner_text("#tooltip")
        page.keyboard.press("ArrowRight")
        assert "(1,1)" in page.inner_text("#tooltip")
        assert texts(page, "#numbers th")[1] == "patch"


def test_swaps_are_named_and_those_that_flip_the_answer(
    browser: playwright.Browser, files: dict[str, Path]
) -> None:
    with opened(browser, files["swaps"]) as page:
        assert "proven for all 1,234 sentences" in page.inner_text(".lede")
        assert column(page, "numbers", 3) == ["0", "2", "9"]
        assert column(page, "numbers", 4)[1] == "dull, <b> [UNK]"
        chips = page.locator(".words .chip")
        assert chips.count() == 2
        chips.last.hover()
        assert "1 more" in page.inner_text("#tooltip")
    with opened(browser, files["flipped"]) as page:
        assert "is negative, with margin -1.5" in page.inner_text(".lede")
        fewer, flip, *_ = texts(page, "section ul li")
        assert fewer == "At most 1: certified, all 12 sentences, margin at least 0.5"
        assert flip == "film → dull"


def test_brackets_of_a_sentence(browser: playwright.Browser, files: dict[str, Path]) -> None:
    with opened(browser, files["certify"]) as page:
        assert texts(page, ".bars .note")[:3] == ["0.3000 … 0.4001", "0.1000 … —", "0.2000 … 0.3000"]
        assert page.locator(".bar .attack").count() == 2
    with opened(browser, files["eps"]) as page:
        assert texts(page, ".bars .note")[:3] == ["certified, 0.5", "falsified, -3", "unknown, —"]
        assert texts(page, "#numbers td.falsified") == ["falsified"]


def test_axes_hold_their_values_with_a_few_round_ticks(
    browser: playwright.Browser, files: dict[str, Path]
) -> None:
    draw = random.Random(0)
    cases = [[10 ** draw.uniform(-9, 4) for _ in range(draw.randint(1, 5))] for _ in range(200)]
    cases += [[value, value * draw.uniform(1, 3)] for [value, *_] in cases] + [[0.0], [1.0], [1e-12, 1e3]]
    with opened(browser, files["certify"]) as page:
        found = page.evaluate(
            """cases => cases.flatMap(values => [null, true].map(log => {
                const axis = makeAxis(values, 100, { log });
                const ticks = axis.ticks;
                return [ticks.map(tick => tick.at), values.map(axis.at), ticks.map(tick => tick.text)];
            }))""",
            cases,
        )
    for values, (ticks, places, names) in zip([v for v in cases for _ in (0, 1)], found, strict=True):
        assert 1 <= len(ticks) <= 9, values
        assert ticks == sorted(set(ticks)), values
        assert len(set(names)) == len(names), values
        assert all(0 <= place <= 100 for place in ticks + places)
        order = sorted(range(len(values)), key=values.__getitem__)
        assert [places[i] for i in order] == sorted(places)


def test_thousands_of_rows_do_not_become_thousands_of_elements(
    browser: playwright.Browser, tmp_path: Path
) -> None:
    rows = sweep_rows(sentences=63, words=5)
    assert len(rows) > 5000
    page_file = tmp_path / "many.html"
    page_file.write_text(sweep_page(rows), encoding="utf-8")
    assert page_file.stat().st_size < 2_000_000
    with opened(browser, page_file) as page:
        assert page.evaluate("document.querySelectorAll('*').length") < 8000
        before = page.locator(".card").count()
        page.click("#sentences .more")
        assert page.locator(".card").count() == before + 10
        # Drawing everything again, as a filter does, has to feel immediate; the limit is for slow machines.
        page.evaluate("document.querySelector('#filter').dispatchEvent(new Event('reset'))")
        spent = page.evaluate(
            """() => new Promise(done => {
                const start = performance.now();
                document.querySelector('#filter').dispatchEvent(new Event('reset'));
                setTimeout(() => done(performance.now() - start), 1);
            })"""
        )
        assert spent < 3000
