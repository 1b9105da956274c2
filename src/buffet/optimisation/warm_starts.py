"""What was learned for some words at some ε, kept for the next ε and for other words."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping

import torch

from buffet.regions import Region
from buffet.relaxations.relaxation import Parameters

Starts = dict[tuple[Hashable, int], tuple[float, dict[int, Parameters]]]
"""The parameters learned for a task to bound some node, and the ε they were learned at."""


class WarmStarts:
    """Parameters that were learned for a task at one ε, to start from at the next, and for other words.

    What is learned is sound at every ε and for every word, and hardly moves between neighbouring ε. Tasks may
    be worked on at the same time: nothing a task gets depends on which of the others came first.
    """

    def __init__(self) -> None:
        self._known: Starts = {}
        self._first: dict[int, dict[int, Parameters]] = {}

    def keep(self, region: Region, root: int, parameters: Mapping[int, Parameters]) -> None:
        """Remember what every task has learned to bound the node `root`, and the ε it was learned at."""
        for task, (name, size) in enumerate(_tasks(region)):
            one = {i: {k: v[task].detach().clone() for k, v in s.items()} for i, s in parameters.items()}
            self.add({(name, root): (size, one)})

    def copy(self) -> WarmStarts:
        """Others that begin with the same."""
        other = WarmStarts()
        other._known, other._first = dict(self._known), dict(self._first)
        return other

    def starts_of(self, region: Region, root: int | None = None) -> Starts:
        """What was learned for the tasks of a region, to bound the node `root` or any."""
        tasks = {name for name, _ in _tasks(region)}
        return {
            (name, node): lesson
            for (name, node), lesson in self._known.items()
            if name in tasks and root in (None, node)
        }

    def add(self, starts: Starts) -> None:
        """Take over what was learned elsewhere."""
        self._known |= starts
        for (_, root), (_, parameters) in starts.items():
            self._first.setdefault(root, parameters)

    def parameters_of(
        self,
        region: Region,
        root: int,
        within: float = math.inf,
        *,
        parents: bool = False,
        others: bool = False,
    ) -> dict[int, Parameters] | None:
        """What was learned for these tasks, no further than `within` (relatively) from their present ε.

        Failing that: with `parents`, what was learned at any ε for the whole that a task is a part of; with
        `others`, what was learned for the first task.
        """
        fit = []
        for (name, size), whole in zip(_tasks(region), region.parents(), strict=True):
            at, parameters = self._known.get((name, root), (0.0, None))
            if parameters and not (math.isinf(within) or abs(size - at) <= within * at):
                parameters = None
            if not parameters and parents and whole != name:
                _, parameters = self._known.get((whole, root), (0.0, None))
            if not parameters and others:
                parameters = self._first.get(root)
            if not parameters:
                return None
            fit.append(parameters)
        # Which sides of a line are free depends on ε: what not all tasks have learned is left to its default.
        return {
            i: {k: torch.stack([one[i][k] for one in fit]) for k in s if all(k in one[i] for one in fit)}
            for i, s in fit[0].items()
            if all(i in one for one in fit)
        }

    def lacking(self, region: Region, root: int, down_to: float) -> list[int]:
        """The tasks of which nothing was learned yet, or only at an ε of which theirs is a smaller share."""
        known = [(self._known.get((name, root), (math.inf, {}))[0], size) for name, size in _tasks(region)]
        return [task for task, (at, size) in enumerate(known) if not size >= down_to * at]

    def moved(self, region: Region, root: int) -> float:
        """How far ε is, relatively, from where the parameters were learned; inf: for another task."""
        known = [(self._known.get((name, root)), size) for name, size in _tasks(region)]
        return max(abs(size / k[0] - 1) if k is not None and k[0] > 0 else math.inf for k, size in known)


def _tasks(region: Region) -> list[tuple[Hashable, float]]:
    """What every task is called, and its size if it has one."""
    sizes = [0.0] * region.tasks if region.eps is None else region.eps.tolist()
    return list(zip(region.names(), sizes, strict=True))
