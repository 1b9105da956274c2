"""What branch and bound claims of one task: leaves, stems and what a tree proves, held against points.

A point has to be in some leaf and in some stem, and no bound of a leaf that it is in may exceed its margin.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from buffet.branching.entries import Ends
from buffet.branching.leaf_bounds import LeafBounds
from buffet.branching.leaves import Leaves
from buffet.branching.prove import Cutting, Walked
from buffet.branching.stems import Effort, Ground, Limits, Trunk, learn_row
from buffet.lab.soundness.claims import Finding, compare
from buffet.lab.soundness.points import Points
from buffet.methods import Method
from buffet.optimisation.context import Context
from buffet.propagation.walk import margins

LEAVES, STEMS, STEPS = 12, 3, 1
"""Of a tree that is looked at, and steps of learning in it: any cut and any parameters are sound."""
SHARES = 9
"""Places of every interval at which lines are looked at."""


def check_cuts(points: Points, method: Method, name: str) -> Finding:
    """Hold leaves, stems and trees of the first task against its points."""
    case = points.case
    region, program = case.inner.select([0]), case.model.program64
    clean_run = method.clean_run(program, region.center, case.label)
    walked = Walked.by(method, method.problem(clean_run, region, dtype=torch.float64), Context())
    if walked is None or not bool(margins(walked.bounds, walked.problem.propagation).isfinite().all()):
        return Finding(bounded=False)
    alone = replace(case, region=case.region.select([0]))
    seen = Points(alone, points.deltas[:, :1], exhaustive=False)
    with torch.no_grad():
        rows = region.points(seen.deltas)[:, 0]
        values = clean_run.program.values(rows)
    at = [v - clean for v, clean in zip(values, clean_run.clean, strict=True)]
    row = int(values[-1][:, 0].amin(0).argmin())
    found = _check_leaves(seen, walked, at, row, name) + _check_stems(seen, walked, at, row, name)
    cutting = Cutting(walked)
    cutting.grow(Effort(None, STEMS, LEAVES))
    if cutting.found is not None:
        real = values[-1][:, None, 0]
        found += compare(seen, name, "margin of a tree", cutting.found[None], real, 1 + real.abs())
    return found


def _check_leaves(points: Points, walked: Walked, at: list[Tensor], row: int, name: str) -> Finding:
    """Every point is in a leaf, and has at least the margin that is proven of it."""
    bounds = walked.bounds
    unit = torch.eye(bounds.clean[-1].shape[-1], dtype=torch.float64)[row]
    leaves = Leaves(LeafBounds.over(bounds, unit, learn_row(bounds, unit, {}, STEPS)), math.inf)
    leaves.grow(lambda: leaves.asked < LEAVES)
    entries = leaves.bounds.entries
    if not len(entries):
        return Finding()
    ends = entries.boxes([leaf.intervals for leaf in leaves.open])
    lower = leaves.bounds.prove(ends, torch.stack([leaf.slopes for leaf in leaves.open], -1))
    arguments = torch.cat(
        [at[p.source][:, : p.tokens].flatten(1)[:, p.where] for p in entries.places], 1
    ).unsqueeze(-1)
    inside = ((arguments >= ends[0]) & (arguments <= ends[1])).all(1)
    real = (at[-1][:, 0] + bounds.clean[-1][0])[:, row]
    claimed = torch.where(inside, lower, -math.inf).amax(1)
    worst = (claimed - real)[:, None, None]
    found = compare(points, name, "bound of a leaf", torch.zeros(1, 1), -worst, 1 + real[:, None, None].abs())
    slopes = torch.stack([leaf.slopes for leaf in leaves.open], -1)
    found += _check_lines(points, leaves.bounds, ends, slopes, name)
    return found + _covered(points, inside.any(1), "leaves", name)


def _check_lines(points: Points, bounds: LeafBounds, ends: Ends, slopes: Tensor, name: str) -> Finding:
    """The lines of every leaf hold over its intervals."""
    entries, found = bounds.entries, Finding()
    for place, own in entries.lines(*ends, slopes):
        lines = bounds._row_lines(place, own)
        below, from_below, above, from_above = (
            side[0, : place.tokens].flatten(0, 1)[place.where]
            for side in (lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)
        )
        low, high = (end[place.part] for end in ends)
        for share in torch.linspace(0, 1, SHARES, dtype=torch.float64):
            deviation = torch.zeros_like(ends[0])
            at = deviation[place.part] = torch.lerp(low, high, share)
            value = entries.values(deviation)[place.part][None, None]
            for claim, line, sign in (
                ("below", below * at + from_below, 1),
                ("above", above * at + from_above, -1),
            ):
                gap = sign * (value - line)
                found += compare(
                    points, name, f"line {claim}", torch.zeros_like(gap[0]), gap, 1 + value.abs()
                )
    return found


def _check_stems(points: Points, walked: Walked, at: list[Tensor], row: int, name: str) -> Finding:
    """Every point is in one of two stems, and within all of its boxes."""
    bounds, known = walked.bounds, walked.learned.get(walked.problem.root, {})
    ground = Ground(bounds, walked.problem.propagation, walked.problem.product, walked.learned)
    unit = torch.eye(bounds.clean[-1].shape[-1], dtype=torch.float64)[row]
    trunk = Trunk(ground, unit, known, math.inf)
    trunk.grow(Effort(None, 1, 2))
    trunk.grow(Effort(None, 2, 2))
    found, inside = Finding(), torch.zeros(len(at[0]), dtype=torch.bool)
    for stem in trunk.stems:
        mine = _within(stem.limits, at)
        inside |= mine
        if not bool(mine.any()):
            continue
        for anew in (False, True):
            part = ground.within(stem.limits, anew)
            for index, box in part.boxes.items():
                value = at[index][mine][:, None]
                for bound, real in ((box.lower, value), (-box.upper, -value)):
                    size = 1 + value.abs()
                    found += compare(points, name, f"box of node {index} in a stem", bound, real, size)
    return found + _covered(points, inside, "stems", name)


def _within(limits: Limits, at: list[Tensor]) -> Tensor:
    found = torch.ones(len(at[0]), dtype=torch.bool)
    for (node, place), (low, high) in limits.items():
        value = at[node].flatten(1)[:, place]
        found &= (value >= low) & (value <= high)
    return found


def _covered(points: Points, inside: Tensor, what: str, name: str) -> Finding:
    """A point in none of the parts is a violation."""
    parts = inside.double()[:, None, None]
    return compare(points, name, f"coverage of {what}", torch.ones(1, 1), parts, torch.ones_like(parts))
