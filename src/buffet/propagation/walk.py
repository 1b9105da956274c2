"""The walk over the graph: interval, forward, backward-and-forward, backward. No formulas of relaxations.

Nodes are visited in order; each gets an interval enclosure, a linear relaxation and, where a later
nonlinearity reads it, a tighter box: its rows are substituted backwards (`substitution`) until they reach
nodes that keep linear forms of the input, and the result is minimised over the region once. A propagation
only says which nodes keep forms (`plan`):

    interval   boxes only
    forward    every node
    baf        the nodes of attention; everything per token is substituted backwards
               (`baf-published`: and what is read of one is a number from there on)
    backward   none (with a window: one per layer, used when it lies that many attention layers back)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Form, Stop
from buffet.bounds.intervals import Box, interval
from buffet.network import Node
from buffet.propagation.clean_run import CleanRun
from buffet.propagation.plan import Derivation, Plan, Propagation, plan_of
from buffet.propagation.rounding import LOST, input_box, outward
from buffet.propagation.substitution import Bounds, Relax
from buffet.regions import Region

Tighten = Callable[[Bounds, Sequence[int], Mapping[int, Stop]], dict[int, Box]]
"""(bounds so far, nodes read together, stops) → boxes of the nodes through linear forms."""
Store = Callable[[int, Box], Box]
"""(node, its box) → a box that contains it, in numbers that can be stored."""


def bound_nodes(
    clean_run: CleanRun,
    region: Region,
    relax: Relax,
    propagation: Propagation,
    *,
    dtype: torch.dtype = torch.float32,
    chunk_bytes: int = 8 << 20,
    tighten: Tighten = Bounds.boxes_of,
    deadline: float | None = None,
    store: Store | None = None,
) -> Bounds:
    """Bound every node that a nonlinearity reads.

    Args:
        clean_run: the program and its clean run on the region's sentence.
        relax: how nonlinear operations are bounded by linear functions.
        dtype: precision of the linear forms; lines and boxes are always made in float64.
        chunk_bytes: size aimed at for the largest tensor of a backward substitution.
        tighten: how boxes are made from linear forms that are not kept.
        deadline: when to give up with `OutOfTime`, on the clock of `time.perf_counter`.
        store: what is made of a tightened box before it is used, such as rounding it outward.

    Where no task can be proven any more, or not in this precision, the walk ends early, and `margins` has
    none; not so while gradients are taken, which need something to flow through.
    """
    plan = plan_of(clean_run.program, propagation)
    bounds = Bounds.start(clean_run, region, relax, dtype, chunk_bytes, deadline, propagation.apart)
    tight: dict[int, Box] = {}
    may_end, limit = not torch.is_grad_enabled(), _widest(dtype)
    for index, node in enumerate(clean_run.program.nodes):
        bounds.check_time()
        box = _interval(bounds, index, node) if index in plan.boxed else None
        if box is not None:
            bounds.boxes[index] = box
        if not propagation.linear:
            continue
        bounds.linearise(index, node)
        if derivation := plan.derivations.get(index):
            tight |= _derived(bounds, derivation, plan, tighten)
        if index in plan.needed:
            found = bounds.widened(index, tight[index])
            found = found & box if box else found
            found = store(index, found) if store else found
            bounds.boxes[index], bounds.widths[index] = found, (found.upper - found.lower).max().item()
            if may_end and dtype == torch.float32:
                bounds.rounding_shares.append(bounds.errors.lost(index, found))
                if not bool((bounds.lost < LOST).any()):
                    break
            if may_end and not bounds.widths[index] < limit and bounds.hopeless(index, limit):
                break
    return bounds


def _derived(bounds: Bounds, derivation: Derivation, plan: Plan, tighten: Tighten) -> dict[int, Box]:
    """Do what a plan says: keep forms that are to be kept, and return the boxes that are needed."""
    index = derivation.nodes[0]
    if derivation.pushed:
        if derivation.keep:
            bounds.forms[index] = _pushed(bounds, index)
        if index not in plan.needed:
            return {}
        if local := bounds.locals.get(index):
            return {index: bounds.box_of_local(local, bounds.clean[index].shape[0])}
        return {index: bounds.box_of_form(bounds.forms[index])}
    stops = bounds.stops(derivation.stops)
    if not derivation.keep:
        return tighten(bounds, derivation.nodes, stops)
    forms, boxes = bounds.forms_of(derivation.nodes, stops)
    bounds.forms.update(forms)
    return boxes


def _pushed(bounds: Bounds, index: int) -> Form:
    """The form of a node from the forms of its inputs."""

    def known(i: int) -> Form:
        if i in bounds.locals and i not in bounds.forms:
            return bounds.locals[i].form(bounds.clean[i].shape[0])
        return bounds.forms[i]

    if index in bounds.locals:
        return known(index)
    return bounds.pushed(index, {i: known(i) for i in bounds.nodes[index].inputs})


def _widest(dtype: torch.dtype) -> float:
    """Every box has to be finite, and narrower than this for the precision to carry its coefficients."""
    return 0.1 / torch.finfo(dtype).eps


def margins(bounds: Bounds, propagation: Propagation) -> Float[Tensor, "tasks others"]:
    """Lower bounds of the margins over the region; NaN where there is none to be trusted."""
    root = len(bounds.nodes) - 1
    if not propagation.linear:
        return bounds.clean[root] + bounds.boxes[root].lower.squeeze(1)
    if root not in bounds.enclosures:
        return bounds.clean[root].new_full((bounds.region.tasks, bounds.clean[root].shape[-1]), torch.nan)
    plan = plan_of(bounds.clean_run.program, propagation)
    last = bounds.relaxed(bounds.relax, torch.float64) if propagation.to_input else bounds.precise()
    lower = last.margin(last.stops(plan.margin.stops))
    if root in bounds.boxes:
        lower = torch.maximum(lower, bounds.boxes[root].lower.squeeze(1))
    limit = _widest(bounds.dtype)
    if not all(bounds.widths[i] < limit for i in plan.needed):  # as is rarely so
        widths = torch.stack([bounds.boxes[i].widest(bounds.clean[i]) for i in plan.needed], -1)
        lower = torch.where((widths < limit).all(-1, keepdim=True), lower, torch.nan)
    if bounds.rounding_shares:
        lower = torch.where(bounds.lost.unsqueeze(-1) < LOST, lower, torch.nan)
    return bounds.clean[root] + lower


def _interval(bounds: Bounds, index: int, node: Node) -> Box | None:
    """Interval arithmetic from the boxes of the inputs, if they have some, rounded outward."""
    if node.is_input:
        return input_box(bounds.region)
    if not all(i in bounds.boxes for i in node.inputs):
        return None
    clean, boxes = tuple(bounds.clean[i] for i in node.inputs), [bounds.boxes[i] for i in node.inputs]
    found = interval(node.op, clean, *boxes)
    return outward(node.op, clean, bounds.clean_run.residuals[index], found, boxes, bounds.errors.precise)
