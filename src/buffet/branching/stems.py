"""The trunk of a tree: parts of a region with bounds of their own, from which leaves grow.

Leaves cost little and share all but a few lines. Where they are too many, what they share has to get better:
a *stem* is a part of the region (some arguments lie in given intervals) for which the parameters of all
relaxations are learned anew and, if that pays, all boxes are found anew.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import torch
from torch import Tensor

from buffet.bounds.forms import Stop
from buffet.bounds.intervals import Box
from buffet.branching.entries import Entries
from buffet.branching.leaf_bounds import LeafBounds
from buffet.branching.leaves import Leaves, ProvenLeaf
from buffet.network import Apply, Program, Softmax
from buffet.optimisation.adam import Adam
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import Best, FlatParameters
from buffet.optimisation.starts import initial_parameters
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import Propagation
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.propagation.walk import Store, bound_nodes, margins
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer
from buffet.system.parallel import side_by_side, threads

FIRST_STEPS = 40
"""Of learning parameters for a row over the whole region,"""
STEPS = 20
"""and over a part of it, from what was learned for the whole."""
RATE = 0.1
SHORTEST = 1.0
LONGER = 6.0
"""Leaves may take this many seconds, or this many times what their stem took, before the stem is cut."""


@dataclass(frozen=True)
class Effort:
    """What a tree may cost: until when, and how many stems and leaves of each of them."""

    deadline: float | None = None  # on the clock of `time.perf_counter`
    stems: int | None = None
    leaves: int | None = None

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def share(self, part: float) -> Effort:
        """The same until a part of the time that is left is spent."""
        if self.deadline is None:
            return self
        now = time.perf_counter()
        return replace(self, deadline=now + part * (self.deadline - now))


Limits = Mapping[tuple[int, int], tuple[float, float]]
"""By node and place in its flattened values: how far it may deviate, at least and at most."""

Cuts = tuple[tuple[int, int, float, bool], ...]
"""In the order they were made: a node, a place in its flattened values, how far it deviates there, and
whether what is meant lies above."""


def clipped(limits: Limits, boxes: Mapping[int, Box]) -> dict[int, Box]:
    """The boxes of one task within limits.

    Where nothing of a box is left, no point of the region is within the limits, and any box will do.
    """
    found = dict(boxes)
    for index in {node for node, _ in limits}:
        if index in boxes:
            found[index] = within(limits, index, boxes[index])
    return found


def within(limits: Limits, index: int, box: Box) -> Box:
    """The box of a node within limits."""
    own = {place: ends for (node, place), ends in limits.items() if node == index}
    if not own:
        return box
    lower, upper = torch.stack([box.lower, box.upper])  # views by place need a layout of their own
    for place, (low, high) in own.items():
        a, b = max(float(lower.view(-1)[place]), low), min(float(upper.view(-1)[place]), high)
        lower.view(-1)[place], upper.view(-1)[place] = (a, b) if a <= b else (low, high)
    return Box(lower, upper)


@dataclass(frozen=True, eq=False)
class Ground:
    """A walk over a region of one task that did not prove it, and what it learned for every box."""

    bounds: Bounds
    propagation: Propagation
    product: str
    learned: Mapping[int, Mapping[int, Parameters]]  # by the first node of those that were read together

    @property
    def clean_run(self) -> CleanRun:
        return self.bounds.clean_run

    def within(self, limits: Limits, anew: bool, deadline: float | None = None) -> Bounds:
        """Bounds of the part of the region within limits: with the same boxes, clipped, or with new ones.

        Where new ones are not to be trusted, as rounding may be too much of them, the same ones are taken.
        """
        if anew:
            with torch.no_grad():
                fresh = self.anew(limits, deadline)
                if bool(margins(fresh, self.propagation).isfinite().all()):
                    return fresh
        boxes = clipped(limits, self.bounds.boxes)
        with torch.no_grad():
            fresh = replace(self.bounds, boxes=boxes, ranges={}, deadline=deadline)
            return fresh.relaxed(Relaxer(self.product), self.bounds.dtype)

    def anew(self, limits: Limits, deadline: float | None) -> Bounds:
        """A walk over the part of the region within limits."""
        store: Store = lambda index, box: within(limits, index, box)  # noqa: E731
        return bound_nodes(
            self.clean_run,
            self.bounds.region,
            Relaxer(self.product),
            self.propagation,
            dtype=self.bounds.dtype,
            chunk_bytes=self.bounds.chunk_bytes,
            tighten=self._tighten,
            store=store,
            deadline=deadline,
        )

    def _tighten(self, bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        """Boxes with what was learned for them over the whole region."""
        if nodes[0] not in self.learned:
            return bounds.boxes_of(nodes, stops)
        root, _ = bounds.units(nodes)
        tuned = bounds.relaxed(Relaxer(learned=self.learned[nodes[0]]), bounds.dtype, upto=root)
        return tuned.boxes_of(nodes, tuned.locals)


@dataclass(frozen=True, eq=False)
class Stem:
    """A part of the region that is to be proven, with the parameters of what it was cut from."""

    limits: Limits
    parameters: Mapping[int, Parameters] = field(repr=False)
    lower: float = -math.inf  # of what it was cut from
    anew: bool = False  # whether boxes are found anew
    cuts: Cuts = ()  # that led to the limits


@dataclass(frozen=True, eq=False)
class Grown:
    """What became of a stem: leaves that are all proven, or two stems."""

    stem: Stem
    parameters: Mapping[int, Parameters] = field(repr=False)
    lower: float
    entries: Entries | None = field(default=None, repr=False)  # that leaves have slopes for
    leaves: tuple[ProvenLeaf, ...] = ()
    halves: tuple[Stem, ...] = ()
    asked: int = 0
    seconds: float = 0.0


def learn_row(
    bounds: Bounds, row: Tensor, known: Mapping[int, Parameters], steps: int, start: str = "zero"
) -> dict[int, Parameters]:
    """Parameters that raise one row, found in some steps from those that are known."""
    with torch.no_grad():
        flat = FlatParameters(
            initial_parameters(bounds, start, only_alphas=False, known=known), torch.float32
        )
    lagrangian = Lagrangian.over(bounds, len(bounds.nodes) - 1, row.float()[None, :, None])
    adam, best = Adam(flat.values, RATE), Best(flat.values)
    for step in range(steps + 1):
        lower, gradient = lagrangian.bound(flat)
        best.offer(flat.values.detach(), lower[:, 0])
        if step < steps:
            adam.descend(gradient(torch.full_like(lower, -1.0)), 1 - step / (steps + 1))
    return flat.reading(best.values.double())


class Trunk:
    """The tree of one row over a region of one task.

    A leaf is proven if its margin is more than `least`. Without `anew`, all stems keep the boxes of the
    ground, clipped.
    """

    def __init__(
        self,
        ground: Ground,
        row: Tensor,
        parameters: Mapping[int, Parameters],
        least: float = 0.0,
        anew: bool = True,
    ) -> None:
        self.ground, self.row, self.least = ground, row, least
        self.proven: list[Grown] = []
        self.asked = 0
        self._number = count()
        self._open: list[tuple[float, int, Stem]] = []
        self._push(Stem({}, parameters))
        self._upstream = _upstream(ground.clean_run.program) if anew else []

    @property
    def open(self) -> int:
        return len(self._open)

    @property
    def stems(self) -> list[Stem]:
        """Those that are not proven."""
        return [stem for _, _, stem in self._open]

    @property
    def lower(self) -> float:
        """About the least value over the stems that are not proven."""
        return self._open[0][0] if self._open else math.inf

    @property
    def margin(self) -> float:
        """The least margin of the proven leaves."""
        return min((leaf.margin for grown in self.proven for leaf in grown.leaves), default=math.inf)

    @property
    def share(self) -> float:
        """How much of the tree is proven, if each side of a cut is half of what was cut."""
        return sum((2.0 ** -len(grown.stem.cuts) for grown in self.proven), 0.0)

    def grow(self, effort: Effort) -> bool:
        """Prove stems, and cut those that cannot be, until the effort is spent. Whether all are proven."""
        workers = torch.get_num_threads()
        while self._open and not effort.expired:
            if effort.stems is not None and self.open + len(self.proven) > effort.stems:
                return False
            stems = [heapq.heappop(self._open)[2] for _ in range(min(workers, len(self._open)))]
            try:
                if len(stems) > 1:
                    results = side_by_side(lambda stem: self._grown(stem, effort), stems)
                else:
                    with threads(1):  # operations are too small to be split
                        results = [self._grown(stems[0], effort)]
            except KeyboardInterrupt:  # they are as open as they were
                for stem in stems:
                    self._push(stem)
                raise
            for stem, grown in zip(stems, results, strict=True):
                if grown is None or not (grown.leaves or grown.halves):
                    self._push(stem)  # out of time, or nothing is left to cut
                    if grown is not None:
                        return False
                    continue
                self.asked += grown.asked
                if grown.leaves:
                    self.proven.append(grown)
                for half in grown.halves:
                    self._push(half)
            if any(grown is None for grown in results):
                return False
        return not self._open

    def _grown(self, stem: Stem, effort: Effort) -> Grown | None:
        """What becomes of a stem; None where the time is up before anything does."""
        begin, deadline = time.perf_counter(), effort.deadline
        try:
            bounds = self.ground.within(stem.limits, stem.anew, deadline)
            steps = STEPS if stem.limits else FIRST_STEPS
            parameters = learn_row(bounds, self.row, stem.parameters, steps)
            leaves = Leaves(LeafBounds.over(bounds, self.row, parameters), self.least)
            lower = float(leaves.whole.lower[0])
            if effort.stems == 1 and lower + leaves.blame < 0:
                return Grown(stem, parameters, lower)  # exact functions would not do, and there is no more
            made = time.perf_counter()
            end = made + max(SHORTEST, LONGER * (made - begin))
            end = end if deadline is None else min(end, deadline)
            if (most := effort.leaves) is None:
                done = leaves.grow(lambda: time.perf_counter() < end)
            else:
                done = leaves.grow(lambda: leaves.asked < most)
        except OutOfTime:
            return None
        found = Grown(stem, parameters, lower, asked=leaves.asked, seconds=made - begin)
        if done:
            return replace(found, entries=leaves.bounds.entries, leaves=tuple(leaves.proven))
        if effort.stems == 1 or effort.expired:
            return found if effort.stems == 1 else None
        anew = stem.anew
        if not stem.limits:  # the first of all
            anew = self._pays(stem, leaves, parameters, deadline)
        cut = (leaves.promising(self._upstream) if anew else None) or leaves.promising()
        if cut is None:
            return found
        node, (_, at) = leaves.bounds.entries.place_of(cut[0]), cut
        halves = (
            Stem(limits, parameters, lower, anew, (*stem.cuts, (*node, at, above)))
            for above, limits in zip((False, True), _halved(stem.limits, leaves, cut), strict=True)
        )
        return replace(found, halves=tuple(halves))

    def _pays(
        self, stem: Stem, leaves: Leaves, parameters: Mapping[int, Parameters], deadline: float | None
    ) -> bool:
        """Whether finding boxes anew behind a cut raises the bound by more than cuts that take as long."""
        if not self._upstream or (cut := leaves.promising(self._upstream)) is None:
            return False
        lowers, times = [], []
        try:
            for anew in (False, True):
                begin = time.perf_counter()
                bounds = self.ground.within(_halved(stem.limits, leaves, cut)[0], anew, deadline)
                whole = Leaves(
                    LeafBounds.over(bounds, self.row, learn_row(bounds, self.row, parameters, STEPS))
                )
                lowers.append(float(whole.whole.lower[0]))
                times.append(time.perf_counter() - begin)
        except OutOfTime:
            return False
        gain, more = lowers[0] - float(leaves.whole.lower[0]), lowers[1] - lowers[0]
        return more > max(gain, 0.0) * math.log2(max(times[1] / times[0], 1.0))

    def _push(self, stem: Stem) -> None:
        heapq.heappush(self._open, (stem.lower, next(self._number), stem))


def _halved(limits: Limits, leaves: Leaves, cut: tuple[int, float]) -> tuple[Limits, Limits]:
    """The limits of both sides of a cut of the whole."""
    entry, place = cut
    entries = leaves.bounds.entries
    node = entries.place_of(entry)
    below, above = (float(entries.lower[entry]), place), (place, float(entries.upper[entry]))
    return {**limits, node: below}, {**limits, node: above}


def _upstream(program: Program) -> list[int]:
    """Function nodes before the last attention: cutting their arguments changes boxes behind them."""
    last = max((i for i, node in enumerate(program.nodes) if isinstance(node.op, Softmax)), default=0)
    return [i for i, node in enumerate(program.nodes[:last]) if isinstance(node.op, Apply)]
