"""Root finding on a margin as a function of ε, one evaluation at a time.

A root finder is a generator for one task: it yields the next ε to try and is sent the smallest margin found
there (NaN if there is no bound). Its `Bracket` only ever moves its lower end to an ε that was proven.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from buffet.search.policy import POLICY

Shape = Callable[[float], float]
"""From the logarithm of a deficit to that of ε, relative to the root."""


@dataclass(frozen=True)
class Bracket:
    """An ε proven (0 at the start) with its margin, and one that was not (infinity: none was tried)."""

    certified: float
    margin: float
    failed: float = math.inf
    curve: Curve | None = None  # the margins seen on the way

    def after(self, eps: float, margin: float) -> Bracket:
        return replace(self, certified=eps, margin=margin) if margin > 0 else replace(self, failed=eps)


RootFinder = Generator[float, float, Bracket]


def hopeless() -> RootFinder:
    """The radius of an input whose label is wrong to begin with."""
    yield from ()
    return Bracket(0.0, 0.0)


def secant(
    clean: float, guess: float, tolerance: float, largest: float, shape: Shape | None = None
) -> RootFinder:
    """Safeguarded root search on the margin as a function of ε.

    In logarithms of ε and of the deficit ``(clean − margin) / clean`` margin functions are smooth, rising and
    alike for all words of a sentence: the root is where the deficit is 1. The next ε is found by inverse
    interpolation there, or from the `shape` that another search has seen; when steps shrink neither the
    bracket nor the margin enough, the next one halves it. Where a margin is larger than one at a smaller ε,
    the method has learned in between, and an ε that failed before may be tried again.
    Ends when the bracket's ends agree to `tolerance`, or the proven end is that close to where its margin,
    falling on as it did, reaches 0; or nothing is proven at the smallest ε, or all is at `largest`.
    """
    bracket = Bracket(0.0, clean)
    curve = Curve(clean)
    eps = min(max(guess, POLICY.smallest) if math.isfinite(guess) and guess > 0 else 0.01, largest)
    slow = rises = falls = restarts = 0
    last = math.inf
    while True:
        margin = yield eps
        before = bracket
        if margin > bracket.margin and bracket.certified > 0 and restarts < POLICY.restarts:
            restarts += 1
            bracket, curve, rises = replace(bracket, failed=math.inf), Curve(clean), 0
        curve = curve.after(eps, margin)
        bracket = replace(bracket.after(eps, margin), curve=curve)
        low, high = bracket.certified, bracket.failed
        closed = high - low <= tolerance * low or math.nextafter(low, math.inf) >= high
        near = curve.beyond(low, shape) <= low * (1 + tolerance)
        if low >= largest or high <= POLICY.smallest or closed or near:
            return bracket
        root = curve.root(low, high, shape)
        if math.isinf(high):
            eps = min(_higher(low, root, tolerance, rises), largest)
            rises += 1
            continue
        shrunk = math.isfinite(before.failed) and high - low > 0.5 * (before.failed - before.certified)
        slow = slow + 1 if shrunk and not abs(margin) < 0.5 * last else 0
        last = abs(margin)
        if low == 0:
            falls += 1
            eps = _lower(high, root, margin, falls, known=shape is not None)
        elif not low < root < high or slow >= 2:
            slow = 0
            # An ε of unknown magnitude is halved geometrically.
            eps = max(math.sqrt(low * high), low + (high - low) / 1024)
        else:
            # Land just inside the proven side, and not on an end.
            eps = max(root * (1 - tolerance / 2), low * (1 + 0.9 * tolerance), low + (high - low) / 1024)
            eps = eps if eps < high else (low + high) / 2


def _higher(low: float, root: float, tolerance: float, rises: int) -> float:
    """The next ε where nothing has failed yet.

    Just short of the expected root, twice, then past it, and ever further when that was not enough.
    """
    aim = root * (1.02 if rises > 1 else 1 - tolerance / 2)
    aim = max(aim, (1 + 0.01 * 8 ** (rises - 2)) * low)
    # A little above, where a failure would be the end of it.
    end = (1 + 0.99 * tolerance) * low
    return min(end if aim < end * (1 + tolerance / 2) else aim, 4 * low)


def _lower(high: float, root: float, margin: float, falls: int, *, known: bool) -> float:
    """The next ε where nothing is proven yet; `known`: the root is expected from a known shape.

    A little short of the expected root, and ever further when that was too much; but not far below what
    failed: margins hardly fall any more where they are far below 0. Where there is no margin at all, as
    beyond the reach of deep networks, the root is far away.
    """
    short = 0.03 if falls == 1 and not known else 0.005 * (falls + 1)
    if math.isnan(margin):
        further = 1 / 4 if falls < 3 else 1 / 16
    else:
        further = 1 / 8 if falls > 3 else 1 - 0.2 * falls
    return max(further * high, (1 - short) * root if root < high else 0.0)


@dataclass(frozen=True)
class Curve:
    """What was seen of a margin function: finite margins by ε, from the clean one at 0."""

    clean: float
    seen: tuple[tuple[float, float], ...] = ()

    def after(self, eps: float, margin: float) -> Curve:
        if not math.isfinite(margin):
            return self
        return Curve(self.clean, tuple(sorted([*self.seen, (eps, margin)])))

    def beyond(self, eps: float, shape: Shape | None) -> float:
        """Where the margin seen at `eps` reaches 0 if it goes on falling as it fell before.

        If nothing was seen before, the `shape` tells, with a little more for what it may be wrong by.
        """
        places = [e for e, _ in self.seen]
        if eps not in places:
            return math.inf
        here = places.index(eps)
        margin = self.seen[here][1]
        if shape and not here:
            deficit = max((self.clean - margin) / self.clean, 1e-9)
            return eps * math.exp(-POLICY.shape_care * shape(math.log(deficit)))
        e, before = self.seen[here - 1] if here else (0.0, self.clean)
        return eps + margin * (eps - e) / (before - margin) if before > margin else math.inf

    def logarithms(self) -> list[tuple[float, float]]:
        """``(log ε, log deficit)`` of all that was seen."""
        return [(math.log(e), math.log(max((self.clean - m) / self.clean, 1e-9))) for e, m in self.seen]

    def root(self, low: float, high: float, shape: Shape | None) -> float:
        """Where the margin is expected to be 0, given the proven and the failed end; NaN if unknown."""
        points = self.logarithms()
        below = [p for p in points if p[0] <= math.log(low)] if low > 0 else []
        above = [p for p in points if p[0] >= math.log(high)] if math.isfinite(high) else []
        if not points:
            return math.nan
        if not below or not above:
            nearest = below[::-1] or above
            x, y = nearest[0]
            power = POLICY.steepness
            if len(nearest) > 1:
                power = max(1.0, (y - nearest[1][1]) / (x - nearest[1][0]))
            elif shape:
                return math.exp(x - shape(y))
            return math.exp(x - max(y / power, -2.0))
        (xa, ya), (xb, yb) = below[-1], above[0]
        if not ya < yb:
            return math.nan
        linear = xa - ya * (xb - xa) / (yb - ya)
        others = [p for p in points if p[0] not in (xa, xb) and not ya <= p[1] <= yb]
        others = [p for p in others if abs(p[1]) < POLICY.near_root]
        if others:
            xc, yc = min(others, key=lambda p: abs(p[1]))
            # the parabola x(y) through three points, at y = 0
            bend = ((xc - xb) / (yc - yb) - (xb - xa) / (yb - ya)) / (yc - ya)
            curved = linear + bend * ya * yb
            if xa < curved < xb:
                return math.exp(curved)
        return math.exp(linear)

    def steepness(self) -> float:
        """The power of ε that the deficit grows with, by the two margins nearest to 0; NaN if unknown."""
        points = sorted(self.logarithms(), key=lambda p: abs(p[1]))[:2]
        if len(points) < 2 or points[0][0] == points[1][0]:
            return math.nan
        (xa, ya), (xb, yb) = points
        return min(max((ya - yb) / (xa - xb), 1.0), 3 * POLICY.steepness)

    def shape(self, root: float) -> Shape | None:
        """How ε relative to the root depends on the deficit, from what was seen; straight beyond it."""
        points = sorted({y: x - math.log(root) for x, y in self.logarithms()}.items())
        if len(points) < 2 or any(a[1] >= b[1] for a, b in pairwise(points)):
            return None

        def offset(y: float) -> float:
            for (ya, xa), (yb, xb) in pairwise(points):
                if ya <= y <= yb:
                    return xa + (xb - xa) * (y - ya) / (yb - ya)
            ya, xa = points[0] if y < points[0][0] else points[-1]
            return xa + (y - ya) / POLICY.steepness

        return offset


def straight(powers: Iterable[float]) -> Shape | None:
    """The shape of a margin function whose deficit grows with the least of some powers of ε."""
    known = [power for power in powers if math.isfinite(power)]
    return (lambda y: y / min(known)) if known else None


def bisection(
    clean: float, guess: float, tolerance: float, largest: float, shape: Shape | None = None, steps: int = 10
) -> RootFinder:
    """The paper's search: from 0.01 double (or halve) until the bracket closes, then halve it ten times."""
    bracket = Bracket(0.0, clean)
    eps = min(0.01, largest)
    while math.isinf(bracket.failed) or bracket.certified == 0.0:
        margin = yield eps
        bracket = bracket.after(eps, margin)
        if bracket.certified >= largest or bracket.failed <= POLICY.smallest:
            return bracket
        eps = min(2 * eps, largest) if margin > 0 else eps / 2
    for _ in range(steps):
        eps = (bracket.certified + bracket.failed) / 2
        margin = yield eps
        bracket = bracket.after(eps, margin)
    return bracket


ROOT_FINDERS: Mapping[str, Callable[[float, float, float, float, Shape | None], RootFinder]] = {
    "secant": secant,
    "bisection": bisection,
}
