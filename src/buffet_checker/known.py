"""What is proven so far of the nodes of a claim, and from that the linear piece of each node."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np

from buffet_checker.arrays import Tensors
from buffet_checker.balls import TINY, Array, gamma
from buffet_checker.certificate import Claim
from buffet_checker.deployed import strain
from buffet_checker.errors import RejectedError
from buffet_checker.functions import FUNCTIONS
from buffet_checker.graph import Node
from buffet_checker.intervals import Box, ends, magnitude
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
from buffet_checker.rows import Form, Local
from buffet_checker.softmax import SoftmaxShares, softmax_piece
from buffet_checker.wholes import whole

NONLINEAR = ("apply", "softmax", "scores", "mix", "rescale", "normalise")
Bounds = tuple[Array, Array, Array, Array]
"""Lower and upper bounds of exact deviations, lower and upper bounds of those of a deployed run."""
INFLATE = 1 + 1e-8
"""More than the relative error of any sum of non-negative terms made here (up to 10⁷ terms)."""


@dataclass
class Known:
    """What is proven so far of the nodes of one claim."""

    nodes: list[Node]
    values: list[Array]
    region: Region
    claim: Claim
    tensors: Tensors
    residuals: list[Array] = field(default_factory=list)  # of the reference values
    roundings: list[Array] = field(default_factory=list)  # of a deployed run
    boxes: list[Box] = field(default_factory=list)
    escapes: list[Array] = field(default_factory=list)  # how far a deployed run may leave the boxes
    derived: dict[int, Bounds] = field(default_factory=dict)
    forms: dict[int, Form] = field(default_factory=dict)
    locals: dict[int, Local] = field(default_factory=dict)
    pieces: dict[tuple[int, int], tuple[Piece, Array, Array]] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """More than the roundings that one number of a form passes besides its sums: one or two per node."""
        return 64 + 4 * len(self.nodes)

    def _inputs(self, node: Node) -> tuple[list[Array], list[Box], list[Array]]:
        read = node.inputs
        return [self.values[i] for i in read], [self.boxes[i] for i in read], [self.escapes[i] for i in read]

    def piece(self, index: int, choices: int) -> tuple[Piece, Array, Array]:
        """The piece of a node under a set of choices, and what accounts for its errors: per entry, and for
        underflow.
        """
        node = self.nodes[index]
        relaxed = node.kind in NONLINEAR
        key = index, choices if relaxed else 0
        if key not in self.pieces:
            values, boxes, escapes = self._inputs(node)
            piece = self._relaxed(index, node, choices) if relaxed else self._exact(index, node)
            error = piece.residual + gamma(piece.depth + self.steps) * piece.reach(*map(magnitude, boxes))
            error = error + gamma(piece.residual.size + self.steps) * piece.constant
            # a deployed run may be outside of the boxes whose magnitudes were used
            deployed = self.roundings[index] + gamma(piece.depth + self.steps) * piece.reach(*escapes)
            if relaxed:
                deployed = deployed + strain(node, piece, values, boxes, escapes)
            moved = sum(float(magnitude(box).sum()) for box in boxes)
            strayed = sum(float(escape.sum()) for escape in escapes)
            lost = TINY * np.array([1 + moved, 1 + strayed])
            self.pieces[key] = piece, np.stack([error, deployed]) * INFLATE, lost
        return self.pieces[key]

    def _exact(self, index: int, node: Node) -> Piece:
        error = self.residuals[index]
        match node.kind:
            case "affine":
                return AffinePiece(error, node.weight)
            case "diagonal":
                return DiagonalPiece(error, node.weight)
            case "center":
                return CenterPiece(error, self.values[index].shape[1])
            case "first" | "mean":
                return PoolPiece(error, len(self.values[node.inputs[0]]), node.kind == "first")
        return SumPiece(error)

    def _relaxed(self, index: int, node: Node, choices: int) -> Piece:
        prefix = f"{self.claim.number}.{choices}.{index}"
        if node.kind == "apply":
            return self._lines(index, node, prefix)
        if node.kind != "softmax":
            return self._planes(index, node, prefix)
        values, boxes, _ = self._inputs(node)
        value = self.values[index]
        tokens, heads = len(value), node.heads
        keys = value.shape[1] // heads
        point = self.tensors.need(f"{prefix}.point", [(), (tokens, heads, keys, keys)], share=True)
        mixture = self.tensors.need(f"{prefix}.mixture", [(tokens, heads, keys)], share=True)
        shift = self.tensors.get(f"{prefix}.shift", [(tokens, heads)], share=True)
        shares = SoftmaxShares(point, mixture, shift)
        return softmax_piece(node, value, values, boxes, self.boxes[index], shares, self.roundings[index])

    def _lines(self, index: int, node: Node, prefix: str) -> Piece:
        """A function between the lines of the slopes that are chosen."""
        value, (x, box) = self.values[index], (self.values[node.inputs[0]], self.boxes[node.inputs[0]])
        low, high = ends(x, box)
        f, found = FUNCTIONS[node.function], []
        for name, side in (("lower", 1), ("upper", -1)):
            slope = self.tensors.need(f"{prefix}.{name}", [value.shape])
            found += [slope, f.intercept(x, value, low, high, slope, side)]
        return LinesPiece(np.zeros_like(value), *found)

    def _planes(self, index: int, node: Node, prefix: str) -> Piece:
        """Products between the planes that are chosen, or attention bounded as a whole."""
        (x, y), boxes, _ = self._inputs(node)
        kind = node.terms.kind
        sizes = {
            "scores": (len(x), node.heads, len(y), x.shape[1] // node.heads),
            "mix": (len(x), node.heads, len(y), y.shape[1] // node.heads),
            "rescale": (len(x), node.heads, x.shape[1] // node.heads),
        }[kind]
        # One number for all terms, or one for each, or one for all tokens.
        of_tokens = (0,) if kind == "rescale" else (0, 2)
        each = (((size, 1) if axis in of_tokens else (size,)) for axis, size in enumerate(sizes))
        shapes = [(), *itertools.product(*each)]
        low, high = (self.tensors.need(f"{prefix}.{s}", shapes, share=True) for s in ("lower", "upper"))
        both = boxes[0], boxes[1]
        piece = planes(kind, node.heads, node.scale, (x, y), both, (low, high), self.residuals[index])
        share = self.tensors.get(f"{prefix}.whole", [sizes[:2]], share=True)
        if share is None:
            return piece
        local = self.locals.get(node.inputs[1])
        if kind != "mix" or node.scale != 1 or local is None:
            raise RejectedError(
                f"node {index} ({node.name}): only values that move linearly are bounded as a whole"
            )
        return whole(piece, share, (x, y), both, local, self.region)
