"""One claim, derived anew: boxes of nodes by rigorous backward substitution, in the order of the network.

Rows of a node are pulled back through linear pieces to the input. Coefficients are plain float64, so every step errs;
what that may change in the result is bounded by a product with known magnitudes. If A are the coefficients at a node
and P the piece there, the exact form differs from the computed one by at most

    |A| · (residual + γ·|P|·m + γ'·|constant|),

m the magnitudes of the deviations of the inputs, γ for the sums of products that make one new coefficient (and for
adding up to sixteen contributions later), γ' for the intercepts. The bracket, `Claimed.errors`, is one vector per
node; so the account costs one matrix-vector product per step instead of a second matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from buffet_checker.balls import Array, U, down, gamma, up
from buffet_checker.certificate import Claim, Derivation, Tensors
from buffet_checker.errors import RejectedError
from buffet_checker.functions import FUNCTIONS
from buffet_checker.intervals import Box, ends, interval, magnitude, residual
from buffet_checker.network import Node
from buffet_checker.pieces import (
    AffinePiece,
    CenterPiece,
    DiagonalPiece,
    LinesPiece,
    Piece,
    PoolPiece,
    SumPiece,
    planes,
)
from buffet_checker.regions import Region
from buffet_checker.rows import Form, Local, Rows
from buffet_checker.softmax import softmax_piece

CHUNK = 8 << 20
"""Bytes aimed at for the coefficients of one pass."""
LOCAL = ("affine", "diagonal", "center", "offset")
NONLINEAR = ("apply", "softmax", "scores", "mix", "rescale", "normalise")
_INFLATE = 1 + 1e-8
"""More than the relative error of any sum of non-negative terms made here (up to 10⁷ terms)."""


@dataclass
class Claimed:
    """What is proven so far of the nodes of one claim."""

    nodes: list[Node]
    values: list[Array]
    region: Region
    claim: Claim
    tensors: Tensors
    residuals: list[Array] = field(default_factory=list)
    boxes: list[Box] = field(default_factory=list)
    derived: dict[int, Box] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)
    locals: dict[int, Local] = field(default_factory=dict)
    pieces: dict[tuple[int, int], tuple[Piece, Array]] = field(default_factory=dict)

    def margins(self) -> Array:
        """Lower bounds of the margins, proven; a `RejectedError` names the first node that fails."""
        last = len(self.nodes) - 1
        by_node: dict[int, list[Derivation]] = {}
        for derivation in self.claim.derivations:
            if derivation.nodes[-1] > last:
                raise RejectedError(f"a derivation of node {derivation.nodes[-1]}: there are {last + 1} nodes")
            by_node.setdefault(derivation.nodes[0], []).append(derivation)
        for index, node in enumerate(self.nodes):
            self._visit(index, node)
            for derivation in by_node.get(index, ()):
                self._derive(derivation)
            self._settle(index, node)
        return down(self.values[last] + self.boxes[last][0])[0]

    # --- one node after the other ---------------------------------------------------------------------------

    def _visit(self, index: int, node: Node) -> None:
        """Interval arithmetic, and the exact form of what lies behind linear operations on single tokens."""
        if node.kind == "input":
            low, high = np.zeros_like(self.values[0]), np.zeros_like(self.values[0])
            low[self.region.moved], high[self.region.moved] = self.region.lower, self.region.upper
            self.residuals.append(np.zeros_like(low))
            self.boxes.append((low, high))
            self.locals[0] = Local(np.eye(low.shape[1]), np.zeros_like(low))
            return
        values = [self.values[i] for i in node.inputs]
        self.residuals.append(residual(node, values))
        boxes = [self.boxes[i] for i in node.inputs]
        self.boxes.append(interval(node, self.values[index], values, boxes, self.residuals[index]))
        source = self.locals.get(node.inputs[0])
        if source is not None and node.kind in LOCAL:
            piece = self.piece(index, 0)[0]
            matrix = piece.push(Form(source.matrix[None], source.matrix[None])).lower[0]
            error = self.residuals[index] + piece.reach(source.error)
            error += gamma(piece.depth + 16) * piece.reach(self._local_size(source))
            self.locals[index] = Local(matrix, error * _INFLATE)

    def _local_size(self, local: Local) -> Array:
        size = np.zeros((len(self.values[0]), len(local.matrix)))
        size[self.region.moved] = self.region.reach @ np.abs(local.matrix.T)
        return size + local.error

    def _settle(self, index: int, node: Node) -> None:
        """What was derived must lie inside what is claimed, and the claim is used from here on."""
        box = self.boxes[index]
        if index in self.derived:
            linear = self.derived.pop(index)
            box = np.maximum(box[0], linear[0]), np.minimum(box[1], linear[1])
        shape = (2, *self.values[index].shape)
        claimed = self.tensors.get(f"{self.claim.number}.box.{index}", [shape])
        if claimed is not None:
            inside = (box[0] >= claimed[0]) & (box[1] <= claimed[1])
            if not inside.all():
                token, feature = np.argwhere(~inside)[0]
                raise RejectedError(
                    f"node {index} ({node.name}): token {token}, entry {feature} is claimed within "
                    f"[{claimed[0][token, feature]:.9g}, {claimed[1][token, feature]:.9g}], derived is "
                    f"[{box[0][token, feature]:.9g}, {box[1][token, feature]:.9g}]"
                )
            box = claimed[0], claimed[1]
        if not (magnitude(box) < 1e100).all():
            raise RejectedError(f"node {index} ({node.name}): nothing finite follows for it")
        self.boxes[index] = box

    # --- pieces ---------------------------------------------------------------------------------------------

    def piece(self, index: int, choices: int) -> tuple[Piece, Array]:
        """The piece of a node under a set of choices, and the vector that accounts for its errors."""
        node = self.nodes[index]
        key = index, choices if node.kind in NONLINEAR else 0
        if key not in self.pieces:
            piece = self._relaxed(index, node, choices) if node.kind in NONLINEAR else self._exact(index, node)
            sizes = [magnitude(self.boxes[i]) for i in node.inputs]
            error = piece.residual + gamma(piece.depth + 16) * piece.reach(*sizes)
            error = error + gamma(piece.residual.size + 64) * piece.constant
            self.pieces[key] = piece, error * _INFLATE + 1e-290
        return self.pieces[key]

    def _exact(self, index: int, node: Node) -> Piece:
        error = self.residuals[index]
        match node.kind:
            case "affine":
                assert node.weight is not None
                return AffinePiece(error, node.weight)
            case "diagonal":
                assert node.weight is not None
                return DiagonalPiece(error, node.weight)
            case "center":
                return CenterPiece(error, self.values[index].shape[1])
            case "first" | "mean":
                return PoolPiece(error, len(self.values[node.inputs[0]]), node.kind == "first")
        return SumPiece(error)

    def _relaxed(self, index: int, node: Node, choices: int) -> Piece:
        prefix = f"{self.claim.number}.{choices}.{index}"
        values, boxes = [self.values[i] for i in node.inputs], [self.boxes[i] for i in node.inputs]
        value = self.values[index]
        if node.kind == "apply":
            low, high = ends(values[0], boxes[0])
            f, found = FUNCTIONS[node.function], []
            for name, side in (("lower", 1), ("upper", -1)):
                slope = self.tensors.need(f"{prefix}.{name}", [value.shape])
                found += [slope, f.intercept(values[0], value, low, high, slope, side)]
            return LinesPiece(np.zeros_like(value), *found)
        if node.kind == "softmax":
            tokens, heads = len(value), node.heads
            keys = value.shape[1] // heads
            point = self.tensors.need(f"{prefix}.point", [(), (tokens, heads, keys, keys)], share=True)
            mixture = self.tensors.need(f"{prefix}.mixture", [(tokens, heads, keys)], share=True)
            shift = self.tensors.get(f"{prefix}.shift", [(tokens, heads)], share=True)
            return softmax_piece(node, value, values, boxes, self.boxes[index], point, mixture, shift)
        kind = "rescale" if node.kind == "normalise" else node.kind
        x, y = values
        sizes = {
            "scores": (len(x), node.heads, len(y), x.shape[1] // node.heads),
            "mix": (len(x), node.heads, len(y), y.shape[1] // node.heads),
            "rescale": (len(x), node.heads, x.shape[1] // node.heads),
        }[kind]
        low, high = (self.tensors.need(f"{prefix}.{s}", [(), sizes], share=True) for s in ("lower", "upper"))
        return planes(
            kind, node.heads, node.scale, (x, y), (boxes[0], boxes[1]), (low, high), self.residuals[index]
        )

    # --- derivations ----------------------------------------------------------------------------------------

    def _derive(self, derivation: Derivation) -> None:
        if derivation.push:
            for index in derivation.nodes:
                form = self._pushed(index)
                self.derived[index] = self._meet(index, self._box_of(form))
                if derivation.keep:
                    self.forms[index] = form
            return
        stops = {n: self.forms[n] for n in derivation.stops if n in self.forms}
        if len(stops) < len(derivation.stops):
            missing = min(set(derivation.stops) - stops.keys())
            raise RejectedError(f"node {derivation.nodes[0]}: stops at node {missing}, which keeps no form")
        lower, upper, forms = self._substituted(derivation, stops)
        start = 0
        for index in derivation.nodes:
            part = slice(start, start + self.values[index].shape[1])
            start = part.stop
            self.derived[index] = self._meet(index, (lower[:, part], upper[:, part]))
            if forms is not None:
                self.forms[index] = Form(forms[0][:, part], forms[1][:, part])

    def _meet(self, index: int, box: Box) -> Box:
        if index not in self.derived:
            return box
        before = self.derived[index]
        return np.maximum(before[0], box[0]), np.minimum(before[1], box[1])

    def _pushed(self, index: int) -> Form:
        """The form of a node from those of its inputs."""
        tokens = len(self.values[index])
        if index in self.locals:
            return self.locals[index].form(self.region.moved, tokens)
        forms = []
        for source in self.nodes[index].inputs[: 1 if self.nodes[index].kind == "softmax" else None]:
            if source in self.locals:
                forms.append(self.locals[source].form(self.region.moved, len(self.values[source])))
            elif source in self.forms:
                forms.append(self.forms[source])
            else:
                raise RejectedError(f"node {index} ({self.nodes[index].name}): node {source} keeps no form")
        piece = self.piece(index, 0)[0]
        sizes = [form.size(self.region.reach) for form in forms]
        error = piece.residual + gamma(piece.depth + 16) * (piece.reach(*sizes) + piece.constant)
        form = piece.push(*forms)
        slack = error * _INFLATE + 8 * U * np.maximum(np.abs(form.lower), np.abs(form.upper))[..., -1]
        return form.plus(-slack, slack)

    def _box_of(self, form: Form) -> Box:
        shape = (*self.region.reach.shape, *form.lower.shape[:2])

        def least(side: Array) -> Array:
            coefs = np.moveaxis(side[..., :-1], -1, 0).reshape(shape)
            return down(self.region.minimum(coefs) + side[..., -1])

        return least(form.lower), -least(-form.upper)

    def _substituted(
        self, derivation: Derivation, stops: dict[int, Form]
    ) -> tuple[Array, Array, tuple[Array, Array] | None]:
        """Lower and upper bounds of the entries of nodes that are read together, and their forms if kept."""
        first = self.nodes[derivation.nodes[0]]
        last = len(self.nodes) - 1
        if first.kind == "affine":
            root = first.inputs[0]
            for n in derivation.nodes:
                if self.nodes[n].kind != "affine" or self.nodes[n].inputs != first.inputs:
                    raise RejectedError(f"node {n}: is not read together with node {derivation.nodes[0]}")
            matrix = np.concatenate([self.nodes[n].weight for n in derivation.nodes]).T  # type: ignore[misc]
            # the reference values of these nodes, and weights that are rounded themselves (1/width)
            size = magnitude(self.boxes[root]) @ np.abs(matrix)
            own = [residual(self.nodes[n], [self.values[root]]) for n in derivation.nodes]
            extra = np.concatenate(own, 1) + gamma(16) * size
        else:
            if len(derivation.nodes) > 1:
                raise RejectedError(f"node {first.name}: only affine nodes are read together")
            root = derivation.nodes[0]
            matrix = np.eye(self.values[root].shape[1])
            extra = np.zeros_like(self.values[root])
        groups, count = len(self.values[root]), matrix.shape[1]
        one_sided = derivation.nodes == (last,)
        widest = max(v.size for v in self.values[: root + 1]) * groups
        step = max(1, CHUNK // (8 * widest * (1 if one_sided else 2)))
        lower, upper = np.empty((groups, count)), np.full((groups, count), np.inf)
        forms = [np.empty((groups, count, self.region.reach.size + 1)) for _ in range(2)]
        for start in range(0, count, step):
            part = matrix[:, start : start + step]
            rows = Rows((part if one_sided else np.concatenate([part, -part], 1))[None], groups, True)
            coefs, constant, slack = self._substitute(root, rows, derivation.choices, stops)
            inside = slice(start, start + part.shape[1])
            slack = slack + np.tile(extra[:, inside], 1 if one_sided else 2) * _INFLATE
            ends = down(self.region.minimum(coefs) + (constant - slack))
            ends = ends - 4 * U * (np.abs(constant) + slack)
            lower[:, inside] = ends[:, : part.shape[1]]
            if not one_sided:
                upper[:, inside] = -ends[:, part.shape[1] :]
            if derivation.keep and not one_sided:
                flat = np.moveaxis(coefs.reshape(-1, *coefs.shape[2:]), 0, -1)
                offset = constant - slack - 4 * U * (np.abs(constant) + slack)
                for form, sign, half in zip(forms, (1, -1), np.split(np.arange(2 * part.shape[1]), 2), strict=True):
                    form[:, inside, :-1], form[:, inside, -1] = sign * flat[:, half], sign * offset[:, half]
        return lower, upper, (forms[0], forms[1]) if derivation.keep and not one_sided else None

    def _substitute(
        self, root: int, rows: Rows, choices: int, stops: dict[int, Form]
    ) -> tuple[Array, Array, Array]:
        """Coefficients ``[moved, width, groups, rows]`` of δ, constants, and what errors may take off the sum."""
        pending = {root: rows}
        shape = rows.groups, rows.coefs.shape[2]
        coefs = np.zeros((*self.region.reach.shape, *shape))
        constant, slack = np.zeros(shape), np.zeros(shape)
        for index in range(root, -1, -1):
            if index not in pending:
                continue
            rows = pending.pop(index)
            if index in self.locals:
                local = self.locals[index]
                coefs += local.compose(rows, self.region.moved)
                error = local.error + gamma(rows.coefs.shape[1] + 16) * self._local_size(local)
                slack += rows.size().contract(error * _INFLATE + 1e-290)
            elif index in stops:
                form = stops[index]
                part = form.compose(rows)
                coefs += part[:-1].reshape(coefs.shape)
                constant += part[-1]
                error = gamma(self.values[index].size + 64) * form.size(self.region.reach)
                slack += rows.size().contract(error * _INFLATE + 1e-290)
            else:
                piece, error = self.piece(index, choices)
                rows, spent = piece.settle(rows)
                slack += rows.size().contract(error)
                if spent is not None:
                    slack += spent * _INFLATE
                parts, bias = piece.pull(rows)
                if bias is not None:
                    constant += bias
                for source, pulled in zip(self.nodes[index].inputs, parts, strict=False):
                    pending[source] = pending[source] + pulled if source in pending else pulled
        return coefs, constant, up(slack * _INFLATE)
