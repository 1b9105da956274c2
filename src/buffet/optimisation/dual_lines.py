"""All free lines of a network over fixed boxes, made of their parameters in a few operations on all of them.

A share is a slope k between the least and the largest useful one, and the line of that slope touches where
``f(x) − k·x`` is smallest (lower line) or largest in the box. Nothing is rounded safely; `bounds.relaxations`
makes lines that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.network.functions import FUNCTIONS, Function
from buffet.relaxations.dual_passes import Curve, Line
from buffet.relaxations.elementwise import Side
from buffet.relaxations.relaxation import Parameters

Flat = Float[Tensor, "tasks numbers"]


@dataclass(frozen=True)
class Place:
    """Some lines among all of them: a side of a node."""

    index: int
    side: Side
    function: str
    shape: tuple[int, ...]  # tokens, features

    @property
    def size(self) -> int:
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, eq=False)
class Lines:
    """The lines of all elementwise functions whose slopes are free; sides of one function side by side."""

    places: tuple[Place, ...]
    least: Flat  # slope
    room: Flat  # how much there is above it
    center: Flat
    low: Flat
    high: Flat
    at_center: Flat

    @staticmethod
    def over(nodes: Sequence[Curve]) -> Lines | None:
        """Those of some nodes."""
        found: list[tuple[Place, list[Tensor]]] = []
        for index, name, clean, box, slopes in nodes:
            f = FUNCTIONS[name]
            for side, (least, most) in slopes.items():
                if bool((most > least).any()):
                    ends = f.admit(clean + box.lower), clean + box.upper
                    columns = (least, most - least, clean, *ends, f.value(clean))
                    whole = [column.expand_as(least).flatten(1) for column in columns]
                    found.append((Place(index, side, name, tuple(clean.shape)), whole))
        if not found:
            return None
        found.sort(key=lambda one: (one[0].function, one[0].side))
        together = (torch.cat(column, 1) for column in zip(*(whole for _, whole in found), strict=True))
        return Lines(tuple(place for place, _ in found), *together)

    def __call__(
        self, parameters: Mapping[int, Parameters], dtype: torch.dtype
    ) -> dict[int, dict[str, Line]]:
        """The lines that have a share, by node and side."""
        given = [parameters.get(p.index, {}).get(p.side) for p in self.places]
        rows = [
            self.least.new_zeros(len(self.least), p.size) if share is None else share.flatten(1)
            for p, share in zip(self.places, given, strict=True)
        ]
        slope = torch.addcmul(self.least, self.room, torch.cat(rows, 1).double())
        touch = self._touch(slope)
        run = touch - self.center
        value = torch.cat([f.value(touch[:, part]) for f, part in self._functions], 1)
        intercept = torch.addcmul(value - self.at_center, slope, run, value=-1)
        sizes = [p.size for p in self.places]
        columns = (column.to(dtype).split(sizes, 1) for column in (slope, intercept, run))
        found: dict[int, dict[str, Line]] = {}
        for p, share, *line in zip(self.places, given, *columns, strict=True):
            if share is not None:
                views = (column.view(len(slope), *p.shape, 1) for column in line)
                found.setdefault(p.index, {})[p.side] = Line(*views)
        return found

    def _touch(self, slope: Flat) -> Flat:
        """Where lines of these slopes touch.

        A useful slope touches at a stationary point, or at the end of the box next to it; a chord at both.
        """
        found = []
        for f, side, part in self._sides:
            k = slope[:, part]
            points = (f.near_minima or f.minima) if side == "lower" else (f.near_maxima or f.maxima)
            x, *others = (self._inside(point, part) for point in points(k))
            for y in others:
                gap = f.value(y) - f.value(x) - k * (y - x)
                x = torch.where(gap < 0 if side == "lower" else gap > 0, y, x)
            found.append(x)
        return torch.cat(found, 1)

    def _inside(self, point: Tensor, part: slice) -> Tensor:
        return torch.fmin(torch.fmax(point, self.low[:, part]), self.high[:, part])

    @cached_property
    def _sides(self) -> list[tuple[Function, Side, slice]]:
        """The sides of all functions, and where they are."""
        return [
            (FUNCTIONS[name], side, part)
            for (name, side), part in self._parts(lambda p: (p.function, p.side))
        ]

    @cached_property
    def _functions(self) -> list[tuple[Function, slice]]:
        return [(FUNCTIONS[name], part) for name, part in self._parts(lambda p: p.function)]

    def _parts(self, key: Callable[[Place], Any]) -> Iterator[tuple[Any, slice]]:
        start = 0
        for name, group in groupby(self.places, key):
            stop = start + sum(place.size for place in group)
            yield name, slice(start, stop)
            start = stop
