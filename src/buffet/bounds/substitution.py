"""Backward substitution: rows of a node become linear forms of the input deviation.

`Bounds` holds what is known of every node (box, linear piece, kept form) and turns rows of one node into
lower linear bounds in the input, by pulling them through the pieces until every path has met a *stop*: a node
whose bounds in the input are known.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.bounds.intervals import Box
from buffet.bounds.keys import Keys, key_rows, pays, splits
from buffet.bounds.linear import Form, Piece, PlanesPiece, Rows, exact_piece
from buffet.program import Add, Affine, Center, Input, Mix, Node, Pool, Program, Scores, Softmax
from buffet.regions import Region

ROUNDING = 16
"""Every concretised bound is widened by this many units of rounding, relative to its size."""


HUGE, CANCELLING = 1e4, 16.0
"""Scores beyond this, or a common part so many times larger than the rest, are for double precision."""


class OutOfTime(Exception):  # noqa: N818 (it is no mistake)
    """The deadline of a computation has passed."""


@runtime_checkable
class Relax(Protocol):
    """How a nonlinear node becomes a linear piece, given what is known of the nodes before it."""

    def __call__(self, bounds: Bounds, index: int, node: Node) -> Piece: ...


@dataclass(frozen=True)
class Local:
    """The exact form of a node behind per-token linear operations only: ``deviation[d] = matrix · δ_d``.

    The product of the operations is taken in float64 and rounded once: its sums may cancel (a LayerNorm takes
    off what all features share), and an allowance relative to the result would not cover that.
    """

    matrix: Float[Tensor, "features width"]
    moved: Int[Tensor, "tasks moved"]
    unrounded: Float[Tensor, "features width"]  # float64

    def compose(self, rows: Rows) -> tuple[Tensor, None]:
        """The rows as exact forms of δ; there is no constant."""
        tasks, moved = self.moved.shape
        width = self.matrix.shape[1]
        task = torch.arange(tasks, device=self.moved.device)[:, None]
        coefs = rows.coefs.expand(tasks, *rows.coefs.shape[1:])
        if rows.moved:
            form = (self.matrix.mT @ coefs).unflatten(-1, (rows.groups, -1))
        elif rows.diagonal:
            # Word d of a task is read by group d only, if there is one.
            group = self.moved.clamp_max(rows.groups - 1)
            read = self.matrix.mT @ rows.like(coefs).per_group()[task, group]
            read = torch.where((group == self.moved)[..., None, None], read, 0.0)
            form = read.new_zeros(tasks, moved, width, rows.groups, read.shape[3])
            word = torch.arange(moved, device=self.moved.device)
            form[task, word, :, group] = read
        else:
            form = (self.matrix.mT @ coefs[task, self.moved]).unflatten(-1, (rows.groups, -1))
        return form.flatten(1, 2), None

    def form(self, tokens: int) -> Form:
        """The same as a form of every token, zero where nothing moves."""
        tasks, moved = self.moved.shape
        features, width = self.matrix.shape
        full = self.matrix.new_zeros(tasks, tokens, features, moved * width + 1)
        task = torch.arange(tasks, device=self.moved.device)
        for word in range(moved):
            full[task, self.moved[:, word], :, word * width : (word + 1) * width] = self.matrix
        return Form.exactly(full)


Stop = Local | Form


class _Precise(dict[int, Piece]):
    """Pieces that turn to float64 when they are asked for: one row passes through few of them."""

    def __getitem__(self, index: int) -> Piece:
        return super().__getitem__(index).to(torch.float64)


@dataclass(frozen=True)
class Scene:
    """A program that ends in margins, with its clean run on one sentence (both float64)."""

    program: Program
    clean: list[Tensor]
    _exact: dict[torch.dtype, list[Piece | None]] = field(default_factory=dict)

    @cached_property
    def tame(self) -> bool:
        """Whether single precision can carry the sums over this network.

        Not if scores are huge, or a LayerNorm takes off a common part much larger than what it leaves: the
        allowance for rounding is relative to a result, and such sums nearly cancel.
        """
        nodes = self.program.nodes
        summed = {i for n in nodes if isinstance(n.op, Add | Center) for i in n.inputs}
        for index, (node, value) in enumerate(zip(nodes, self.clean, strict=True)):
            if isinstance(node.op, Scores) and not bool(value.abs().max() < HUGE):
                return False
            if isinstance(node.op, Center):
                before = self.clean[node.inputs[0]]
                if not bool(before.abs().max() <= CANCELLING * value.abs().max()):
                    return False
            if index in summed and isinstance(node.op, Affine) and node.op.common > CANCELLING:
                return False
        return True

    def exact(self, dtype: torch.dtype) -> list[Piece | None]:
        """The piece of every linear operation, made once per precision; None for the nonlinear ones."""
        if dtype not in self._exact:
            # The pieces outlive the call: ordinary tensors, even if this call needs no gradients.
            with torch.inference_mode(False):
                self._exact[dtype] = [
                    exact_piece(n.op, tuple(self.clean[i] for i in n.inputs), dtype)
                    for n in self.program.nodes
                ]
        return self._exact[dtype]


@dataclass(frozen=True)
class Bounds:
    """What is known of the nodes of one scene over one region.

    The dictionaries are filled in the order of the nodes (`propagation.bound_nodes`); a node's entry never
    changes once a later node has been visited.
    """

    scene: Scene
    region: Region
    relax: Relax
    dtype: torch.dtype
    chunk_bytes: int
    unit: float  # of rounding, in the least precise numbers that enter
    deadline: float | None = None  # on the clock of `time.perf_counter`; `OutOfTime` is raised after it
    boxes: dict[int, Box] = field(default_factory=dict)
    widths: dict[int, float] = field(default_factory=dict)  # of the widest entry of a sharpened box, or NaN
    pieces: dict[int, Piece] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)
    locals: dict[int, Local] = field(default_factory=dict)
    keys: dict[int, Keys] = field(default_factory=dict)  # of scores whose rows are split by token

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.scene.program.nodes

    @property
    def clean(self) -> list[Tensor]:
        return self.scene.clean

    def check_time(self) -> None:
        """Raise `OutOfTime` after the deadline."""
        if self.deadline is not None and time.perf_counter() > self.deadline:
            raise OutOfTime

    def hopeless(self, index: int, limit: float) -> bool:
        """Whether no task has a box of this node that is narrower than `limit`, relatively."""
        return not bool((self.boxes[index].widest(self.clean[index]) < limit).any())

    def relaxed(self, relax: Relax, dtype: torch.dtype, upto: int | None = None) -> Bounds:
        """The same boxes with the pieces (of nodes up to `upto`) made anew, possibly in another precision.

        No forms are kept.
        """
        unit = torch.finfo(dtype).eps
        known = self._locals(dtype)
        fresh = replace(self, relax=relax, dtype=dtype, unit=unit, pieces={}, forms={}, locals=known, keys={})
        for index, node in enumerate(self.nodes[: None if upto is None else upto + 1]):
            fresh.linearise(index, node)
        return fresh

    def precise(self) -> Bounds:
        """The same pieces and forms, with sums taken in float64: for the one row that decides."""
        exact = self.scene.exact(torch.float64)
        pieces = _Precise({i: exact[i] or piece for i, piece in self.pieces.items()})
        return replace(self, dtype=torch.float64, pieces=pieces, locals=self._locals(torch.float64), keys={})

    def _locals(self, dtype: torch.dtype) -> dict[int, Local]:
        """The exact forms in a precision."""
        if dtype == self.dtype:
            return dict(self.locals)
        return {i: replace(local, matrix=local.unrounded.to(dtype)) for i, local in self.locals.items()}

    def localise(self, index: int, node: Node) -> None:
        """Give a node its exact form, if only linear operations on single tokens lie before it."""
        if isinstance(node.op, Input):
            eye = torch.eye(self.region.width, dtype=torch.float64, device=self.region.center.device)
            self.locals[index] = Local(eye.to(self.dtype), self.region.moved, eye)
            return
        piece = self.scene.exact(torch.float64)[index]
        alone = len(node.inputs) == 1 and not isinstance(node.op, Pool)
        if piece and alone and node.inputs[0] in self.locals:
            form = piece.push(Form.exactly(self.locals[node.inputs[0]].unrounded[None, None]))
            matrix = form.lower[0, 0]
            self.locals[index] = Local(matrix.to(self.dtype), self.region.moved, matrix)

    def linearise(self, index: int, node: Node) -> None:
        """Give a node its linear piece and, behind linear operations only, its exact form."""
        if index not in self.locals:
            self.localise(index, node)
        if not isinstance(node.op, Input):
            self.pieces[index] = self.scene.exact(self.dtype)[index] or self.relax(self, index, node)

    def substitute(
        self, root: int, rows: Rows, stops: Mapping[int, Stop]
    ) -> tuple[Float[Tensor, "tasks inputs groups rows"], Float[Tensor, "#tasks groups rows"]]:
        """Lower linear bounds of rows of the node `root`: coefficients of the input deviation, and constants.

        Every path from `root` to the input must meet a stop.
        """
        pending = {root: rows}
        coefs: Tensor | None = None
        constant: Tensor | None = None
        for index in range(root, -1, -1):
            if index not in pending:
                continue
            self.check_time()
            rows = pending.pop(index)
            stop = stops.get(index)
            if stop is not None:
                part, bias = stop.compose(rows)
                coefs = part if coefs is None else coefs.add_(part)
                if isinstance(stop, Form) and self.unit > torch.finfo(self.dtype).eps:
                    # The sums are precise, but the form is not: it errs by units of its largest entries.
                    errors = self._errors(stop)
                    bias = (0 if bias is None else bias) - rows.like(rows.coefs.abs()).contract(errors)
            else:
                piece, inputs = self.pieces[index], self.nodes[index].inputs
                if keys := self._keys(root, index, rows, stops):
                    parts, part, bias = keys.pull(rows)
                    coefs = part if coefs is None else coefs.add_(part)
                else:
                    moved = [s.moved if isinstance(s := stops.get(i), Local) else None for i in inputs]
                    parts, bias = piece.pull_moved(rows, moved)
                # A piece need not use all its inputs: softmax only looks at the differences of its scores.
                for source, pulled in zip(inputs, parts, strict=False):
                    if pulled.moved:
                        part, _ = stops[source].compose(pulled)
                        coefs = part if coefs is None else coefs.add_(part)
                    else:
                        pending[source] = pending[source] + pulled if source in pending else pulled
            if bias is not None:
                constant = bias if constant is None else constant + bias
        assert coefs is not None
        return coefs, coefs.new_zeros(1, *coefs.shape[2:]) if constant is None else constant

    def _keys(self, root: int, index: int, rows: Rows, stops: Mapping[int, Stop]) -> Keys | None:
        """Forms of the keys that rows of `root` read at `index`, if it pays to have them apart."""
        piece = self.pieces[index]
        if not (isinstance(piece, PlanesPiece) and rows.diagonal and pays(rows.coefs.shape[3], piece.op)):
            return None
        if not splits(self.nodes, root, index, stops, self.locals):
            return None
        if index not in self.keys:
            source = self.nodes[index].inputs[1]
            found = self.substitute(source, key_rows(piece, len(self.clean[source])), stops)
            self.keys[index] = Keys.of(piece, *found)
        return self.keys[index]

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
        return torch.sub(constant + least, size, alpha=ROUNDING * self.unit)

    def _errors(self, form: Form) -> Float[Tensor, "tasks tokens features"]:
        """How far the values of a form kept in single precision may be off."""
        box = self.box_of_form(form)
        size = torch.maximum(box.lower.abs(), box.upper.abs())
        return ROUNDING * self.unit * torch.where(size > 0, size.amax(-1, keepdim=True), 0.0)

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
        forms, boxes = [], []
        for root, rows in self.unit_rows(nodes, stops):
            coefs, constant = self.substitute(root, rows, stops)
            boxes.append(self.concretise(coefs, constant).chunk(2, -1))
            constant = constant.expand(len(coefs), -1, -1)
            forms.append(torch.cat([coefs.transpose(1, 2), constant.unsqueeze(2)], 2).chunk(2, -1))
        ordered = {n: Form.between(*(side.mT for side in sides)) for n, sides in self._sides(nodes, forms)}
        return ordered, {n: Box(*sides) for n, sides in self._sides(nodes, boxes)}

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
        sides = torch.stack([form.lower, -form.upper], 1).movedim(-1, 1)
        lower, upper = self.concretise(sides[:, :-1], sides[:, -1]).unbind(1)
        return Box(lower, -upper)

    def box_of_local(self, local: Local, tokens: int) -> Box:
        """The box of a node that varies in the moved rows only."""
        tasks, moved = local.moved.shape
        features = len(local.matrix)
        sides = torch.cat([local.matrix, -local.matrix]).mT  # inputs, rows
        each = torch.eye(moved, dtype=sides.dtype, device=sides.device)[:, None, :, None] * sides[:, None]
        coefs = each.flatten(0, 1).expand(tasks, -1, -1, -1)  # tasks, inputs, moved, rows
        ends = self.concretise(coefs, coefs.new_zeros(1, moved, 2 * features))
        full = ends.new_zeros(tasks, tokens, 2 * features)
        full.scatter_(1, local.moved[..., None].expand_as(ends), ends)
        lower, upper = full.chunk(2, -1)
        return Box(lower, -upper)

    def margin(self, stops: Mapping[int, Stop]) -> Float[Tensor, "tasks others"]:
        """Lower bounds of the deviation of the last node, which has one token."""
        root = len(self.nodes) - 1
        others = self.clean[root].shape[-1]
        eye = torch.eye(others, dtype=self.dtype, device=self.region.center.device)
        return self.concretise(*self.substitute(root, Rows(eye[None, None], 1, True), stops)).squeeze(1)

    def unit_rows(
        self, nodes: Sequence[int], stops: Mapping[int, Stop], sample: Tensor | None = None
    ) -> Iterator[tuple[int, Rows]]:
        """Unit rows of the nodes and their negatives, in chunks of about `chunk_bytes`.

        The rows of an affine node start at the node it reads, as the rows of its weight. With `sample`, only
        those of the nodes' features, all their tokens.
        """
        first = self.nodes[nodes[0]]
        if isinstance(first.op, Affine):
            root = first.inputs[0]
            weights = [self.nodes[n].op.weight for n in nodes]  # type: ignore[attr-defined]
            matrix = torch.cat(weights).to(self.dtype).mT
        else:
            (root,) = nodes
            matrix = torch.eye(self.clean[root].shape[-1], dtype=self.dtype, device=self.clean[root].device)
        if sample is not None:
            matrix = matrix[:, sample]
        entries = widest_rows(self.scene, root, stops)
        per_row = 2 * torch.finfo(self.dtype).bits // 8 * self.region.tasks * entries
        groups = self.clean[root].shape[0]
        for part in matrix.split(max(1, self.chunk_bytes // per_row), 1):
            yield root, Rows(torch.cat([part, -part], 1)[None, None], groups, diagonal=True)


def widest_rows(scene: Scene, root: int, stops: Collection[int]) -> int:
    """Coefficients that one feature of `root` (at all its tokens) has at the widest node on the way down."""
    return max(row_entries(scene, root, stops))


def row_entries(scene: Scene, root: int, stops: Collection[int]) -> Iterator[int]:
    """Coefficients that one feature of `root` (at all its tokens) has at every node on the way down.

    Rows read only their own token until they pass through attention; from there on every token.
    """
    groups = scene.clean[root].shape[0]
    pending = {root: False}
    for index in range(root, -1, -1):
        if index not in pending:
            continue
        dense = pending.pop(index)
        tokens, features = scene.clean[index].shape
        yield (tokens if dense else 1) * features * groups
        if index not in stops:
            node = scene.program.nodes[index]
            mixes = isinstance(node.op, Scores | Mix) or (
                isinstance(node.op, Pool) and node.op.kind == "mean"
            )
            for source in node.inputs[:1] if isinstance(node.op, Softmax) else node.inputs:
                pending[source] = pending.get(source, False) or dense or mixes


def together(program: Program, nodes: frozenset[int]) -> dict[int, tuple[int, ...]]:
    """For each of the nodes, those that are substituted in one go: affine maps of the same value."""
    groups: dict[int, list[int]] = {}
    for n in sorted(nodes):
        node = program.nodes[n]
        key = node.inputs[0] if isinstance(node.op, Affine) else -n
        groups.setdefault(key, []).append(n)
    return {n: tuple(group) for group in groups.values() for n in group}
