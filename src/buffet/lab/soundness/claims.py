"""What a method claims of a case, held against points: margins, verdicts, and everything on the way there.

A bound of the margin says little about a mistake that the slack of other bounds hides. So the campaign also
looks inside: the box of every node, the linear forms that are kept and every relaxed operation are claims of
their own, which the values of the network at the points must not break.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from buffet.bounds.forms import Form, Rows
from buffet.engine import bound_margins
from buffet.lab.soundness.cases import Case
from buffet.lab.soundness.points import Points, deviations
from buffet.methods import Method
from buffet.optimisation.starts import initial_parameters
from buffet.propagation.substitution import Bounds
from buffet.propagation.walk import bound_nodes
from buffet.relaxations.enclosures import Enclosure
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer

TOLERANCE = 1e-9
"""How far, relative to the numbers it is computed from, a value in float64 may itself be off."""
INNER_POINTS = 48
"""Points of every task at which the nodes inside are looked at."""
ROWS = 6
"""Random linear forms of a relaxed operation's output that are tried."""


@dataclass(frozen=True)
class Violation:
    """A point that a bound says cannot exist, and everything needed to reproduce it."""

    seed: int
    case: str
    method: str
    claim: str
    task: int
    bound: float
    value: float  # below the bound
    point: tuple[tuple[float, ...], ...]  # δ of every moved row; of boxes and candidates, exactly, the row
    extreme: bool = False  # of the campaign at the edges of floating point

    @classmethod
    def of(
        cls, case: Case, method: str, claim: str, task: int, bound: float, value: float, point: Any
    ) -> Violation:
        """A violation in a case, at a point that is an array moved × width."""
        place = tuple(map(tuple, point.tolist()))
        return cls(case.seed, case.name, method, claim, task, bound, value, place)

    @property
    def command(self) -> str:
        """The command that reproduces it."""
        which = "--extreme " if self.extreme else ""
        return f"buffet soundness {which}--networks 1 --seed {self.seed} --method '{self.method}'"


@dataclass(frozen=True)
class Finding:
    """What the points say of one method on one case."""

    checks: int = 0  # comparisons of a bound with a value
    bounded: bool = True  # every task has finite bounds
    violations: tuple[Violation, ...] = ()
    undecided: int = 0  # comparisons with exact values that are too near to tell

    def __add__(self, other: Finding) -> Finding:
        return Finding(
            self.checks + other.checks,
            self.bounded and other.bounded,
            self.violations + other.violations,
            self.undecided + other.undecided,
        )


def check_margins(points: Points, method: Method, name: str) -> Finding:
    """Hold the margins of the points against a method's bounds."""
    case = points.case
    bounds = bound_margins(case.model, case.inner, method, case.label, case.engine)
    found = compare(points, name, "margin", bounds, points.margins, 1 + points.margins.abs())
    return replace(found, bounded=bool(bounds.isfinite().all()))


def check_answer(points: Points, method: Method, name: str) -> Finding:
    """Hold the margins of a whole answer, of whichever bounds it was made, against the points."""
    bounds = points.case.verify(method).margins
    return compare(points, name, "margin of an answer", bounds, points.margins, 1 + points.margins.abs())


def check_verdicts(points: Points, method: Method, name: str) -> Finding:
    """Nothing that has a point with another answer may be certified, at a given size or by a search."""
    case = points.case
    certified = torch.tensor([v == "certified" for v in case.verify(method, falsify=True).verdicts])
    least = points.margins.amin(-1, keepdim=True)
    claimed = torch.where(certified, 0.0, torch.nan)[:, None]
    found = compare(points, name, "verdict", claimed, least, 1 + least.abs())
    if case.radius is None:
        return found
    # No radius beyond that of a planted point may be found.
    radius = case.certified_radius(method, max(4 * case.radius, 1e-6))
    lowest = int(least[:, 0, 0].argmin())
    if radius <= case.radius or not float(least[lowest, 0, 0]) < 0:
        return found + Finding(1)
    point = points.deltas[lowest, 0]
    return found + Finding(1, True, (Violation.of(case, name, "radius", 0, radius, case.radius, point),))


def check_inside(points: Points, method: Method, name: str, seed: int | None = None) -> Finding:
    """Hold the values of every node against its box, its form and its relaxation.

    With a `seed`, the parameters of all relaxations are drawn at random from it: what an optimiser
    may come to, and worse.
    """
    case, region = points.case, points.case.inner
    clean_run = method.clean_run(case.model.program64, region.center, case.label)

    def walk(relaxer: Relaxer) -> Bounds:
        with torch.no_grad():
            return bound_nodes(clean_run, region, relaxer, method.describe(), dtype=case.engine.dtype)

    bounds = walk(Relaxer(method.product))
    if seed is not None:
        bounds = walk(Relaxer(learned=_random_parameters(bounds, seed)))
    deltas = points.telling(INNER_POINTS)
    some = Points(case, deltas, exhaustive=False)
    at = deviations(clean_run.program, clean_run.clean, region, deltas)
    total = Finding()
    for claim, bound, value, scale in _claims(bounds, at, _sizes(bounds, at), deltas):
        total += compare(some, name, claim, bound, value, scale)
    return total


def _random_parameters(bounds: Bounds, seed: int) -> dict[int, Parameters]:
    """Random parameters of all nodes, some at the ends of their range."""
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return (2 * torch.rand(like.shape, generator=generator, dtype=like.dtype) - 0.5).clamp(0, 1)

    with torch.no_grad():
        # A hopeless walk ends early.
        known = initial_parameters(bounds, "zero", only_alphas=False, upto=max(bounds.enclosures))
    return {index: {key: draw(value) for key, value in node.items()} for index, node in known.items()}


def _sizes(bounds: Bounds, at: list[Tensor]) -> list[Tensor]:
    """The largest number of a node or of what it is computed from, points × tasks × 1 × 1."""
    sizes: list[Tensor] = []
    for node, deviation, clean in zip(bounds.nodes, at, bounds.clean, strict=True):
        own = (deviation.abs() + clean.abs()).amax((-1, -2), keepdim=True)
        sizes.append(torch.stack([own, *(sizes[i] for i in node.inputs)]).amax(0))
    return sizes


Claim = tuple[str, Tensor, Tensor, Tensor]
"""What is claimed, the bound (tasks × entries), the value (points × tasks × entries) and the size of what the
value is computed from: a value below its bound, by more than rounding, is a violation."""


def _claims(bounds: Bounds, at: list[Tensor], size: list[Tensor], deltas: Tensor) -> Iterator[Claim]:
    """Lower bounds of the deviations at the points; upper ones as lower bounds of the negative."""
    ones = deltas.new_ones(*deltas.shape[:2], 1)
    inputs = torch.cat([deltas.flatten(2), ones], -1)
    generator = torch.Generator().manual_seed(0)
    for index, node in enumerate(bounds.nodes):
        where = f"node {index} ({type(node.op).__name__})"
        if index in bounds.boxes:
            box = bounds.boxes[index]
            yield f"lower box of {where}", box.lower, at[index], size[index]
            yield f"upper box of {where}", -box.upper, -at[index], size[index]
        if bounds.dtype != torch.float64:
            continue  # the rounding of float32 is allowed for where forms are minimised, not before
        if index in bounds.forms:
            for side, form, sign in _sides(bounds.forms[index]):
                line = torch.einsum("tnfd,ptd->ptnf", form.double(), inputs)
                weight = torch.einsum("tnfd,ptd->ptnf", form.double().abs(), inputs.abs())
                slack = weight.amax(0) + size[index]
                yield f"{side} form of {where}", _zero(line), sign * at[index] - line, slack
        if index in bounds.enclosures and not node.op.linear:
            sources = [at[i] for i in node.inputs]
            value, weight = _gap(bounds.enclosures[index], sources, at[index], generator)
            slack = weight.amax(0) + size[index].squeeze(-1)
            yield f"relaxation of {where}", _zero(value), value, slack


def _sides(form: Form) -> tuple[tuple[str, Tensor, int], tuple[str, Tensor, int]]:
    return ("lower", form.lower, 1), ("upper", -form.upper, -1)


def _zero(value: Tensor) -> Tensor:
    return value.new_zeros(value.shape[1:])


def _gap(
    enclosure: Enclosure, sources: list[Tensor], out: Tensor, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """By how much random forms of an operation's output exceed what `pull` says they are at least.

    Also the sum of all numbers that enter, in absolute value.
    """
    shape = (1, *out.shape[2:], ROWS)
    rows = torch.randn(shape, generator=generator, dtype=torch.float64)
    # Half of the forms look at few entries, where nothing averages out.
    few = torch.rand(shape, generator=generator) < 1.5 / rows[0, ..., 0].numel()
    rows[..., ::2] *= few[..., ::2]
    pulled, bias = enclosure.to(torch.float64).pull(Rows(rows, groups=1, diagonal=False))
    parts = [_apply(p.coefs, source) for p, source in zip(pulled, sources, strict=False)]
    weights = [_apply(p.coefs.abs(), source.abs()) for p, source in zip(pulled, sources, strict=False)]
    constant = out.new_zeros(1) if bias is None else bias.squeeze(1)
    least = torch.stack(parts).sum(0) + constant
    weight = torch.stack([*weights, _apply(rows.abs(), out.abs())]).sum(0) + constant.abs()
    return _apply(rows, out) - least, weight


def _apply(coefs: Tensor, values: Tensor) -> Tensor:
    return torch.einsum("tnfr,ptnf->ptr", coefs.expand(values.shape[1], -1, -1, -1), values)


def compare(points: Points, method: str, claim: str, bound: Tensor, value: Tensor, scale: Tensor) -> Finding:
    """Count the comparisons with finite bounds, and report the worst value below one of every task."""
    gap = (bound - value) / (TOLERANCE * scale).clamp(min=torch.finfo(torch.float64).tiny)
    known = bound.isfinite() & value.isfinite()
    gap = torch.where(known, gap, -torch.inf).flatten(2)
    worst, entry = gap.amax(-1).max(0)  # per task, over entries and points
    violations = []
    for task in (worst > 1).nonzero()[:, 0].tolist():
        place = int(entry[task])
        where = int(gap[place, task].argmax())
        claimed = float(bound.expand(value.shape[1:]).flatten(1)[task, where])
        found, point = float(value.flatten(2)[place, task, where]), points.deltas[place, task]
        violations.append(Violation.of(points.case, method, claim, task, claimed, found, point))
    return Finding(int(known.sum()), True, tuple(violations))
