"""Bounds of one row over many leaves at once, on top of one walk over the graph.

All leaves share the boxes and linear bounds of the walk, except for the lines of the entries that may be cut
(`entries`). So leaves are the rows of one backward substitution, each with lines of its own: attention, which
costs the most, is a matrix product with as many columns as there are leaves.

Estimates are made by the dual passes that serve to choose parameters (`optimisation.dual`); what is proven is
computed with lines that hold exactly (`prove`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.bounds.forms import Rows
from buffet.branching.entries import Ends, Entries, Place
from buffet.optimisation.dual import Lagrangian, Step
from buffet.propagation.substitution import Bounds
from buffet.relaxations.dual_passes import Line, LinesDual, State
from buffet.relaxations.elementwise import Lines
from buffet.relaxations.enclosures import Enclosure, LinesEnclosure, Pulled
from buffet.relaxations.relaxation import Parameters
from buffet.relaxations.table import Relaxer


@dataclass(frozen=True, eq=False)
class Estimate:
    """What a pass back and forth finds of some leaves."""

    lower: Float[Tensor, " leaves"]  # about the least value of the row
    slopes: Float[Tensor, "2 entries leaves"]
    blame: Float[Tensor, "entries leaves"]  # how much of the gap is due to every entry's lines
    at: Float[Tensor, "entries leaves"]  # where the minimiser of the bound has the arguments

    def or_better(self, other: Estimate, some: Int[Tensor, " some"]) -> Estimate:
        """The better one of two for `some` of the leaves, of which the other is."""
        better = other.lower > self.lower[some]
        found = {}
        for name, mine in ((f.name, getattr(self, f.name).clone()) for f in fields(self)):
            mine[..., some] = torch.where(better, getattr(other, name), mine[..., some])
            found[name] = mine
        return Estimate(**found)


@dataclass(frozen=True, eq=False)
class LeafBounds:
    """A row of margins over leaves of a region of one task."""

    bounds: Bounds
    row: Float[Tensor, " others"]
    parameters: Mapping[int, Parameters]  # learned for the row over the whole region
    lagrangian: Lagrangian
    entries: Entries

    @staticmethod
    def over(bounds: Bounds, row: Tensor, parameters: Mapping[int, Parameters]) -> LeafBounds:
        root = len(bounds.nodes) - 1
        lagrangian = Lagrangian.over(bounds, root, row.float()[None, :, None])
        return LeafBounds(bounds, row, parameters, lagrangian, Entries.over(bounds, lagrangian.tokens))

    @cached_property
    def start(self) -> Float[Tensor, "2 entries"]:
        """The slopes of the whole region."""
        return self.entries.of(self.parameters, self.bounds)

    # --- estimates, which choose and prove nothing ---

    def estimate(self, ends: Ends, slopes: Float[Tensor, "2 entries leaves"]) -> Estimate:
        """About the least value of the row in some leaves, with lines of these slopes."""
        intercepts = self.entries.intercepts(*ends, slopes)
        lower, multipliers, at = self._pass(slopes.float(), intercepts.float())
        below, above = slopes * at + intercepts
        line = torch.where(multipliers.signbit(), above, below)
        blame = multipliers * (self.entries.values(at.double()) - line)
        return Estimate(lower, slopes, blame.float(), at)

    def _pass(
        self, slope: Float[Tensor, "2 entries leaves"], intercept: Float[Tensor, "2 entries leaves"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """About the least value of the row in every leaf; the multipliers and arguments of all entries."""
        lag, leaves = self.lagrangian, slope.shape[-1]
        multipliers, at = (torch.zeros_like(slope[0]) for _ in range(2))

        def pull(step: Step, reached: Tensor) -> tuple[tuple[Tensor, ...], State]:
            given = self._lines if isinstance(step.dual, LinesDual) else self._given
            found, state = step.dual.pull(reached, given.get(step.index, {}))
            if place := self._places.get(step.index):
                return self._own(place, reached, state, slope, intercept, multipliers)
            return found, state

        def seen(index: int, read: Tensor) -> None:
            if place := self._places.get(index):
                at[place.part] = read[0].flatten(0, 1)[place.where]

        with torch.inference_mode():
            row = lag.rows.unsqueeze(0).expand(1, -1, -1, leaves)
            value, _ = lag.back_and_forth(row, pull, seen)
            lower = lag.clean + (row * value).sum((0, 1, 2))
        return lower.double().clone(), multipliers, at

    @staticmethod
    def _own(
        place: Place, reached: Tensor, state: State, slope: Tensor, intercept: Tensor, multipliers: Tensor
    ) -> tuple[tuple[Tensor, ...], State]:
        """Pull rows through the lines that every leaf has for itself."""
        _, slopes, intercepts, runs = state
        mine = reached[0].flatten(0, 1)[place.where]
        multipliers[place.part] = mine
        negative, part = mine.signbit(), place.part
        whole = []
        for lines, base in ((slope, slopes), (intercept, intercepts)):
            full = base.expand_as(reached).clone(memory_format=torch.contiguous_format)
            full[0].view(-1, full.shape[-1])[place.where] = torch.where(
                negative, lines[1, part], lines[0, part]
            )
            whole.append(full)
        return (reached * whole[0],), (reached, whole[0], whole[1], runs)

    @cached_property
    def _places(self) -> dict[int, Place]:
        return {place.node: place for place in self.entries.places}

    @cached_property
    def _given(self) -> dict[int, Parameters]:
        """The parameters of everything but lines, of the tokens that count."""
        own = {i: {k: v.float() for k, v in p.items()} for i, p in self.parameters.items()}
        return self.lagrangian.read(own)

    @cached_property
    def _lines(self) -> Mapping[int, Mapping[str, Line]]:
        """The lines of entries that are not cut."""
        lines = self.lagrangian.lines
        return lines(self._given, torch.float32) if lines else {}

    # --- proving ---

    def prove(self, ends: Ends, slopes: Float[Tensor, "2 entries leaves"]) -> Float[Tensor, " leaves"]:
        """Lower bounds of the row in every leaf, with lines that hold exactly and every rounding counted."""
        with torch.inference_mode():
            lines = self.entries.lines(*ends, slopes)
            enclosures = dict(self._exact.enclosures)
            for place, own in lines:
                enclosures[place.node] = self._row_lines(place, own)
            exact = replace(self._exact, enclosures=enclosures)
            rows = self.row.double()[None, None, :, None].expand(1, 1, -1, slopes.shape[-1])
            form = exact.substitute(len(exact.nodes) - 1, Rows(rows, 1, True), exact.locals)
            lower = exact.concretise(*form)[0, 0]
            root = len(exact.nodes) - 1
            if (error := exact.errors[root]) is not None:
                lower = lower - (error[0, 0].double() * self.row.abs()).sum()
            return lower + (self.row.double() * exact.clean[root][0]).sum()

    @cached_property
    def _exact(self) -> Bounds:
        return self.bounds.relaxed(Relaxer(learned=self.parameters), torch.float64)

    def _row_lines(self, place: Place, own: Lines) -> RowLines:
        """The lines of a node, with those that every leaf has for itself, with room for rounding."""
        base = self._exact.enclosures[place.node]
        assert isinstance(base, LinesEnclosure)
        leaves = own.lower_slope.shape[-1]
        steep = torch.maximum(own.lower_slope.abs(), own.upper_slope.abs()).amax(-1)
        high = torch.maximum(own.lower_intercept.abs(), own.upper_intercept.abs()).amax(-1)
        slopes, intercepts = base.lower_slope.new_zeros(2, *base.lower_slope.shape)
        for full, most in ((slopes, steep), (intercepts, high)):
            full[0, : place.tokens].view(-1)[place.where] = most
        whole = self._exact.errors.of_lines(place.node, (slopes, intercepts))
        error = whole[0, : place.tokens].flatten()[place.where]
        error = error.clamp_min(torch.finfo(torch.float64).tiny).unsqueeze(-1)

        def with_own(shared: Tensor, mine: Tensor) -> Tensor:
            full = shared.unsqueeze(-1).repeat(1, 1, 1, leaves)
            full[0, : place.tokens].view(-1, leaves)[place.where] = mine
            return full

        return RowLines(
            with_own(base.lower_slope, own.lower_slope),
            with_own(base.lower_intercept, own.lower_intercept - error),
            with_own(base.upper_slope, own.upper_slope),
            with_own(base.upper_intercept, own.upper_intercept + error),
        )


@dataclass(frozen=True, eq=False)
class RowLines(Enclosure):
    """An elementwise function between lines that every row has for itself.

    All are ``[1, tokens, features, rows]``.
    """

    lower_slope: Tensor
    lower_intercept: Tensor
    upper_slope: Tensor
    upper_intercept: Tensor

    def pull(self, rows: Rows) -> Pulled:
        positive, negative = (part.coefs for part in rows.parts())
        lower, li, upper, ui = (
            rows.read(v)
            for v in (self.lower_slope, self.lower_intercept, self.upper_slope, self.upper_intercept)
        )
        coefs = (positive * lower).addcmul_(negative, upper)
        return (rows.like(coefs),), (positive * li).addcmul_(negative, ui).sum((1, 2)).unsqueeze(1)
