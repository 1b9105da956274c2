"""Mutants break what the engine executes, in every method they are said to show in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from buffet.lab.soundness import claims
from buffet.lab.soundness.campaign import check_bounds
from buffet.lab.soundness.claims import check_answer
from buffet.lab.soundness.cut_claims import check_cuts
from buffet.lab.soundness.points import Points
from buffet.methods import Method
from buffet.regions import Cell
from engine_mutants.exact import EXACT, check_exactly
from engine_mutants.hunting import SEEDS, WITH_CUTS, Mutant, Patch, evidence, findings, hunt, methods
from engine_mutants.staged import STAGED
from engine_mutants.table import MUTANTS


def place(mutant: Mutant) -> tuple[int, str]:
    return id(mutant.owner), mutant.attribute


def counting(right: Any, tick: Callable[[], None]) -> Any:
    """The same function or entry of a table, telling when it is used."""

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            tick()
            return function(*args, **kwargs)

        return wrapped

    if is_dataclass(right) and not isinstance(right, type):
        values = {f.name: getattr(right, f.name) for f in fields(right)}
        return replace(right, **{name: told(v) for name, v in values.items() if callable(v)})
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

            stack.enter_context(Patch(patch.owner, patch.attribute, counted)())
        for now in sorted({name for mutant in MUTANTS for name in mutant.methods}):
            own = [mutant for mutant in MUTANTS if now in mutant.methods]
            wanted = {place(mutant) for mutant in own}
            first = [name for mutant in own for name in mutant.cases if name not in EXACT]
            for work in (_cuts, _answer, _bounds):  # what is quick first
                for case in dict.fromkeys([*first, *SEEDS]):
                    if wanted <= used[now]:
                        break
                    work(evidence(case), known[now], now)
        for now in EXACT:
            check_exactly(now)
    idle = [(m.name, name) for m in MUTANTS for name in m.methods if place(m) not in used[name]]
    exact = [(m, [name for name in m.cases if name in EXACT]) for m in MUTANTS]
    idle += [(m.name, "") for m, names in exact if names and not any(place(m) in used[n] for n in names)]
    assert idle == [("rounding of ranges", "")]  # a number, whose use cannot be counted


def _cuts(points: Points, method: Method, name: str) -> None:
    if name in WITH_CUTS:
        check_cuts(points, method, name)


def _answer(points: Points, method: Method, name: str) -> None:
    if name not in WITH_CUTS and (method.cells == 1 or not isinstance(points.case.region, Cell)):
        points.case.verify(method)


def _bounds(points: Points, method: Method, name: str) -> None:
    if method.cells == 1 and name not in WITH_CUTS:
        list(check_bounds(points, method, name, inside=True))


def _nothing(*_: Any) -> Iterator[Any]:
    return iter(())


OWN = [m for m in MUTANTS if len(m.cases) > 1 or any(isinstance(case, str) for case in m.cases)]
SLOW = ("lower halves", "leaves' size", "a gap", "sign of a threshold", "upper children", "limits of a stem")
QUICK = [mutant for mutant in OWN if mutant.name not in SLOW]


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_mutants_with_cases_of_their_own_are_noticed(mutant: Mutant) -> None:
    """Those that show soon; `make soundness` has all."""
    assert hunt(mutant).violation is not None


@pytest.mark.parametrize("name", STAGED)
def test_staged_cases_show_nothing_without_a_mutant(name: str) -> None:
    """In the methods that they are staged for."""
    points = evidence(name)
    assert bool(points.case.region.contains(points.deltas).all())
    names = {method for m in OWN if name in m.cases for method in m.methods}
    assert names
    assert all(found.violations == () for found in findings([points], sorted(names)))


@pytest.mark.parametrize("name", EXACT)
def test_nothing_is_wrong_in_the_last_bits(name: str) -> None:
    found = check_exactly(name)
    assert found.violations == ()
    assert found.checks > 100


def test_cells_prove_nothing_beyond_a_planted_point() -> None:
    points, name = evidence(203), "lse, cells"
    found = check_answer(points, methods()[name], name)
    assert found.violations == ()
    assert found.checks > 100
