"""Answers: of a query, and of a search for radii."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float
from torch import Tensor

Verdict = Literal["certified", "falsified", "unknown"]


@dataclass(frozen=True)
class Verification:
    """The answer to a query with one or more tasks.

    `margins` are lower bounds of ``logit[label] − logit[other]``, valid everywhere in the region.
    """

    label: int
    verdicts: tuple[Verdict, ...]
    margins: Float[Tensor, "tasks others"]
    clean_margin: float  # at the unmoved rows; negative: the label is not what the model answers
    counterexamples: tuple[Tensor | None, ...]  # rows of a flipped input, per falsified task
    seconds: float  # spent on bounds

    @property
    def verdict(self) -> Verdict:
        """The verdict of all tasks together: certified only if every one is."""
        if all(v == "certified" for v in self.verdicts):
            return "certified"
        return "falsified" if "falsified" in self.verdicts else "unknown"

    @property
    def margin(self) -> float:
        """The smallest lower bound over tasks and other classes; NaN if there is none."""
        return float(self.margins.min())


@dataclass(frozen=True)
class TaskRadius:
    """The bracket around the true radius of one task."""

    words: tuple[int, ...]
    certified: float  # proven: no smaller move changes the answer
    attacked: float  # a move of this size was seen to change it (inf: none found)
    margin: float  # lower bound of the margin at `certified`; if that is 0, the clean margin or 0
    evaluations: int  # engine evaluations of this task


@dataclass(frozen=True)
class Radius:
    """The radii of all tasks; `certified` and `attacked` bracket the smallest true one."""

    label: int
    clean_margin: float  # negative: the model does not give this label even to the unmoved rows
    tasks: tuple[TaskRadius, ...]
    evaluations: int  # calls of the engine, each for all unfinished tasks that share their work
    seconds: float  # spent on proofs
    attack_seconds: float

    @property
    def certified(self) -> float:
        """An ε proven for every task."""
        return min(t.certified for t in self.tasks)

    @property
    def attacked(self) -> float:
        """The smallest ε at which some task was attacked successfully."""
        return min(t.attacked for t in self.tasks)
