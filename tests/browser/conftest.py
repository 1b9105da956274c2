"""A browser, and a page of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffet.report import render_html, render_substitutions
from buffet.report.evaluation import evaluation_page
from buffet.report.sweep import sweep_page
from reports import AT_EPS, FLIPPED, IMAGE, RADII, answer, evaluation, row, swaps, sweep_rows, task


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from chromium import FLAGS, PROGRAM, playwright  # tests skip where playwright is not installed

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
        "sweep": sweep_page(sweep_rows()),
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
