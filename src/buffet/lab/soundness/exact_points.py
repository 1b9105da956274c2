"""Points of a region whose rows, and whether they are inside, are known exactly; and their exact margins."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffet.lab.soundness.cases import Case
from buffet.lab.soundness.exact_regions import Floats, exactly
from buffet.lab.soundness.judge import BITS, Judge
from buffet.lab.soundness.points import margin_slopes
from buffet.lab.soundness.spans import Ints, Span
from buffet.regions import Region

STEPS = 4
"""Points at which gradients, in float64, tell where else to look."""


@dataclass(frozen=True, eq=False)
class ExactPoints:
    """Points of a case's only task, in real numbers, without padding.

    `places` are deviations of the moved rows from the clean ones (a ball), or the moved rows themselves.
    """

    case: Case
    judge: Judge
    places: Floats  # points × moved × width
    margins: Span  # points × others, of BITS[0] bits

    @property
    def planted(self) -> bool:
        """Whether the network is one of which bounds are tight."""
        return self.case.name.startswith("constructed")

    @property
    def exhaustive(self) -> bool:
        return self.case.region.finite

    def count(self) -> int:
        return len(self.places)

    def select(self, index: Any) -> ExactPoints:
        return replace(self, places=self.places[index], margins=self.margins.map(lambda v: v[index]))

    def violated(self, bounds: Tensor) -> tuple[Ints, int]:
        """Which margins are below their bounds for certain, points × others; and how many are undecided.

        What few bits do not decide, many do, unless it is nearer than that.
        """
        wrong, open_ = below(self.margins, bounds)
        rows = np.flatnonzero(open_.any(1))
        if len(rows):
            case = self.case
            finer = self.judge.margins(exactly(case.inner).rows(self.places[rows]), case.label, BITS[1])
            better, still = below(finer, bounds)
            wrong[rows] = better
            return wrong, int(still.sum())
        return wrong, 0

    def margin(self, point: int, other: int) -> float:
        """About the margin at a point."""
        return self.margins.about((point, other))


def below(margins: Span, bounds: Tensor) -> tuple[Ints, Ints]:
    """Which margins are below finite bounds of one task, and which may be."""
    wrong = np.zeros(margins.shape, dtype=bool)
    open_ = np.zeros(margins.shape, dtype=bool)
    for other, bound in enumerate(bounds.tolist()):
        if math.isfinite(bound):
            one = margins.map(lambda v: v[:, other])  # noqa: B023 (called at once)
            wrong[:, other] = one.below(bound)
            open_[:, other] = ~(wrong[:, other] | one.above(bound).astype(bool))
    return wrong, open_


def exact_points(case: Case, count: int) -> ExactPoints:
    """Up to about `count` different points of a case: the centre, corners, samples, where gradients lead,
    where exact differences along the axes lead."""
    region, generator = case.inner, torch.Generator().manual_seed(case.seed)
    judge = Judge(case.model.program64)
    at = exactly(region)
    first = _unique([at.corners(generator), _led(case, region, generator)])
    room = max(3, count - len(first) - 2 * region.width * region.moved.shape[1])
    first = _inside(region, _unique([first, _sampled(region, 2 * room, generator)]))[:count]
    margins = judge.margins(at.rows(first), case.label, BITS[0])
    found = ExactPoints(case, judge, first, margins)
    more = _inside(region, _unique([_along(found)]))
    if not len(more):
        return found
    also = judge.margins(at.rows(more), case.label, BITS[0])
    return ExactPoints(case, judge, np.concatenate([first, more]), margins.followed_by(also))


def _inside(region: Region, places: Floats) -> Floats:
    """Those that are in the region for certain."""
    return places[exactly(region).contained(places)] if len(places) else places


def _unique(parts: list[Floats]) -> Floats:
    """Every point once, in order."""
    everything = np.concatenate(parts) + 0.0  # no -0
    flat = everything.reshape(len(everything), math.prod(everything.shape[1:]))
    _, first = np.unique(flat, axis=0, return_index=True)
    return everything[np.sort(first)]


def _sampled(region: Region, count: int, generator: torch.Generator) -> Floats:
    return exactly(region).places(region.sample(count, generator)[:, 0])


def _led(case: Case, region: Region, generator: torch.Generator) -> Floats:
    """Where linear forms with gradients in float64 for their slopes are smallest and largest."""
    slopes = margin_slopes(case, region, region.sample(STEPS, generator))
    found = [region.extreme(sign * slope) for slope in slopes for sign in (1, -1)]
    return exactly(region).places(torch.cat(found)[:, 0])


def _along(points: ExactPoints) -> Floats:
    """Where exact differences of the margins between points lead: the corner on the falling side.

    Float64 knows nothing of slopes that underflow or cancel.
    """
    region, places = points.case.inner, points.places
    if region.finite or len(places) < 2:
        return places[:0]
    at, shape = exactly(region), places.shape[1:]
    found = []
    for other in range(points.margins.shape[1]):
        values = points.margins.lower[:, other]
        signs = np.zeros(shape)
        for entry in np.ndindex(*shape):
            along = places[(slice(None), *entry)]
            high, low = values[along >= np.quantile(along, 0.8)], values[along <= np.quantile(along, 0.2)]
            # Means of exact numbers: what is common to all of them drops out.
            rise = int(high.sum()) * len(low) - int(low.sum()) * len(high)
            signs[entry] = (rise > 0) - (rise < 0)
        slope = torch.from_numpy(signs)[None]
        best = int(values.argmin())
        found += [at.places(region.extreme(slope)), at.places(region.extreme(-slope))]
        found.append(places[best : best + 1] * 0.5 + 0.5 * found[-2])
    return np.concatenate(found)
