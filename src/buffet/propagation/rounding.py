"""An account of rounding: what it may do to bounds, step by step, in proportion to what passes through.

Bounds are bounds of deviations from the clean run. Floating point does three things to them:

    clean values err    The exact operation on the clean values it read is off its clean value by `residual`.
    rows are rounded    If rows A pass a linear enclosure P, their new coefficients err by κu·|A||P|. With
                        deviations of the inputs up to m, their `reach`, a form changes by κu·|A|(|P|m).
    numbers underflow   Each new coefficient may lose τ, whatever A is: τ·Σm in all.

So every node has an *error*, by entry: residual + κu·|P|m, which rows meet with the factor |A|. Linear
operations hand theirs on, |P|·error, to the next nonlinearity, which takes it up in its intercepts at no
cost, or to the next residual connection, where it is taken off the rows: further on it would grow, as nothing
cancels in it. Boxes are widened by the error of their node. Where large numbers cancel, the error is as large
as these are; nothing rests on a measurement.

In double precision κ counts every rounding, so nothing is left out. In single precision it is what roundings
add up to when they do not all go one way: an allowance for the worst would hide what is left.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.intervals import Box, interval
from buffet.network import Add, Bilinear, Center, Linear, Normalise, Op, Program
from buffet.regions import Region

Sizes = Float[Tensor, "_ _ _"]
"""Of the entries of a node: tasks (or 1), tokens, features."""
Slopes = tuple[Tensor, Tensor]
"""The largest slopes and intercepts of lines, in size."""
LOST = 0.016
"""Where rounding may be such a share of boxes, added up along the network, they are for double precision.

What widens one box widens all that follow, and more so."""


def roundings(program: Program, clean: Sequence[Tensor], dtype: torch.dtype) -> float:
    """κ·u: how far a new coefficient, or a sum of them, may be off relative to the sizes of its terms."""
    every = 64 + 4 * len(program.nodes) + 2 * max(value.numel() for value in clean)
    longest = max(value.shape[-1] for value in clean)
    return (typical(longest) if dtype == torch.float32 else every) * torch.finfo(dtype).eps


def typical(terms: int) -> float:
    """κ in single precision, in units of 2⁻²³: a few roundings for every step and, for its sums, the root of
    their length, as random roundings add up.

    Sums of terms of one sign, which err the most, were seen to stay within it on several processors: of 512
    terms, within 6 units where they are added up in blocks, within 14 where one after the other.
    """
    return 4 + math.sqrt(terms) / 2


def residual(op: Op, result: Tensor, *values: Tensor) -> Float[Tensor, "_ _"]:
    """How far the clean result of an operation may be from the exact one of the values it read.

    A sum of n terms, in whatever order, errs by at most n roundings of the sum of their sizes, and by what
    may underflow. Lines of functions and of softmax count from the clean values themselves.
    """
    if not op.sums:
        return torch.zeros_like(result)
    info = torch.finfo(result.dtype)
    terms = 4 + max(n for value in values for n in value.shape)
    return terms * info.eps * op.largest(*values) + info.tiny


def magnitude(box: Box) -> Float[Tensor, "tasks tokens features"]:
    """The largest deviation of every entry."""
    return torch.maximum(box.lower.abs(), box.upper.abs())


def outward(
    op: Op, clean: Sequence[Tensor], residual: Tensor, box: Box, boxes: Sequence[Box], unit: float
) -> Box:
    """What interval arithmetic says of a sum, rounded outward; of the rest it is already."""
    if not op.sums:
        return box
    slack = residual
    if not isinstance(op, Normalise):  # whose range is relative to itself
        slack = slack + unit * op.largest_deviation(clean, *(magnitude(b) for b in boxes))
    return Box(box.lower - slack, box.upper + slack)


@dataclass
class Reaches:
    """How far the nodes of a walk may deviate, entry by entry, found as their readers ask for it.

    A box says so; where there is none, what the operation makes of its inputs. The deviation of a node that
    is an exact form of an asymmetric region may be small because large terms cancel, which their rounding
    errors do not: there no box is asked.
    """

    program: Program
    clean: Sequence[Tensor]
    region: Region
    boxes: Mapping[int, Box]
    local: frozenset[int]
    found: dict[int, Tensor] = field(default_factory=dict)
    total: Tensor | float = 0.0  # Σ (1 + Σ reach), by task: what underflow scales with

    def __getitem__(self, index: int) -> Float[Tensor, "tasks tokens features"]:
        if index not in self.found:
            with torch.no_grad():
                reach = self._reach(index)
                self.total = self.total + (1 + reach.sum((1, 2)))
            self.found[index] = reach
        return self.found[index]

    def _reach(self, index: int) -> Tensor:
        node = self.program.nodes[index]
        exact = index in self.local and not self.region.symmetric
        if index in self.boxes and not exact:
            return magnitude(self.boxes[index]).detach()
        if node.is_input:
            return magnitude(input_box(self.region))
        clean = [self.clean[i] for i in node.inputs]
        if not node.op.sums:
            return magnitude(interval(node.op, tuple(clean), *(self.boxes[i] for i in node.inputs))).detach()
        # Enlarged by more than its own roundings, and by more than may have underflowed.
        grown = node.op.largest_deviation(clean, *(self[i] for i in node.inputs))
        if isinstance(node.op, Center):
            # Deviations of many features hardly have a mean, whatever that of their sizes is.
            (source,) = node.inputs
            mean = grown.new_full(grown.shape[-1:], 1 / grown.shape[-1])
            grown = torch.minimum(grown, self[source] + self.of_row(source, mean).unsqueeze(-1))
        return grown * (1 + 1e-9) + torch.finfo(grown.dtype).tiny

    def of_row(self, index: int, row: Float[Tensor, " features"]) -> Float[Tensor, "tasks tokens"]:
        """How large ``row · deviation`` of any token may be: what linear operations cancel counts as nothing.

        The row is pulled back to what has a box or is not linear. On its way from y = Px to x it is rounded,
        by n units or less of its terms, which changes the form by nε·|row||P|·reach(x) at most.
        """
        node = self.program.nodes[index]
        if isinstance(node.op, Add) and index not in self.boxes:
            return sum((self.of_row(i, row) for i in node.inputs), start=row.new_zeros(()))
        if not (isinstance(node.op, Linear) and node.op.per_token) or index in self.boxes:
            return self[index] @ row.abs()
        (source,) = node.inputs
        op, reach = node.op, self[source]
        pulled = op.act_transposed(op.coefficients(reach), row[None, :, None])[0, :, 0]
        share = (8 + max(len(row), len(pulled))) * torch.finfo(row.dtype).eps
        rounded = op.largest_deviation((), share * reach) @ row.abs()
        return self.of_row(source, pulled) + rounded


def input_box(region: Region) -> Box:
    """How far the rows of the sentence may move."""
    full = torch.zeros(region.tasks, *region.center.shape, dtype=torch.float64, device=region.moved.device)
    index = region.moved[..., None].expand(-1, -1, region.width)
    return Box(*(full.scatter(1, index, side) for side in region.extent()))


@dataclass
class Errors:
    """The error of every node of a walk in one precision, found as its readers ask for it."""

    reaches: Reaches
    residuals: Sequence[Tensor]
    unit: float  # κ·u of the rows
    precise: float  # κ·u of exact forms, which are made in double precision
    kept: float  # κ·u of forms that are kept
    tiny: float  # what underflow may take off a coefficient
    found: dict[int, Tensor | None] = field(default_factory=dict)

    def __getitem__(self, index: int) -> Sizes | None:
        """How far a node may be off what rows of it stand for; None: not at all.

        Nonlinear nodes and sums have taken up their errors already.
        """
        if index not in self.found:
            with torch.no_grad():
                self.found[index] = self._error(index)
        return self.found[index]

    def _error(self, index: int) -> Tensor | None:
        node, reaches = self.reaches.program.nodes[index], self.reaches
        if not isinstance(node.op, Linear):  # those of one value hand their error on; sums take it off
            return None
        (source,) = node.inputs
        if index not in reaches.local:
            return self.residuals[index] + node.op.largest_deviation((), self._strayed(source, self.unit))
        error = self.residuals[index] + node.op.largest_deviation((), self._strayed(source, self.precise))
        return error + self._vanished(reaches[0])

    def _vanished(self, *moving: Sizes) -> Sizes:
        """What a form may lack because coefficients of what moves, and its constant, underflowed."""
        sums = [reach.sum((1, 2), keepdim=True) for reach in moving]
        return self.tiny * (1 + torch.stack(sums).sum(0))

    def anew(self, unit: float, kept: float, tiny: float) -> Errors:
        """The errors of the same nodes with rows in another precision."""
        return Errors(self.reaches, self.residuals, unit, self.precise, kept, tiny)

    def lost(self, index: int, box: Box) -> Float[Tensor, "tasks"]:
        """How much of a node's widest box is the rounding of its rows, which double precision would save."""
        with torch.no_grad():
            width, error = (box.upper - box.lower).amax((1, 2)), self[index]
            if error is None:
                return torch.zeros_like(width)
            share = error.expand_as(box.lower).amax((1, 2)) / width
            if bool((share < LOST).all()):
                return share
            exact = self._in_double[index]
            assert exact is not None
            return (error - exact).expand_as(box.lower).amax((1, 2)) / width

    @cached_property
    def _in_double(self) -> Errors:
        return self.anew(self.precise, self.precise, torch.finfo(torch.float64).tiny)

    def underflow(self) -> Tensor | float:
        """What underflow may have taken off any rows of the nodes so far, by task."""
        return self.tiny * self.reaches.total

    def _strayed(self, index: int, unit: float) -> Tensor:
        """What a reader of a node has to reckon with: its error, and the rounding of rows that read it."""
        own, reach = self[index], unit * self.reaches[index]
        return reach if own is None else own + reach

    def of_sum(self, index: int) -> Sizes:
        """What a residual connection takes off the rows that pass it."""
        with torch.no_grad():
            parts = (self._strayed(i, self.unit) for i in self.reaches.program.nodes[index].inputs)
            return sum(parts, start=self.residuals[index])

    def of_push(self, index: int, inputs: Sequence[Sizes], slopes: Slopes | None) -> Sizes:
        """What is to be taken off a form that is made from forms of the inputs, of these sizes.

        They may be larger than the boxes for which enclosures have room.
        """
        reaches = self.reaches
        node = reaches.program.nodes[index]
        with torch.no_grad():
            vanished = self._vanished(reaches[0])
            if slopes:
                return self.kept * _sloped(slopes, inputs[0]) + vanished
            clean = [reaches.clean[i] for i in node.inputs]
            return self.residuals[index] + self.kept * node.op.largest_deviation(clean, *inputs) + vanished

    def of_product(self, index: int) -> Sizes:
        """What the planes of a product, or its bound as a whole, leave open.

        No slope exceeds the other factor; constants are at most products of deviations.
        """
        node, reaches = self.reaches.program.nodes[index], self.reaches
        assert isinstance(node.op, Bilinear)
        with torch.no_grad():
            a, b = (reaches[i] for i in node.inputs)
            x, y = (self.reaches.clean[i].abs() for i in node.inputs)
            first, second = (self._strayed(i, self.unit) for i in node.inputs)
            error = node.op.evaluate(first, y + b) + node.op.evaluate(x + 2 * a, second)
            error = error + self.unit * node.op.evaluate(a, b) + self.residuals[index]
            return error + self._vanished(a, b)

    def of_lines(self, index: int, slopes: Slopes) -> Sizes:
        """What the lines of a function, or of the weights of a softmax, leave open."""
        with torch.no_grad():
            strayed = self._strayed(self.reaches.program.nodes[index].inputs[0], self.unit)
            return _sloped(slopes, strayed) + self.unit * slopes[1].double()


def _sloped(slopes: Slopes, inputs: Sizes) -> Sizes:
    """What deviations of the inputs come to, by slopes of every entry or of every weight in every score."""
    steepness = slopes[0].double()
    if steepness.ndim == 3:
        return steepness * inputs
    scores = inputs.unflatten(-1, (steepness.shape[2], -1)).unsqueeze(-1)
    return (steepness @ scores).squeeze(-1).flatten(2)
