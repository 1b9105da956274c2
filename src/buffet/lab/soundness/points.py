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

    @property
    def planted(self) -> bool:
        """Whether an adversarial point is known."""
        return self.case.radius is not None

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
    """About `count` sampled points of every task, and some that were searched for."""
    region, generator = case.region, torch.Generator().manual_seed(case.seed)
    if isinstance(region, CandidateSet) and _choices(region) <= ALL:
        return Points(case, _enumerate(region), exhaustive=True)
    settings = AttackSettings(steps=15, restarts=2)
    found = attack(case.model.program64, region, case.label, settings, mask=case.mask)
    sampled = region.sample(count, generator)
    slopes = margin_slopes(case, region, region.sample(max(2, count // 10), generator))
    deltas = [
        sampled,
        found.deltas[None],
        *(region.extreme(slope) for slope in slopes),
        _extremes(case, generator),
    ]
    if case.known is not None:
        deltas.append(case.known)
    everything = torch.cat(deltas)
    inside = region.contains(everything)
    # A point that rounding puts outside says nothing; the unmoved rows may be outside of a box.
    still = region.project(torch.zeros_like(everything))
    return Points(case, torch.where(inside[..., None, None], everything, still), exhaustive=False)


def margin_slopes(case: Case, region: Region, start: Tensor) -> list[Tensor]:
    """The gradients of all margins at points of the region, or of it without padding.

    A linear bound with such a slope is attained where the region is extreme in its direction.
    """
    start = start.requires_grad_()
    rows = region.points(start)
    mask = case.mask.expand(rows.shape[:-1]) if region is case.region else None
    values = case.model.program64.margins(case.label).evaluate(rows, mask)
    return [_slope(values[..., other], start) for other in range(values.shape[-1])]


def _slope(value: Tensor, at: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(value.sum(), at, retain_graph=True, materialize_grads=True)
    return slope.nan_to_num(0.0, 1.0, -1.0)


def _extremes(case: Case, generator: torch.Generator) -> Tensor:
    """Where some entries of the network's values are smallest and largest, as far as their gradient knows."""
    delta = torch.zeros(1, *case.region.moved.shape, case.region.width, dtype=torch.float64)
    rows = case.region.points(delta.requires_grad_())
    program = case.model.program64.margins(case.label)
    values = program.values(rows, case.mask.expand(rows.shape[:-1]))
    found = []
    for _ in range(ENTRIES):
        node = values[int(torch.randint(1, len(values), (1,), generator=generator))]
        entries = node.flatten(2)
        slope = _slope(entries[..., int(torch.randint(entries.shape[-1], (1,), generator=generator))], delta)
        found += [case.region.extreme(slope), case.region.extreme(-slope)]
    return torch.cat(found)


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
