"""Mutants break what the engine executes, in every method they are said to show in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from buffet.lab.soundness import claims
from buffet.lab.soundness.campaign import check_bounds, engine_of
from buffet.lab.soundness.exact import EXACT, check_exactly
from buffet.lab.soundness.mutants import SEEDS, Mutant, Patch, check_answer, evidence, findings, hunt, methods
from buffet.lab.soundness.mutations import MUTANTS, staged
from buffet.lab.soundness.points import Points
from buffet.lab.soundness.staged import STAGED
from buffet.methods import Method
from buffet.regions import Cell
from buffet.verification.verify import verify


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
    if isinstance(right, staticmethod):
        return staticmethod(told(right.__func__))
    return told(right) if callable(right) else right


def test_every_mutant_breaks_what_its_methods_execute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not what only the campaign calls when it looks inside."""
    used: dict[str, set[tuple[int, str]]] = defaultdict(set)
    now = ""
    known = methods()
    monkeypatch.setattr(claims, "_claims", _nothing)
    with ExitStack() as stack:
        for where, patch in {place(m): m.patch for m in MUTANTS}.items():

            def counted(right: Any, where: tuple[int, str] = where) -> Any:
                return counting(right, lambda: used[now].add(where))

            stack.enter_context(Patch(patch.owner, patch.name, counted)())
        for now in sorted({name for mutant in MUTANTS for name in mutant.methods}):
            own = [mutant for mutant in MUTANTS if now in mutant.methods]
            wanted = {place(mutant) for mutant in own}
            first = [name for mutant in own for name in mutant.cases]
            for work in (_answer, _bounds):  # what is quick first
                for case in dict.fromkeys([*first, *SEEDS]):
                    if wanted <= used[now]:
                        break
                    work(evidence(case), known[now], now)
        for now in sorted({name for mutant in MUTANTS for name in mutant.exact}):
            check_exactly(now)
    idle = [(m.name, name) for m in MUTANTS for name in m.methods if place(m) not in used[name]]
    idle += [(m.name, "") for m in MUTANTS if m.exact and not any(place(m) in used[e] for e in m.exact)]
    assert idle == [("rounding of ranges", "")]  # a number, whose use cannot be counted


def _answer(points: Points, method: Method, name: str) -> None:
    case, engine = points.case, engine_of(points.case)
    if method.cells == 1 or not isinstance(case.region, Cell):
        verify(
            case.model, case.region, None, method,
            label=case.label, mask=case.mask, falsify=False, engine=engine,
        )  # fmt: skip


def _bounds(points: Points, method: Method, name: str) -> None:
    if method.cells == 1:
        list(check_bounds(points, method, name, inside=True))


def _nothing(*_: Any) -> Iterator[Any]:
    return iter(())


QUICK = [mutant for mutant in staged.MUTANTS if mutant.name not in ("lower halves", "leaves' size", "a gap")]


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_mutants_with_cases_of_their_own_are_noticed(mutant: Mutant) -> None:
    """Those that show soon; `make soundness` has all."""
    assert hunt(mutant).violation is not None


@pytest.mark.parametrize("name", STAGED)
def test_staged_cases_show_nothing_without_a_mutant(name: str) -> None:
    """In the methods that they are staged for."""
    points = evidence(name)
    assert bool(points.case.region.contains(points.deltas).all())
    names = {method for m in staged.MUTANTS if name in m.cases for method in m.methods}
    assert names
    assert all(found.violations == () for found in findings([points], sorted(names)))


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_wrong_in_the_last_bits(name: str) -> None:
    found = check_exactly(name)
    assert found.violations == ()
    assert found.checks > 100


def test_cells_prove_nothing_beyond_a_planted_point() -> None:
    points, name = evidence(203), "lse, cells"
    found = check_answer(points, methods()[name], name, engine_of(points.case))
    assert found.violations == ()
    assert found.checks > 100
