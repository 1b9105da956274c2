"""Branching: a region is cut into parts, worst first, and a task is proven when every part is.

Bounds over a part are tighter than over the whole. It is cut where attention scores move most: products, and
with them everything that is loose, vary with the scores, and those with few directions of the input. How a
region is cut is its own affair (`Region.cuttable`); any cut is sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.network import Program, Scores
from buffet.regions import Region
from buffet.system.parallel import side_by_side

CHUNK = 1 << 28
"""Bytes that the values of the network may take at a time while it is looked for where to cut."""
SOME = 4096
"""The most scores that are looked at."""

Ask = Callable[[Region], Float[Tensor, "others"]]
"""The margins of a single part, NaN where there are none."""


@dataclass(eq=False)
class Leaf:
    """A part, its margins at the last ε that it was asked about, and at the largest that it was proven at."""

    part: Region
    eps: float
    margins: Float[Tensor, "others"]
    proven: float = -math.inf
    proof: Float[Tensor, "others"] | None = None

    @property
    def least(self) -> float:
        """The smallest margin; −inf where there is none."""
        return float(self.margins.min()) if bool(self.margins.isfinite().all()) else -math.inf

    def hear(self, eps: float, margins: Float[Tensor, "others"]) -> None:
        self.eps, self.margins = eps, margins
        if self.least > 0 and eps > self.proven:
            self.proven, self.proof = eps, margins


class Tree:
    """The region of one task, which is not proven as a whole, cut into parts that together cover it.

    Cuts stay where they are when ε changes, so what is proven of a part holds for all smaller ε. A region
    without a size has one ε only, which is 0.
    """

    def __init__(self, program: Program, region: Region, ask: Ask, most: int, together: bool) -> None:
        """
        Args:
            region: of one task; the margins of the whole are of no use at this ε.
            ask: bounds the margins of a part.
            most: how many parts there may be.
            together: whether parts may be asked about at the same time.
        """
        whole, self._halve = region.cuttable(changes(program, region))
        self._ask, self._most = ask, most
        self._step = torch.get_num_threads() if together else 1
        self._resizable = region.resizable
        size = 0.0 if region.eps is None else float(region.eps[0])
        self.leaves = [Leaf(whole, size, torch.tensor([-math.inf]))]
        self.asked = 0

    def grow(self, eps: float, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Halve the worst part until all are proven, or there are as many as may be. Whether they are."""
        while worst := self._failing(eps):
            if len(self.leaves) >= self._most or not go_on():
                return False
            if (halves := self._halve(self._sized(worst.part, eps))) is None:
                return False
            self.leaves.remove(worst)
            leaves = [replace(worst, part=half, eps=0.0) for half in halves]
            self.leaves += leaves
            self._hear(leaves, eps)
        return True

    def limit(self, eps: float) -> float:
        """The margin of a part that is not proven; else the smallest found at this ε, or of all proofs."""
        if failing := self._failing(eps):
            return failing.least
        return min((leaf.least for leaf in self.leaves if leaf.eps == eps), default=self.margin)

    @property
    def margins(self) -> Float[Tensor, "others"]:
        """The smallest margins of all parts, where all are proven."""
        return torch.stack([leaf.proof for leaf in self.leaves if leaf.proof is not None]).amin(0)

    @property
    def margin(self) -> float:
        """The smallest of these."""
        return float(self.margins.min())

    def _failing(self, eps: float) -> Leaf | None:
        """A part that is not proven, the worst as far as one can tell."""
        rest = sorted((leaf for leaf in self.leaves if leaf.proven < eps), key=lambda leaf: leaf.least)
        for k in range(0, len(rest), self._step):
            some = rest[k : k + self._step]
            self._hear([leaf for leaf in some if leaf.eps != eps], eps)
            if failing := [leaf for leaf in some if leaf.proven < eps]:
                return min(failing, key=lambda leaf: leaf.least)
        return None

    def _hear(self, leaves: Sequence[Leaf], eps: float) -> None:
        parts = [self._sized(leaf.part, eps) for leaf in leaves]
        found = side_by_side(self._ask, parts) if self._step > 1 else [self._ask(part) for part in parts]
        for leaf, margins in zip(leaves, found, strict=True):
            leaf.hear(eps, margins)
        self.asked += len(leaves)

    def _sized(self, part: Region, eps: float) -> Region:
        return part.with_eps(eps) if self._resizable else part


def changes(program: Program, region: Region) -> list[Float[Tensor, "_ some"]]:
    """What scores change by between the probes of every moved row, in a region of one task."""
    return [_changes(program, region, row) for row in range(region.moved.shape[1])]


def _changes(program: Program, region: Region, row: int) -> Float[Tensor, "probes some"]:
    center = region.center.double()
    kept = sum(value.numel() for value in program.values(center))
    size = max(1, CHUNK // (2 * kept * center.element_size()))
    found = []
    for pair in zip(*(side.split(size) for side in region.probes(row)), strict=True):
        x = center.repeat(2, len(pair[0]), 1, 1)
        x[:, :, region.moved[0, row]] += torch.stack(pair)
        up, down = _scores(program, x)
        found.append(up - down)
    return torch.cat(found)


def _scores(
    program: Program, x: Float[Tensor, "sides probes tokens width"]
) -> Float[Tensor, "sides probes some"]:
    """Attention scores of all layers; of very many, some that stand for all."""
    values = program.values(x)
    scores = [v for v, node in zip(values, program.nodes, strict=True) if isinstance(node.op, Scores)]
    found = torch.cat([v.flatten(2) for v in scores or values[-1:]], 2)
    return found[..., :: -(-found.shape[2] // SOME)].clone()
