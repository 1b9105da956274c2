"""What rounding does to the network as it is deployed, in float32: bounds that hold over the whole region.

The model of deployed arithmetic: every sum of n products errs by at most γ_n of the sum of their sizes (any
order, with or without fused multiply-add), exp, tanh, erf and 1/√ by a few units, and softmax is ``exp(s −
max) / Σ``. Inputs are float32 rows, so they carry no error. Numbers below 2⁻¹²⁶, factors or results, may be
kept or taken for 0; where one beyond 2¹²⁶ may occur, or a divisor below 2⁻¹²⁶, nothing is known of the run.

A deployed run satisfies the network's equations up to a local rounding per node (`local_rounding`). Linear
bounds of a node carry over to it: every local rounding enters with the coefficients that the backward
substitution has at that node anyway. Only nonlinear pieces need more, as they are valid on boxes which the
deployed run may leave by a little, its *escape*: `strain` bounds what they err by there. `drift` is the same
for interval arithmetic.
"""

from __future__ import annotations

import numpy as np

from buffet_checker.balls import Array
from buffet_checker.functions import FUNCTIONS
from buffet_checker.graph import Node
from buffet_checker.intervals import Box, differences, ends, magnitude
from buffet_checker.pieces import LinesPiece, Piece
from buffet_checker.wholes import WholePiece

U32 = 2.0**-24
SMALLEST = 2.0**-126
"""The smallest normal number of float32: what lies below may be taken for 0."""
OVERFLOW = 2.0**126
"""Sums of terms of this size stay finite in float32, whatever their order."""
_CUBES = 2.0**40
"""The cube of a smaller number is finite."""
_MORE = 1 + 1e-6
"""More than all roundings made here, in float64."""
_UNITS = {"relu": 0.0, "tanh": 8.0, "gelu": 16.0, "gelu_tanh": 16.0, "square": 2.0, "rsqrt": 8.0}


def _gamma(count: int) -> float:
    return count * U32 / (1 - count * U32)


def _products(node: Node, x: Array, y: Array) -> Array:
    """``scale · Σ x·y`` of non-negative factors."""
    terms = node.terms
    return node.scale * terms.total(terms.split(x, 0) * terms.split(y, 1))


def local_rounding(
    nodes: list[Node], index: int, values: list[Array], boxes: list[Box], escapes: list[Array]
) -> Array:
    """How far a deployed operation may be from the exact one on the same deployed inputs.

    Infinite where a number on the way may overflow, or a divisor vanish.
    """
    node = nodes[index]
    inputs = [np.abs(values[i]) + magnitude(boxes[i]) + escapes[i] for i in node.inputs]
    match node.kind:
        case "affine":
            weight, bias = map(np.abs, node.sizes or (node.weight, node.bias))
            size = inputs[0] @ weight.T + bias
            small = (inputs[0] + 1) @ (weight.T + 1) + bias + 1
            vanishes = 0 <= node.least < SMALLEST  # an eps that float32 does not have
            return _rounded(weight.shape[1] + 4, np.where(vanishes, np.inf, size), small)
        case "diagonal":
            weight, bias = np.abs(node.weight), np.abs(node.bias)
            return _rounded(4, inputs[0] * weight + bias, (inputs[0] + 1) * (weight + 1) + bias)
        case "center":
            width, mean = inputs[0].shape[1], inputs[0].mean(-1, keepdims=True)
            return _rounded(width + 4, inputs[0] + mean, width + 4.0, sums=inputs[0] + width * mean)
        case "mean":
            tokens, mean = len(inputs[0]), inputs[0].mean(0, keepdims=True)
            return _rounded(tokens + 4, mean, tokens + 4.0, sums=tokens * mean)
        case "add":
            return _rounded(2, inputs[0] + inputs[1], 4.0)
        case "scores" | "mix" | "rescale":
            count = 4 if node.kind == "rescale" else inputs[0].shape[1] // node.heads + 8
            x, y = inputs
            size = _products(node, x, y)
            return _rounded(count, size, _products(node, x + 1, y + 1) / node.scale, sums=size / node.scale)
    if node.kind in ("softmax", "normalise") or (node.kind == "apply" and node.function in _UNITS):
        sources = [values[i] for i in node.inputs], [boxes[i] for i in node.inputs]
        strayed = [escapes[i] for i in node.inputs]
        out = np.abs(values[index]) + magnitude(boxes[index])
        out = out + _MORE * _variation(node, *sources, strayed, out)
        if node.kind == "apply":
            low = ends(sources[0][0], sources[1][0])[0] - strayed[0]
            return _function_rounding(node.function, out, inputs[0], low)
        scores = node.inputs[0]
        while nodes[scores].kind != "scores":
            scores = nodes[scores].inputs[0]
        sizes = np.abs(values[scores]) + magnitude(boxes[scores]) + escapes[scores]
        return _softmax_rounding(node, out, sizes)
    # nothing is computed, or it is a step of softmax, which is one operation
    return np.zeros_like(values[index])


def _rounded(count: int, size: Array, small: Array | float, sums: Array | None = None) -> Array:
    """``γ_n`` of the size of the terms and four times 2⁻¹²⁶ for all that is `small`; infinite on overflow.

    `small` is at least the number of operations plus all factors of products: what is lost if results, or
    factors, below 2⁻¹²⁶ are taken for 0. `sums`: the largest number on the way, if that is not `size`.
    """
    lost = _MORE * (_gamma(count) * size + 4 * SMALLEST * small)
    return np.where((size if sums is None else sums) < OVERFLOW, lost, np.inf)


def _function_rounding(function: str, out: Array, size: Array, low: Array) -> Array:
    """Of a function with values up to `out`, of arguments up to `size` in absolute value and from `low`."""
    if function == "rsqrt":
        out = np.where(low > SMALLEST, out, np.inf)
    if function == "gelu_tanh":
        out = np.where(size < _CUBES, out, np.inf)
    scale = out + size * (_UNITS[function] == 16.0)
    return _rounded(0, scale, 1 + size) + _MORE * _UNITS[function] * U32 * scale


def _softmax_rounding(node: Node, out: Array, scores: Array) -> Array:
    """``exp(s − max)`` errs by a factor of ``e^{2u·|s|}`` and a few units, and so does the sum of them."""
    s = scores.reshape(len(scores), node.heads, -1)
    keys = s.shape[-1]
    share = _gamma(2 * keys + 24)
    share = share + (1 + share) * np.expm1(4 * U32 * s.max(-1, keepdims=True))
    lost = _MORE * (np.minimum(out, 1.0).reshape(s.shape) * share)
    return (_rounded(0, s.max(-1, keepdims=True) + 0 * s, keys + 4.0) + lost).reshape(out.shape)


def _variation(node: Node, values: list[Array], boxes: list[Box], escapes: list[Array], out: Array) -> Array:
    """How much a nonlinear operation changes when its inputs leave their boxes by their escapes.

    `out` is the largest weight of a softmax.
    """
    if node.kind == "apply":
        low, high = ends(values[0], boxes[0])
        least, most = FUNCTIONS[node.function].slopes(low - escapes[0], high + escapes[0])
        steepest = np.maximum(np.abs(least), np.abs(most))
        return np.where(escapes[0] > 0, steepest * escapes[0], 0.0)
    if node.kind == "softmax":
        worst = _worst(node, escapes)
        return (out.reshape(worst.shape[0], node.heads, -1) * 4 * np.expm1(2 * worst)).reshape(out.shape)
    x, y = (np.abs(v) + magnitude(b) + e for v, b, e in zip(values[:2], boxes[:2], escapes[:2], strict=True))
    return _products(node, x, escapes[1]) + _products(node, escapes[0], y)


def _worst(node: Node, escapes: list[Array]) -> Array:
    """The largest escape among the scores of a query and head, and among their differences."""
    parts = [e.reshape(len(e), node.heads, -1).max(-1, keepdims=True) for e in escapes]
    return np.maximum.reduce(parts)


def strain(node: Node, piece: Piece, values: list[Array], boxes: list[Box], escapes: list[Array]) -> Array:
    """How far outside of the lines of a piece the exact operation may be on deployed inputs.

    Lines touch the operation at the ends of a box and bend away from it slowly, so this is of second order:
    an escape times a width, or times the difference between the slopes of a function and of its line at an
    end.
    """
    if isinstance(piece, LinesPiece):
        return _MORE * _overshoot(node, piece, ends(values[0], boxes[0]), escapes[0])
    if node.kind == "softmax":
        return _MORE * _softmax_strain(node, values, boxes, escapes)
    # (a − l)(b − m) and the like, which are the gaps between a product and its planes, turn negative outside
    (a, b), (wide_a, wide_b) = escapes[:2], (high - low for low, high in boxes[:2])
    beyond = _products(node, a, wide_b + b) + _products(node, wide_a + a, b)
    if isinstance(piece, WholePiece):
        # what is left over grows with the weights, and values leave their forms
        beyond = beyond + _products(node, a, piece.size) + _products(node, wide_a + a, piece.wobble)
    return _MORE * beyond


def _overshoot(node: Node, piece: LinesPiece, box: Box, escape: Array) -> Array:
    """``f(x) − k·x`` beyond an end of the box changes with slope f' − k.

    Only one sign of it crosses the line.
    """
    f = FUNCTIONS[node.function]
    worst = np.zeros_like(escape)
    for end, outward in ((box[0], -1.0), (box[1], 1.0)):
        least, most = f.slopes(end, end + outward * escape)
        below, above = (most, least) if outward < 0 else (least, most)
        worst = np.maximum(worst, outward * (piece.lower_slope - below))
        worst = np.maximum(worst, outward * (above - piece.upper_slope))
    return np.where(escape > 0, worst * escape, 0.0)


def _softmax_strain(node: Node, values: list[Array], boxes: list[Box], escapes: list[Array]) -> Array:
    """All bounds of an attention weight rest on lines above exp over some range; their tangents are valid
    everywhere.

    An escape ω beyond a range of width Ω, ending at h, exceeds such a line by at most ``ω·e^{h+ω}(1 −
    e^{−Ω−ω})``. Sums of exponentials that grow by that much lower a quotient by its square times that (lower
    bounds), and p by that much itself (the upper bound, whose range is that of log p).
    """
    shape = len(values[0]), node.heads, -1
    smallest, largest = differences(node, values, boxes)
    w = escapes[0].reshape(shape)
    apart = w[..., None, :] + w[..., :, None]
    if len(escapes) > 1:
        first, second = np.triu_indices(w.shape[-1], 1)
        direct = escapes[1].reshape(shape)
        apart[..., first, second] = np.maximum(apart[..., first, second], direct)
        apart[..., second, first] = np.maximum(apart[..., second, first], direct)
    own = np.arange(w.shape[-1])
    apart[..., own, own] = 0.0

    def excess(low: Array, high: Array, escape: Array) -> Array:
        return escape * np.exp(high + escape) * -np.expm1(low - high - escape)

    least, most = 1 / np.exp(largest).sum(-1), 1 / np.exp(smallest).sum(-1)
    reciprocal = most**2 * excess(smallest, largest, apart).sum(-1)
    s = values[0].reshape(shape)
    s = s - s.max(-1, keepdims=True)
    low, high = s + boxes[0][0].reshape(shape), s + boxes[0][1].reshape(shape)
    total = np.exp(low).sum(-1, keepdims=True)
    quotient = np.exp(high + w) / total**2 * excess(low, high, w).sum(-1, keepdims=True)
    above = excess(np.log(least), np.log(most), apart.max(-1))
    return np.maximum(np.maximum(reciprocal, quotient), above).reshape(values[0].shape)


def drift(
    node: Node, piece: Piece | None, values: list[Array], boxes: list[Box], escapes: list[Array], out: Array
) -> Array:
    """How far the exact operation on deployed inputs may leave the interval of its output."""
    if piece is not None:
        return _MORE * piece.reach(*escapes)
    return _MORE * _variation(node, values, boxes, escapes, out)
