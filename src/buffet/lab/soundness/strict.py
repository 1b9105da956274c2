"""The campaign at the edges of floating point: what a method claims, held against exact values.

Nothing is tolerated here: a claim is violated by a point of the region whose margin, in real arithmetic, is
below it by whatever little. The campaign of `claims` evaluates points in float64, and tolerates what that may
be off by; it sees everything inside a network, but no mistake of that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from buffet.lab.soundness.campaign import Progress, Tally, checked_methods, engine_of, known_methods
from buffet.lab.soundness.claims import Finding, Violation
from buffet.lab.soundness.exact_points import ExactPoints, contained, exact_points
from buffet.lab.soundness.extremes import extreme_case
from buffet.methods import Method
from buffet.search.radius import radius
from buffet.verification.verify import verify

TURNS = {"none": 2, "backward": 4, "final": 8, "all": 24, "tuned": 96}
"""Methods get every so manieth network: plain ones, those that substitute backwards, those that learn."""
RADIUS_EVERY = 32
"""Of every so manieth network a method's radius is searched too."""
LARGEST = 1e300


def strict_campaign(
    networks: int, points: int, seed: int = 0, methods: Sequence[str] | None = None
) -> Iterator[Progress]:
    """Run the campaign on extreme networks; yields what it has seen so far after every one of them.

    What is done with a network depends on its seed alone.
    """
    known = known_methods()
    now = Progress(seed, seed, {name: Tally(name) for name in checked_methods(methods)})
    for number in range(seed, seed + networks):
        evidence = exact_points(extreme_case(number), points)
        tallies, undecided = dict(now.tallies), 0
        for place, name in enumerate(tallies):
            turn = number + place
            if methods or turn % _every(known[name]) == 0:
                found = check_claims(evidence, known[name], name)
                undecided += found.undecided
                # A radius is many verifications.
                if turn % RADIUS_EVERY == 0 or (methods and known[name].optimise == "none"):
                    found += check_radius(evidence, known[name], name)
                tallies[name] = tallies[name].after(found)
        now = Progress(
            seed,
            number + 1,
            tallies,
            now.points + evidence.count(),
            now.planted + evidence.case.name.startswith("constructed"),
            now.exhaustive + evidence.case.region.finite,
            now.undecided + undecided,
        )
        yield now


def check_claims(points: ExactPoints, method: Method, name: str) -> Finding:
    """Hold the margins that a verification claims, whatever its verdict, against exact ones."""
    case = points.case
    found = verify(
        case.model,
        case.region,
        method=method,
        label=case.label,
        mask=case.mask,
        engine=engine_of(case),
        falsify=False,
    )
    bounds = found.margins[0]
    wrong, undecided = points.violated(bounds)
    checks = int(bounds.isfinite().sum()) * points.count()
    if not wrong.any():
        return Finding(checks, bool(bounds.isfinite().all()), (), undecided)
    claim = "verdict" if found.verdict == "certified" and (bounds > 0).all() else "margin"
    violation = _violation(points, name, claim, wrong, bounds)
    return Finding(checks, True, (violation,), undecided)


def check_radius(points: ExactPoints, method: Method, name: str) -> Finding:
    """No point with another answer may be within a certified radius."""
    case, ball = points.case, points.case.inner
    size = 0.0 if ball.eps is None else float(ball.eps[0])
    if size == 0:
        return Finding()
    wrong, _ = points.violated(torch.zeros(points.margins.shape[1], dtype=torch.float64))
    flips = points.select(np.flatnonzero(wrong.any(1)))
    if not flips.count():
        return Finding()
    found = radius(
        case.model,
        case.region,
        method,
        label=case.label,
        mask=case.mask,
        search="bisection",
        largest=min(4 * size, LARGEST),
        attack=False,
        engine=engine_of(case),
    )
    if not found.certified > 0:
        return Finding(1)  # nothing is claimed
    inside = contained(ball.with_eps(found.certified), flips.places)
    if not inside.any():
        return Finding(1)
    nearest = flips.select(np.flatnonzero(inside))
    bounds = torch.zeros(points.margins.shape[1], dtype=torch.float64)
    claim = f"radius {found.certified!r}"
    return Finding(1, True, (_violation(nearest, name, claim, nearest.violated(bounds)[0], bounds),))


def _violation(
    points: ExactPoints, name: str, claim: str, wrong: np.ndarray, bounds: torch.Tensor
) -> Violation:
    """The worst of the points that break a claim."""
    case = points.case
    places = [
        (points.margin(int(i), int(j)) - float(bounds[j]), int(i), int(j)) for i, j in np.argwhere(wrong)
    ]
    _, point, other = min(places)
    return Violation(
        case.seed,
        case.name,
        name,
        claim,
        0,
        float(bounds[other]),
        points.margin(point, other),
        tuple(map(tuple, points.places[point].tolist())),
        extreme=True,
    )


def _every(method: Method) -> int:
    slow = method.optimise == "none" and method.propagation == "backward"
    return TURNS["backward" if slow else method.optimise]
