"""Who may import whom: the architecture, held to the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import buffet
import buffet_checker

HOME, CHECKER = Path(buffet.__file__).parent, Path(buffet_checker.__file__).parent
EVERYONE = {"errors", "lazy"}
LAYERS: dict[str, set[str]] = {
    "network": {"printing"},
    "regions": set(),
    "bounds": {"network"},
    "relaxations": {"network", "regions", "bounds"},
    "propagation": {"network", "properties", "regions", "bounds", "relaxations"},
    "optimisation": {"network", "regions", "bounds", "relaxations", "propagation"},
    "compositions": set(),
    "methods": {
        *("compositions", "network", "properties", "regions", "bounds", "relaxations", "propagation"),
        "optimisation",
    },
    "branching": {
        "network",
        "regions",
        "bounds",
        "relaxations",
        "propagation",
        "optimisation",
        "methods",
        "system",
    },
    "footprint": {"network", "propagation", "optimisation", "methods"},
    "attack": {"network", "properties", "regions", "system"},
    "properties": {"network", "printing"},
    "loading": {"network", "printing", "properties", "regions", "system"},
    "synonyms": {"system"},
    "training": {"network", "loading", "data", "printing", "synonyms", "system"},
    "evaluation": {
        *("attack", "compositions", "data", "experiments", "loading", "methods", "printing", "query"),
        *("properties", "regions", "report", "search", "synonyms", "system", "verdicts", "verification"),
        "words",
    },
    "system": set(),
    "printing": set(),
    "verdicts": set(),
    "results": {"compositions", "printing", "regions", "verdicts"},
}
"""What a package or module may import of buffet besides `EVERYONE`; those not named import what they need."""


def imported(folder: Path, package: str) -> Iterator[tuple[Path, str]]:
    """Every file of a folder, and the parts of a package that it imports."""
    files = folder.rglob("*.py") if folder.is_dir() else [folder.with_suffix(".py")]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                first, *rest = node.module.split(".")
                if first == package:
                    yield from ((file, part) for part in (rest[:1] or [alias.name for alias in node.names]))
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] == package:
                        yield file, alias.name.partition(".")[2].split(".")[0]


@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_imports_what_lies_below_it(layer):
    allowed = LAYERS[layer] | EVERYONE | {layer}
    assert {
        (str(file), part) for file, part in imported(HOME / layer, "buffet") if part not in allowed
    } == set()


def test_nothing_but_commands_imports_what_measures_buffet():
    others = [part for part in HOME.iterdir() if part.name not in ("lab", "cli", "models", "__pycache__")]
    assert [file for part in others for file, name in imported(part, "buffet") if name == "lab"] == []


def test_the_checker_shares_nothing_with_what_it_checks():
    assert list(imported(CHECKER, "buffet")) == []
    assert list(imported(CHECKER, "torch")) == []
