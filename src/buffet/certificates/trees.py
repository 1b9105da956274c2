"""Proofs by branch and bound with numbers that can be stored.

The tree grows on the boxes of a proof as they are stored, so that its leaves prove what the checker will find
in them: leaves share these boxes, which end at their cuts, and have slopes of their own where they are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from buffet.branching.stems import Cuts, Effort, Ground, Grown, Limits, Stem, Trunk, clipped
from buffet.certificates.proof import Proof, Recorder, Room, Tensors, reads, walk
from buffet.methods import Method
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import margins
from buffet.relaxations.elementwise import SIDES
from buffet.relaxations.enclosures import Enclosure
from buffet.relaxations.relaxation import Parameters, Site
from buffet.relaxations.table import Relaxer, relaxation_of

LEAST = 1e-5
"""A leaf counts as proven with this margin, more than storing its slopes in float32 takes off."""


@dataclass(frozen=True)
class Given:
    """Relaxes with choices as they are stored."""

    choices: Mapping[int, Tensors]

    def __call__(self, bounds: Bounds, index: int) -> Enclosure:
        site = Site(bounds, index)
        stored = self.choices[index].items()
        choices = {name: v.double().unsqueeze(0) if v.ndim else float(v) for name, v in stored}
        return relaxation_of(site.node.op).linearise(site, choices)


@dataclass(frozen=True, eq=False)
class StoredGround(Ground):
    """A walk whose boxes can be stored, also where they are found anew for a part of the region."""

    method: Method
    room: Room

    def anew(self, limits: Limits, deadline: float | None) -> Bounds:
        return self.stored(limits, deadline)[1]

    def stored(self, limits: Limits, deadline: float | None = None) -> tuple[Proof, Bounds]:
        """A walk over the part of the region within limits, and its proof."""
        region = self.bounds.region
        return walk(self.clean_run, region, self.method, self.learned, self.room, limits, deadline)


def add_trees(
    proof: Proof,
    bounds: Bounds,
    method: Method,
    learned: Mapping[int, Mapping[int, Parameters]],
    effort: Effort,
) -> bool:
    """Prove the margins that a proof leaves open, each by a tree, on the boxes that it stores.

    Whether all are proven; the proof has the trees and the margins that they prove then.
    """
    root = len(bounds.nodes) - 1
    ground = StoredGround(bounds, method.describe(), method.product, learned, method, proof.room)
    eye = torch.eye(len(proof.margins), dtype=torch.float64, device=proof.margins.device)
    while proof.margin <= LEAST:
        row = int(ground.clean_run.deciding(proof.margins[None])[1])
        trunk = Trunk(ground, eye[row], learned.get(root, {}), LEAST)
        if not trunk.grow(effort):
            return False
        margins = _written(proof, ground, trunk.proven)
        if not float(margins[row]) > float(proof.margins[row]) or not float(margins[row]) > 0:
            return False
        proof.margins = torch.maximum(proof.margins, margins)
    return True


def _written(proof: Proof, ground: StoredGround, proven: list[Grown]) -> Tensor:
    """Write a tree into a proof: the margins of all rows that every leaf proves.

    Boxes that a stem found anew are found once more, as only their number is known before.
    """
    leaves: list[dict[str, object]] = []
    least: list[Tensor] = []
    root = len(ground.bounds.nodes) - 1
    used = reads(ground.bounds, root)
    for grown in proven:
        holder, base, named = _holder(proof, ground, grown.stem)
        with torch.no_grad():
            stem = replace(base, boxes=clipped(grown.stem.limits, base.boxes), ranges={})
            recorder = Recorder(Relaxer(learned=grown.parameters))
            stem.relaxed(recorder, torch.float64)
        number = holder.keep(recorder.chosen)
        shared = holder.sets[number]
        for cuts, choices in _leaves(grown, shared):
            name = f"leaf.{len(proof.trees)}.{len(leaves)}"
            least.append(_margins(base, cuts, choices))
            for index in used & choices.keys():
                own = {k: v for k, v in choices[index].items() if not torch.equal(v, shared[index][k])}
                proof.own_choices |= {f"{name}.{number}.{index}.{k}": v for k, v in own.items()}
                holder.used |= {(number, index, k) for k in choices[index] if k not in own}
            derivation = {"nodes": [root], "choices": number}
            leaves.append({"cuts": _sides(cuts), "derivations": [derivation], **named})
    proof.trees.append(leaves)
    return torch.stack(least).amin(0)


def _holder(proof: Proof, ground: StoredGround, stem: Stem) -> tuple[Proof, Bounds, dict[str, object]]:
    """The proof whose boxes and choices the leaves of a stem share, their bounds, and how a leaf names it."""
    if stem.anew and stem.limits:
        own, bounds = ground.stored(stem.limits)
        if bool(margins(bounds, ground.propagation).isfinite().all()):
            proof.stems.append((stem.cuts, own))
            return own, bounds, {"stem": len(proof.stems) - 1}
    return proof, ground.bounds, {}


def stem_facts(cuts: Cuts, proof: Proof) -> dict[str, object]:
    """A stem in the words of the schema."""
    return {"cuts": _sides(cuts), "derivations": proof.derivations}


def _sides(cuts: Cuts) -> list[list[object]]:
    return [[node, place, at, "above" if above else "below"] for node, place, at, above in cuts]


def _leaves(grown: Grown, shared: Mapping[int, Tensors]) -> Iterator[tuple[Cuts, Mapping[int, Tensors]]]:
    """The cuts of every leaf of a stem, and its choices."""
    entries = grown.entries
    assert entries is not None
    for leaf in grown.leaves:
        own = ((*entries.place_of(entry), at, above) for entry, at, above in leaf.path)
        choices = dict(shared)
        for place in entries.places:
            if place.node in shared:
                slopes = dict(zip(SIDES, leaf.slopes[:, place.part], strict=True))
                choices[place.node] = {
                    name: _with(value, place.where, slopes[name])
                    for name, value in shared[place.node].items()
                }
        yield (*grown.stem.cuts, *own), choices


def _with(value: Tensor, where: Tensor, slopes: Tensor) -> Tensor:
    changed = value.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[where] = slopes.to(changed)
    return changed


def _margins(bounds: Bounds, cuts: Cuts, choices: Mapping[int, Tensors]) -> Tensor:
    """What a leaf proves of all margins."""
    limits: dict[tuple[int, int], tuple[float, float]] = {}
    for node, place, at, above in cuts:
        low, high = limits.get((node, place), (-torch.inf, torch.inf))
        limits[node, place] = (max(low, at), high) if above else (low, min(high, at))
    with torch.no_grad():
        inside = replace(bounds, boxes=clipped(limits, bounds.boxes), ranges={})
        fresh = inside.relaxed(Given(choices), torch.float64)
        return (bounds.clean[-1] + fresh.margin(fresh.locals))[0]
