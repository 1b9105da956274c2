"""The shares that learning starts from."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from buffet.bounds.choices import PRODUCTS, Relaxer, Shares, whole_of
from buffet.bounds.relaxations import SIDES, default_slopes
from buffet.bounds.softmax import better_bound
from buffet.bounds.substitution import Bounds
from buffet.program import Apply, Bilinear, Softmax

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
            if not products_only and (whole := whole_of(bounds, node)):
                shares[index]["whole"] = torch.full_like(whole.reach, WHOLE)
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
                    share = (slope - least) / torch.where(most > least, most - least, 1.0)
                    shares[index][side] = share.clamp(0, 1).nan_to_num(0.0)
    return shares


def _term_shape(op: Bilinear, x: Tensor, y: Tensor) -> tuple[int, ...]:
    sizes = dict(zip(op.x, op.split(x, op.x).shape, strict=True))
    sizes |= dict(zip(op.y, op.split(y, op.y).shape, strict=True))
    return tuple(sizes[c] for c in op.terms)
