"""What is imported when: a name, a listing or a page of help costs no PyTorch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import buffet
from buffet import compositions
from buffet.cli.app import COMMANDS
from buffet.loading.directories import MODELS
from buffet.methods import METHODS, Method, method_named
from buffet.optimisation.starts import STARTS
from buffet.optimisation.table import OPTIMISERS
from buffet.propagation.plan import PROPAGATIONS
from buffet.relaxations.softmax import SOFTMAXES
from buffet.relaxations.table import PRODUCTS

LAZY = ("buffet", "buffet.loading", "buffet.training")
ENGINE = ("buffet.engine", "buffet.methods", "buffet.network", "buffet.regions", "buffet.verification.verify")


def imported_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after it ran some code."""
    script = f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def command(*arguments: str) -> str:
    return f"from buffet.cli import main\nassert main({list(arguments)}) == 0"


@pytest.mark.parametrize(
    "code",
    [
        "import buffet; dir(buffet); buffet.__version__; buffet.BuffetError",
        command("--help"),
        command("methods"),
        command("methods", "--json"),
        "\n".join(command(name, "--help") for name in COMMANDS),
    ],
)
def test_names_listings_and_help_take_no_torch(code: str) -> None:
    assert not {"torch", "numpy", *ENGINE} & imported_by(code)


def test_the_checker_takes_neither_torch_nor_the_engine(tmp_path: Path) -> None:
    model = buffet.load()
    proof = tmp_path / "proof.safetensors"
    region = buffet.LpBall(model.embed("a gripping film"), words=[2])
    buffet.certify_to(proof, model, region, eps=0.01, method="baseline")
    for place in ([], ["--model", str(MODELS / "sst2-small")]):
        modules = imported_by(command("check", str(proof), *place))
        assert "buffet_checker.check" in modules
        assert not {"torch", *ENGINE} & modules


def test_from_buffet_import_everything() -> None:
    names: dict[str, object] = {}
    exec("from buffet import *", names)
    assert names.keys() >= set(buffet.__all__)
    assert "__version__" not in names
    assert set(dir(buffet)) >= {*buffet.__all__, "__version__", "__doc__"}
    with pytest.raises(AttributeError, match="module 'buffet' has no attribute 'certify'"):
        _ = buffet.certify


@pytest.mark.parametrize("package", LAZY)
def test_names_of_a_lazy_package_are_what_a_type_checker_sees(package: str) -> None:
    """The table says of every name where it is; so do the imports that only type checkers read."""
    module = import_module(package)
    assert module.__file__ is not None
    tree = ast.parse(Path(module.__file__).read_text())
    (seen,) = (node for node in tree.body if isinstance(node, ast.If))
    declared = {
        alias.name: f"{node.module}.{alias.name}" if node.module == package else node.module
        for node in seen.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (table,) = (node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    assert ast.literal_eval(table) == declared
    assert set(module.__all__) == declared.keys() - {"__version__"}
    for name in declared:
        assert getattr(module, name) is not None


def test_methods_are_listed_with_the_parts_that_the_engine_has() -> None:
    assert {
        "propagation": tuple(PROPAGATIONS),
        "product": tuple(PRODUCTS),
        "softmax": tuple(SOFTMAXES),
        "optimise": tuple(OPTIMISERS),
        "start": tuple(STARTS),
    } == compositions.PARTS
    assert {name: vars(method) for name, method in METHODS.items()} == {
        name: vars(parts) for name, parts in compositions.COMPOSITIONS.items()
    }


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        *((METHODS[name], name) for name in METHODS),
        (method_named("buffet", steps=60), "buffet (steps 60)"),
        (method_named("lse", propagation="backward", window=2), "lse (propagation backward, window 2)"),
        (method_named("buffet", optimise="none"), "buffet (optimise none)"),
        (Method(**{**vars(METHODS["buffet"]), "rivals": ()}), "buffet (alone)"),
        (Method(**{**vars(METHODS["lse"]), "rivals": ("dual", "middle")}), "lse (rivals dual, middle)"),
    ],
)
def test_a_method_has_a_title(method: Method, expected: str) -> None:
    assert compositions.title(method) == expected
