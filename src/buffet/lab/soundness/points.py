"""Points of a region that try to break a bound: sampled, vertices, attacked, corners, all there are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.lab.soundness.cases import Case
from buffet.network import Program
from buffet.regions import CandidateSet, Region

ALL = 512
"""Candidate sets with at most this many choices are tried exhaustively."""
ENTRIES = 12
"""Entries of the network's values that are driven to their extremes, besides the margins."""


@dataclass(frozen=True, eq=False)
class Points:
    """Points of a case's region as deviations δ, with the margins there (float64)."""

    case: Case
    deltas: Float[Tensor, "points tasks moved width"]
    exhaustive: bool  # these are all the points there are

    @cached_property
    def margins(self) -> Float[Tensor, "points tasks others"]:
        program, mask = self.case.model.program64.margins(self.case.label), self.case.mask
        with torch.no_grad():
            rows = self.case.region.points(self.deltas)
            return program.evaluate(rows, mask.expand(rows.shape[:-1]))

    def count(self) -> int:
        return self.deltas.shape[0] * self.deltas.shape[1]

    def telling(self, most: int) -> Float[Tensor, "points tasks moved width"]:
        """Some of the points, those with the smallest margins and the last ones, which are corners, first."""
        order = torch.cat([self.margins.amin(-1).argmin(0), torch.arange(len(self.deltas)).flip(0)])
        return self.deltas[order[: most + self.case.region.tasks]]


def points_of(case: Case, count: int) -> Points:
    """About `count` sampled points of every task, and some that were looked for."""
    region, generator = case.region, torch.Generator().manual_seed(case.seed)
    if isinstance(region, CandidateSet) and _choices(region) <= ALL:
        return Points(case, _enumerate(region), exhaustive=True)
    margins = case.model.program64.margins(case.label)
    settings = AttackSettings(steps=15, restarts=2)
    found = attack(case.model.program64, region, case.label, settings, mask=case.mask)
    deltas = [
        region.sample(count, generator),
        found.deltas[None],
        _corners(case, margins, region.sample(max(2, count // 10), generator)),
        _extremes(case, margins, generator),
    ]
    if case.known is not None:
        deltas.append(case.known)
    everything = torch.cat(deltas)
    inside = region.contains(everything)
    # A point that rounding puts outside says nothing; the unmoved rows may be outside of a box.
    still = region.project(torch.zeros_like(everything))
    return Points(case, torch.where(inside[..., None, None], everything, still), exhaustive=False)


def _corners(case: Case, margins: Program, start: Tensor) -> Tensor:
    """Where a linear bound with the gradient at `start` for its slope is attained, for every margin."""
    start = start.requires_grad_()
    rows = case.region.points(start)
    values = margins.evaluate(rows, case.mask.expand(rows.shape[:-1]))
    slopes = [
        torch.autograd.grad(values[..., other].sum(), start, retain_graph=True)[0]
        for other in range(values.shape[-1])
    ]
    return torch.cat([case.region.extreme(s.nan_to_num(0.0, 0.0, 0.0)) for s in slopes])


def _extremes(case: Case, margins: Program, generator: torch.Generator) -> Tensor:
    """Where some entries of the network's values are smallest and largest, as far as their gradient knows."""
    delta = torch.zeros(1, *case.region.moved.shape, case.region.width, dtype=torch.float64)
    delta.requires_grad_()
    rows = case.region.points(delta)
    values = margins.values(rows, case.mask.expand(rows.shape[:-1]))
    found = []
    for _ in range(ENTRIES):
        node = values[int(torch.randint(1, len(values), (1,), generator=generator))]
        entries = node.flatten(2)
        entry = int(torch.randint(entries.shape[-1], (1,), generator=generator))
        (slope,) = torch.autograd.grad(entries[..., entry].sum(), delta, retain_graph=True, allow_unused=True)
        if slope is not None:
            slope = slope.nan_to_num(0.0, 0.0, 0.0)
            found += [case.region.extreme(slope), case.region.extreme(-slope)]
    return torch.cat(found) if found else delta.detach()


def _choices(region: CandidateSet) -> int:
    return region.offsets.shape[2] ** region.moved.shape[1]


def _enumerate(region: CandidateSet) -> Float[Tensor, "points tasks moved width"]:
    """All points of a candidate set; what is over budget is replaced by the original."""
    moved, choices = region.moved.shape[1], region.offsets.shape[2]
    picks = torch.tensor(list(product(range(choices), repeat=moved)))
    deltas = region.offsets[:, torch.arange(moved), picks].transpose(0, 1)
    allowed = (picks > 0).sum(1) <= region.budget
    return torch.where(allowed[:, None, None, None], deltas, 0.0)


def deviations(
    program: Program, clean: list[Tensor], region: Region, deltas: Tensor
) -> list[Float[Tensor, "points tasks tokens features"]]:
    """How far every node of a program is from its clean value, at points of a region without padding."""
    with torch.no_grad():
        values = program.values(region.points(deltas))
    return [value - at for value, at in zip(values, clean, strict=True)]
