"""The parameters that learning starts from."""

from __future__ import annotations

from collections.abc import Mapping

from buffet.propagation.substitution import Bounds
from buffet.relaxations.relaxation import Parameters, Site
from buffet.relaxations.table import ALPHAS, relaxation_of

STARTS = (*ALPHAS, "best")
"""The first α of every product: chosen as without learning, at random, or the best of several such."""


def initial_parameters(
    bounds: Bounds,
    start: str,
    *,
    only_alphas: bool,
    upto: int | None = None,
    known: Mapping[int, Parameters] | None = None,
) -> dict[int, Parameters]:
    """Parameters of every nonlinear node (up to node `upto`) to start learning from, one set per task.

    Args:
        start: a key of `ALPHAS`: the α of every product term and side.
        only_alphas: learn nothing but α (the paper's o-BuFFeT).
        known: parameters of some nodes that are to be taken as they are; whatever else a node has begins as
            it would without.
    """
    found: dict[int, Parameters] = {}
    for index, node in enumerate(bounds.nodes[: None if upto is None else upto + 1]):
        if node.op.linear:
            continue
        relaxation = relaxation_of(node.op)
        given = known.get(index, {}) if known else {}
        if given or relaxation.has_alpha or not only_alphas:
            alphas = ALPHAS["zero" if given else start]
            found[index] = relaxation.start(Site(bounds, index), alphas, only_alphas)
        if given:
            found[index] |= {name: value.clone() for name, value in given.items()}
    return found
