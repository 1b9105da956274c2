"""The shares that learning starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from buffet.network import Apply, Bilinear, Node, Softmax
from buffet.propagation.substitution import Bounds
from buffet.relaxations.elementwise import SIDES, default_slopes
from buffet.relaxations.parameters import PRODUCTS, Relaxer, Shares, whole_of
from buffet.relaxations.softmax import better_bound

STARTS = (*PRODUCTS, "random", "best")
"""The first α of every product: chosen as without learning, at random, or the best of several such."""

WHOLE = 0.8
"""The first share of what bounds a product as a whole."""


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
            shape, alone = _terms(bounds, node)
            if start == "random":
                generator = torch.Generator().manual_seed(index)
                draw = [torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(2)]
                alphas = [share.to(device) for share in draw]
            else:
                alphas = [
                    _at(alone, torch.as_tensor(a, dtype=torch.float64, device=device)).expand(shape).clone()
                    for a in Relaxer(start).alphas(bounds, node)
                ]
            shares[index] = dict(zip(SIDES, alphas, strict=True))
            if not products_only and (whole := whole_of(bounds, node)):
                shares[index]["whole"] = torch.full_like(whole.reach[..., 0], WHOLE)
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
                least, most = bounds.slopes(index, side)
                if bool((most > least).any()):
                    # Where there is no choice now, as for a ReLU that is always on, there may be one at a
                    # larger ε: it should begin with the slope of now.
                    share = torch.where(most > least, (slope - least) / (most - least), slope)
                    shares[index][side] = share.clamp(0, 1).nan_to_num(0.0)
    return shares


def _terms(bounds: Bounds, node: Node) -> tuple[tuple[int, ...], dict[int, Tensor]]:
    """The sizes of the task and term axes of a product's α, and the moved token on those of size 1.

    A factor that moves at a single token, exactly, makes a product with anything else linear: α matters there
    only, so one along the tokens of this factor is as good as one for each.
    """
    assert isinstance(node.op, Bilinear)
    op, moved, sizes, alone = node.op, bounds.region.moved, dict[str, int](), dict[int, Tensor]()
    for source, axes in zip(node.inputs, (op.x, op.y), strict=True):
        sizes |= dict(zip(axes, op.split(bounds.clean[source], axes).shape, strict=True))
    for source, axes in zip(node.inputs, (op.x, op.y), strict=True):
        if source in bounds.locals and moved.shape[1] == 1:
            sizes[axes[0]] = 1
            alone[1 + op.terms.index(axes[0])] = moved
    return (len(moved), *(sizes[c] for c in op.terms)), alone


def _at(alone: Mapping[int, Tensor], alpha: Tensor) -> Tensor:
    """The α of one token of every task on some axes, if there is more than one."""
    for axis, token in alone.items() if alpha.ndim else ():
        alpha = alpha.take_along_dim(token.view(-1, *[1] * (alpha.ndim - 1)), axis)
    return alpha
