"""Pages in a real browser, and what they did besides being looked at."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

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


@dataclass
class Seen:
    """What a page did besides being looked at."""

    trouble: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


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
