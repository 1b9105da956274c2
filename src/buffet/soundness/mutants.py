"""An engine broken on purpose, one mistake at a time: a campaign that does not notice is not worth its time.

A mutant replaces one attribute of one module, class or table of the engine while a context is open; nothing
in the engine knows of it. `mutations` has the table of what is broken. A mutant is caught if some case of a
short list, by one of the methods it concerns, shows a violation; without it the same cases show none.
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

from buffet.soundness.campaign import case_of, check_bounds, engine_of, known_methods
from buffet.soundness.claims import Finding, Violation, check_verdicts
from buffet.soundness.points import Points, points_of

SEEDS = (203, 311, 32, 116, 185, 231, 28, 282, 43, 398, 359)
"""The cases a mutant has to survive, all small: planted networks of every kind, two words, a box, candidates,
a network without finite bounds."""
POINTS = 60

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
    seeds: tuple[int, ...] = ()  # cases in which it is likely to show, tried first


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


@cache
def evidence(seed: int) -> Points:
    """The points of a case, made by the engine as it is."""
    points = points_of(case_of(seed), POINTS)
    points.margins  # noqa: B018 (made now, not by a mutant)
    return points


def hunt(mutant: Mutant) -> Caught:
    """Let a mutant loose on the cases until one shows it: in its bounds, or else in a verdict."""
    first = [evidence(seed) for seed in mutant.seeds]
    others = [evidence(seed) for seed in SEEDS if seed not in mutant.seeds]
    begin = time.perf_counter()
    with mutant.patch():
        found = chain(*(_findings(cases, mutant.methods) for cases in (first, others)))
        violation = next((v for finding in found for v in finding.violations), None)
    return Caught(mutant.name, mutant.what, violation, time.perf_counter() - begin)


def _findings(cases: Sequence[Points], methods: Sequence[str]) -> Iterator[Finding]:
    """All findings; verdicts, which are slow to find out, after all bounds."""
    known = known_methods()
    for points, name in product(cases, methods):
        yield from check_bounds(points, known[name], name, inside=True)
    for points, name in product(cases, methods):
        yield check_verdicts(points, known[name], name, engine_of(points.case))
