"""A best-first tree of leaves on top of one walk: the worst are cut first, where their bounds lose the most.

Nothing is learned here: a leaf takes over the slopes of what it was cut from, or the usual ones of the entry
that was cut, so that it costs one pass back and forth, shared by many.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from buffet.branching.entries import Ends, Intervals
from buffet.branching.leaf_bounds import Estimate, LeafBounds

BATCH = 64
"""Leaves that are bounded together; more at once are no faster."""
LOOKED_AT = 16
"""Cuts that are tried before one is made for good."""


Path = tuple[tuple[int, float, bool], ...]
"""The cuts that led to a leaf, in order: the entry, the place, and whether the leaf lies above it."""


@dataclass(frozen=True, eq=False)
class Part:
    """A part of the region, and the cuts that led to it."""

    intervals: Intervals = field(default_factory=dict)
    path: Path = ()


@dataclass(frozen=True, eq=False)
class Leaf:
    """A part of the region that is not proven, and where it is cut next."""

    intervals: Intervals
    path: Path
    lower: float  # about the least value of the row
    slopes: Tensor = field(repr=False)  # 2 × entries
    entry: int  # −1: there is nothing to cut
    place: float


@dataclass(frozen=True, eq=False)
class ProvenLeaf:
    """A part of the region with the slopes of its lines, and the margin they prove."""

    intervals: Intervals
    path: Path
    slopes: Tensor = field(repr=False)
    margin: float


class Leaves:
    """The leaves of one row of a region that is not proven as a whole.

    A leaf is proven if its margin is more than `least`.
    """

    def __init__(self, bounds: LeafBounds, least: float = 0.0) -> None:
        self.bounds, self.least = bounds, least
        self.proven: list[ProvenLeaf] = []
        self.asked = 0
        self._number = count()
        self._open: list[tuple[float, int, Leaf]] = []
        ends = bounds.entries.boxes([{}])
        self.whole = bounds.estimate(ends, bounds.start.unsqueeze(-1))
        self._settle([Part()], self.whole, ends)

    @property
    def open(self) -> list[Leaf]:
        return [leaf for _, _, leaf in self._open]

    @property
    def blame(self) -> float:
        """About by how much exact functions would raise the bound of the whole."""
        return float(self.whole.blame.sum())

    def grow(self, go_on: Callable[[], bool]) -> bool:
        """Cut the worst leaves as long as it may go on. Whether all are proven."""
        while self._open and go_on():
            worst = [heapq.heappop(self._open)[2] for _ in range(min(BATCH // 2, len(self._open)))]
            if any(leaf.entry < 0 for leaf in worst):
                for leaf in worst:
                    self._push(leaf)
                return False
            halves = [half for leaf in worst for half in self._halves(leaf)]
            cut = [leaf.entry for leaf in worst for _ in range(2)]
            slopes = torch.stack([leaf.slopes for leaf in worst], -1).repeat_interleave(2, -1)
            known = torch.tensor([leaf.lower for leaf in worst], dtype=torch.float64).repeat_interleave(2)
            found = self._estimate([half.intervals for half in halves], slopes, cut, known)
            self._settle(halves, *found)
        return not self._open

    def promising(self, upstream: Sequence[int] | None = None) -> tuple[int, float] | None:
        """The entry and place where a cut of the whole raises the worse half the most, of those that are
        blamed the most; with `upstream`, of entries of these nodes."""
        entries, whole = self.bounds.entries, self.whole
        places = entries.cut_at(whole.at, entries.lower, entries.upper)[:, 0]
        blame = whole.blame[:, 0].where(~places.isnan(), -1.0)
        if upstream is not None:
            for place in entries.places:
                if place.node not in upstream:
                    blame[place.part] = -1.0
        chosen = [e for e in blame.topk(min(LOOKED_AT, len(blame))).indices.tolist() if blame[e] > 0]
        if not chosen:
            return None
        ends = [(float(entries.lower[e]), float(places[e]), float(entries.upper[e])) for e in chosen]
        halves: list[Intervals] = []
        for e, (low, at, high) in zip(chosen, ends, strict=True):
            halves += [{e: (low, at)}, {e: (at, high)}]
        slopes = whole.slopes.repeat(1, 1, len(halves))
        cut = [e for e in chosen for _ in range(2)]
        found, _ = self._estimate(halves, slopes, cut, whole.lower)
        worse, better = found.lower.view(-1, 2).sort(-1).values.unbind(-1)
        best = int((worse + 0.1 * better).argmax())
        return chosen[best], ends[best][1]

    def _halves(self, leaf: Leaf) -> tuple[Part, Part]:
        """What lies below the place of the cut, and above."""
        entries = self.bounds.entries
        whole = float(entries.lower[leaf.entry]), float(entries.upper[leaf.entry])
        low, high = leaf.intervals.get(leaf.entry, whole)
        sides = ((low, leaf.place), False), ((leaf.place, high), True)
        below, above = (
            Part({**leaf.intervals, leaf.entry: ends}, (*leaf.path, (leaf.entry, leaf.place, side)))
            for ends, side in sides
        )
        return below, above

    def _estimate(
        self, leaves: Sequence[Intervals], slopes: Tensor, cut: Sequence[int], known: Tensor
    ) -> tuple[Estimate, Ends]:
        """With the usual slopes of what was just cut or, where that is worse than what is `known` of the
        whole, with the slopes as they are, which lose nothing."""
        self.asked += len(leaves)
        bounds, entries, at = self.bounds, self.bounds.entries, (torch.tensor(cut), torch.arange(len(cut)))
        ends = entries.boxes(leaves)
        usual = slopes.clone()
        usual[:, *at] = entries.usual(*ends)[:, *at]
        found = bounds.estimate(ends, usual)
        worse = (found.lower < known).nonzero()[:, 0]
        if len(worse):
            lower, upper = (end[:, worse] for end in ends)
            found = found.or_better(bounds.estimate((lower, upper), slopes[..., worse]), worse)
        return found, ends

    def _settle(self, leaves: Sequence[Part], found: Estimate, ends: Ends) -> None:
        """Prove what can be proven, and keep the rest for later."""
        entries = self.bounds.entries
        hopeful = (found.lower > self.least).nonzero()[:, 0]
        margins = torch.full((len(leaves),), -math.inf, dtype=torch.float64)
        if len(hopeful):
            lower, upper = (end[:, hopeful] for end in ends)
            margins[hopeful] = self.bounds.prove((lower, upper), found.slopes[..., hopeful])
        places = entries.cut_at(found.at, *ends)
        if not len(entries):
            places = torch.full((1, len(leaves)), math.nan)
        blame = found.blame if len(entries) else places
        worst, chosen = blame.where(~places.isnan(), -1.0).max(0)
        for k, leaf in enumerate(leaves):
            slopes, margin = found.slopes[..., k].clone(), float(margins[k])
            if self.least < margin < math.inf:
                self.proven.append(ProvenLeaf(leaf.intervals, leaf.path, slopes, margin))
                continue
            entry = int(chosen[k]) if float(worst[k]) >= 0 else -1
            place = float(places[entry, k]) if entry >= 0 else math.nan
            least = min(float(found.lower[k]), self.least)
            self._push(Leaf(leaf.intervals, leaf.path, least, slopes, entry, place))

    def _push(self, leaf: Leaf) -> None:
        heapq.heappush(self._open, (leaf.lower, next(self._number), leaf))
