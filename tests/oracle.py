"""A second, independent CROWN-BaF and backward CROWN, written to be read, not to be fast.

Everything is numpy float64 in *absolute* coordinates: a value is one flat vector, every operation is a dense
matrix, and a bound of a value is a linear function of the whole flat input. Nothing is shared with the
package: the two meet only in the numbers (`tests/soundness/test_against_oracle.py`).

Network: post-norm encoder, LayerNorm without variance, ReLU, decomposed softmax, ``cls`` or ``mean`` pooling.
Weights carry Hugging Face BERT names without the prefix ``bert.``.

References: Shi et al. 2020, *Robustness Verification for Transformers* (BaF, relaxations of exp, 1/x, x·y,
softmax); Zhang et al. 2018, *CROWN* (ReLU, tanh, backward substitution).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

Array = np.ndarray
Weights = Mapping[str, Array]
Config = Mapping[str, Any]  # layers, heads, pooling
Line = tuple[float, float]  # slope, intercept
Mode = Literal["baf", "published", "backward"]

HOPELESS = 1e12


# Relaxations: f on [lo, hi] -> (lower line, upper line).


def relu_lines(lo: float, hi: float) -> tuple[Line, Line]:
    """Chord above; below the identity or zero, whichever leaves the smaller area."""
    if lo >= 0:
        return (1.0, 0.0), (1.0, 0.0)
    if hi <= 0:
        return (0.0, 0.0), (0.0, 0.0)
    slope = hi / (hi - lo)
    return (1.0 if hi > -lo else 0.0, 0.0), (slope, -slope * lo)


def exp_lines(lo: float, hi: float) -> tuple[Line, Line]:
    """Chord above; below the tangent at min((lo+hi)/2, lo+0.99), which is positive on the interval."""
    at = min((lo + hi) / 2, lo + 0.99)
    return tangent(math.exp, math.exp, at), chord(math.exp, math.exp, lo, hi, above=True)


def reciprocal_lines(lo: float, hi: float) -> tuple[Line, Line]:
    """Chord above, tangent at the middle below; only for 0 < lo."""
    if not lo > 0:
        raise DomainError(f"reciprocal of [{lo}, {hi}]")

    def f(x: float) -> float:
        return 1 / x

    def df(x: float) -> float:
        return -1 / x**2

    return tangent(f, df, (lo + hi) / 2), chord(f, df, lo, hi, above=True)


def tanh_lines(lo: float, hi: float) -> tuple[Line, Line]:
    """Chord on the convex or concave side, tangent on the other; mixed intervals by the S-shape rule."""

    def df(x: float) -> float:
        return 1 - math.tanh(x) ** 2

    if lo >= 0:  # concave
        return chord(math.tanh, df, lo, hi, above=False), tangent(math.tanh, df, (lo + hi) / 2)
    if hi <= 0:  # convex
        return tangent(math.tanh, df, (lo + hi) / 2), chord(math.tanh, df, lo, hi, above=True)
    upper = tanh_above(lo, hi)
    slope, intercept = tanh_above(-hi, -lo)  # tanh is odd: a line above at −x is one below at x
    return (slope, -intercept), upper


def tanh_above(lo: float, hi: float) -> Line:
    """For lo < 0 < hi: the line through (lo, tanh lo) that touches tanh at d > 0, or the chord if d > hi.

    A tangent at d ≥ 0 is above the concave half, and above the convex half too iff it is above at lo and
    at 0 (it always is at 0). What it leaves at lo grows with d: bisect, keep the end that is above.
    """

    def gap(d: float) -> float:
        return math.tanh(d) + (1 - math.tanh(d) ** 2) * (lo - d) - math.tanh(lo)

    if gap(hi) <= 0:  # even the tangent at hi starts below: the chord to (hi, tanh hi) is above
        slope = (math.tanh(hi) - math.tanh(lo)) / (hi - lo)
        return slope, math.tanh(lo) - slope * lo
    low, high = 0.0, hi
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if gap(middle) >= 0 else (middle, high)
    return tangent(math.tanh, lambda x: 1 - math.tanh(x) ** 2, high)


def tangent(f: Callable[[float], float], df: Callable[[float], float], at: float) -> Line:
    return df(at), f(at) - df(at) * at


def chord(
    f: Callable[[float], float], df: Callable[[float], float], lo: float, hi: float, *, above: bool
) -> Line:
    """The line over (or under) both ends; on a hair-thin interval with the slope of the tangent."""
    slope = (f(hi) - f(lo)) / (hi - lo) if hi - lo > 1e-6 else df((lo + hi) / 2)
    ends = (f(lo) - slope * lo, f(hi) - slope * hi)
    return slope, max(ends) if above else min(ends)


FUNCTIONS: dict[str, tuple[Callable[[Array], Array], Callable[[float, float], tuple[Line, Line]]]] = {
    "relu": (lambda x: np.maximum(x, 0), relu_lines),
    "exp": (np.exp, exp_lines),
    "reciprocal": (lambda x: 1 / x, reciprocal_lines),
    "tanh": (np.tanh, tanh_lines),
}


def product_planes(lx: Array, ux: Array, ly: Array, uy: Array) -> tuple[tuple[Array, Array, Array], ...]:
    """x·y between a·x + b·y + c below and above, as (a, b, c): the planes L1 and U1 (alpha = 0)."""
    return (ly, lx, -lx * ly), (uy, lx, -lx * uy)


class DomainError(ValueError):
    """An interval outside the domain of its function: there is no bound."""


# The network as a list of flat values.


@dataclass(frozen=True)
class Node:
    """``affine``: Σ matrix·parent + bias. ``product``: x[ix]·y[iy]. Else: a function of the parent."""

    kind: str
    parents: tuple[int, ...] = ()
    matrices: tuple[Array, ...] = ()
    bias: Array | None = None
    picks: tuple[list[int], ...] = ()
    attention: bool = False  # BaF keeps a forward form of this value
    mixed: bool = (
        False  # it is what attention returns: the published code makes a number of it when it is read
    )


@dataclass
class Network:
    """The margins ``logit[label] − logit[other]`` of an encoder, as nodes; the last one is the result."""

    tokens: int
    width: int
    nodes: list[Node] = field(default_factory=lambda: [Node("input")])

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def affine(self, parent: int, matrix: Array, bias: Array | float = 0.0, attention: bool = False) -> int:
        bias = np.broadcast_to(bias, matrix.shape[0])
        return self.add(Node("affine", (parent,), (matrix,), bias, attention=attention))

    def dense(self, parent: int, weight: Array, bias: Array, attention: bool = False) -> int:
        """``W x + b`` for every token."""
        n = self.tokens
        return self.affine(parent, np.kron(np.eye(n), weight), np.tile(bias, n), attention)

    def norm(self, parent: int, weight: Array, bias: Array) -> int:
        """LayerNorm without variance: ``w ⊙ (x − mean x) + b``."""
        center = np.eye(self.width) - 1 / self.width
        return self.dense(parent, weight[:, None] * center, bias)

    def plus(self, a: int, b: int) -> int:
        eye = np.eye(self.tokens * self.width)
        return self.add(Node("affine", (a, b), (eye, eye), np.zeros(len(eye))))

    def function(self, kind: str, parent: int, attention: bool = False) -> int:
        return self.add(Node(kind, (parent,), attention=attention))

    def products(self, x: int, y: int, picks: list[tuple[int, int]]) -> int:
        ix, iy = [p[0] for p in picks], [p[1] for p in picks]
        return self.add(Node("product", (x, y), picks=(ix, iy), attention=True))

    def sums(
        self, parent: int, groups: list[int], count: int, scale: float = 1.0, mixed: bool = False
    ) -> int:
        """Entry g of the result is the scaled sum of the parent's entries of group g."""
        matrix = np.zeros((count, len(groups)))
        matrix[groups, range(len(groups))] = scale
        return self.add(Node("affine", (parent,), (matrix,), np.zeros(count), attention=True, mixed=mixed))

    def attention(self, x: int, heads: int, projections: list[tuple[Array, Array]]) -> int:
        """Σ_j softmax_j(q_i·k_j / √d) v_j, softmax as exp, sum, reciprocal, product."""
        n, w = self.tokens, self.width
        d = w // heads
        q, k, v = (self.dense(x, weight, bias, attention=True) for weight, bias in projections)

        def row(i: int, h: int, c: int) -> int:  # place of feature c of head h of token i in q, k, v
            return i * w + h * d + c

        def pair(i: int, h: int, j: int) -> int:  # place of (query i, head h, key j) in the scores
            return (i * heads + h) * n + j

        terms = [(i, h, j, c) for i in range(n) for h in range(heads) for j in range(n) for c in range(d)]
        pairs = [(i, h, j) for i in range(n) for h in range(heads) for j in range(n)]
        qk = self.products(q, k, [(row(i, h, c), row(j, h, c)) for i, h, j, c in terms])
        scores = self.sums(qk, [pair(i, h, j) for i, h, j, _ in terms], len(pairs), 1 / math.sqrt(d))
        exps = self.function("exp", scores, attention=True)
        total = self.sums(exps, [i * heads + h for i, h, _ in pairs], n * heads)
        inverse = self.function("reciprocal", total, attention=True)
        probs = self.products(exps, inverse, [(pair(i, h, j), i * heads + h) for i, h, j in pairs])
        pv = self.products(probs, v, [(pair(i, h, j), row(j, h, c)) for i, h, j, c in terms])
        return self.sums(pv, [row(i, h, c) for i, h, _, c in terms], n * w, mixed=True)

    def values(self, x: Array) -> list[Array]:
        """The value of every node at the flat input `x`."""
        values = [x]
        for node in self.nodes[1:]:
            args = [values[p] for p in node.parents]
            if node.kind == "affine":
                assert node.bias is not None
                values.append(sum((m @ a for m, a in zip(node.matrices, args, strict=True)), node.bias))
            elif node.kind == "product":
                values.append(args[0][node.picks[0]] * args[1][node.picks[1]])
            else:
                values.append(FUNCTIONS[node.kind][0](args[0]))
        return values


def build(weights: Weights, config: Config, tokens: int, label: int) -> Network:
    """The network that ends in the margins of `label`."""

    def pair(name: str) -> tuple[Array, Array]:
        return weights[f"{name}.weight"].astype(float), weights[f"{name}.bias"].astype(float)

    net = Network(tokens, len(weights["embeddings.LayerNorm.weight"]))
    x = net.norm(0, *pair("embeddings.LayerNorm"))
    for layer in range(config["layers"]):
        at = f"encoder.layer.{layer}"
        projections = [pair(f"{at}.attention.self.{name}") for name in ("query", "key", "value")]
        mixed = net.attention(x, config["heads"], projections)
        mixed = net.dense(mixed, *pair(f"{at}.attention.output.dense"))
        x = net.norm(net.plus(x, mixed), *pair(f"{at}.attention.output.LayerNorm"))
        inner = net.function("relu", net.dense(x, *pair(f"{at}.intermediate.dense")))
        x = net.norm(
            net.plus(x, net.dense(inner, *pair(f"{at}.output.dense"))), *pair(f"{at}.output.LayerNorm")
        )
    first, mean = np.eye(1, tokens), np.full((1, tokens), 1 / tokens)
    pool = np.kron(first if config["pooling"] == "cls" else mean, np.eye(net.width))
    x = net.affine(x, pool)
    if config["pooling"] == "cls":
        x = net.function("tanh", net.affine(x, *pair("pooler.dense")))
    weight, bias = pair("classifier")
    others = [c for c in range(len(bias)) if c != label]
    net.affine(x, weight[label] - weight[others], bias[label] - bias[others])
    return net


# Bounds.


@dataclass(frozen=True)
class Ball:
    """Every row of `words` moves by at most `eps` in the Lp norm, the other rows are fixed."""

    center: Array  # tokens × width
    words: tuple[int, ...]
    eps: float
    p: float

    def minimum(self, A: Array, b: Array) -> Array:
        """``min A·x + b = A·x0 + b − ε Σ_d ‖A_d‖_q``, for every row of A; exact."""
        q = 1.0 if math.isinf(self.p) else math.inf if self.p == 1 else self.p / (self.p - 1)
        A_words = A.reshape(len(A), *self.center.shape)[:, list(self.words), :]
        return A @ self.center.ravel() + b - self.eps * np.linalg.norm(A_words, ord=q, axis=2).sum(1)


Form = tuple[Array, Array]  # A, b: the function A·x + b of the flat input
Relation = tuple[list[Array], Array]  # one matrix per parent, bias


@dataclass
class Bounds:
    """Bounds of the nodes of a network over a ball, node by node.

    mode ``backward``: every form is obtained by substitution down to the input.
    mode ``baf``: the values inside attention keep their forms, and substitution stops at them.
    mode ``published``: the same, as Shi et al. have it in their code: what is read of the values that
    attention returns becomes a number on its own, so only residual connections carry linear terms further up.
    """

    net: Network
    ball: Ball
    mode: Mode
    boxes: dict[int, tuple[Array, Array]] = field(default_factory=dict)
    forms: dict[int, tuple[Form, Form]] = field(default_factory=dict)
    relations: dict[int, tuple[Relation, Relation]] = field(default_factory=dict)

    def run(self) -> Bounds:
        nodes = self.net.nodes
        read = {p for node in nodes if node.kind != "affine" for p in node.parents} | {len(nodes) - 1}
        for index, node in enumerate(nodes):
            if index > 0:
                self.relations[index] = self.relation(node)
            keep = self.mode != "backward" and node.attention
            if not keep and index not in read:
                continue  # nobody asks for its box
            eye = np.eye(self.size(index))
            lower = self.substitute(index, eye)
            A, b = self.substitute(index, -eye)
            self.boxes[index] = self.ball.minimum(*lower), -self.ball.minimum(A, b)
            if keep:
                self.forms[index] = lower, (-A, -b)
        return self

    def size(self, index: int) -> int:
        return self.ball.center.size if index == 0 else len(self.relations[index][0][1])

    def relation(self, node: Node) -> tuple[Relation, Relation]:
        """The value between linear functions of its parents, given the boxes of the parents."""
        if node.kind == "affine":
            assert node.bias is not None
            return (list(node.matrices), node.bias), (list(node.matrices), node.bias)
        boxes = [self.boxes[p] for p in node.parents]
        if node.kind == "product":
            (lx, ux), (ly, uy) = (
                (lo[pick], hi[pick]) for (lo, hi), pick in zip(boxes, node.picks, strict=True)
            )
            select = [np.eye(len(box[0]))[pick] for box, pick in zip(boxes, node.picks, strict=True)]
            (a, b, c), (d, e, f) = product_planes(lx, ux, ly, uy)
            lower = [a[:, None] * select[0], b[:, None] * select[1]]
            return (lower, c), ([d[:, None] * select[0], e[:, None] * select[1]], f)
        lines = [FUNCTIONS[node.kind][1](lo, hi) for lo, hi in zip(*boxes[0], strict=True)]
        slopes = np.array(lines)[:, :, 0]
        intercepts = np.array(lines)[:, :, 1]
        return ([np.diag(slopes[:, 0])], intercepts[:, 0]), ([np.diag(slopes[:, 1])], intercepts[:, 1])

    def substitute(self, target: int, C: Array) -> Form:
        """A linear function of the input below ``C · value(target)``."""
        bias = np.zeros(len(C))
        pending = {target: C}
        result = np.zeros((len(C), self.ball.center.size))
        while pending:
            index = max(pending)  # every node that reads it is already substituted
            C = pending.pop(index)
            positive, negative = np.maximum(C, 0), np.minimum(C, 0)
            if index == 0:
                result = result + C
            elif index in self.forms:
                (A_lower, b_lower), (A_upper, b_upper) = self.forms[index]
                A, b = positive @ A_lower + negative @ A_upper, positive @ b_lower + negative @ b_upper
                if self.mode == "published" and self.net.nodes[index].mixed:
                    A, b = np.zeros_like(A), self.ball.minimum(A, b)
                result, bias = result + A, bias + b
            else:
                (lower, b_lower), (upper, b_upper) = self.relations[index]
                bias = bias + positive @ b_lower + negative @ b_upper
                for parent, L, U in zip(self.net.nodes[index].parents, lower, upper, strict=True):
                    pending[parent] = pending.get(parent, 0) + positive @ L + negative @ U
        return result, bias


def oracle_bounds(
    weights: Weights,
    config: Config,
    x: Array,
    words: list[int],
    eps: float,
    p: float,
    label: int,
    mode: Mode,
) -> Bounds:
    """The boxes of every value that is relaxed; the last box holds the margins."""
    net = build(weights, config, len(x), label)
    return Bounds(net, Ball(x.astype(float), tuple(words), eps, p), mode).run()


def oracle_margin(
    weights: Weights,
    config: Config,
    x: Array,
    words: list[int],
    eps: float,
    p: float,
    label: int,
    mode: Mode,
) -> float:
    """A lower bound of ``min over other classes of logit[label] − logit[other]``; −inf if there is none.

    There is none either once an interval reaches `HOPELESS`: rounding then shows in values of order one.
    """
    try:
        with np.errstate(all="ignore"):
            bounds = oracle_bounds(weights, config, x, words, eps, p, label, mode)
    except (DomainError, OverflowError):
        return -math.inf
    if not all(np.abs(ends).max() < HOPELESS for box in bounds.boxes.values() for ends in box):
        return -math.inf
    return float(bounds.boxes[len(bounds.net.nodes) - 1][0].min())
