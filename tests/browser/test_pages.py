"""The pages in a real browser: what is drawn, filtered, sorted and shown on demand, and what must not be."""

from __future__ import annotations

from pathlib import Path

import pytest
from chromium import column, expect, opened, playwright, texts

from buffet.experiments.summary import FAIR, GOOD, cells, summarise
from reports import HOSTILE, sweep_rows

ROWS = sweep_rows()


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
