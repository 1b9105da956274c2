"""Mutants break what the engine executes, in every method they are said to show in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from buffet.soundness import claims
from buffet.soundness.campaign import check_bounds, engine_of, known_methods
from buffet.soundness.mutants import SEEDS, Mutant, Patch, evidence
from buffet.soundness.mutations import MUTANTS
from buffet.verify import verify


def place(mutant: Mutant) -> tuple[int, str]:
    return id(mutant.patch.owner), mutant.patch.name


def counting(right: Any, tick: Callable[[], None]) -> Any:
    """The same function, property or entry of a table, telling when it is used."""

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            tick()
            return function(*args, **kwargs)

        return wrapped

    if isinstance(right, property):
        assert right.fget is not None
        return property(told(right.fget))
    if is_dataclass(right) and not isinstance(right, type):
        values = {f.name: getattr(right, f.name) for f in fields(right)}
        return replace(right, **{name: told(v) for name, v in values.items() if callable(v)})
    return told(right)


def test_every_mutant_breaks_what_its_methods_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what only the campaign calls when it looks inside."""
    used: dict[str, set[tuple[int, str]]] = defaultdict(set)
    now = ""
    methods = known_methods()
    monkeypatch.setattr(claims, "_claims", _nothing)
    with ExitStack() as stack:
        for where, patch in {place(m): m.patch for m in MUTANTS}.items():

            def counted(right: Any, where: tuple[int, str] = where) -> Any:
                return counting(right, lambda: used[now].add(where))

            stack.enter_context(Patch(patch.owner, patch.name, counted)())
        for now in sorted({name for mutant in MUTANTS for name in mutant.methods}):
            own = [mutant for mutant in MUTANTS if now in mutant.methods]
            wanted = {place(mutant) for mutant in own}
            for points in map(evidence, dict.fromkeys([*(s for m in own for s in m.seeds), *SEEDS])):
                case, engine = points.case, engine_of(points.case)
                list(check_bounds(points, methods[now], now, inside=True))
                if not wanted <= used[now]:
                    verify(
                        case.model, case.region, None, methods[now],
                        label=case.label, mask=case.mask, falsify=False, engine=engine,
                    )  # fmt: skip
                if wanted <= used[now]:
                    break
    idle = [(m.name, method) for m in MUTANTS for method in m.methods if place(m) not in used[method]]
    assert idle == []


def _nothing(*_: Any) -> Iterator[Any]:
    return iter(())
