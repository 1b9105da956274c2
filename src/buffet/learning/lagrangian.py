"""The margin over fixed boxes as a function of the shares, and its gradient, by one pass back and one forth.

A lower bound of the margin is the value of a linear program: the smallest root of the network in which every
operation lies between its lines. Its multipliers λ are the coefficients of a backward substitution, whose
signs select a line at every entry; the network of these lines, run on the input that minimises the form at
the end, has values v, and its root is the bound. By the envelope theorem neither moves to first order, so

    d bound / d share = Σ λ · d line(v) / d share

over the lines that were selected, with no graph in between. It all is in single precision and without any
allowance for rounding: it serves to choose shares, whose bound is then computed by `bounds.substitution`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.choices import Shares, whole_of
from buffet.bounds.intervals import Box
from buffet.bounds.relaxations import SIDES
from buffet.bounds.substitution import Bounds
from buffet.learning.lines import Curve, Lines
from buffet.learning.links import LinesLink, Link, PlanesLink, State, WholeLink, linear_link
from buffet.learning.sheet import Gradient, Sheet
from buffet.learning.softmax_link import SoftmaxLink
from buffet.program import Apply, Bilinear, Node, Op, Pool, Softmax
from buffet.regions import LpBall, Region


@dataclass(frozen=True)
class Step:
    """A node of the walk: its link, the nodes it reads, and how many of their tokens (None: all it has)."""

    index: int
    link: Link
    sources: tuple[int, ...]
    cuts: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Lagrangian:
    """The margin of every task as a function of the shares of its nonlinear nodes."""

    region: Region
    clean: Float[Tensor, "1 others"]  # margins
    dtype: torch.dtype
    tokens: Mapping[int, int]  # how many tokens of a node the margin depends on
    steps: tuple[Step, ...]  # in the order of the nodes
    lines: Lines | None  # that are free

    @staticmethod
    def over(bounds: Bounds, dtype: torch.dtype = torch.float32) -> Lagrangian:
        """That of the boxes of `bounds`."""
        tokens = tokens_read(bounds)
        steps: list[Step] = []
        curves: list[Curve] = []
        for index in sorted(tokens.keys() - {0}):
            node, sources = bounds.nodes[index], _sources(bounds.nodes[index])
            link: Link
            if isinstance(node.op, Apply):
                curves.append(_curve(bounds, index, tokens[index]))
                link = LinesLink.over(bounds.pieces[index], curves[-1].slopes, dtype)  # type: ignore[arg-type]
            elif isinstance(node.op, Bilinear | Softmax):
                link = _relaxed(node.op, _inputs(bounds, node, tokens[index]), dtype)
                if isinstance(link, PlanesLink) and (whole := whole_of(bounds, node)):
                    assert isinstance(bounds.region, LpBall)
                    link = WholeLink.mixing(link, whole, tokens[index], bounds.region, dtype)
            else:
                link = linear_link(node.op, bounds.clean[sources[0]], dtype)
            read = [reads(node.op, place, tokens[index], tokens[i]) for place, i in enumerate(sources)]
            cuts = [None if n == tokens[i] else n for i, n in zip(sources, read, strict=True)]
            steps.append(Step(index, link, sources, tuple(cuts)))
        lines = Lines.over(curves)
        return Lagrangian(bounds.region, bounds.clean[-1], dtype, tokens, tuple(steps), lines)

    def margins(self, sheet: Sheet) -> tuple[Float[Tensor, "tasks others"], Gradient]:
        """Lower bounds of the margins, up to rounding, and how to get their gradient."""
        values = sheet.values.detach()
        same = values.dtype == self.dtype
        with torch.inference_mode():
            shares = sheet.current if same else sheet.reading(values.to(self.dtype))
            margins, states = self._passes(self._read(shares))

        def gradient(weights: Tensor) -> Tensor:
            total = torch.zeros_like(values)
            with torch.inference_mode():
                found = self._read(sheet.reading(total))
                weighted = weights.to(self.dtype)[..., None, None]
                for step in self.steps:
                    if step.index in found:
                        for key, part in step.link.gradient(states[step.index], weighted).items():
                            found[step.index][key].copy_(part)
            return total

        return margins.clone(), gradient

    def _read(self, shares: Mapping[int, Shares]) -> dict[int, Shares]:
        """The shares that the margin depends on, of the tokens that it reads."""
        return {
            i: {key: share if share.shape[1] == n else share[:, :n] for key, share in shares[i].items()}
            for i, n in self.tokens.items()
            if i in shares
        }

    def _passes(self, shares: Mapping[int, Shares]) -> tuple[Tensor, dict[int, State]]:
        """The margins, and what every link knows afterwards."""
        states: dict[int, State] = {}
        lines = self.lines(shares, self.dtype) if self.lines else {}
        unit = torch.eye(self.clean.shape[-1], dtype=self.dtype, device=self.clean.device)[:, None]
        pending = {self.steps[-1].index: unit.expand(self.region.tasks, *unit.shape)}
        for step in reversed(self.steps):
            i = step.index
            given = lines.get(i, {}) if isinstance(step.link, LinesLink) else shares.get(i, {})
            found, states[i] = step.link.pull(pending.pop(i), given)
            for source, part in zip(step.sources, found, strict=True):
                pending[source] = _plus(pending[source], part) if source in pending else part
        values = {0: self._lowest(pending.pop(0))}
        for step in self.steps:
            read = [
                values[i] if n is None else values[i][:, :, :n]
                for i, n in zip(step.sources, step.cuts, strict=True)
            ]
            values[step.index], states[step.index] = step.link.push(states[step.index], *read)
        return self.clean + values[step.index].squeeze(2).diagonal(dim1=1, dim2=2), states

    def _lowest(self, form: Tensor) -> Tensor:
        """The input where the form is smallest."""
        moved = self.region.moved[:, None, :, None].expand(-1, form.shape[1], -1, form.shape[3])
        at = self.region.lowest(form.gather(2, moved).transpose(0, 1))
        return torch.zeros_like(form).scatter_(2, moved, at.transpose(0, 1))


def tokens_read(bounds: Bounds) -> dict[int, int]:
    """The nodes the margin depends on, and how many of their tokens: the first one only, or all."""
    nodes = bounds.nodes
    read = {len(nodes) - 1: 1}
    for index in range(len(nodes) - 1, 0, -1):
        if index in read:
            for place, source in enumerate(_sources(nodes[index])):
                count = reads(nodes[index].op, place, read[index], bounds.clean[source].shape[0])
                read[source] = max(read.get(source, 0), count)
    return read


def reads(op: Op, place: int, wanted: int, tokens: int) -> int:
    """How many tokens of an input an operation reads for the first `wanted` ones of its output."""
    if isinstance(op, Pool):
        return 1 if op.kind == "first" else tokens
    if isinstance(op, Bilinear) and place == 1 and "i" not in op.y:
        return tokens
    return wanted


def _sources(node: Node) -> tuple[int, ...]:
    """The inputs that enter the bounds of a node linearly: of a softmax, only its scores."""
    return node.inputs[:1] if isinstance(node.op, Softmax) else node.inputs


def _inputs(bounds: Bounds, node: Node, wanted: int) -> list[tuple[Tensor, Box]]:
    """Clean values and boxes of the tokens of its inputs that a node reads."""
    found = []
    for place, source in enumerate(node.inputs):
        count = reads(node.op, place, wanted, len(bounds.clean[source]))
        box = bounds.boxes[source]
        found.append((bounds.clean[source][:count], Box(box.lower[:, :count], box.upper[:, :count])))
    return found


def _curve(bounds: Bounds, index: int, count: int) -> Curve:
    """The first tokens of an elementwise function."""
    node = bounds.nodes[index]
    assert isinstance(node.op, Apply)
    least_most = {side: bounds.slopes(index, side) for side in SIDES}
    slopes = {side: (least[:, :count], most[:, :count]) for side, (least, most) in least_most.items()}
    return Curve(index, node.op.function, *_inputs(bounds, node, count)[0], slopes)


def _relaxed(op: Op, inputs: Sequence[tuple[Tensor, Box]], dtype: torch.dtype) -> Link:
    clean, boxes = [value for value, _ in inputs], [box for _, box in inputs]
    match op:
        case Bilinear():
            return PlanesLink.over(op, (clean[0], clean[1]), boxes[0], boxes[1], dtype)
        case Softmax():
            return SoftmaxLink.over(op, clean[0], *boxes)
    raise NotImplementedError(type(op).__name__)


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """The sum of multipliers, those of further tokens being 0."""
    if a.shape[2] == b.shape[2]:
        return a + b
    wide, narrow = (a, b) if a.shape[2] > b.shape[2] else (b, a)
    total = wide.clone()
    total[:, :, : narrow.shape[2]] += narrow
    return total
