"""Backward substitution: rows of a node become linear forms of the input deviation.

`Bounds` holds what is known of every node (box, linear enclosure, kept form) and turns rows of one node into
lower linear bounds in the input, by pulling them through the enclosures until every path has met a *stop*: a
node whose bounds in the input are known.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Composed, Form, Local, Rows, Stop
from buffet.bounds.fused import assembled
from buffet.bounds.intervals import Box
from buffet.network import Apply, Linear, Node
from buffet.network.structure import local_nodes
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.descent import Descent
from buffet.propagation.key_split import KeyForms, key_rows, pays, splits
from buffet.propagation.plan import first_row, widest_rows
from buffet.propagation.rounding import Errors, Reaches
from buffet.regions import Region
from buffet.relaxations.elementwise import Side, slope_range
from buffet.relaxations.enclosures import Enclosure, PlanesEnclosure, SumEnclosure

ROUNDINGS = 16.0
"""Every concretised bound is widened by at least this many units of rounding, relative to its size."""


class OutOfTime(Exception):  # noqa: N818 (it is no mistake)
    """The deadline of a computation has passed."""


@runtime_checkable
class Relax(Protocol):
    """How a nonlinear node becomes a linear enclosure, given what is known of the nodes before it."""

    def __call__(self, bounds: Bounds, index: int, /) -> Enclosure: ...


class _Precise(dict[int, Enclosure]):
    """Pieces that turn to float64 when they are asked for: one row passes through few of them."""

    def __getitem__(self, index: int) -> Enclosure:
        return super().__getitem__(index).to(torch.float64)


@dataclass(frozen=True)
class Bounds:
    """What is known of the nodes of one clean_run over one region.

    The dictionaries are filled in the order of the nodes (`propagation.bound_nodes`); a node's entry never
    changes once a later node has been visited.
    """

    clean_run: CleanRun
    region: Region
    relax: Relax
    dtype: torch.dtype
    chunk_bytes: int
    errors: Errors  # of rounding, in the precision of the rows
    deadline: float | None = None  # on the clock of `time.perf_counter`; `OutOfTime` is raised after it
    apart: bool = False  # whether what rows read of a kept form is a number from there on
    boxes: dict[int, Box] = field(default_factory=dict)
    widths: dict[int, float] = field(default_factory=dict)  # of the widest entry of a tightened box, or NaN
    enclosures: dict[int, Enclosure] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)
    locals: dict[int, Local] = field(default_factory=dict)
    key_forms: dict[int, KeyForms] = field(default_factory=dict)  # of scores whose rows are split by token
    ranges: dict[tuple[int, Side], tuple[Tensor, Tensor]] = field(default_factory=dict)  # of `slopes`
    sizes: dict[int, Tensor] = field(default_factory=dict)  # of kept forms: rounding errors scale with them
    rounding_shares: list[Tensor] = field(default_factory=list)  # of tightened boxes that rounding may be

    @staticmethod
    def start(
        clean_run: CleanRun,
        region: Region,
        relax: Relax,
        dtype: torch.dtype,
        chunk_bytes: int,
        deadline: float | None = None,
        apart: bool = False,
    ) -> Bounds:
        """Nothing is known yet."""
        boxes: dict[int, Box] = {}
        reaches = Reaches(clean_run.program, clean_run.clean, region, boxes, local_nodes(clean_run.program))
        unit = clean_run.rounding(dtype)
        exact, tiny = clean_run.rounding(torch.float64), torch.finfo(dtype).tiny
        errors = Errors(reaches, clean_run.residuals, unit, exact, unit, tiny)
        return Bounds(clean_run, region, relax, dtype, chunk_bytes, errors, deadline, apart, boxes)

    @property
    def _unit(self) -> float:
        return torch.finfo(self.dtype).eps

    @property
    def lost(self) -> Float[Tensor, "tasks"]:
        """The shares of tightened boxes that rounding may be, added up."""
        return torch.stack(self.rounding_shares).sum(0)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.clean_run.program.nodes

    @property
    def clean(self) -> list[Tensor]:
        return self.clean_run.clean

    def check_time(self) -> None:
        """Raise `OutOfTime` after the deadline."""
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise OutOfTime

    def hopeless(self, index: int, limit: float) -> bool:
        """Whether no task has a box of this node that is narrower than `limit`, relatively."""
        return not bool((self.boxes[index].widest(self.clean[index]) < limit).any())

    def relaxed(self, relax: Relax, dtype: torch.dtype, upto: int | None = None) -> Bounds:
        """The same boxes with enclosures (of nodes up to `upto`) made anew, possibly in another precision.

        No forms are kept.
        """
        unit = self.clean_run.rounding(dtype)
        known, errors = self._locals(dtype), self.errors.anew(unit, unit, torch.finfo(dtype).tiny)
        nothing: dict[str, Any] = {"enclosures": {}, "forms": {}, "key_forms": {}, "sizes": {}}
        fresh = replace(self, relax=relax, dtype=dtype, errors=errors, locals=known, **nothing)
        for index, node in enumerate(self.nodes[: None if upto is None else upto + 1]):
            fresh.linearise(index, node)
        return fresh

    def precise(self) -> Bounds:
        """The same enclosures and forms, with sums taken in float64: for the one row that decides."""
        known, exact = self._locals(torch.float64), self.clean_run.exact(torch.float64)
        unit, tiny = self.clean_run.rounding(torch.float64), torch.finfo(torch.float64).tiny
        errors = self.errors.anew(unit, self.errors.kept, tiny)
        enclosures = _Precise({i: exact[i] or enclosure for i, enclosure in self.enclosures.items()})
        for i, enclosure in enclosures.items():
            if isinstance(enclosure, SumEnclosure):
                enclosures[i] = enclosure.widened(errors.of_sum(i))
        return replace(
            self, dtype=torch.float64, errors=errors, enclosures=enclosures, locals=known, key_forms={}
        )

    def _locals(self, dtype: torch.dtype) -> dict[int, Local]:
        """The exact forms in a precision."""
        if dtype == self.dtype:
            return dict(self.locals)
        return {i: replace(local, matrix=local.unrounded.to(dtype)) for i, local in self.locals.items()}

    def localise(self, index: int, node: Node) -> None:
        """Give a node its exact form, if only linear operations on single tokens lie before it."""
        if node.is_input:
            eye = torch.eye(self.region.width, dtype=torch.float64, device=self.region.center.device)
            self.locals[index] = Local(eye.to(self.dtype), self.region.moved, eye)
            return
        alone = isinstance(node.op, Linear) and node.op.per_token
        if alone and node.inputs[0] in self.locals:
            enclosure = self.clean_run.exact(torch.float64)[index]
            assert enclosure
            form = enclosure.push(Form.exactly(self.locals[node.inputs[0]].unrounded[None, None]))
            matrix = form.lower[0, 0]
            self.locals[index] = Local(matrix.to(self.dtype), self.region.moved, matrix)

    def linearise(self, index: int, node: Node) -> None:
        """Give a node its linear enclosure and, behind linear operations only, its exact form."""
        if index not in self.locals:
            self.localise(index, node)
        if not node.is_input:
            enclosure = self.clean_run.exact(self.dtype)[index] or self.relax(self, index)
            error = enclosure.error(self.errors, index)
            # no intercept is a denormal number, by which processors multiply very slowly
            tiny = torch.finfo(self.dtype).tiny
            self.enclosures[index] = (
                enclosure if error is None else enclosure.widened(error.clamp_min(tiny).to(self.dtype))
            )

    def stops(self, kept: Collection[int]) -> dict[int, Stop]:
        """Where a substitution ends: at exact forms, and at the forms that these nodes keep."""
        return {**{i: self.forms[i] for i in kept}, **self.locals}

    def slopes(self, index: int, side: Side) -> tuple[Tensor, Tensor]:
        """The least and the largest useful slope of an elementwise function, made once."""
        if (index, side) not in self.ranges:
            node = self.nodes[index]
            assert isinstance(node.op, Apply)
            clean, box = self.clean[node.inputs[0]], self.boxes[node.inputs[0]]
            self.ranges[index, side] = slope_range(node.op.function, clean, box.lower, box.upper, side)
        return self.ranges[index, side]

    def substitute(
        self, root: int, rows: Rows, stops: Mapping[int, Stop]
    ) -> tuple[Float[Tensor, "tasks inputs groups rows"], Float[Tensor, "#tasks groups rows"]]:
        """Lower linear bounds of rows of the node `root`: coefficients of the input deviation, and constants.

        Every path from `root` to the input must meet a stop.
        """
        descent = Descent(root, rows)
        for index, reached in descent:
            self.check_time()
            if index in stops:
                descent.arrive(*self._composed(index, stops[index], reached))
            elif keys := self._keys(root, index, reached, stops):
                self._split(descent, index, reached, keys)
            else:
                self._pull(descent, index, reached, stops)
        return descent.total()

    def _composed(self, index: int, stop: Stop, rows: Rows) -> Composed:
        """What rows of a stop come to in the input, with an allowance for the errors of a form."""
        coefs, constant = stop.compose(rows)
        if isinstance(stop, Form):
            with torch.no_grad():
                size = self.errors.kept * self.size_of(index, stop).to(self.dtype)
                error = rows.like(rows.coefs.abs()).contract(size)
            constant = -error if constant is None else constant - error
            if self.apart:
                number = self.concretise(coefs.movedim(-1, 1), constant)
                return torch.zeros_like(coefs), number.to(coefs)
        return coefs, constant

    def pushed(self, index: int, forms: Mapping[int, Form]) -> Form:
        """The form of a node from those of its inputs."""
        enclosure = self.enclosures[index]
        form = enclosure.push(*forms.values())
        sizes = [self.size_of(i, known) for i, known in forms.items()]
        error = self.errors.of_push(index, sizes, enclosure.steepness())
        error = error.to(form.sides).expand(form.sides.shape[1:-1])
        return form.plus(torch.stack([-error, error]))

    def size_of(self, index: int, form: Form) -> Float[Tensor, "tasks tokens features"]:
        """How large the linear bounds of a node's entries can get, constants and all: nothing cancels."""
        if index not in self.sizes:
            with torch.no_grad():
                coefs, constant = form.sides.movedim(-1, 2).split([form.sides.shape[-1] - 1, 1], 2)
                found = [self._size(c, k.squeeze(1)) for c, k in zip(coefs, constant, strict=True)]
                self.sizes[index] = torch.stack(found).amax(0)
        return self.sizes[index]

    def _size(self, coefs: Tensor, constant: Tensor) -> Tensor:
        """The same of forms ``[tasks, inputs, *rows]``."""
        form = coefs.unflatten(1, (self.region.moved.shape[1], self.region.width))
        return constant.double().abs() + self.region.spread(form, self.region.minimise(form)).double()

    def _split(self, descent: Descent, index: int, rows: Rows, keys: KeyForms) -> None:
        """Rows of scores: what reads keys of other tokens arrives, query and key of their own token go on."""
        parts, coefs, constant = keys.pull(rows)
        descent.arrive(coefs, constant)
        for source, part in zip(self.nodes[index].inputs, parts, strict=True):
            descent.go_on(source, part)

    def _pull(self, descent: Descent, index: int, rows: Rows, stops: Mapping[int, Stop]) -> None:
        """Rows of any other node go through its enclosure and on to the nodes it reads."""
        inputs = self.nodes[index].inputs
        moved = [s.moved if isinstance(s := stops.get(i), Local) else None for i in inputs]
        parts, constant = self.enclosures[index].pull_moved(rows, moved)
        descent.leave(constant)
        # A enclosure need not use all its inputs: softmax only looks at the differences of its scores.
        for source, part in zip(inputs, parts, strict=False):
            if part.moved:
                descent.arrive(*stops[source].compose(part))
            else:
                descent.go_on(source, part)

    def _keys(self, root: int, index: int, rows: Rows, stops: Mapping[int, Stop]) -> KeyForms | None:
        """Forms of the keys that rows of `root` read at `index`, if it pays to have them apart."""
        enclosure = self.enclosures[index]
        if not (
            isinstance(enclosure, PlanesEnclosure)
            and rows.diagonal
            and pays(rows.coefs.shape[3], enclosure.op)
        ):
            return None
        if not splits(self.nodes, root, index, stops, self.locals):
            return None
        if index not in self.key_forms:
            source = self.nodes[index].inputs[1]
            coefs, constant = self.substitute(source, key_rows(enclosure, len(self.clean[source])), stops)
            with torch.no_grad():
                error = self.errors.unit * self._size(coefs, constant).to(self.dtype)
                error = error + self._lost(error)
            self.key_forms[index] = KeyForms.of(enclosure, coefs, constant - error)
        return self.key_forms[index]

    def concretise(
        self, coefs: Float[Tensor, "tasks inputs *rows"], constant: Float[Tensor, "#tasks *rows"]
    ) -> Float[Tensor, "tasks *rows"]:
        """The minimum of linear forms over the region, widened for rounding, in float64."""
        moved, width = self.region.moved.shape[1], self.region.width
        form = coefs.unflatten(1, (moved, width))
        least = self.region.minimise(form)
        constant = constant.double()
        size = constant.abs() + self.region.spread(form, least)
        # A row that nearly cancels is small, but its rounding errors are as large as those of the other rows
        # of its token. What cannot move at all is exactly 0.
        size = size.sign() * size.amax(-1, keepdim=True)
        found = torch.sub(constant + least, size, alpha=max(self.errors.unit, ROUNDINGS * self._unit))
        return found - self._lost(found)

    def _lost(self, like: Tensor) -> Tensor:
        """What underflow may have taken off rows, by task, to be subtracted from ``[tasks, *rows]``."""
        lost = torch.as_tensor(self.errors.underflow(), dtype=like.dtype, device=like.device)
        return lost.reshape(-1, *[1] * (like.ndim - 1))

    def least_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        """About the minimum over the region of ``a_i + b_j``, forms whose last column is their constant."""
        with torch.no_grad():
            least = self.region.minimise_sums(a[..., :-1], b[..., :-1])
        return least + a[..., -1].unsqueeze(-1) + b[..., -1].unsqueeze(-2)

    def boxes_of(self, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        """Boxes of nodes that can be read together (`together`), through linear forms that are not kept."""
        parts = [
            self.concretise(*self.substitute(root, rows, stops)).chunk(2, -1)
            for root, rows in self.unit_rows(nodes, stops)
        ]
        return {n: Box(*sides) for n, sides in self._sides(nodes, parts)}

    def forms_of(
        self, nodes: Sequence[int], stops: Mapping[int, Stop]
    ) -> tuple[dict[int, Form], dict[int, Box]]:
        """Linear bounds, in the input, of nodes that can be read together, and the boxes they give."""
        chunks, boxes = [], []
        for root, rows in self.unit_rows(nodes, stops):
            coefs, constant = self.substitute(root, rows, stops)
            boxes.append(self.concretise(coefs, constant).chunk(2, -1))
            chunks.append((coefs, constant.expand(len(coefs), -1, -1)))
        sides = assembled(chunks, [self.clean[n].shape[-1] for n in nodes])
        forms = {n: self._off(n, Form(both)) for n, both in zip(nodes, sides, strict=True)}
        return forms, {n: Box(*both) for n, both in self._sides(nodes, boxes)}

    def _off(self, index: int, form: Form) -> Form:
        """The form of a node with room for what the node may be off."""
        own = self.errors[index]
        lost = self._lost(form.sides[0, ..., -1])
        error = lost if own is None else own.to(lost) + lost
        error = error.expand(form.sides.shape[1:-1])
        return form.plus(torch.stack([-error, error]))

    def widened(self, index: int, box: Box) -> Box:
        """A box made from linear forms of a node, with room for what the node may be off."""
        if (error := self.errors[index]) is None:
            return box
        return Box(box.lower - error, box.upper + error)

    def _sides(
        self, nodes: Sequence[int], parts: Sequence[tuple[Tensor, ...]]
    ) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Lower and upper bounds of each node, from those of chunks of rows and of their negatives."""
        lower, upper = (
            torch.cat(side, -1) if len(side) > 1 else side[0] for side in zip(*parts, strict=True)
        )
        sizes = [self.clean[n].shape[-1] for n in nodes]
        pairs = zip(lower.split(sizes, -1), upper.neg().split(sizes, -1), strict=True)
        return zip(nodes, pairs, strict=True)

    def box_of_form(self, form: Form) -> Box:
        """The box of a node whose form is kept."""

        def least(side: Tensor) -> Tensor:
            coefs, constant = side.movedim(-1, 1).split([side.shape[-1] - 1, 1], 1)
            return self.concretise(coefs, constant.squeeze(1))

        return Box(least(form.lower), -least(-form.upper))

    def box_of_local(self, local: Local, tokens: int) -> Box:
        """The box of a node that varies in the moved rows only."""
        coefs = local.units()
        ends = self.concretise(coefs, coefs.new_zeros(1, *coefs.shape[2:]))
        full = ends.new_zeros(len(ends), tokens, ends.shape[-1])
        full.scatter_(1, local.moved[..., None].expand_as(ends), ends)
        lower, upper = full.chunk(2, -1)
        return Box(lower, -upper)

    def margin(self, stops: Mapping[int, Stop]) -> Float[Tensor, "tasks others"]:
        """Lower bounds of the deviation of the last node, which has one token."""
        root = len(self.nodes) - 1
        others = self.clean[root].shape[-1]
        eye = torch.eye(others, dtype=self.dtype, device=self.region.center.device)
        lower = self.concretise(*self.substitute(root, Rows(eye[None, None], 1, True), stops)).squeeze(1)
        error = self.errors[root]
        return lower if error is None else lower - error.squeeze(1)

    def unit_rows(self, nodes: Sequence[int], stops: Mapping[int, Stop]) -> Iterator[tuple[int, Rows]]:
        """Unit rows of the nodes and their negatives, in chunks of about `chunk_bytes`."""
        root, matrix = self.units(nodes)
        entries = widest_rows(self.clean_run, root, stops)
        per_row = 2 * torch.finfo(self.dtype).bits // 8 * self.region.tasks * entries
        groups = self.clean[root].shape[0]
        for part in matrix.split(max(1, self.chunk_bytes // per_row), 1):
            both = torch.cat([part.mT, -part.mT]).mT  # features side by side
            yield root, Rows(both[None, None], groups, diagonal=True)

    def units(self, nodes: Sequence[int]) -> tuple[int, Float[Tensor, "features units"]]:
        """The node where unit rows of the nodes start, and what they read there of a token.

        The rows of affine nodes start at the node they read, as the rows of their weights.
        """
        root = first_row(self.clean_run.program, nodes[0])
        if root != nodes[0]:
            weights = [self.nodes[n].op.weight for n in nodes]  # type: ignore[attr-defined]
            return root, torch.cat(weights).to(self.dtype).mT
        return root, torch.eye(self.clean[root].shape[-1], dtype=self.dtype, device=self.clean[root].device)
