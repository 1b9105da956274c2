"""Whether a mistake in the engine would be noticed: a campaign that misses mistakes is worth little.

A mutant replaces one attribute of one module, class or table of the engine while a context is open; nothing
in the engine knows of it. It is noticed if some case of a short list, or one that is `staged` for it, shows a
violation by one of the methods it concerns, or if a claim is wrong in its last bits (`exact`). Without it the
same cases and claims show none.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, product
from typing import Any

from buffet.lab.soundness.campaign import case_of, check_bounds, known_methods
from buffet.lab.soundness.claims import Finding, Violation, check_answer, check_verdicts
from buffet.lab.soundness.cut_claims import check_cuts
from buffet.lab.soundness.points import Points, points_of
from buffet.methods import Method, method_named
from buffet.regions import Cell
from engine_mutants.exact import EXACT, check_exactly
from engine_mutants.staged import STAGED

SEEDS = (203, 311, 32, 116, 185, 231, 28, 282, 43, 398, 359)
"""The cases a mutant has to survive, all small: planted networks of every kind, two words, a box, candidates,
a network without finite bounds."""
POINTS = 60

Name = int | str
"""Of a case: a seed of the campaign, or one of those that are staged; or a kind of exact claims."""
WITH_CELLS = {f"{name}, cells": method_named(name, cells=6) for name in ("baseline", "lse")}
"""Methods that cut balls, which the campaign does not try."""

WITH_CUTS = {"buffet, cuts": method_named("buffet", steps=2, rivals=())}
"""Methods whose trees of cuts are looked at."""

Wrong = Callable[[Any], Any]
"""Makes the wrong version of something from the right one."""


@dataclass(frozen=True)
class Patch:
    """A context in which an attribute (of a table: an entry) of `owner` is `wrong` of the right one.

    Of properties and static methods it is their function that is replaced.
    """

    owner: Any
    attribute: str
    wrong: Wrong

    @contextmanager
    def __call__(self) -> Iterator[None]:
        table = isinstance(self.owner, dict)
        right = self.owner[self.attribute] if table else vars(self.owner)[self.attribute]
        put = self.owner.__setitem__ if table else lambda *pair: setattr(self.owner, *pair)
        if isinstance(right, staticmethod):
            wrong: Any = staticmethod(self.wrong(right.__func__))
        else:
            wrong = property(self.wrong(right.fget)) if isinstance(right, property) else self.wrong(right)
        put(self.attribute, wrong)
        try:
            yield
        finally:
            put(self.attribute, right)


@dataclass(frozen=True)
class Mutant:
    """One mistake: how to make it, and the methods it must show in."""

    name: str
    what: str
    owner: Any
    attribute: str
    wrong: Wrong
    methods: tuple[str, ...]
    cases: tuple[Name, ...] = ()  # in which it is likely to show, tried first

    @property
    def patch(self) -> Patch:
        return Patch(self.owner, self.attribute, self.wrong)


@dataclass(frozen=True)
class Caught:
    """How a mutant fared."""

    mutant: str
    what: str
    violation: Violation | None  # None: it was not noticed
    seconds: float


def around(wrong: Callable[..., Any]) -> Wrong:
    """A function that gets the right one and its arguments."""
    return lambda right: lambda *args, **kwargs: wrong(right, *args, **kwargs)


def result(change: Callable[[Any], Any]) -> Wrong:
    """The right function with its result changed."""
    return around(lambda right, *args, **kwargs: change(right(*args, **kwargs)))


def entry(**changed: Any) -> Wrong:
    """The right entry of a table with some fields changed."""
    return lambda right: replace(right, **changed)


def methods() -> dict[str, Method]:
    """Everything a mutant may be tried with."""
    return known_methods() | WITH_CELLS | WITH_CUTS


@cache
def evidence(name: Name) -> Points:
    """The points of a case, made by the engine as it is."""
    points = STAGED[name]() if isinstance(name, str) else points_of(case_of(name), POINTS)
    points.margins  # noqa: B018 (made now, not by a mutant)
    return points


def hunt(mutant: Mutant) -> Caught:
    """Try a mutant on its own cases and then on all, until one reveals it."""
    exact = [name for name in mutant.cases if isinstance(name, str) and name in EXACT]
    first = [evidence(name) for name in mutant.cases if name not in exact]
    others = [evidence(seed) for seed in SEEDS if seed not in mutant.cases and mutant.methods]
    begin = time.perf_counter()
    with mutant.patch():
        found = chain(map(check_exactly, exact), *(findings(c, mutant.methods) for c in (first, others)))
        violation = next((v for finding in found for v in finding.violations), None)
    return Caught(mutant.name, mutant.what, violation, time.perf_counter() - begin)


def findings(cases: Sequence[Points], names: Sequence[str]) -> Iterator[Finding]:
    """All findings; verdicts, which are slow to find out, after all bounds.

    Bounds are those of whole balls, so a method that cuts them is judged by its answers.
    """
    known = methods()
    for points, name in product(cases, names):
        if name in WITH_CUTS:
            if not isinstance(points.case.region, Cell):
                yield check_cuts(points, known[name], name)
        elif name not in WITH_CELLS:
            yield from check_bounds(points, known[name], name, inside=True)
    for points, name in product(cases, names):
        if name in WITH_CELLS:
            yield check_answer(points, known[name], name)
        if not isinstance(points.case.region, Cell) and name not in WITH_CUTS:
            yield check_verdicts(points, known[name], name)
