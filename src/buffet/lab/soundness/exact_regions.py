"""Regions in exact arithmetic: the rows of a point, whether it is inside for certain, corners to try."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from buffet.lab.soundness.spans import Span, span_of
from buffet.regions import Box, CandidateSet, LpBall, Region

CORNERS = 64
"""Corners of a region that are tried: all of them, if there are no more."""
Floats = np.ndarray
"""Floats, points × moved × width."""


@dataclass(frozen=True, eq=False)
class ExactRegion(ABC):
    """The only task of a region, in real numbers. The places of points are the moved rows themselves."""

    region: Any

    @property
    def clean(self) -> Floats:
        """The moved rows, unmoved."""
        rows: Floats = self.region.center.double()[self.region.moved[0]].numpy()
        return rows

    def rows(self, places: Floats) -> Span:
        """The exact rows of points, moved or not."""
        return span_of(self._filled(places, self.region.center.double().numpy()))

    def _filled(self, places: Floats, others: Floats) -> Floats:
        """All rows: the moved ones from `places`."""
        found = np.broadcast_to(others, (len(places), *self.region.center.shape)).copy()
        found[:, self.region.moved[0].tolist()] = places
        return found

    def contained(self, places: Floats) -> np.ndarray:
        """Which points are in the region, exactly."""
        finite = np.asarray(np.isfinite(places).all((1, 2)))
        return finite & self._contains(np.where(finite[:, None, None], places, 0.0))

    @abstractmethod
    def _contains(self, places: Floats) -> np.ndarray:
        """The same of finite points."""

    @abstractmethod
    def places(self, deltas: Tensor) -> Floats:
        """Where deviations of the engine's kind lead."""

    @abstractmethod
    def corners(self, generator: torch.Generator) -> Floats:
        """The centre, and points at the rim."""

    def _signs(self, generator: torch.Generator) -> Floats:
        """Corners of the cube from −1 to 1."""
        shape = self.region.moved.shape[1], self.region.width
        sides = shape[0] * shape[1]
        if 2**sides <= CORNERS:
            signs = np.array(list(product((-1.0, 1.0), repeat=sides)))
        else:
            signs = 2.0 * torch.randint(2, (CORNERS, sides), generator=generator).numpy() - 1
        return signs.reshape(-1, *shape)


class ExactBall(ExactRegion):
    """The places of points are deviations of the moved rows from the clean ones."""

    def rows(self, places: Floats) -> Span:
        """Sums of clean rows and deviations are not rounded."""
        center = self.region.center.double().numpy()
        return span_of(np.broadcast_to(center, (len(places), *center.shape))) + span_of(
            self._filled(places, np.zeros_like(center))
        )

    def _contains(self, places: Floats) -> np.ndarray:
        size, p, eps = np.abs(places), self.region.p, float(self.region.eps[0])
        if math.isinf(p):
            return np.asarray((size <= eps).all((1, 2)))
        assert p == int(p)
        exact = span_of(size)
        limit = span_of(np.array([eps]))
        scale = math.lcm(exact.scale, limit.scale)
        powers = (exact.over(scale).lower ** int(p)).sum(-1)
        inside = powers <= limit.over(scale).lower[0] ** int(p)
        return np.asarray(inside.astype(bool).all(1))

    def places(self, deltas: Tensor) -> Floats:
        return deltas.double().numpy()

    def corners(self, generator: torch.Generator) -> Floats:
        """The centre, ends of the axes, corners of the cube inside or of the ball, one entry of every row."""
        signs = self._signs(generator)
        shape, p, eps = signs.shape[1:], self.region.p, float(self.region.eps[0])
        axes = np.eye(math.prod(shape)).reshape(-1, *shape) * eps
        spread = 1.0 if math.isinf(p) else shape[1] ** (-1 / p) * (1 - 1e-15)
        hot = torch.randint(shape[1], (CORNERS // 4, shape[0]), generator=generator).numpy()
        single = np.eye(shape[1])[hot] * signs[np.arange(len(hot)) % len(signs)] * eps
        return np.concatenate([np.zeros((1, *shape)), axes, -axes, signs * (eps * spread), single])


class ExactBox(ExactRegion):
    @property
    def _ends(self) -> tuple[Floats, Floats]:
        return self.region.lower[0].numpy(), self.region.upper[0].numpy()

    def _contains(self, places: Floats) -> np.ndarray:
        lower, upper = self._ends
        return np.asarray(((places >= lower) & (places <= upper)).all((1, 2)))

    def places(self, deltas: Tensor) -> Floats:
        return np.clip(self.clean + deltas.double().numpy(), *self._ends)

    def corners(self, generator: torch.Generator) -> Floats:
        """The middle, what is nearest to the clean rows, and corners."""
        lower, upper = self._ends
        middle = np.stack([lower + (upper - lower) / 2, np.clip(self.clean, lower, upper)])
        return np.concatenate([middle, np.where(self._signs(generator) > 0, upper, lower)])


class ExactCandidates(ExactRegion):
    def _contains(self, places: Floats) -> np.ndarray:
        there, changed = np.ones(len(places), dtype=bool), np.zeros(len(places), dtype=int)
        for d, choices in enumerate(self.region.candidates[0]):
            same = (places[:, d] == self.clean[d]).all(-1)
            known = [(places[:, d] == row).all(-1) for row in choices.double().numpy()]
            there &= same | np.any(known, axis=0)
            changed += ~same
        return there & (changed <= self.region.budget)

    def places(self, deltas: Tensor) -> Floats:
        return self.clean + deltas.double().numpy()

    def corners(self, generator: torch.Generator) -> Floats:
        """All choices, also those beyond the budget."""
        pairs = zip(self.clean, self.region.candidates[0], strict=True)
        choices = [[row, *some.double().numpy()] for row, some in pairs]
        return np.stack([np.stack(pick) for pick in product(*choices)])


EXACT: Mapping[type[Region], type[ExactRegion]] = {
    LpBall: ExactBall,
    Box: ExactBox,
    CandidateSet: ExactCandidates,
}
"""Every kind of region that the campaign at the edges of floating point draws."""


def exactly(region: Region) -> ExactRegion:
    """A region with a single task, in exact arithmetic."""
    return EXACT[type(region)](region)
