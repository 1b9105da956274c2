"""Packages whose names are imported when they are first asked for (PEP 562).

PyTorch takes more than a second of CPU time to import: help, listings and the checker do without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package that offers these names, each with the module it is in.

    A name whose home is the package's own submodule of that name is the submodule. What was asked for once
    becomes an attribute of the package, so that it is looked up here no more.
    """

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(homes[name])
        value = module if homes[name] == f"{package}.{name}" else getattr(module, name)
        setattr(import_module(package), name, value)
        return value

    def listed() -> list[str]:
        return sorted({*vars(import_module(package)), *homes})

    return find, listed
