"""Points of a region whose rows, and whether they are inside, are known exactly; and their exact margins."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffet.lab.soundness.cases import Case
from buffet.lab.soundness.judge import BITS, Judge
from buffet.lab.soundness.points import margin_slopes
from buffet.lab.soundness.spans import Ints, Span, span_of
from buffet.regions import Box, CandidateSet, LpBall, Region

CORNERS = 64
"""Corners of a region that are tried: all of them, if there are no more."""
STEPS = 4
"""Points at which gradients, in float64, tell where else to look."""
Floats = np.ndarray
"""Floats, points × moved × width."""


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
        return isinstance(self.case.region, CandidateSet)

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
            finer = self.judge.margins(rows_of(case.inner, self.places[rows]), case.label, BITS[1])
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
    first = _unique([_corners(region, generator), _led(case, region, generator)])
    room = max(3, count - len(first) - 2 * region.width * region.moved.shape[1])
    first = _inside(region, _unique([first, _sampled(region, 2 * room, generator)]))[:count]
    margins = judge.margins(rows_of(region, first), case.label, BITS[0])
    found = ExactPoints(case, judge, first, margins)
    more = _inside(region, _unique([_along(found)]))
    if not len(more):
        return found
    also = judge.margins(rows_of(region, more), case.label, BITS[0])
    return ExactPoints(case, judge, np.concatenate([first, more]), margins.followed_by(also))


def rows_of(region: Region, places: Floats) -> Span:
    """The exact rows of points: sums of clean rows and deviations are not rounded."""
    moved = region.moved[0].tolist()
    clean = region.center.double().numpy()
    fixed = np.broadcast_to(clean, (len(places), *clean.shape)).copy()
    if isinstance(region, LpBall):
        deltas = np.zeros_like(fixed)
        deltas[:, moved] = places
        return span_of(fixed) + span_of(deltas)
    fixed[:, moved] = places
    return span_of(fixed)


def _inside(region: Region, places: Floats) -> Floats:
    """Those that are in the region for certain."""
    return places[contained(region, places)] if len(places) else places


def contained(region: Region, places: Floats) -> np.ndarray:
    """Which points are in the region, exactly."""
    finite = np.asarray(np.isfinite(places).all((1, 2)))
    places = np.where(finite[:, None, None], places, 0.0)
    if isinstance(region, LpBall):
        assert region.eps is not None
        return finite & _in_ball(places, region.p, float(region.eps[0]))
    if isinstance(region, Box):
        lower, upper = region.lower[0].numpy(), region.upper[0].numpy()
        return finite & ((places >= lower) & (places <= upper)).all((1, 2))
    assert isinstance(region, CandidateSet)
    clean = region.center.double()[region.moved[0]].numpy()
    there = np.ones(len(places), dtype=bool)
    changed = np.zeros(len(places), dtype=int)
    for d, choices in enumerate(region.candidates[0]):
        same = (places[:, d] == clean[d]).all(-1)
        known = [(places[:, d] == row).all(-1) for row in choices.double().numpy()]
        there &= same | np.any(known, axis=0)
        changed += ~same
    return finite & there & (changed <= region.budget)


def _in_ball(deltas: Floats, p: float, eps: float) -> np.ndarray:
    size = np.abs(deltas)
    if math.isinf(p):
        return np.asarray((size <= eps).all((1, 2)))
    assert p == int(p)
    exact = span_of(size)
    limit = span_of(np.array([eps]))
    scale = math.lcm(exact.scale, limit.scale)
    powers = (exact.over(scale).lower ** int(p)).sum(-1)
    inside = powers <= limit.over(scale).lower[0] ** int(p)
    return np.asarray(inside.astype(bool).all(1))


def _unique(parts: list[Floats]) -> Floats:
    """Every point once, in order."""
    everything = np.concatenate(parts) + 0.0  # no -0
    flat = everything.reshape(len(everything), math.prod(everything.shape[1:]))
    _, first = np.unique(flat, axis=0, return_index=True)
    return everything[np.sort(first)]


def _sampled(region: Region, count: int, generator: torch.Generator) -> Floats:
    return _places(region, region.sample(count, generator)[:, 0])


def _places(region: Region, deltas: Tensor) -> Floats:
    """Deviations of the engine's kind as points."""
    deltas = deltas.double()
    if isinstance(region, LpBall):
        return deltas.numpy()
    rows = region.center.double()[region.moved[0]] + deltas
    if isinstance(region, Box):
        rows = torch.minimum(torch.maximum(rows, region.lower[0]), region.upper[0])
    return rows.numpy()


def _corners(region: Region, generator: torch.Generator) -> Floats:
    """The centre, corners of boxes and cubes, ends of the axes of other balls, all candidates."""
    shape = region.moved.shape[1], region.width
    if isinstance(region, CandidateSet):
        rows = region.center.double()[region.moved[0]]
        choices = [[row, *c.double()] for row, c in zip(rows, region.candidates[0], strict=True)]
        return np.stack([torch.stack(pick).numpy() for pick in product(*choices)])
    sides = shape[0] * shape[1]
    if 2**sides <= CORNERS:
        signs = np.array(list(product((-1.0, 1.0), repeat=sides)))
    else:
        signs = 2.0 * torch.randint(2, (CORNERS, sides), generator=generator).numpy() - 1
    signs = signs.reshape(-1, *shape)
    if isinstance(region, Box):
        lower, upper = region.lower[0].numpy(), region.upper[0].numpy()
        clean = region.center.double()[region.moved[0]].numpy()
        middle = np.stack([lower + (upper - lower) / 2, np.clip(clean, lower, upper)])
        return np.concatenate([middle, np.where(signs > 0, upper, lower)])
    assert isinstance(region, LpBall)
    assert region.eps is not None
    eps = float(region.eps[0])
    axes = np.eye(sides).reshape(-1, *shape) * eps
    found = [np.zeros((1, *shape)), axes, -axes]
    spread = 1.0 if math.isinf(region.p) else shape[1] ** (-1 / region.p) * (1 - 1e-15)
    found.append(signs * (eps * spread))
    hot = torch.randint(shape[1], (CORNERS // 4, shape[0]), generator=generator).numpy()
    found.append(np.eye(shape[1])[hot] * signs[np.arange(len(hot)) % len(signs)] * eps)
    return np.concatenate(found)


def _led(case: Case, region: Region, generator: torch.Generator) -> Floats:
    """Where linear forms with gradients in float64 for their slopes are smallest and largest."""
    slopes = margin_slopes(case, region, region.sample(STEPS, generator))
    found = [region.extreme(sign * slope) for slope in slopes for sign in (1, -1)]
    return _places(region, torch.cat(found)[:, 0])


def _along(points: ExactPoints) -> Floats:
    """Where exact differences of the margins between points lead: the corner on the falling side.

    Float64 knows nothing of slopes that underflow or cancel.
    """
    region, places = points.case.inner, points.places
    if isinstance(region, CandidateSet) or len(places) < 2:
        return places[:0]
    shape = places.shape[1:]
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
        found += [_places(region, region.extreme(slope)), _places(region, region.extreme(-slope))]
        found.append(places[best : best + 1] * 0.5 + 0.5 * found[-2])
    return np.concatenate(found)
