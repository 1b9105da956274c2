"""Methods by name: propagation × relaxation of products × relaxation of softmax × optimiser, composed.

Every method returns lower bounds of the margins and nothing else; `verify` alone turns bounds into verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.compositions import COMPOSITIONS, Composition
from buffet.errors import BuffetError
from buffet.network import Program
from buffet.optimisation.context import Context
from buffet.optimisation.end_to_end import EndToEnd
from buffet.optimisation.optimiser import Optimiser, Problem
from buffet.optimisation.steps import Learning
from buffet.optimisation.table import OPTIMISERS, RULE_KEPT
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import PROPAGATIONS, Propagation
from buffet.properties import Property, program_of
from buffet.regions import Region
from buffet.relaxations.softmax import SOFTMAXES
from buffet.relaxations.table import PRODUCTS, RULE


@dataclass(frozen=True)
class Method(Composition):
    """How margins are bounded; every part is a name in the table of its kind."""

    @property
    def optimiser(self) -> Optimiser:
        """How parameters are learned; α that the rule chooses are kept from one ε to the next."""
        return RULE_KEPT if self.ruled else OPTIMISERS[self.optimise]

    @property
    def ruled(self) -> bool:
        """Whether α are what the rule chooses, and nothing is learned instead."""
        return not OPTIMISERS[self.optimise].learns and PRODUCTS[self.product] is RULE

    @property
    def learns(self) -> bool:
        """Whether an optimiser takes steps: over boxes alone there is nothing to learn."""
        return self.optimiser.learns and self.steps > 0 and self.describe().linear

    def describe(self) -> Propagation:
        """The propagation with its window."""
        return replace(PROPAGATIONS[self.propagation], window=self.window)

    @property
    def graph(self) -> str:
        """How the graph has softmax: a name in SOFTMAXES. Interval arithmetic takes it as it is."""
        return self.softmax if self.describe().linear else "lse"

    def clean_run(self, program: Program, x: Float[Tensor, "tokens width"], goal: Property | int) -> CleanRun:
        """The program (float64) as this method sees it near the rows `x`; reusable for any region there.

        The `goal` is what is to be proven: a property, or the class that is to have the largest output.
        """
        asked = goal if isinstance(goal, Property) else None
        return CleanRun(*SOFTMAXES[self.graph](program_of(program, goal), x.double()), asked)

    def problem(
        self,
        clean_run: CleanRun,
        region: Region,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
    ) -> Problem:
        """The margins of a region as the optimiser sees them."""
        learning = Learning(self.steps, self.rate, self.start)
        return Problem(clean_run, region, self.describe(), self.product, learning, dtype, chunk_bytes)

    def bound(
        self,
        clean_run: CleanRun,
        region: Region,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
        context: Context | None = None,
    ) -> Float[Tensor, "tasks rows"]:
        """Lower bounds of the margins over the region; NaN where there is none."""
        problem = self.problem(clean_run, region, dtype=dtype, chunk_bytes=chunk_bytes)
        return self.optimiser.bound(problem, context or Context())

    def follow(
        self,
        clean_run: CleanRun,
        region: Region,
        eps: Float[Tensor, "tasks"],
        context: Context,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
    ) -> Float[Tensor, "tasks"]:
        """Learn end to end at the edge of what can be proven; about the largest ε proven then."""
        optimiser = self.optimiser
        assert isinstance(optimiser, EndToEnd)
        problem = self.problem(clean_run, region, dtype=dtype, chunk_bytes=chunk_bytes)
        return optimiser.follow(problem, region, eps, context)

    def challengers(self, program: Program) -> tuple[Method, ...]:
        """Methods that may do better on some task of a network.

        Those that learn end to end are asked on one layer only: there gradients through all boxes cost little
        and gain the most.
        """
        rivals = (METHODS[name] for name in self.rivals)
        return tuple(rival for rival in rivals if program.layers == 1 or not rival.learns)

    def plain(self) -> Method:
        """The same without an optimiser."""
        return replace(self, optimise="none", rivals=())


METHODS: Mapping[str, Method] = {name: Method(**vars(parts)) for name, parts in COMPOSITIONS.items()}


def method_named(name: str | Method, **changes: object) -> Method:
    """A method by its name (or as it is), with some parts changed; ``None`` changes nothing.

    With another composition of parts a method is asked on its own, without a portfolio; other `steps`,
    `rate`, `start` or `cells` keep it.

    Args:
        name: one of `METHODS`, or a `Method`.
        changes: fields of `Method`: propagation, product, softmax, optimise, steps, rate, start, window,
            cells.

    Example:
        >>> import buffet
        >>> buffet.method("buffet", steps=60, softmax="lse").softmax
        'lse'
    """
    if isinstance(name, str):
        if name not in METHODS:
            raise BuffetError(f"unknown method '{name}'; choose one of: {', '.join(METHODS)}")
        name = METHODS[name]
    known = [f.name for f in fields(Method)]
    if unknown := changes.keys() - set(known):
        raise BuffetError(f"a method has no part '{min(unknown)}'; choose some of: {', '.join(known)}")
    given = {k: v for k, v in changes.items() if v is not None}
    if not given.keys() <= {"steps", "rate", "start", "cells", "rivals", "summary"}:
        given.setdefault("rivals", ())  # a composition of one's own is taken by its word
    return replace(name, **given)  # type: ignore[arg-type]


method = method_named
"""What people type: ``buffet.method("buffet", steps=60, softmax="lse")``."""
