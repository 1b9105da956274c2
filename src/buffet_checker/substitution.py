"""One claim, derived anew: boxes of nodes by rigorous backward substitution, in the order of the network.

Rows of a node are pulled back through linear pieces to the input. Coefficients are plain float64, so every
step errs; what that may change in the result is bounded by a product with known magnitudes. If A are the
coefficients at a node and P the piece there, the exact form differs from the computed one by at most

    |A| · (residual + γ·|P|·m + γ'·|constant|) + τ·(1 + Σ m),

m the magnitudes of the deviations of the inputs, γ for the sums of products that make one new coefficient
(and for adding it to others later), γ' for the intercepts. The bracket is one vector per node;
so the account costs one matrix-vector product per step instead of a second matrix product. The last term is
for underflow, which takes up to n·2⁻¹⁰⁷⁵ < τ off a new coefficient whatever A is, be it 0. A second vector
accounts for a deployed run (`deployed`) in the same way: `Bounds` are lower and upper bounds of the exact
deviations, and of those of a deployed run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import TINY, Array, U, down, gamma, up
from buffet_checker.certificate import Derivation
from buffet_checker.deployed import drift, local_rounding
from buffet_checker.errors import RejectedError
from buffet_checker.graph import Node
from buffet_checker.intervals import interval, magnitude, residual
from buffet_checker.known import INFLATE, NONLINEAR, Bounds, Known
from buffet_checker.rows import Form, Local, Rows

CHUNK = 8 << 20
"""Bytes aimed at for the coefficients of one pass."""
LOCAL = ("affine", "diagonal", "center", "offset")


@dataclass
class Claimed(Known):
    """The claim, derived node by node."""

    def margins(self) -> tuple[Array, Array]:
        """Lower bounds of the margins, proven: in exact arithmetic, and of a deployed run.

        A `RejectedError` names the first node that fails.
        """
        last = len(self.nodes) - 1
        by_node: dict[int, list[Derivation]] = {}
        for derivation in self.claim.derivations:
            if derivation.nodes[-1] > last:
                raise RejectedError(
                    f"a derivation of node {derivation.nodes[-1]}: there are {last + 1} nodes"
                )
            by_node.setdefault(derivation.nodes[0], []).append(derivation)
        for index, node in enumerate(self.nodes):
            self._visit(index, node)
            for derivation in by_node.get(index, ()):
                self._derive(derivation)
            self._settle(index, node)
        exact = down(self.values[last] + self.boxes[last][0])[0]
        if not all(np.isfinite(rounding).all() for rounding in self.roundings):
            return exact, np.full_like(exact, -np.inf)  # a NaN may be hidden by a coefficient of 0
        return exact, down(self.values[last] + self.boxes[last][0] - self.escapes[last])[0]

    # --- one node after the other ---------------------------------------------------------------------------

    def _visit(self, index: int, node: Node) -> None:
        """Interval arithmetic, and the exact form of what lies behind linear operations on single tokens."""
        if node.kind == "input":
            low, high = np.zeros_like(self.values[0]), np.zeros_like(self.values[0])
            low[self.region.moved], high[self.region.moved] = self.region.lower, self.region.upper
            nothing = np.zeros_like(low)
            self.residuals.append(nothing)
            self.roundings.append(nothing)
            self.boxes.append((low, high))
            self.escapes.append(nothing)
            self.locals[0] = Local(np.eye(low.shape[1]), nothing, nothing)
            return
        values, boxes, escapes = self._inputs(node)
        self.residuals.append(residual(node, values))
        self.boxes.append(interval(node, self.values[index], values, boxes, self.residuals[index]))
        self.roundings.append(local_rounding(self.nodes, index, self.values, self.boxes, self.escapes))
        exact = None if node.kind in NONLINEAR else self.piece(index, 0)[0]
        moved = drift(node, exact, values, boxes, escapes, self._weights(index))
        self.escapes.append(moved + self.roundings[index])
        source = self.locals.get(node.inputs[0])
        if source is not None and exact is not None and node.kind in LOCAL:
            matrix = exact.push(Form(source.matrix[None], source.matrix[None])).lower[0]
            error = self.residuals[index] + exact.reach(source.error)
            error += gamma(exact.depth + self.steps) * exact.reach(self._local_size(source))
            error += TINY * (1 + self.region.reach.sum())
            wobble = exact.reach(source.wobble) + self.roundings[index]
            self.locals[index] = Local(matrix, error * INFLATE, wobble * INFLATE)

    def _weights(self, index: int) -> Array:
        """The largest values of the node: for attention weights, what their changes scale with."""
        return np.abs(self.values[index]) + magnitude(self.boxes[index])

    def _local_size(self, local: Local) -> Array:
        size = np.zeros((len(self.values[0]), len(local.matrix)))
        size[self.region.moved] = self.region.reach @ np.abs(local.matrix.T)
        return size + local.error

    def _settle(self, index: int, node: Node) -> None:
        """What was derived must lie inside what is claimed, and the claim is used from here on."""
        own, drifted = self.boxes[index], self.escapes[index]
        bounds: Bounds = (*own, own[0] - drifted, own[1] + drifted)
        if index in self.derived:
            bounds = _meet(bounds, self.derived.pop(index))
        low, high = box = bounds[:2]
        claimed = self.tensors.get(f"{self.claim.number}.box.{index}", [(2, *self.values[index].shape)])
        if claimed is not None:
            inside = (low >= claimed[0]) & (high <= claimed[1])
            if not inside.all():
                token, feature = np.argwhere(~inside)[0]
                raise RejectedError(
                    f"node {index} ({node.name}): token {token}, entry {feature} is claimed within "
                    f"[{claimed[0][token, feature]:.9g}, {claimed[1][token, feature]:.9g}], derived is "
                    f"[{low[token, feature]:.9g}, {high[token, feature]:.9g}]"
                )
            box = claimed[0], claimed[1]
        if not (magnitude(box) < 1e100).all():
            raise RejectedError(f"node {index} ({node.name}): nothing finite follows for it")
        self.boxes[index] = box
        outside = np.maximum(box[0] - bounds[2], bounds[3] - box[1])
        self.escapes[index] = np.where(np.isnan(outside), np.inf, np.maximum(outside, 0.0)) * INFLATE

    # --- derivations ----------------------------------------------------------------------------------------

    def _derive(self, derivation: Derivation) -> None:
        first = derivation.nodes[0]
        if derivation.push:
            if len(derivation.nodes) > 1:
                raise RejectedError(f"node {first} ({self.nodes[first].name}): forms are pushed one by one")
            form = self._pushed(first)
            self._found(first, self._bounds_of(form))
            if derivation.keep:
                self.forms[first] = form
            return
        if missing := set(derivation.stops) - self.forms.keys():
            raise RejectedError(f"node {first} ({self.nodes[first].name}): node {min(missing)} keeps no form")
        stops = {n: self.forms[n] for n in derivation.stops}
        bounds, kept = self._substituted(derivation, stops)
        start = 0
        for index in derivation.nodes:
            part = slice(start, start + self.values[index].shape[1])
            start = part.stop
            self._found(index, tuple(side[:, part] for side in bounds))  # type: ignore[arg-type]
            if kept is not None:
                assert kept.wobble is not None
                self.forms[index] = Form(kept.lower[:, part], kept.upper[:, part], kept.wobble[:, part])

    def _found(self, index: int, bounds: Bounds) -> None:
        before = self.derived.get(index)
        self.derived[index] = bounds if before is None else _meet(before, bounds)

    def _pushed(self, index: int) -> Form:
        """The form of a node from those of its inputs."""
        node = self.nodes[index]
        if index in self.locals:
            return self.locals[index].form(self.region.moved, len(self.values[index]))
        forms = []
        for source in node.inputs[: 1 if node.kind == "softmax" else None]:
            if source in self.locals:
                forms.append(self.locals[source].form(self.region.moved, len(self.values[source])))
            elif source in self.forms:
                forms.append(self.forms[source])
            else:
                raise RejectedError(f"node {index} ({node.name}): node {source} keeps no form")
        piece, errors, _ = self.piece(index, 0)
        sizes = [form.size(self.region.reach) for form in forms]
        error = piece.residual + gamma(piece.depth + self.steps) * (piece.reach(*sizes) + piece.constant)
        error += TINY * (1 + self.region.reach.sum())
        wobble = errors[1] + piece.reach(*(form.wobble for form in forms))  # type: ignore[arg-type]
        form = piece.push(*forms)
        slack = error * INFLATE + 8 * U * np.maximum(np.abs(form.lower), np.abs(form.upper))[..., -1]
        form = form.plus(-slack, slack)
        return Form(form.lower, form.upper, wobble * INFLATE)

    def _bounds_of(self, form: Form) -> Bounds:
        shape = (*self.region.reach.shape, *form.lower.shape[:2])

        def least(side: Array) -> Array:
            coefs = np.moveaxis(side[..., :-1], -1, 0).reshape(shape)
            return down(self.region.minimum(coefs) + side[..., -1])

        low, high = least(form.lower), -least(-form.upper)
        assert form.wobble is not None
        return low, high, down(low - form.wobble), up(high + form.wobble)

    def _substituted(self, derivation: Derivation, stops: dict[int, Form]) -> tuple[Bounds, Form | None]:
        """Bounds of the entries of nodes that are read together, and their form if it is kept."""
        root, matrix, extra = self._read_together(derivation)
        groups, count = len(self.values[root]), matrix.shape[1]
        # of a margin, only the lower side counts
        sides = 1 if derivation.nodes == (len(self.nodes) - 1,) else 2
        widest = max(v.size for v in self.values[: root + 1]) * groups
        step = max(1, CHUNK // (8 * widest * sides))
        lows, highs = (np.full((2, groups, count), end) for end in (-np.inf, np.inf))
        kept = derivation.keep and sides == 2
        forms = [np.empty((groups, count, self.region.reach.size + 1)) for _ in range(2 * kept)]
        wobble = np.zeros((groups, count))
        for start in range(0, count, step):
            part = matrix[:, start : start + step]
            inside, size = slice(start, start + part.shape[1]), part.shape[1]
            rows = Rows(np.concatenate([part, -part], 1)[None] if sides == 2 else part[None], groups, True)
            coefs, constant, slack = self._substitute(root, rows, derivation.choices, stops)
            slack += np.tile(extra[..., inside], sides) * INFLATE
            constant = down(constant - slack[0]) - 8 * U * (np.abs(constant) + slack[0])
            exact = down(self.region.minimum(coefs) + constant)
            deployed = down(exact - slack[1])
            lows[..., inside] = exact[:, :size], deployed[:, :size]
            if sides == 2:
                highs[..., inside] = -exact[:, size:], -deployed[:, size:]
            if kept:
                flat = np.moveaxis(coefs.reshape(-1, *coefs.shape[2:]), 0, -1)
                for form, sign, half in zip(forms, (1, -1), (slice(size), slice(size, None)), strict=True):
                    form[:, inside, :-1], form[:, inside, -1] = sign * flat[:, half], sign * constant[:, half]
                wobble[:, inside] = np.maximum(slack[1][:, :size], slack[1][:, size:])
        bounds = lows[0], highs[0], lows[1], highs[1]
        return bounds, Form(forms[0], forms[1], wobble) if kept else None

    def _read_together(self, derivation: Derivation) -> tuple[int, Array, Array]:
        """Where the rows of nodes start, the rows, and what is to be taken off their bounds in the end.

        The rows of affine nodes start at the node they read, as the rows of their weights.
        """
        number = derivation.nodes[0]
        first = self.nodes[number]
        if first.kind != "affine":
            if len(derivation.nodes) > 1:
                raise RejectedError(f"node {number} ({first.name}): only affine nodes are read together")
            nothing = np.zeros((2, *self.values[number].shape))
            return number, np.eye(self.values[number].shape[1]), nothing
        root = first.inputs[0]
        weights, own, rounded = [], [], []
        for n in derivation.nodes:
            node = self.nodes[n]
            if node.kind != "affine" or node.inputs != first.inputs:
                raise RejectedError(f"node {n} ({node.name}): is not read together with node {number}")
            weights.append(node.weight)
            own.append(residual(node, [self.values[root]]))
            rounded.append(local_rounding(self.nodes, n, self.values, self.boxes, self.escapes))
        matrix = np.concatenate(weights).T
        # weights that are rounded themselves: 1/width, differences
        size = gamma(16) * (magnitude(self.boxes[root]) @ np.abs(matrix)) + TINY
        return root, matrix, np.stack([np.concatenate(own, 1) + size, np.concatenate(rounded, 1)])

    def _substitute(
        self, root: int, rows: Rows, choices: int, stops: dict[int, Form]
    ) -> tuple[Array, Array, Array]:
        """Coefficients ``[moved, width, groups, rows]`` of δ, constants, and what errors may take off the
        sum.

        The latter twice: for the exact sum, and for what a deployed run may be below it.
        """
        pending = {root: rows}
        shape = rows.groups, rows.coefs.shape[2]
        coefs = np.zeros((*self.region.reach.shape, *shape))
        constant, slack = np.zeros(shape), np.zeros((2, *shape))
        lost = TINY * np.array([1 + self.region.reach.sum(), 1.0])
        for index in range(root, -1, -1):
            if index not in pending:
                continue
            rows = pending.pop(index)
            if not rows.fit(self.values[index]):
                raise RejectedError(
                    f"node {index} ({self.nodes[index].name}): rows of other tokens lead to it"
                )
            if index in self.locals:
                local = self.locals[index]
                coefs += local.compose(rows, self.region.moved)
                error = local.error + gamma(rows.coefs.shape[1] + self.steps) * self._local_size(local)
                slack += rows.size().contract(np.stack([error, local.wobble]) * INFLATE)
                slack += lost[:, None, None]
            elif index in stops:
                form = stops[index]
                part = form.compose(rows)
                coefs += part[:-1].reshape(coefs.shape)
                constant += part[-1]
                error = gamma(self.values[index].size + self.steps) * form.size(self.region.reach)
                assert form.wobble is not None
                slack += rows.size().contract(np.stack([error, form.wobble]) * INFLATE)
                slack += lost[:, None, None]
            else:
                piece, errors, underflow = self.piece(index, choices)
                rows, spent = piece.settle(rows)
                slack += rows.size().contract(errors) + underflow[:, None, None]
                if spent is not None:
                    slack += spent * INFLATE
                parts, bias = piece.pull(rows)
                if bias is not None:
                    constant += bias
                for source, pulled in zip(self.nodes[index].inputs, parts, strict=False):
                    pending[source] = pending[source] + pulled if source in pending else pulled
        return coefs, constant, up(slack * INFLATE)


def _meet(a: Bounds, b: Bounds) -> Bounds:
    """The intersection; a NaN stays a NaN."""
    return np.maximum(a[0], b[0]), np.minimum(a[1], b[1]), np.fmax(a[2], b[2]), np.fmin(a[3], b[3])
