"""What is free in a relaxation, and how it is chosen: fixed, by the rule of r-BuFFeT, or learned.

Every free number is a share in [0, 1], and every share is sound: α between the two planes of a product, the
slope of a line between the least and the largest useful one, the point of the box where a softmax bound
touches, the mixture of two such bounds, the constant that Σp = 1 allows to take off. So a learned relaxation
is a dictionary of shares per node, and projecting it means clamping.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from buffet.bounds.linear import Form, LinesPiece, Piece
from buffet.bounds.products import Alpha, planes, rule
from buffet.bounds.relaxations import SIDES, Side, default_slopes, relax, slope_range
from buffet.bounds.sheet import Shares
from buffet.bounds.softmax import better_bound, softmax_piece
from buffet.bounds.substitution import Bounds
from buffet.program import Apply, Bilinear, Node, Softmax
from buffet.regions import LpBall

PRODUCTS: Mapping[str, float | None] = {"zero": 0.0, "dual": 1.0, "middle": 0.5, "rule": None}
"""How the plane of a product is chosen: one α for all, or by the range of the fused ReLU's input."""


@dataclass(frozen=True)
class Relaxer:
    """Turns nonlinear nodes into pieces: learned shares where there are some, defaults elsewhere."""

    product: str = "zero"
    learned: Mapping[int, Shares] = field(default_factory=dict)

    def __call__(self, bounds: Bounds, index: int, node: Node) -> Piece:
        clean = tuple(bounds.clean[i] for i in node.inputs)
        boxes = tuple(bounds.boxes[i] for i in node.inputs)
        shares = self.learned.get(index, {})
        if isinstance(node.op, Bilinear):
            lower, upper = (shares["lower"], shares["upper"]) if shares else self.alphas(bounds, node)
            return planes(node.op, clean, *boxes, alpha_lower=lower, alpha_upper=upper, dtype=bounds.dtype)
        if isinstance(node.op, Softmax):
            return softmax_piece(node.op, clean[0], *boxes, dtype=bounds.dtype, **shares)  # type: ignore[arg-type]
        assert isinstance(node.op, Apply)
        where = node.op.function, clean[0], boxes[0].lower, boxes[0].upper

        def slope(side: Side) -> Tensor | None:
            return torch.lerp(*slope_range(*where, side), shares[side]) if side in shares else None

        lines = relax(*where, lower_slope=slope("lower"), upper_slope=slope("upper"), dtype=bounds.dtype)
        return LinesPiece(lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)

    def alphas(self, bounds: Bounds, node: Node) -> tuple[Alpha, Alpha]:
        """The α of both sides of a product that has no learned ones."""
        fixed = PRODUCTS[self.product]
        if fixed is not None:
            return fixed, fixed
        assert isinstance(node.op, Bilinear)
        x, y = node.inputs
        forms = _form(bounds, x), _form(bounds, y)
        if all(form.exact for form in forms) and isinstance(bounds.region, LpBall):
            return 0.0, 0.0  # ranges of exact forms over a ball are symmetric: all ties
        return rule(node.op, bounds.boxes[x], bounds.boxes[y], *forms, bounds.least_sums)


def _form(bounds: Bounds, index: int) -> Form:
    """Linear bounds of a factor in the input, kept or made for the occasion."""
    if index in bounds.locals:
        return bounds.locals[index].form(bounds.clean[index].shape[0])
    if index in bounds.forms:
        return bounds.forms[index]
    forms, _ = bounds.forms_of((index,), {**bounds.forms, **bounds.locals})
    return forms[index]


def initial_shares(
    bounds: Bounds,
    start: str,
    *,
    products_only: bool,
    upto: int | None = None,
    known: Mapping[int, Shares] | None = None,
) -> dict[int, Shares]:
    """Shares of every nonlinear node (up to node `upto`) to start learning from, one set per task.

    Args:
        start: a key of `PRODUCTS`, or ``random``: the α of every product term and side.
        products_only: learn nothing but α (the paper's o-BuFFeT).
        known: shares of some nodes that are to be taken as they are.
    """
    shares: dict[int, Shares] = {}
    tasks, device = bounds.region.tasks, bounds.region.center.device
    for index, node in enumerate(bounds.nodes[: None if upto is None else upto + 1]):
        clean = tuple(bounds.clean[i] for i in node.inputs)
        if known and index in known:
            shares[index] = {key: share.clone() for key, share in known[index].items()}
        elif isinstance(node.op, Bilinear):
            shape = (tasks, *_term_shape(node.op, *clean))
            if start == "random":
                generator = torch.Generator().manual_seed(index)
                draw = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
                alphas = [share.to(device) for share in draw]
            else:
                alphas = [
                    torch.as_tensor(a, dtype=torch.float64, device=device).expand(shape).clone()
                    for a in Relaxer(start).alphas(bounds, node)
                ]
            shares[index] = dict(zip(SIDES, alphas, strict=True))
        elif products_only:
            continue
        elif isinstance(node.op, Softmax):
            keys = clean[0].unflatten(-1, (node.op.heads, -1)).shape
            middle = torch.full((tasks, *keys, keys[-1]), 0.5, dtype=torch.float64, device=device)
            mixture = better_bound(node.op, clean[0], *(bounds.boxes[i] for i in node.inputs))
            shares[index] = {"point": middle, "mixture": mixture, "shift": middle[..., 0, 0].clone()}
        elif isinstance(node.op, Apply):
            box = bounds.boxes[node.inputs[0]]
            where = node.op.function, clean[0], box.lower, box.upper
            shares[index] = {}
            for side, slope in zip(SIDES, default_slopes(*where), strict=True):
                least, most = slope_range(*where, side)
                if bool((most > least).any()):
                    share = (slope - least) / torch.where(most > least, most - least, 1.0)
                    shares[index][side] = share.clamp(0, 1).nan_to_num(0.0)
    return shares


def _term_shape(op: Bilinear, x: Tensor, y: Tensor) -> tuple[int, ...]:
    sizes = dict(zip(op.x, op.split(x, op.x).shape, strict=True))
    sizes |= dict(zip(op.y, op.split(y, op.y).shape, strict=True))
    return tuple(sizes[c] for c in op.terms)
