"""Walks over the graph: interval, forward, backward-and-forward, backward. No relaxation formulas here.

All of them are one walk. Nodes are visited in order; each gets an interval enclosure, a linear piece and,
where a later nonlinearity reads it, a sharper box: its rows are substituted backwards (`substitution`) until
they reach nodes that keep linear forms of the input, and the result is minimised over the region once. A
propagation only says which nodes keep forms:

    interval   boxes only
    forward    every node
    baf        the nodes of attention; everything per token is substituted backwards
    backward   none (with a window: one per layer, used when it lies that many attention layers back)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Form, Stop
from buffet.bounds.intervals import Box, interval
from buffet.network import Input, Mix, Node, Program, Scores
from buffet.propagation.clean_run import Scene, together
from buffet.propagation.rounding import LOST, input_box, outward
from buffet.propagation.substitution import Bounds, Relax
from buffet.regions import Region

Sharpen = Callable[[Bounds, Sequence[int], Mapping[int, Stop]], dict[int, Box]]
"""(bounds so far, nodes read together, stops) → boxes of the nodes through linear forms."""
Settle = Callable[[int, Box], Box]
"""(node, its box) → a box that contains it."""


@dataclass(frozen=True)
class Propagation:
    """Which nodes keep linear forms, and how the margin is finished."""

    keeps: str  # nodes that keep forms: "none" | "attention" | "all"; "boxes": no linear forms at all
    margin: str = "stops"  # "stops": bounded like every other node; "input": substituted to the input
    window: int | None = None  # keep one form per layer, used this many attention layers further up


PROPAGATIONS: Mapping[str, Propagation] = {
    "interval": Propagation("boxes"),
    "forward": Propagation("all"),
    "baf": Propagation("attention"),
    "baf+backward": Propagation("attention", margin="input"),
    "backward": Propagation("none", margin="input"),
}


def bound_nodes(
    scene: Scene,
    region: Region,
    relax: Relax,
    propagation: Propagation,
    *,
    dtype: torch.dtype = torch.float32,
    chunk_bytes: int = 8 << 20,
    sharpen: Sharpen = Bounds.boxes_of,
    deadline: float | None = None,
    settle: Settle | None = None,
) -> Bounds:
    """Bound every node that a nonlinearity reads.

    Args:
        scene: the program and its clean run on the region's sentence.
        relax: how nonlinear operations become linear pieces.
        dtype: precision of the linear forms; lines and boxes are always made in float64.
        chunk_bytes: size aimed at for the largest tensor of a backward substitution.
        sharpen: how boxes are made from linear forms that are not kept.
        deadline: when to give up with `OutOfTime`, on the clock of `time.perf_counter`.
        settle: what is made of a sharpened box before it is used, such as rounding it outward.

    Where no task can be proven any more the walk ends early, and `margins` has none; not so while gradients
    are taken, which need something to flow through.
    """
    program = scene.program
    bounds = Bounds.start(scene, region, relax, dtype, chunk_bytes, deadline)
    needed, keeps = needed_boxes(program), kept_forms(program, propagation)
    groups = together(program, needed | keeps)
    everywhere = propagation.keeps in ("boxes", "all")
    boxed = range(len(program.nodes)) if everywhere else boxed_nodes(program)
    sharper: dict[int, Box] = {}
    may_end, limit = not torch.is_grad_enabled(), _widest(dtype)
    for index, node in enumerate(program.nodes):
        bounds.check_time()
        box = _interval(bounds, index, node) if index in boxed else None
        if box is not None:
            bounds.boxes[index] = box
        if propagation.keeps == "boxes":
            continue
        bounds.linearise(index, node)
        if index in keeps and index not in bounds.forms:
            if form := _pushed(bounds, index, node):
                bounds.forms[index] = form
            else:
                forms, boxes = bounds.forms_of(groups[index], stops_at(bounds, index, propagation))
                bounds.forms.update(forms)
                sharper |= boxes
        if index in needed:
            if index not in sharper:
                known = _sharper(bounds, index)
                sharper |= known or sharpen(bounds, groups[index], stops_at(bounds, index, propagation))
            sharp = bounds.widened(index, sharper[index])
            sharp = sharp & box if box else sharp
            sharp = settle(index, sharp) if settle else sharp
            bounds.boxes[index], bounds.widths[index] = sharp, (sharp.upper - sharp.lower).max().item()
            if may_end and dtype == torch.float32:
                bounds.shares.append(bounds.errors.lost(index, sharp))
            if may_end and not bounds.widths[index] < limit and bounds.hopeless(index, limit):
                break
    return bounds


def _widest(dtype: torch.dtype) -> float:
    """Every box has to be finite, and narrower than this for the precision to carry its coefficients."""
    return 0.1 / torch.finfo(dtype).eps


def margins(bounds: Bounds, propagation: Propagation) -> Float[Tensor, "tasks others"]:
    """Lower bounds of the margins over the region; NaN where there is none to be trusted."""
    root = len(bounds.nodes) - 1
    if propagation.keeps == "boxes":
        return bounds.clean[root] + bounds.boxes[root].lower.squeeze(1)
    if root not in bounds.pieces:
        return bounds.clean[root].new_full((bounds.region.tasks, bounds.clean[root].shape[-1]), torch.nan)
    if propagation.margin == "input":
        exact = bounds.relaxed(bounds.relax, torch.float64)
        lower = exact.margin(exact.locals)
    else:
        precise = bounds.precise()
        lower = precise.margin(stops_at(precise, root, propagation))
    if root in bounds.boxes:
        lower = torch.maximum(lower, bounds.boxes[root].lower.squeeze(1))
    limit = _widest(bounds.dtype)
    needed = needed_boxes(bounds.scene.program)
    if not all(bounds.widths[i] < limit for i in needed):  # as is rarely so
        widths = torch.stack([bounds.boxes[i].widest(bounds.clean[i]) for i in needed], -1)
        lower = torch.where((widths < limit).all(-1, keepdim=True), lower, torch.nan)
    if bounds.shares:
        lower = torch.where(torch.stack(bounds.shares, -1).amax(-1, keepdim=True) < LOST, lower, torch.nan)
    return bounds.clean[root] + lower


def needed_boxes(program: Program) -> frozenset[int]:
    """Nodes read by a nonlinearity whose box linear forms can sharpen.

    The box of an elementwise function of a bounded node is already exact.
    """
    read = {i for n in program.nodes if not n.op.linear for i in n.inputs}
    return frozenset(i for i in read if not program.nodes[i].op.exact_box)


def boxed_nodes(program: Program) -> frozenset[int]:
    """Nodes whose interval arithmetic is of use: margins, what nonlinearities read, and what those read."""
    read = {i for n in program.nodes if not n.op.linear for i in n.inputs}
    read.add(len(program.nodes) - 1)
    return frozenset(read | {i for index in read for i in program.nodes[index].inputs})


def kept_forms(program: Program, propagation: Propagation) -> frozenset[int]:
    """The nodes that keep linear forms of the input."""
    if propagation.window is not None:
        return cuts(program)
    if propagation.keeps == "all":
        return frozenset(range(1, len(program.nodes)))
    if propagation.keeps == "attention":
        return attention_nodes(program)
    return frozenset()


def attention_nodes(program: Program) -> frozenset[int]:
    """Queries, keys, values, and everything from the scores to the mixed values."""
    weights: set[int] = set()  # from the scores to the attention weights
    others: set[int] = set()
    for index, node in enumerate(program.nodes):
        if isinstance(node.op, Scores | Mix):
            others |= {index, *node.inputs}
        if isinstance(node.op, Scores) or (not isinstance(node.op, Mix) and weights & set(node.inputs)):
            weights.add(index)
    return frozenset(weights | others)


def cuts(program: Program) -> frozenset[int]:
    """For every attention layer the last node before it that all paths from the input pass through."""
    reach = list(range(len(program.nodes)))  # the last reader of every node
    for index, node in enumerate(program.nodes):
        for source in node.inputs:
            reach[source] = max(reach[source], index)
    found: set[int] = set()
    passages: list[int] = []
    furthest = 0
    for index, node in enumerate(program.nodes):
        if furthest <= index:
            passages.append(index)
        furthest = max(furthest, reach[index])
        if isinstance(node.op, Scores):
            found.add(max(p for p in passages if p < min(node.inputs)))
    return frozenset(found)


def stops_at(bounds: Bounds, root: int, propagation: Propagation) -> Mapping[int, Stop]:
    """The nodes at which a substitution from `root` ends."""
    if propagation.window is None:
        return {**bounds.forms, **bounds.locals}
    layers = 0
    for index in range(root, 0, -1):
        if layers >= propagation.window and index in bounds.forms:
            return {index: bounds.forms[index], **bounds.locals}
        layers += isinstance(bounds.nodes[index].op, Mix)
    return bounds.locals


def _pushed(bounds: Bounds, index: int, node: Node) -> Form | None:
    """The form of a node from the forms of its inputs, if they are all known."""

    def known(i: int) -> Form | None:
        if i in bounds.locals and i not in bounds.forms:
            return bounds.locals[i].form(bounds.clean[i].shape[0])
        return bounds.forms.get(i)

    if index in bounds.locals:
        return known(index)
    forms = {i: form for i in node.inputs if (form := known(i))}
    if len(forms) < len(node.inputs):
        return None
    return bounds.pushed(index, forms)


def _sharper(bounds: Bounds, index: int) -> dict[int, Box]:
    """The box of a node whose form is known already."""
    if index in bounds.locals:
        return {index: bounds.box_of_local(bounds.locals[index], bounds.clean[index].shape[0])}
    if index in bounds.forms:
        return {index: bounds.box_of_form(bounds.forms[index])}
    return {}


def _interval(bounds: Bounds, index: int, node: Node) -> Box | None:
    """Interval arithmetic from the boxes of the inputs, if they have some, rounded outward."""
    if isinstance(node.op, Input):
        return input_box(bounds.region)
    if not all(i in bounds.boxes for i in node.inputs):
        return None
    clean, boxes = tuple(bounds.clean[i] for i in node.inputs), [bounds.boxes[i] for i in node.inputs]
    found = interval(node.op, clean, *boxes)
    return outward(node.op, clean, bounds.scene.residuals[index], found, boxes, bounds.errors.precise)
