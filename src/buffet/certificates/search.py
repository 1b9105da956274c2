"""Proofs of tasks by whichever method has one, with numbers that can be stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from buffet.branching.prove import can_cut
from buffet.branching.stems import Effort
from buffet.certificates.proof import ROOMS, Proof, Room, prove
from buffet.certificates.trees import add_trees
from buffet.engine import Classifier, Engine
from buffet.errors import BuffetError
from buffet.loading import OnnxModel
from buffet.methods import Method
from buffet.optimisation.context import Context
from buffet.optimisation.warm_starts import WarmStarts
from buffet.propagation.clean_run import CleanRun
from buffet.properties import Property
from buffet.regions import Region
from buffet.relaxations.relaxation import Parameters
from buffet.search.cells import tree_of_proofs
from buffet.search.policy import POLICY
from buffet.search.portfolio import Ladder

Goal = Property | int
"""A property, or the class that is to have the largest output."""
ROUNDING = 1e-7
"""Claimed margins are rounded down by this share, more than the checker's own rounding takes off."""
Learned = dict[int, dict[int, Parameters]]
"""The parameters learned for every node."""


@dataclass(frozen=True, eq=False)
class Task:
    """One task: a region, what is to be proven of it, by which method and with how much effort."""

    model: Classifier
    region: Region
    goal: Goal
    method: Method
    effort: Effort
    warm_starts: WarmStarts | None = None

    @property
    def rooms(self) -> tuple[Room, ...]:
        """How boxes are widened; of a network that the certificate stores, no deployed run is promised
        anything."""
        return ROOMS[-1:] if isinstance(self.model, OnnxModel) else ROOMS

    def clean_run(self, method: Method) -> CleanRun:
        return method.clean_run(self.model.program64, self.region.center, self.goal)


def proofs(task: Task) -> list[tuple[Region, Method, Proof]]:
    """A proof of one task: as a whole, by a tree of cuts, or of every part that its region is cut into."""
    region, method, learned = task.region, task.method, Learned()
    try:
        return [(region, *_first_proof(task, learned))]
    except BuffetError:
        if method.cells == 1:
            proof = _proof_by_cuts(task, learned) if can_cut(method) else None
            if proof is None:
                raise
            return [(region, method, proof)]
        context = Context(WarmStarts(), deadline=task.effort.deadline)
        tree = tree_of_proofs(task.model, region, method, task.goal, Engine(), context)
        if tree is None:
            raise
    parts = [leaf.part if region.eps is None else leaf.part.with_eps(region.eps) for leaf in tree.leaves]
    tasks = [replace(task, region=part, warm_starts=context.warm_starts) for part in parts]
    return [(one.region, *_first_proof(one, Learned())) for one in tasks]


def _proof_by_cuts(task: Task, learned: Learned) -> Proof | None:
    """A proof by trees; where there is no deadline, if the whole is close to one."""
    method, effort = task.method, task.effort
    clean_run = task.clean_run(method)
    clean = float(clean_run.deciding(clean_run.clean[-1])[0].min())
    for left, room in reversed(list(enumerate(reversed(task.rooms), 1))):
        proof, bounds = prove(clean_run, task.region, method, learned, room)
        least = proof.margin
        close = least > -POLICY.close * clean if effort.deadline is None else math.isfinite(least)
        if close and add_trees(proof, bounds, method, learned, effort.share(1 / left)) and _holds(proof):
            return proof
    return None


def _least(proof: Proof) -> float:
    """The least margin, less than what rounding takes off it."""
    return proof.margin - 2 * ROUNDING * (1 + abs(proof.margin))


def _holds(proof: Proof) -> bool:
    return 0 < _least(proof) < math.inf


def _first_proof(task: Task, learned: Learned) -> tuple[Method, Proof]:
    """A proof by the method, which may remember something, or one of its rivals, the cheapest first.

    What the method itself learns is left in `learned`.
    """
    best = -math.inf
    for candidate in Ladder.of(task.method, task.model.program64):
        clean_run = task.clean_run(candidate)
        known = learned if candidate is task.method else Learned()
        warm_starts = task.warm_starts if candidate is task.method else None
        context = Context(warm_starts, deadline=task.effort.deadline, learned=known)
        for choices in _learned(candidate, clean_run, task.region, context):
            for room in task.rooms:
                proof, _ = prove(clean_run, task.region, candidate, choices, room)
                if _holds(proof):
                    return candidate, proof
                best = max(best, _least(proof))  # a NaN is no better
    moved = task.region.moved[0].tolist()
    words = "+".join(map(str, moved[:8])) + ("+…" if len(moved) > 8 else "")
    raise BuffetError(
        f"certificate: word {words} is not proven (the best margin is {best:.4g}); nothing was written, "
        "try a smaller eps or a tighter method"
    )


def _learned(method: Method, clean_run: CleanRun, region: Region, context: Context) -> Iterator[Learned]:
    """Choices to try: none learned, where a method starts from that, and then what it learns."""
    optimiser = method.optimiser
    if not optimiser.learns_boxes:
        yield {}
    if optimiser.learns:
        assert context.learned is not None
        method.bound(clean_run, region, context=context)
        yield context.learned
