"""Interval arithmetic in deviations, rounded outward: what an operation's output may do, given boxes of its
inputs.

Also `residual`: how far the reference value of a linear or bilinear operation may be from the exact operation
on the reference values of its inputs.
"""

from __future__ import annotations

import numpy as np

from buffet_checker.balls import TINY, Array, Ball, down, gamma, up
from buffet_checker.functions import FUNCTIONS
from buffet_checker.graph import Node

Box = tuple[Array, Array]


def magnitude(box: Box) -> Array:
    return np.maximum(np.abs(box[0]), np.abs(box[1]))


def ends(value: Array, box: Box) -> Box:
    """Floats that enclose the exact ``value + box``."""
    return down(value + box[0]), up(value + box[1])


def residual(node: Node, values: list[Array]) -> Array:
    """A bound of |op(reference inputs) − reference output|, elementwise; 0 where lines account for it.

    ``γ_n`` of the sizes of the terms for roundings, and `TINY` for products that underflow.
    """
    match node.kind:
        case "first":
            return np.zeros_like(values[0][:1])
        case "apply" | "softmax":
            return np.zeros_like(values[0])
    return _rounded(node, values) + TINY


def _rounded(node: Node, values: list[Array]) -> Array:
    x = np.abs(values[0])
    match node.kind:
        case "affine":
            size = x @ np.abs(node.weight.T) + np.abs(node.bias)
            return gamma(2 * node.weight.shape[1] + 16) * size
        case "diagonal":
            return gamma(16) * (x * np.abs(node.weight) + np.abs(node.bias))
        case "center":
            return gamma(2 * x.shape[1] + 16) * (x + x.mean(-1, keepdims=True))
        case "add":
            return gamma(4) * (x + np.abs(values[1]))
        case "offset":
            return gamma(4) * (x + np.abs(node.bias))
        case "mean":
            return gamma(2 * len(x) + 16) * x.mean(0, keepdims=True)
    first, second = (node.terms.split(np.abs(v), factor) for factor, v in enumerate(values[:2]))
    size = first * second
    return gamma(2 * sum(size.shape) + 16) * node.scale * node.terms.total(size)


def interval(node: Node, value: Array, values: list[Array], boxes: list[Box], error: Array) -> Box:
    """An enclosure of the deviation of the output; `error` is its residual."""
    low, high = boxes[0]
    match node.kind:
        case "affine":
            middle, radius = 0.5 * (low + high), 0.5 * (high - low) + TINY
            size = np.abs(node.weight.T)
            center = middle @ node.weight.T
            spread = radius @ size + gamma(2 * len(size) + 16) * ((np.abs(middle) + radius) @ size) + error
            spread = spread * (1 + gamma(len(size) + 8))
            return np.maximum(down(center - spread), down(node.least - value)), up(center + spread)
        case "diagonal":
            a, b = low * node.weight, high * node.weight
            slack = error + gamma(8) * np.maximum(np.abs(a), np.abs(b))
            return down(np.minimum(a, b) - slack), up(np.maximum(a, b) + slack)
        case "center":
            share = 1 / low.shape[1]
            slack = error + gamma(2 * low.shape[1] + 16) * (
                magnitude(boxes[0]) + magnitude(boxes[0]).mean(-1, keepdims=True)
            )
            bottom = (1 - share) * low - share * (high.sum(-1, keepdims=True) - high)
            top = (1 - share) * high - share * (low.sum(-1, keepdims=True) - low)
            return down(bottom - slack), up(top + slack)
        case "add":
            slack = error + gamma(4) * (magnitude(boxes[0]) + magnitude(boxes[1]))
            return down(low + boxes[1][0] - slack), up(high + boxes[1][1] + slack)
        case "offset":
            return down(low - error), up(high + error)
        case "first":
            return low[:1], high[:1]
        case "mean":
            slack = error + gamma(2 * len(low) + 16) * magnitude(boxes[0]).mean(0, keepdims=True)
            return down(low.mean(0, keepdims=True) - slack), up(high.mean(0, keepdims=True) + slack)
        case "apply":
            bottom, top = FUNCTIONS[node.function].image(*ends(values[0], boxes[0]))
            return down(bottom - value), up(top - value)
        case "softmax":
            return _softmax(node, value, values, boxes)
        case "normalise":
            found, other = _normalise(node, value, values, boxes), _bilinear(node, values, boxes, error)
            return np.maximum(found[0], other[0]), np.minimum(found[1], other[1])
    return _bilinear(node, values, boxes, error)


def _bilinear(node: Node, values: list[Array], boxes: list[Box], error: Array) -> Box:
    """Per term ``ŷa + x̂b + ab`` is extreme at a corner of its box."""
    terms = node.terms
    x, y = (terms.split(v, factor) for factor, v in enumerate(values[:2]))
    xs, ys = ([terms.split(v, factor) for v in boxes[factor]] for factor in (0, 1))
    corners = [y * a + (x + a) * b for a in xs for b in ys]
    low, high = np.minimum.reduce(corners), np.maximum.reduce(corners)
    a, b = np.maximum(*map(np.abs, xs)), np.maximum(*map(np.abs, ys))
    size = np.broadcast_to(np.abs(y) * a + (np.abs(x) + a) * b, low.shape)
    slack = error + gamma(2 * sum(low.shape) + 32) * (node.scale * terms.total(size))
    return down(node.scale * terms.total(low) - slack), up(node.scale * terms.total(high) + slack)


def _normalise(node: Node, value: Array, values: list[Array], boxes: list[Box]) -> Box:
    """``e_j / Σ e`` with positive e: the own entry against all the others."""
    low, high = (v.reshape(len(v), node.heads, -1) for v in ends(values[0], boxes[0]))
    low = np.maximum(low, 0.0)
    others = 1 - np.eye(low.shape[-1])

    def rest(e: Array) -> Ball:
        return Ball(e @ others, gamma(e.shape[-1] + 4) * (e @ others) * 1.01 + 1e-300)

    def share(own: Array, other: Array) -> Ball:
        return Ball.exact(own) / (Ball.exact(own) + rest(other))

    bottom, top = share(low, high).low, share(high, low).high
    # A NaN (0/0, or a divisor that may be 0) leaves what every weight satisfies.
    bottom, top = np.fmax(bottom, 0.0).reshape(value.shape), np.fmin(top, 1.0).reshape(value.shape)
    return down(bottom - value), up(top - value)


def _softmax(node: Node, value: Array, values: list[Array], boxes: list[Box]) -> Box:
    """``p_j = 1 / Σ_k e^{s_k − s_j}`` falls in every difference."""
    smallest, largest = differences(node, values, boxes)
    bottom = (Ball.exact(1.0) / Ball.exact(largest).exp().sum()).low
    top = (Ball.exact(1.0) / Ball.exact(smallest).exp().sum()).high
    bottom, top = np.fmax(bottom, 0.0).reshape(value.shape), np.fmin(top, 1.0).reshape(value.shape)
    return down(bottom - value), up(top - value)


def differences(node: Node, values: list[Array], boxes: list[Box]) -> Box:
    """The range of ``s_k − s_j`` as ``[query, head, j, k]``, from the scores and from their bounded
    differences.
    """
    heads = node.heads
    low, high = (v.reshape(len(v), heads, -1) for v in boxes[0])
    s = values[0].reshape(low.shape)
    apart = Ball.exact(s[..., None, :]) - Ball.exact(s[..., :, None])
    smallest = (apart + (Ball.exact(low[..., None, :]) - Ball.exact(high[..., :, None]))).low
    largest = (apart + (Ball.exact(high[..., None, :]) - Ball.exact(low[..., :, None]))).high
    keys = low.shape[-1]
    if len(boxes) > 1:
        first, second = np.triu_indices(keys, 1)
        less, more = (v.reshape(len(v), heads, -1) for v in ends(values[1], boxes[1]))
        smallest[..., first, second] = np.maximum(smallest[..., first, second], less)
        largest[..., first, second] = np.minimum(largest[..., first, second], more)
        smallest[..., second, first] = np.maximum(smallest[..., second, first], -more)
        largest[..., second, first] = np.minimum(largest[..., second, first], -less)
    own = np.arange(keys)
    smallest[..., own, own] = largest[..., own, own] = 0.0
    return smallest, largest
