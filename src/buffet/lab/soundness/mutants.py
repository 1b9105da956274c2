"""An engine broken on purpose, one mistake at a time: a campaign that does not notice is not worth its time.

A mutant replaces one attribute of one module, class or table of the engine while a context is open; nothing
in the engine knows of it. `mutations` has the table of what is broken. A mutant is caught if some case of a
short list, or one that is `staged` for it, shows a violation by one of the methods it concerns, or if a claim
is wrong in its last bits (`exact`). Without it the same cases and claims show none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from typing import Any

from torch import Tensor

from buffet.engine import Engine
from buffet.lab.soundness.campaign import case_of, check_bounds, engine_of, known_methods
from buffet.lab.soundness.claims import Finding, Violation, check_verdicts
from buffet.lab.soundness.claims import _compare as held_against
from buffet.lab.soundness.exact import check_exactly
from buffet.lab.soundness.points import Points, points_of
from buffet.lab.soundness.staged import STAGED
from buffet.methods import Method, method_named
from buffet.regions import Cell
from buffet.verification.verify import verify

SEEDS = (203, 311, 32, 116, 185, 231, 28, 282, 43, 398, 359)
"""The cases a mutant has to survive, all small: planted networks of every kind, two words, a box, candidates,
a network without finite bounds."""
POINTS = 60

Name = int | str
"""Of a case: a seed of the campaign, or one of those that are staged."""
CELLS = {f"{name}, cells": method_named(name, cells=6) for name in ("baseline", "lse")}
"""Methods that cut balls, which the campaign does not try."""

Wrong = Callable[[Any], Any]
"""From what is right to what is wrong."""


@dataclass(frozen=True)
class Patch:
    """A context in which an attribute (of a table: an entry) of `owner` is `wrong` of the right one."""

    owner: Any
    name: str
    wrong: Wrong

    @contextmanager
    def __call__(self) -> Iterator[None]:
        table = isinstance(self.owner, dict)
        right = self.owner[self.name] if table else vars(self.owner)[self.name]
        _put(self.owner, self.name, self.wrong(right), table)
        try:
            yield
        finally:
            _put(self.owner, self.name, right, table)


@dataclass(frozen=True)
class Mutant:
    """One mistake: how to make it, and the methods it must show in."""

    name: str
    what: str
    patch: Patch
    methods: tuple[str, ...]
    cases: tuple[Name, ...] = ()  # in which it is likely to show, tried first
    only: bool = False  # no others are tried
    exact: tuple[str, ...] = ()  # claims it breaks in the last bits, which are held against exact values


@dataclass(frozen=True)
class Caught:
    """How a mutant fared."""

    mutant: str
    what: str
    violation: Violation | None  # None: it was not noticed
    seconds: float


def _put(owner: Any, name: str, value: Any, table: bool) -> None:
    if table:
        owner[name] = value
    else:
        setattr(owner, name, value)


def changed_result(change: Callable[[Any], Any]) -> Wrong:
    """The right function with its result changed."""
    return lambda right: lambda *args, **kwargs: change(right(*args, **kwargs))


def forced(**fixed: Any) -> Wrong:
    """The right function with some keywords forced."""
    return lambda right: lambda *args, **kwargs: right(*args, **{**kwargs, **fixed})


def changed_fields(**changed: Any) -> Wrong:
    """The right entry of a table with some fields changed."""
    return lambda right: replace(right, **changed)


def narrowed(ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A range without a tenth of its width at both ends."""
    low, high = ends
    return low + 0.1 * (high - low), high - 0.1 * (high - low)


def methods() -> dict[str, Method]:
    """Everything a mutant may be tried with."""
    return known_methods() | CELLS


@cache
def evidence(name: Name) -> Points:
    """The points of a case, made by the engine as it is."""
    points = STAGED[name]() if isinstance(name, str) else points_of(case_of(name), POINTS)
    points.margins  # noqa: B018 (made now, not by a mutant)
    return points


def hunt(mutant: Mutant) -> Caught:
    """Let a mutant loose on the cases until one shows it: in its bounds, or else in a verdict."""
    first = [evidence(name) for name in mutant.cases]
    others = [evidence(seed) for seed in SEEDS if seed not in mutant.cases and not mutant.only]
    begin = time.perf_counter()
    with mutant.patch():
        exactly = map(check_exactly, mutant.exact)
        found = chain(exactly, *(findings(cases, mutant.methods) for cases in (first, others)))
        violation = next((v for finding in found for v in finding.violations), None)
    return Caught(mutant.name, mutant.what, violation, time.perf_counter() - begin)


def findings(cases: Sequence[Points], names: Sequence[str]) -> Iterator[Finding]:
    """All findings; verdicts, which are slow to find out, after all bounds.

    Bounds are those of whole balls, so a method that cuts them is judged by its answers.
    """
    known = methods()
    for points, name in product(cases, names):
        if name not in CELLS:
            yield from check_bounds(points, known[name], name, inside=True)
    for points, name in product(cases, names):
        if name in CELLS:
            yield check_answer(points, known[name], name, engine_of(points.case))
        if not isinstance(points.case.region, Cell):
            yield check_verdicts(points, known[name], name, engine_of(points.case))


def check_answer(points: Points, method: Method, name: str, engine: Engine) -> Finding:
    """The margins of an answer, of whatever parts they are put together, hold for every point."""
    case = points.case
    answer = verify(
        case.model, case.region, None, method, label=case.label, mask=case.mask, engine=engine, falsify=False
    )
    size = 1 + points.margins.abs()
    return held_against(points, name, "margin of an answer", answer.margins, points.margins, size)
