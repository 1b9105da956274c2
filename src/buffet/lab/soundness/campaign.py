"""The campaigns: every method on many cases, with everything counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from buffet.branching.prove import can_cut
from buffet.errors import BuffetError
from buffet.lab.soundness.cases import Case, random_case
from buffet.lab.soundness.claims import Finding, Violation, check_inside, check_margins, check_verdicts
from buffet.lab.soundness.cut_claims import check_cuts
from buffet.lab.soundness.exact_points import ExactPoints, exact_points
from buffet.lab.soundness.extremes import extreme_case
from buffet.lab.soundness.planted import planted_case
from buffet.lab.soundness.points import Points, points_of
from buffet.lab.soundness.strict import check_claims, check_radius
from buffet.methods import METHODS, Method, method_named

LEARNING_STEPS = 4
"""All parameters are sound, so a few steps of an optimiser test as much as a hundred."""
PLANTED_EVERY = 3
"""One network in three is a planted one."""

COMPOSED: Mapping[str, Method] = {
    "baf+backward": method_named("baseline", propagation="baf+backward"),
    "backward, window 1": method_named("backward", window=1),
    "backward, middle": method_named("backward", product="middle"),
    "backward, lse": method_named("backward", softmax="lse"),
    "backward, differences": method_named("backward", softmax="differences"),
    "backward, learned margin": method_named("backward", softmax="lse", optimise="final"),
}
"""Compositions without a name, so that every part is combined with the others."""


@dataclass(frozen=True)
class Tally:
    """What the campaign has seen of one method."""

    method: str
    networks: int = 0
    checks: int = 0  # values held against finite bounds: margins, and everything inside
    no_bound: int = 0  # networks for which the method gave no finite bound
    violations: tuple[Violation, ...] = ()

    def after(self, found: Finding) -> Tally:
        return Tally(
            self.method,
            self.networks + 1,
            self.checks + found.checks,
            self.no_bound + (not found.bounded),
            self.violations + found.violations,
        )


@dataclass(frozen=True)
class CampaignState:
    """What the campaign has seen so far; the networks of the seeds from `first` up to before `next`."""

    first: int
    next: int
    tallies: Mapping[str, Tally] = field(default_factory=dict)
    points: int = 0  # at which margins were evaluated, each counted once whatever it is held against
    planted: int = 0  # networks with a known adversarial point
    exhaustive: int = 0  # networks whose region was tried point by point
    undecided: int = 0  # comparisons with exact values that were too near to tell

    @property
    def networks(self) -> int:
        return self.next - self.first

    @property
    def checks(self) -> int:
        return sum(t.checks for t in self.tallies.values())

    @property
    def violations(self) -> tuple[Violation, ...]:
        return tuple(v for t in self.tallies.values() for v in t.violations)


def known_methods() -> dict[str, Method]:
    """Everything the campaign tries: the named methods and some compositions, with few learning steps."""
    named = {name: method_named(name, steps=LEARNING_STEPS) for name in METHODS}
    return named | {name: replace(m, steps=LEARNING_STEPS) for name, m in COMPOSED.items()}


def checked_methods(methods: Sequence[str] | None) -> Sequence[str]:
    """The given names, which must be known; without any, all."""
    known = known_methods()
    for name in methods or ():
        if name not in known:
            raise BuffetError(f"unknown method '{name}'; choose one of: {', '.join(known)}")
    return methods or tuple(known)


def case_of(seed: int) -> Case:
    """The case of a seed: a random network, or every third time a planted one."""
    return planted_case(seed) if seed % PLANTED_EVERY == 2 else random_case(seed)


def check_bounds(points: Points, method: Method, name: str, *, inside: bool) -> Iterator[Finding]:
    """What the points say about one method's bounds, the quickest checks first."""
    yield check_margins(points, method, name)
    if inside and not method.optimiser.learns:
        yield check_inside(points, method, name)
        if method.describe().linear:
            yield check_inside(points, method, name, seed=points.case.seed)


def _ordinary(points: Points, method: Method, name: str, turn: int, given: bool) -> Iterator[Finding]:
    """Margins; for one network in 16 everything that a method claims."""
    inside = given or turn % 16 == 0
    yield from check_bounds(points, method, name, inside=inside)
    if inside and points.planted:
        yield check_verdicts(points, method, name)
    if inside and can_cut(method):
        yield check_cuts(points, method, name)


def _extreme(points: ExactPoints, method: Method, name: str, turn: int, given: bool) -> Iterator[Finding]:
    """Margins and verdicts; for one network in 32 also a radius, which is many verifications."""
    yield check_claims(points, method, name)
    if turn % 32 == 0 or (given and not method.optimiser.learns):
        yield check_radius(points, method, name)


@dataclass(frozen=True)
class Kind:
    """A kind of campaign: the points of a seed's network, and what is held against them."""

    draw: Callable[[int, int], Any]  # from a seed and a number of points
    check: Callable[..., Iterator[Finding]]
    turns: Mapping[str, int]  # a method is tried on one network in this many: slow ones rarely

    def every(self, method: Method) -> int:
        slow = not method.optimiser.learns and method.describe().fully_backward
        return self.turns.get("backward" if slow else method.optimise, max(self.turns.values()))


ORDINARY = Kind(
    lambda seed, count: points_of(case_of(seed), count),
    _ordinary,
    {"none": 3, "backward": 8, "final": 16, "all": 24, "tuned": 96},
)
EXTREME = Kind(
    lambda seed, count: exact_points(extreme_case(seed), count),
    _extreme,
    {"none": 2, "backward": 4, "final": 8, "all": 24, "tuned": 96},
)


def campaign(
    networks: int, points: int, seed: int = 0, methods: Sequence[str] | None = None, kind: Kind = ORDINARY
) -> Iterator[CampaignState]:
    """Run the campaign; yields what it has seen so far, after every network.

    What is done with a network depends on its seed alone, so that a campaign can be split and continued. The
    given methods are tried on every network, with all that is known to try; without them, all methods are,
    in turns where they are slow.
    """
    known = known_methods()
    now = CampaignState(seed, seed, {name: Tally(name) for name in checked_methods(methods)})
    for number in range(seed, seed + networks):
        evidence = kind.draw(number, points)
        tallies, undecided = dict(now.tallies), now.undecided
        for place, name in enumerate(tallies):
            turn = number + place
            if methods or turn % kind.every(known[name]) == 0:
                found = sum(kind.check(evidence, known[name], name, turn, bool(methods)), Finding())
                tallies[name] = tallies[name].after(found)
                undecided += found.undecided
        now = CampaignState(
            seed,
            number + 1,
            tallies,
            now.points + evidence.count(),
            now.planted + evidence.planted,
            now.exhaustive + evidence.exhaustive,
            undecided,
        )
        yield now
