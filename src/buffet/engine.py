"""Margins of many tasks by one method: in batches that fit the memory, and in float64 where float32 fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.footprint import Need, chunk_within, need, readable
from buffet.methods import Method
from buffet.network import Program
from buffet.optimisation.context import Context
from buffet.optimisation.warm_starts import Starts
from buffet.propagation.clean_run import CleanRun
from buffet.properties import Property
from buffet.regions import Region
from buffet.system.parallel import side_by_side

Trace = Callable[[list[int], int, Tensor], None]
"""Called with tasks, the step of the optimiser, and their smallest margins before it."""
BATCH = 2 << 30
"""Bytes that several tasks together may take: more at once is no faster."""


@runtime_checkable
class Classifier(Protocol):
    """What verification needs of a model: its program in float32 and in float64."""

    @property
    def program(self) -> Program: ...

    @property
    def program64(self) -> Program: ...


@dataclass(frozen=True)
class Engine:
    """How the machine is used; nothing here changes what is proven."""

    dtype: torch.dtype = torch.float32  # of the linear forms
    memory: int | None = None  # bytes the bounds may take; None: what one task takes, if need be
    chunk: int = 8 << 20  # bytes aimed at for one tensor of a backward pass, about a cache
    widen: bool = True  # where single precision is too narrow, try again in double precision

    def need(self, clean_run: CleanRun, method: Method, region: Region) -> Need:
        """About how much memory a method takes."""
        size = torch.finfo(self.dtype).bits // 8
        return need(clean_run, method, region.moved.shape[1], size=size, chunk=self.rows)

    @property
    def rows(self) -> int:
        """Bytes of the rows of one backward pass."""
        return self.chunk if self.memory is None else chunk_within(self.memory, self.chunk)

    def parallel(self, method: Method) -> bool:
        """Whether tasks of a method may be worked on at the same time: not where each fills the memory with
        forms, nor where someone counts the bytes."""
        return method.describe().fully_backward and self.memory is None

    def holds(self, clean_run: CleanRun, method: Method, region: Region) -> bool:
        """Whether one task of a method stays within the memory."""
        return self.memory is None or self.need(clean_run, method, region).one <= self.memory

    def check(self, clean_run: CleanRun, method: Method, region: Region) -> None:
        """Refuse a method of which not even one task stays within the memory."""
        if self.memory is None or self.holds(clean_run, method, region):
            return
        fewer = " move fewer words at once," if region.moved.shape[1] > 1 else " take a shorter text,"
        other = "" if method.describe().fully_backward else " or use --method backward, which keeps no forms"
        raise BuffetError(
            f"one task takes about {readable(self.need(clean_run, method, region).one)} by this method, and"
            f" {readable(self.memory)} are allowed: give a larger --memory,{fewer}{other}".rstrip(",")
        )


def bound_margins(
    model: Classifier,
    region: Region,
    method: Method,
    goal: Property | int,
    engine: Engine,
    clean_run: CleanRun | None = None,
    context: Context | None = None,
    trace: Trace | None = None,
) -> Float[Tensor, "tasks cases"]:
    """Lower bounds of the margins of every task, in batches of tasks that fit the engine's memory.

    The `goal` is a property, or the class that is to have the largest output; there is a margin for every
    case that must not happen (`Property.by_case`), of a class one for every other class. A `clean_run` made
    by ``method.clean_run`` for the same rows and goal saves preparing it again; with warm
    starts in its `context`, an optimiser goes on from what it learned for the same words before.
    """
    clean_run = clean_run or method.clean_run(model.program64, region.center, goal)
    engine.check(clean_run, method, region)
    step = batch_size(clean_run, method, region, engine)

    def bound(part: Tensor) -> tuple[Tensor, Starts]:
        told = context or Context()
        if trace:
            told = replace(told, trace=lambda step, margins: trace(part.tolist(), step, margins))
        some = region.select(part)
        found = method.bound(clean_run, some, dtype=engine.dtype, chunk_bytes=engine.rows, context=told)
        return found, told.warm_starts.starts_of(some) if told.warm_starts else {}

    groups = torch.arange(region.tasks).split(step)
    # A trace has to be told from here.
    together = engine.parallel(method) and trace is None
    parts = side_by_side(bound, groups) if together else [bound(part) for part in groups]
    if context and context.warm_starts:
        for _, starts in parts:
            context.warm_starts.add(starts)
    margins = plausible(torch.cat([found for found, _ in parts]), region, clean_run.clean[-1])
    margins = clean_run.asked.by_case(margins) if clean_run.asked else margins
    lost = margins.isnan().any(-1)
    expired = context is not None and context.expired
    if engine.widen and engine.dtype == torch.float32 and bool(lost.any()) and not expired:
        # Bounds too wide for single precision; most are hopeless, but some are not.
        wide = replace(engine, dtype=torch.float64)
        if wide.holds(clean_run, method, region):
            margins[lost] = bound_margins(model, region.select(lost), method, goal, wide, clean_run, context)
    return margins


def batch_size(clean_run: CleanRun, method: Method, region: Region, engine: Engine) -> int:
    """How many tasks of a region are bounded together, within the engine's memory."""
    if method.optimiser.learns_boxes or region.tasks == 1:
        return 1  # every task learns as much as it needs
    memory = BATCH if engine.memory is None else min(engine.memory, BATCH)
    step = max(1, engine.need(clean_run, method, region).tasks(memory))
    if method.describe().fully_backward:
        # Dense rows of several tasks would share a chunk without sharing any work: keep a few rows of each.
        size, tokens = torch.finfo(engine.dtype).bits // 8, region.center.shape[0]
        widest = max(v.shape[-1] for v in clean_run.clean)
        step = min(step, max(1, engine.rows // (64 * size * tokens**2 * widest)))
    return step


def plausible(margins: Tensor, region: Region, clean: Tensor) -> Tensor:
    """The bounds, NaN where one exceeds the clean margin though the region contains the unmoved rows.

    That cannot happen; if rounding should ever make it happen, it must not become a proof.
    """
    still = torch.zeros(*region.moved.shape, region.width, dtype=torch.float64, device=margins.device)
    absurd = margins > clean + 1e-9 * (1 + clean.abs())
    return margins.masked_fill(absurd & region.contains(still)[:, None], torch.nan)


def proven(margins: Float[Tensor, "tasks cases"]) -> Tensor:
    """Which tasks their margins prove; NaN, infinity and no margin at all prove nothing."""
    return ((margins > 0) & margins.isfinite()).all(-1) & (margins.shape[-1] > 0)
