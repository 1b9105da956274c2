"""What pages look like: light, dark and on paper, letters that can be read, axes, thousands of rows."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from chromium import opened, playwright

from buffet.report.sweep import sweep_page
from reports import sweep_rows


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
