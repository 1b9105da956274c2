"""Claims that are proven leaf by leaf: what was derived for the whole region, on both sides of some cuts.

A *cut* is on the deviation d of one entry of a node that a function reads: ``d ≤ t`` below it, ``d ≥ t``
above. A *leaf* is what lies on the given sides of some cuts, and a tree is a list of leaves such that every
run of the network is in one of them. That follows from the order in which each leaf names its cuts: all
leaves have the same first cut, those below it have the same second one, and so on, until one leaf is left.
Nothing is computed for it, so it holds for exact numbers, whatever is known of d.

Everything that was derived for the region holds in its parts. In a leaf, the box of an entry that is cut ends
at t, so that the lines of its function are nearer, and the margins are substituted once more. For a deployed
run the leaf is the one that its own, deployed, values are in: where its d may be outside of the region's box
by an escape, it is outside of the leaf's by no more, as it does not pass t.

A *stem* is a part of the region in which everything is derived anew, node by node, with the boxes of entries
that are cut ending there. Its leaves are those that name all of its cuts: what is derived for the stem holds
in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from buffet_checker.arrays import Tensors
from buffet_checker.balls import Array, down
from buffet_checker.certificate import Cut, Leaf
from buffet_checker.errors import RejectedError
from buffet_checker.graph import Node
from buffet_checker.intervals import Box
from buffet_checker.pieces import Piece
from buffet_checker.substitution import Claimed

Margins = tuple[Array, Array]
"""Lower bounds of the margins: in exact arithmetic, and of a deployed run."""

CHOICES = ("lower", "upper", "whole", "point", "mixture", "shift")
"""Names of what is chosen for a node."""


def with_trees(whole: Claimed, margins: Margins) -> Margins:
    """The margins of a claim, with what its trees prove: of each tree, what all of its leaves prove."""
    exact, deployed = margins
    for number, tree in enumerate(whole.claim.trees):
        where = f"{whole.claim.number}.leaf.{number}"
        if not covers([leaf.cuts for leaf in tree]):
            raise RejectedError(
                f"claims[{whole.claim.number}].trees[{number}]: the leaves do not add up to the whole"
            )
        found, stems = [], _Stems(whole)
        for k, leaf in enumerate(tree):
            found.append(leaf_margins(stems.of(leaf, f"{where}.{k}"), leaf, f"{where}.{k}"))
        leaves, leaves_deployed = (np.min(side, 0) for side in zip(*found, strict=True))
        exact, deployed = np.maximum(exact, leaves), np.fmax(deployed, leaves_deployed)
    return exact, deployed


def covers(paths: Sequence[tuple[Cut, ...]]) -> bool:
    """Whether leaves that name their cuts in this order are all that there are."""
    parts = [(list(paths), 0)]
    while parts:
        leaves, depth = parts.pop()
        if len(leaves) == 1 and len(leaves[0]) == depth:
            continue
        if not leaves or any(len(path) == depth for path in leaves):
            return False
        if len({path[depth].place for path in leaves}) > 1:
            return False
        parts += [([p for p in leaves if p[depth].above == side], depth + 1) for side in (False, True)]
    return True


def leaf_margins(whole: Claimed, leaf: Leaf, name: str) -> Margins:
    """What is proven of the margins in one leaf, whose arrays are those of the claim or have its name."""
    last = len(whole.nodes) - 1
    inside = _inside(whole, leaf, name)
    for derivation in leaf.derivations:
        if derivation.nodes != (last,) or derivation.keep:
            raise RejectedError(f"{name}: a leaf derives margins only, and keeps no form")
        inside._derive(derivation)
    low = whole.boxes[last][0]
    strayed = down(low - whole.escapes[last])
    if last in inside.derived:
        found = inside.derived[last]
        low, strayed = np.maximum(low, found[0]), np.fmax(strayed, found[2])
    exact, deployed = (down(whole.values[last] + side)[0] for side in (low, strayed))
    if not all(np.isfinite(rounding).all() for rounding in whole.roundings):
        deployed = np.full_like(exact, -np.inf)  # a NaN may be hidden by a coefficient of 0
    return exact, np.nan_to_num(deployed, nan=-np.inf)


def clipped(box: Box, cut: Cut) -> Box:
    """A box on one side of a cut. Where nothing is left of it, no exact run is there: it is a point then,
    and a deployed run is outside of it by no more than it was before."""
    low, high = (side.reshape(-1).copy() for side in box)
    if cut.above:
        low[cut.entry] = max(low[cut.entry], cut.threshold)
        high[cut.entry] = max(high[cut.entry], low[cut.entry])
    else:
        high[cut.entry] = min(high[cut.entry], cut.threshold)
        low[cut.entry] = min(low[cut.entry], high[cut.entry])
    return low.reshape(box[0].shape), high.reshape(box[1].shape)


def _inside(whole: Claimed, leaf: Leaf, name: str) -> _Inside:
    _check_cuts(whole, leaf.cuts, name)
    boxes = list(whole.boxes)
    for cut in leaf.cuts:
        boxes[cut.node] = clipped(boxes[cut.node], cut)
    return _Inside(
        nodes=whole.nodes,
        values=whole.values,
        region=whole.region,
        claim=whole.claim,
        tensors=_Own(
            whole.tensors.stored, whole.tensors.used, f"{whole.claim.number}.", f"{name}.", whole.tensors
        ),
        residuals=whole.residuals,
        roundings=whole.roundings,
        boxes=boxes,
        escapes=whole.escapes,
        forms=whole.forms,
        locals=whole.locals,
        whole=whole,
        cut=frozenset(cut.node for cut in leaf.cuts),
    )


def _check_cuts(whole: Claimed, cuts: Sequence[Cut], name: str) -> None:
    read = {node.inputs[0] for node in whole.nodes if node.kind == "apply"}
    for cut in cuts:
        if cut.node not in read:
            raise RejectedError(f"{name}: a cut of node {cut.node}, which no function reads")
        if cut.entry >= whole.values[cut.node].size:
            raise RejectedError(f"{name}: a cut of entry {cut.entry} of node {cut.node}, which has fewer")


@dataclass
class _Own(Tensors):
    """The arrays of a part, under the names that its claim has for them; `shared`: where it has none."""

    claim: str = ""
    name: str = ""
    shared: Tensors | None = None

    def get(self, name: str, shapes: list[tuple[int, ...]], share: bool = False) -> Array | None:
        own = super().get(self.name + name.removeprefix(self.claim), shapes, share)
        return self.shared.get(name, shapes, share) if own is None and self.shared else own

    def has(self, prefix: str) -> bool:
        """Whether the part has arrays of its own for a node under a set of choices."""
        return any(f"{self.name}{prefix}.{name}" in self.stored.tensors for name in CHOICES)


@dataclass
class _Stem(Claimed):
    """Everything derived anew for the part of the region on these sides of some cuts."""

    cuts: tuple[Cut, ...] = ()

    def _settle(self, index: int, node: Node) -> None:
        super()._settle(index, node)
        for cut in self.cuts:
            if cut.node == index:
                self.boxes[index] = clipped(self.boxes[index], cut)


@dataclass
class _Stems:
    """The stems of a claim, one at a time: leaves of one follow each other."""

    whole: Claimed
    number: int | None = None
    found: Claimed | None = None

    def of(self, leaf: Leaf, name: str) -> Claimed:
        """What the boxes of a leaf are made from."""
        if leaf.stem is None:
            return self.whole
        stems = self.whole.claim.stems
        if leaf.stem >= len(stems):
            raise RejectedError(f"{name}: there is no stem {leaf.stem}")
        if not set(stems[leaf.stem].cuts) <= set(leaf.cuts):
            raise RejectedError(f"{name}: is no part of stem {leaf.stem}")
        if self.found is None or self.number != leaf.stem:
            self.number, self.found = leaf.stem, self._derived(leaf.stem)
        return self.found

    def _derived(self, number: int) -> Claimed:
        whole, claim = self.whole, self.whole.claim
        stem, name = claim.stems[number], f"{claim.number}.stem.{number}"
        _check_cuts(whole, stem.cuts, name)
        own = replace(claim, derivations=stem.derivations, trees=(), stems=())
        tensors = _Own(whole.tensors.stored, whole.tensors.used, f"{claim.number}.", f"{name}.")
        found = _Stem(whole.nodes, whole.values, whole.region, own, tensors, cuts=stem.cuts)
        found.margins()
        return found


@dataclass
class _Inside(Claimed):
    """What is known of the nodes in a leaf: all that is known in the whole region, and the cuts."""

    whole: Claimed = field(kw_only=True)
    cut: frozenset[int] = field(kw_only=True)

    def piece(self, index: int, choices: int) -> tuple[Piece, Array, Array]:
        """A piece of the whole region is valid here too; behind a cut the leaf has its own."""
        assert isinstance(self.tensors, _Own)
        if self.cut.isdisjoint(self.nodes[index].inputs) and not self.tensors.has(f"{choices}.{index}"):
            return self.whole.piece(index, choices)
        return super().piece(index, choices)
