"""What a method claims at the edges of floating point, held against exact values.

Nothing is tolerated here: a claim is violated by a point of the region whose margin, in real arithmetic, is
below it by whatever little. `claims` evaluates points in float64, and tolerates what that may be off by; it
sees everything inside a network, but no mistake of that size.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from torch import Tensor

from buffet.lab.soundness.claims import Finding, Violation
from buffet.lab.soundness.exact_points import ExactPoints
from buffet.lab.soundness.exact_regions import exactly
from buffet.methods import Method

LARGEST = 1e300


def check_claims(points: ExactPoints, method: Method, name: str) -> Finding:
    """Hold the margins that a verification claims, whatever its verdict, against exact ones."""
    found = points.case.verify(method)
    bounds = found.margins[0]
    wrong, undecided = points.violated(bounds)
    checks, finite = int(bounds.isfinite().sum()) * points.count(), bool(bounds.isfinite().all())
    if not wrong.any():
        return Finding(checks, finite, (), undecided)
    claim = "verdict" if found.verdict == "certified" and (bounds > 0).all() else "margin"
    return Finding(checks, True, (_worst(points, name, claim, wrong, bounds),), undecided)


def check_radius(points: ExactPoints, method: Method, name: str) -> Finding:
    """No point with another answer may be within a certified radius."""
    ball = points.case.inner
    size = 0.0 if ball.eps is None else float(ball.eps[0])
    zero = points.case.region.center.new_zeros(points.margins.shape[1]).double()
    flips = points.select(np.flatnonzero(points.violated(zero)[0].any(1)))
    if size == 0 or not flips.count():
        return Finding()
    certified = points.case.certified_radius(method, min(4 * size, LARGEST))
    if not certified > 0:
        return Finding(1)  # nothing is claimed
    nearest = flips.select(np.flatnonzero(exactly(ball.with_eps(certified)).contained(flips.places)))
    if not nearest.count():
        return Finding(1)
    wrong = nearest.violated(zero)[0]
    return Finding(1, True, (_worst(nearest, name, f"radius {certified!r}", wrong, zero),))


def _worst(points: ExactPoints, name: str, claim: str, wrong: np.ndarray, bounds: Tensor) -> Violation:
    """The worst of the points that break a claim."""
    places = np.argwhere(wrong).tolist()
    _, point, other = min((points.margin(i, j) - float(bounds[j]), i, j) for i, j in places)
    bound, value = float(bounds[other]), points.margin(point, other)
    found = Violation.of(points.case, name, claim, 0, bound, value, points.places[point])
    return replace(found, extreme=True)
