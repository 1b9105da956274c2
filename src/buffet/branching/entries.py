"""Entries of elementwise functions whose lines a leaf of a tree has for itself, and the lines of many leaves.

A *leaf* is the part of a region in which what some functions read lies in given intervals: a ReLU's argument
is negative, say. Over a smaller interval lines are closer to the function, and any slope is sound with the
intercept of its conjugate (`relaxations.elementwise`), so a leaf is a set of intervals and of slopes. Where
an interval is narrower than what the other bounds imply, a slope that differs from the function's brings in
the knowledge that the argument lies there: it is a multiplier of that constraint.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.network import Apply
from buffet.network.functions import FUNCTIONS
from buffet.propagation.substitution import Bounds
from buffet.relaxations.elementwise import SIDES, Lines, default_slopes, relax
from buffet.relaxations.relaxation import Parameters

NARROWEST = 1e-4
"""Intervals of smooth functions are not cut below this share of what they were."""

Intervals = Mapping[int, tuple[float, float]]
"""By entry: what its argument may deviate from the clean value, at least and at most."""

Ends = tuple[Float[Tensor, "entries leaves"], Float[Tensor, "entries leaves"]]
"""The least and the largest deviation of every entry's argument in some leaves."""


@dataclass(frozen=True)
class Place:
    """The entries of one function node among all of them."""

    node: int
    function: str
    source: int  # the node it reads
    tokens: int  # how many of its tokens count
    where: Int[Tensor, " entries"]  # in the flattened features of these tokens
    part: slice


@dataclass(frozen=True, eq=False)
class Entries:
    """All entries that may be cut: those whose two lines differ over the region, in order of the nodes."""

    places: tuple[Place, ...]
    clean: Float[Tensor, "entries 1"]  # what the functions read in the clean run
    lower: Float[Tensor, "entries 1"]  # and how far that may deviate in the region
    upper: Float[Tensor, "entries 1"]

    @staticmethod
    def over(bounds: Bounds, tokens: Mapping[int, int]) -> Entries:
        """Those of nodes of which so many tokens count, over the boxes of the only task of `bounds`."""
        places, columns, start = [], [], 0
        for index, count in sorted(tokens.items()):
            node = bounds.nodes[index]
            if not isinstance(node.op, Apply) or index in bounds.locals:
                continue
            (source,) = node.inputs
            rooms = (bounds.slopes(index, side) for side in SIDES)
            free = torch.stack([most > least for least, most in rooms]).any(0)[0, :count]
            where = free.flatten().nonzero()[:, 0]
            if not len(where):
                continue
            part = slice(start, start := start + len(where))
            places.append(Place(index, node.op.function, source, count, where, part))
            box = bounds.boxes[source]
            values = bounds.clean[source], box.lower[0], box.upper[0]
            columns.append(torch.stack([v[:count].flatten()[where] for v in values]))
        together = torch.cat(columns, 1) if columns else torch.zeros(3, 0, dtype=torch.float64)
        return Entries(tuple(places), *together.unsqueeze(-1).unbind(0))

    def __len__(self) -> int:
        return len(self.clean)

    def of(self, parameters: Mapping[int, Parameters], bounds: Bounds) -> Float[Tensor, "2 entries"]:
        """The slopes, below and above, that parameters (or, without them, `default_slopes`) stand for."""
        found = torch.empty(2, len(self), dtype=torch.float64)
        for place in self.places:
            usual = self._each(place, default_slopes, self.lower, self.upper)
            for number, side in enumerate(SIDES):
                share = parameters.get(place.node, {}).get(side)
                slopes = usual[number].squeeze(-1)
                if share is not None:
                    whole = torch.lerp(*bounds.slopes(place.node, side), share.double())
                    slopes = whole[0, : place.tokens].flatten()[place.where]
                found[number, place.part] = slopes
        return found

    def boxes(self, leaves: Sequence[Intervals]) -> Ends:
        """How far the arguments may deviate in some leaves."""
        lower, upper = (v.repeat(1, len(leaves)) for v in (self.lower, self.upper))
        cuts = [(e, k, *ends) for k, leaf in enumerate(leaves) for e, ends in leaf.items()]
        if cuts:
            entries, columns, lows, highs = zip(*cuts, strict=True)
            at = torch.tensor(entries), torch.tensor(columns)
            lower[at] = torch.tensor(lows, dtype=torch.float64)
            upper[at] = torch.tensor(highs, dtype=torch.float64)
        return lower, upper

    def usual(self, lower: Tensor, upper: Tensor) -> Float[Tensor, "2 entries leaves"]:
        """The usual slopes over some intervals, below and above."""
        found = [torch.stack(self._each(p, default_slopes, lower, upper)) for p in self.places]
        return torch.cat(found, 1)

    def lines(
        self, lower: Tensor, upper: Tensor, slopes: Float[Tensor, "2 entries leaves"]
    ) -> Iterator[tuple[Place, Lines]]:
        """Lines of these slopes that hold exactly for the numbers as stored (`elementwise.relax`)."""
        for place in self.places:
            below, above = slopes[:, place.part]
            yield (
                place,
                relax(
                    place.function,
                    self.clean[place.part],
                    lower[place.part],
                    upper[place.part],
                    lower_slope=below,
                    upper_slope=above,
                ),
            )

    def intercepts(
        self, lower: Tensor, upper: Tensor, slopes: Float[Tensor, "2 entries leaves"]
    ) -> Float[Tensor, "2 entries leaves"]:
        """Intercepts of lines of these slopes, up to rounding."""
        intercepts = torch.empty_like(slopes)
        for place in self.places:
            f, center = FUNCTIONS[place.function], self.clean[place.part]
            low, high = f.admit(center + lower[place.part]), center + upper[place.part]
            value = f.value(center)
            for number, sign in enumerate((1.0, -1.0)):
                slope = slopes[number, place.part]
                points = (f.near_minima or f.minima) if number == 0 else (f.near_maxima or f.maxima)
                inside = [torch.fmin(torch.fmax(x, low), high) for x in points(slope)]
                x = torch.stack([low, high, *inside])
                gap = f.value(x) - value - slope * (x - center)
                intercepts[number, place.part] = sign * (sign * gap).nan_to_num(nan=torch.inf).amin(0)
        return intercepts

    def place_of(self, entry: int) -> tuple[int, int]:
        """The node whose argument an entry is, and where in its flattened values."""
        place = next(p for p in self.places if p.part.start <= entry < p.part.stop)
        return place.source, int(place.where[entry - place.part.start])

    def values(self, deviation: Float[Tensor, "entries leaves"]) -> Float[Tensor, "entries leaves"]:
        """How far the functions deviate from their clean values where their arguments do so."""
        found = torch.empty_like(deviation)
        for place in self.places:
            f, center = FUNCTIONS[place.function], self.clean[place.part].to(deviation)
            found[place.part] = f.value(f.admit(center + deviation[place.part])) - f.value(center)
        return found

    def cut_at(
        self, deviation: Float[Tensor, "entries leaves"], lower: Tensor, upper: Tensor
    ) -> Float[Tensor, "entries leaves"]:
        """Where intervals are best cut: a ReLU's at 0, others near the given deviation, NaN where nowhere."""
        found = torch.empty_like(lower)
        for place in self.places:
            part = place.part
            low, high, center = lower[part], upper[part], self.clean[part]
            if place.function == "relu":
                at = (-center).expand_as(low)
            else:
                width = high - low
                at = torch.clamp(deviation[part].double(), low + 0.25 * width, high - 0.25 * width)
                wide = width > NARROWEST * (self.upper - self.lower)[part]
                at = torch.where(wide, at, torch.nan)
            found[part] = torch.where((low < at) & (at < high), at, torch.nan)
        return found

    def _each(self, place: Place, make, lower: Tensor, upper: Tensor, *more: object) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
        part = place.part
        found: tuple[Tensor, ...] = make(place.function, self.clean[part], lower[part], upper[part], *more)
        return found
