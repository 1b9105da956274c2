"""Proofs made with numbers that can be stored, for `certificate`.

Boxes and choices are stored in float32, so the proof is made again, in float64, with the numbers as they are
stored: boxes are rounded outward as soon as they are found, choices before they are used. The checker, which
does the same with rigorous rounding, then finds what is stored up to float64's rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch import Tensor

from buffet.bounds.forms import Stop
from buffet.bounds.intervals import Box
from buffet.branching.stems import Cuts, Limits, within
from buffet.methods import Method
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import Derivation, first_row, plan_of
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import bound_nodes, margins
from buffet.regions import Region
from buffet.relaxations.enclosures import Enclosure
from buffet.relaxations.relaxation import Choice, Parameters, Site
from buffet.relaxations.table import Relaxer, relaxation_of

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Room:
    """By how much boxes are widened: by a share of their width, and of 1 + |clean value|."""

    relative: float
    absolute: float


ROOMS = (Room(4e-3, 1e-4), Room(1e-6, 1e-9))
"""Tried in this order. In the first, the boxes hold what float32 rounding does to a deployed run, so that the
checker finds a small slack; it costs a few percent of the margin. Where that is too much, the second leaves
room for the checker's own rounding only: its boxes differ from ours by float64's, about 1e-13 of the values
that enter."""


@dataclass
class Recorder:
    """Relaxes as a `Relaxer` does, with choices rounded to float32, and takes down what was chosen."""

    relaxer: Relaxer
    chosen: dict[int, Tensors] = field(default_factory=dict)

    def __call__(self, bounds: Bounds, index: int) -> Enclosure:
        site = Site(bounds, index)
        relaxation = relaxation_of(site.node.op)
        choices = relaxation.complete(site, self.relaxer.choices(site))
        return relaxation.linearise(site, {name: self._keep(index, name, c) for name, c in choices.items()})

    def _keep(self, index: int, name: str, value: Choice) -> Choice:
        stored = torch.as_tensor(value, dtype=torch.float32).detach()
        self.chosen.setdefault(index, {})[name] = stored[0] if stored.ndim else stored
        return stored.double() if stored.ndim else float(stored)


@dataclass
class Proof:
    """The proof of one task, as it grows: boxes, sets of choices, and how boxes are derived."""

    clean_run: CleanRun
    room: Room
    boxes: dict[int, Tensor] = field(default_factory=dict)
    sets: list[dict[int, Tensors]] = field(default_factory=list)
    own: dict[int, int] = field(default_factory=dict)  # first node of a group → its own set of choices
    derivations: list[dict[str, object]] = field(default_factory=list)
    used: set[tuple[int, int, str]] = field(default_factory=set)  # (set, node, name)
    trees: list[list[dict[str, object]]] = field(default_factory=list)  # each a list of leaves
    own_choices: Tensors = field(default_factory=dict)  # of leaves, by the name they are stored under
    stems: list[tuple[Cuts, Proof]] = field(default_factory=list)  # parts with boxes of their own
    margins: Tensor = field(default_factory=lambda: torch.tensor([math.nan]))

    @property
    def margin(self) -> float:
        """The least margin of any case; NaN if there is none."""
        asked = self.clean_run.asked
        return float((asked.by_case(self.margins) if asked else self.margins).min())

    def store(self, index: int, box: Box) -> Box:
        """The box as it is stored: float32, rounded outward."""
        scale = 1 + self.clean_run.clean[index].abs()
        slack = self.room.relative * (box.upper - box.lower) + self.room.absolute * scale
        ends = torch.stack([box.lower - slack, box.upper + slack], 1).float()
        outward = torch.tensor([-math.inf, math.inf]).view(1, 2, 1, 1)
        stored = torch.nextafter(ends, outward.expand_as(ends))
        self.boxes[index] = stored[0]
        return Box(*stored.double().unbind(1))

    def keep(self, choices: dict[int, Tensors]) -> int:
        """The number of a set of choices; one that is there already is not stored twice."""
        for number, known in enumerate(self.sets):
            if all(i in known and _same(known[i], chosen) for i, chosen in choices.items()):
                return number
        self.sets.append(choices)
        return len(self.sets) - 1

    def derive(self, bounds: Bounds, derivation: Derivation, choices: int | None = None) -> None:
        """How linear bounds of some nodes were found, with the choices that were learned for them, if any."""
        nodes, keep = derivation.nodes, derivation.keep
        if derivation.pushed:
            self.derivations.append({"nodes": list(nodes), "push": True, "keep": keep})
            self._use(0, {index for index in nodes if index not in bounds.locals})
            return
        choices = self.own.get(nodes[0]) if choices is None else choices
        stops = derivation.stops if choices is None else frozenset()
        entry = {"nodes": list(nodes), "choices": choices or 0, "stops": sorted(stops), "keep": keep}
        self.derivations.append(entry)
        self._use(choices or 0, reads(bounds, nodes[0], stops))

    def _use(self, choices: int, nodes: Set[int]) -> None:
        self.used |= {(choices, n, name) for n in nodes for name in self.sets[choices].get(n, {})}

    def tensors(self, prefix: str) -> Tensors:
        """What is stored, by name."""
        stored = {f"{prefix}.box.{index}": box for index, box in self.boxes.items()}
        for choices, index, name in sorted(self.used):
            stored[f"{prefix}.{choices}.{index}.{name}"] = self.sets[choices][index][name]
        for stem, (_, proof) in enumerate(self.stems):
            stored |= proof.tensors(f"{prefix}.stem.{stem}")
        return stored | {f"{prefix}.{name}": value for name, value in self.own_choices.items()}


def reads(bounds: Bounds, node: int, stops: Set[int] = frozenset()) -> set[int]:
    """The nodes whose linear bounds are read when rows of a node are substituted as far as `stops`."""
    found: set[int] = set()
    pending = {first_row(bounds.clean_run.program, node)}
    while pending:
        index = max(pending)
        pending.remove(index)
        if index not in stops and index not in bounds.locals:
            found.add(index)
            pending |= set(bounds.nodes[index].followed)
    return found


def _same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def walk(
    clean_run: CleanRun,
    region: Region,
    method: Method,
    learned: Mapping[int, Mapping[int, Parameters]],
    room: Room,
    limits: Limits | None = None,
    deadline: float | None = None,
) -> tuple[Proof, Bounds]:
    """A proof of everything but the margins of one task, with numbers that can be stored.

    Returns the proof, and the bounds over its boxes as they are stored, within `limits`.

    Args:
        learned: parameters that the method has learned for the boxes of nodes and, under the last node, for
            the margin.
    """
    propagation, root = method.describe(), len(clean_run.program.nodes) - 1
    end_to_end = method.optimiser.end_to_end and root in learned
    base = Recorder(Relaxer(method.product, learned[root] if end_to_end else {}))
    proof = Proof(clean_run, room, sets=[base.chosen])

    def tighten(bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        if nodes[0] not in learned:
            return bounds.boxes_of(nodes, stops)
        upto = first_row(clean_run.program, nodes[0])
        own = Recorder(Relaxer(method.product, learned[nodes[0]]))
        tuned = bounds.relaxed(own, bounds.dtype, upto=upto)
        proof.own[nodes[0]] = proof.keep(own.chosen)
        return tuned.boxes_of(nodes, tuned.locals)

    with torch.no_grad():
        bounds = bound_nodes(
            clean_run,
            region,
            base,
            propagation,
            dtype=torch.float64,
            tighten=tighten,
            store=lambda index, box: within(limits or {}, index, proof.store(index, box)),
            deadline=deadline,
        )
    if propagation.linear and root in bounds.enclosures:  # not boxes only, nor a walk that has ended
        for derivation in plan_of(clean_run.program, propagation).derivations.values():
            proof.derive(bounds, derivation)
    return proof, bounds


def prove(
    clean_run: CleanRun,
    region: Region,
    method: Method,
    learned: Mapping[int, Mapping[int, Parameters]],
    room: Room,
) -> tuple[Proof, Bounds]:
    """The same with the margins, which may turn out not to be positive."""
    proof, bounds = walk(clean_run, region, method, learned, room)
    propagation, root = method.describe(), len(clean_run.program.nodes) - 1
    end_to_end = method.optimiser.end_to_end and root in learned
    with torch.no_grad():
        if not propagation.linear or root not in bounds.enclosures:
            proof.margins = margins(bounds, propagation)[0]
            return proof, bounds
        plan = plan_of(clean_run.program, propagation)
        last: list[tuple[Tensor, Recorder | None]] = []
        if not propagation.to_input:
            last.append((margins(bounds, propagation)[0], None))
        for parameters in _last_choices(learned.get(root), end_to_end, propagation.to_input):
            own = Recorder(Relaxer(method.product, parameters))
            fresh = bounds.relaxed(own, torch.float64)
            lower = fresh.margin(fresh.locals)
            if root in bounds.boxes:
                lower = torch.maximum(lower, bounds.boxes[root].lower.squeeze(1))
            last.append(((clean_run.clean[root] + lower)[0], own))
        least = [clean_run.deciding(found[None])[0] for found, _ in last]
        best = max(range(len(last)), key=lambda k: float(least[k].nan_to_num(-math.inf)))
        proof.margins, chosen = last[best]
    proof.derive(bounds, plan.margin, None if chosen is None else proof.keep(chosen.chosen))
    return proof, bounds


def _last_choices(
    learned: Mapping[int, Parameters] | None, end_to_end: bool, to_the_input: bool
) -> list[Mapping[int, Parameters]]:
    """Choices that the margins are substituted to the input with, one set after the other.

    What is learned end to end is what the boxes were made with: there are no other choices to try, and none
    at all where margins stop at forms, as those were made with it too.
    """
    plain: list[Mapping[int, Parameters]] = [{}] if to_the_input else []
    if learned is None:
        return plain
    if end_to_end:
        return [learned] if to_the_input else []
    return [*plain, learned]
