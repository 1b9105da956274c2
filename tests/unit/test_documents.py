"""Numbers in documents come from committed rows."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def measured() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measured", DOCS / "measured.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_say_what_the_rows_say(measured: ModuleType) -> None:
    """`python docs/measured.py` makes them so."""
    for path, text in measured.pages().items():
        assert path.read_text() == text, f"{path}: draw it anew"


def test_a_table_takes_its_place_on_a_page(measured: ModuleType) -> None:
    page = "before\n\n<!-- a -->\nold\n<!-- end -->\n\nafter <!-- end -->\n"
    drawn = measured.drawn(page, {"a": "| new \\1 |\n"})
    assert drawn == "before\n\n<!-- a -->\n\n| new \\1 |\n\n<!-- end -->\n\nafter <!-- end -->\n"
    assert measured.drawn(drawn, {"a": "| new \\1 |\n"}) == drawn
    with pytest.raises(AssertionError, match="stands 0 times"):
        measured.drawn(page, {"b": ""})


def test_a_card_is_read_as_it_is_written(measured: ModuleType) -> None:
    models = DOCS.parent / "src" / "buffet" / "models"
    found = measured.card(models / "sst2-small")
    assert 80 < found["dev"] < 90
    assert 80 < found["test"] < 90
    assert measured.card(models / "sst2-substitutions")["recipe"].startswith("sst-narrow-1-substitutions")
