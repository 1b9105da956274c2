"""What is free in a relaxation, and how it is chosen: fixed, by the rule of r-BuFFeT, or learned.

Every free number is a share in [0, 1], and every share is sound: α between the two planes of a product, the
slope of a line between the least and the largest useful one, the point of the box where a softmax bound
touches, the mixture of two such bounds, the constant that Σp = 1 allows to take off, how much of a product is
bounded as a whole. So a learned relaxation is a dictionary of shares per node, and projecting it means
clamping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from buffet.bounds.forms import Form, Local, Stop
from buffet.bounds.intervals import Box
from buffet.network import Apply, Bilinear, Mix, Node, Softmax
from buffet.propagation.substitution import Bounds
from buffet.relaxations.elementwise import SIDES, Side, relax
from buffet.relaxations.headwise import Whole
from buffet.relaxations.linear import LinesPiece, Piece
from buffet.relaxations.products import Alpha, planes, rule
from buffet.relaxations.softmax import softmax_piece

Shares = dict[str, Tensor]
"""The learned shares of one node: ``lower``, ``upper``, of some products also ``whole``; or of a softmax
``point``, ``mixture``, ``shift``."""

PRODUCTS: Mapping[str, float | None] = {"zero": 0.0, "dual": 1.0, "middle": 0.5, "rule": None}
"""How the plane of a product is chosen: one α for all, or by the range of the fused ReLU's input."""


@dataclass(frozen=True)
class Relaxer:
    """Turns nonlinear nodes into pieces: learned shares where there are some, defaults elsewhere."""

    product: str = "zero"
    learned: Mapping[int, Shares] = field(default_factory=dict)
    chosen: dict[int, Shares] | None = None  # takes the α of products that were not learned

    def __call__(self, bounds: Bounds, index: int, node: Node) -> Piece:
        clean = tuple(bounds.clean[i] for i in node.inputs)
        boxes = tuple(bounds.boxes[i] for i in node.inputs)
        shares = self.learned.get(index, {})
        if isinstance(node.op, Bilinear):
            lower, upper = (shares["lower"], shares["upper"]) if shares else self.alphas(bounds, node)
            if self.chosen is not None:
                shape = bounds.region.tasks, *[1] * len(node.op.terms)
                both = (clean[0].new_full(shape, a) if isinstance(a, float) else a for a in (lower, upper))
                self.chosen[index] = dict(zip(SIDES, both, strict=True))
            return product_piece(bounds, node, lower, upper, shares.get("whole"))
        if isinstance(node.op, Softmax):
            return softmax_piece(node.op, clean[0], *boxes, dtype=bounds.dtype, **shares)  # type: ignore[arg-type]
        assert isinstance(node.op, Apply)
        where = node.op.function, clean[0], boxes[0].lower, boxes[0].upper

        def slope(side: Side) -> Tensor | None:
            return torch.lerp(*bounds.slopes(index, side), shares[side]) if side in shares else None

        lines = relax(*where, lower_slope=slope("lower"), upper_slope=slope("upper"), dtype=bounds.dtype)
        return LinesPiece(lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)

    def alphas(self, bounds: Bounds, node: Node) -> tuple[Alpha, Alpha]:
        """The α of both sides of a product that has no learned ones."""
        fixed = PRODUCTS[self.product]
        if fixed is not None:
            return fixed, fixed
        assert isinstance(node.op, Bilinear)
        known = tuple(_known(bounds, i) for i in node.inputs)
        if bounds.region.symmetric and all(_exact(factor) for factor in known):
            return 0.0, 0.0  # ranges of exact forms are symmetric then: all ties
        x, y = (bounds.boxes[i] for i in node.inputs)
        weights, values = known
        if isinstance(node.op, Mix) and isinstance(values, Local):
            return _of_moved(node.op, (x, y), (_form(weights, x), values), bounds)
        return rule(node.op, x, y, _form(weights, x), _form(values, y), bounds.least_sums)


def product_piece(bounds: Bounds, node: Node, lower: Alpha, upper: Alpha, share: Tensor | None) -> Piece:
    """The planes of a product that α selects on both sides, with a share of it bounded as a whole."""
    assert isinstance(node.op, Bilinear)
    clean = tuple(bounds.clean[i] for i in node.inputs)
    boxes = (bounds.boxes[i] for i in node.inputs)
    piece = planes(node.op, clean, *boxes, alpha_lower=lower, alpha_upper=upper, dtype=bounds.dtype)
    whole = None if share is None else whole_of(bounds, node)
    return piece if share is None or whole is None else whole.mixed(piece, share)


def whole_of(bounds: Bounds, node: Node) -> Whole | None:
    """How a product is bounded as a whole, if it can be: where its values are exact forms of the input."""
    values = bounds.locals.get(node.inputs[-1])
    if not (isinstance(node.op, Mix) and node.op.scale == 1 and values):
        return None
    clean = tuple(bounds.clean[i] for i in node.inputs)
    return Whole.of(node.op, clean, bounds.boxes[node.inputs[0]], values, bounds.region)


def _of_moved(
    op: Mix, boxes: tuple[Box, Box], forms: tuple[Form, Local], bounds: Bounds
) -> tuple[Tensor, Tensor]:
    """The rule where only the moved rows of the values vary: of the others any α gives the same, so 0."""
    moved = bounds.region.moved  # tasks × words

    def weights(v: Tensor) -> Tensor:
        """Those of the moved tokens, of ``[tasks, tokens, heads · keys, …]``."""
        v = v.unflatten(2, (op.heads, -1))
        return v.take_along_dim(moved.view(len(moved), 1, 1, -1, *[1] * (v.ndim - 4)), 3).flatten(2, 3)

    def values(v: Tensor) -> Tensor:
        return v.take_along_dim(moved.view(*moved.shape, *[1] * (v.ndim - 2)), 1)

    (x, y), (x_form, local) = boxes, forms
    chosen = rule(
        op,
        Box(weights(x.lower), weights(x.upper)),
        Box(values(y.lower), values(y.upper)),
        Form.between(weights(x_form.lower), weights(x_form.upper)),
        local.of_moved(),
        bounds.least_sums,
    )
    tokens = y.lower.shape[1]

    def everywhere(alpha: Tensor) -> Tensor:
        """From terms ``[tasks, i, h, words, k]`` to those of all tokens."""
        full = alpha.new_zeros(*alpha.shape[:3], tokens, alpha.shape[4])
        return full.scatter_(3, moved[:, None, None, :, None].expand_as(alpha), alpha)

    lower, upper = (everywhere(alpha) for alpha in chosen)
    return lower, upper


def _known(bounds: Bounds, index: int) -> Stop:
    """Linear bounds of a factor in the input, kept or made for the occasion."""
    for kept in (bounds.locals, bounds.forms):
        if index in kept:
            return kept[index]
    forms, _ = bounds.forms_of((index,), {**bounds.forms, **bounds.locals})
    return forms[index]


def _exact(known: Stop) -> bool:
    return isinstance(known, Local) or known.exact or known.still


def _form(known: Stop, box: Box) -> Form:
    return known.form(box.lower.shape[1]) if isinstance(known, Local) else known
