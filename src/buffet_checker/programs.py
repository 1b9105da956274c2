"""A network that a certificate stores, operation by operation, because the file that it was read from is of
another kind (ONNX).

What is proven is a claim about the network as it is stored here. Nothing that is stored is believed but the
numbers: shapes follow from the operations, and so does whatever else a bound may rest on, such as that a
variance is positive.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffet_checker import fields
from buffet_checker.arrays import Tensors
from buffet_checker.balls import Array
from buffet_checker.errors import RejectedError
from buffet_checker.graph import Builder

FUNCTIONS = ("relu", "gelu", "gelu_tanh", "tanh", "square", "rsqrt")
"""Functions of an operation ``apply``."""
KEYS: Mapping[str, frozenset[str]] = {
    **{kind: frozenset() for kind in ("affine", "diagonal", "center", "offset", "add", "first", "mean")},
    "apply": frozenset({"function"}),
    "softmax": frozenset({"heads"}),
    **{kind: frozenset({"heads", "scale"}) for kind in ("scores", "mix", "rescale")},
}
"""The operations, and what is said of them besides their inputs."""
TWO_INPUTS = ("add", "scores", "mix", "rescale")
MOST_STEPS = 1 << 16
Shape = tuple[int, int]


@dataclass(frozen=True)
class Step:
    """An operation, and which earlier steps it reads."""

    kind: str
    inputs: tuple[int, ...]
    fields: Mapping[str, Any]  # of a node of the graph


@dataclass(frozen=True)
class Program:
    """The steps, of which the last is the affine map to the outputs, and where the input's entries are."""

    steps: tuple[Step, ...]
    layout: Array  # tokens × width: numbers of entries, −1 where there is none

    @property
    def inputs(self) -> int:
        """The number of entries of the input."""
        return int((self.layout >= 0).sum())

    @property
    def outputs(self) -> int:
        return len(self.steps[-1].fields["bias"])

    def shape(self, tokens: int) -> tuple[int, int]:
        """Of the rows of an input."""
        return self.layout.shape[0], self.layout.shape[1]

    def written(self, rows: Array, graph: str) -> tuple[Builder, int, Array, Array]:
        """All nodes but the last; which one that reads, its weight and its bias."""
        net, place = Builder(rows, graph), [0]
        for number, step in enumerate(self.steps[1:-1], 1):
            inputs, name = [place[i] for i in step.inputs], f"step {number}, {step.kind}"
            if step.kind == "softmax":
                place.append(net.softmax(inputs[0], step.fields["heads"], name))
            else:
                place.append(net.add(step.kind, name, *inputs, **step.fields))
        last = self.steps[-1]
        return net, place[last.inputs[0]], last.fields["weight"], last.fields["bias"]

    def rows_of(self, entries: Array) -> Array:
        """The rows of an input, given as all its entries in order."""
        return np.append(entries, 0.0)[self.layout.astype(np.int64)]

    def evaluate(self, entries: Array) -> Array:
        """The outputs for an input, in float64."""
        net, x, weight, bias = self.written(self.rows_of(entries), "plain")
        return (net.values[x] @ weight.T + bias)[0]


def read_program(raw: Any, tensors: Tensors) -> Program:
    """The network that a certificate stores."""
    steps = fields.sequence(fields.mapping(raw, "network", {"steps"})["steps"], "network.steps")
    if not 2 <= len(steps) <= MOST_STEPS:
        raise RejectedError(f"network.steps has {len(steps)} operations; expected 2 to {MOST_STEPS}")
    layout = _layout(tensors)
    found, shapes = [Step("input", (), {})], [layout.shape]
    for number, given in enumerate(steps, 1):
        step = _step(number, given, found, shapes, tensors)
        _check_attention(step, found, f"network.steps[{number - 1}]")
        found.append(step)
        shapes.append(_shape(step, [shapes[i] for i in step.inputs], f"network.steps[{number - 1}]"))
    if found[-1].kind != "affine" or shapes[-1][0] != 1:
        raise RejectedError("network.steps: the last operation has to be affine, of a single row")
    return Program(tuple(found), layout)


def _layout(tensors: Tensors) -> Array:
    """Every entry of the input is in one place."""
    stored = tensors.stored.tensors.get("network.layout")
    shape = stored.shape if stored is not None and stored.ndim == 2 else (1, 1)
    layout = tensors.need("network.layout", [shape])
    read = np.sort(layout[layout != -1])
    if not len(read) or not (read == np.arange(len(read))).all():
        raise RejectedError("network.layout must have every number from 0 once, and −1 elsewhere")
    return layout


def _step(number: int, raw: Any, before: Sequence[Step], shapes: Sequence[Shape], tensors: Tensors) -> Step:
    where = f"network.steps[{number - 1}]"
    kind = raw.get("kind") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in KEYS:
        raise RejectedError(f"{where}: operation {kind!r:.40} is none of {', '.join(KEYS)}")
    keys = fields.mapping(raw, where, {"kind", "inputs"} | KEYS[kind])
    inputs = fields.counts(keys["inputs"], f"{where}.inputs")
    if len(inputs) != 1 + (kind in TWO_INPUTS) or max(inputs) >= number:
        raise RejectedError(f"{where}.inputs must be {1 + (kind in TWO_INPUTS)} of the steps before it")
    given: dict[str, Any] = {}
    if "heads" in keys:
        given["heads"] = fields.count(keys["heads"], f"{where}.heads")
    if "scale" in keys:
        given["scale"] = _positive(fields.number(keys["scale"], f"{where}.scale"), f"{where}.scale")
    if "function" in keys:
        if keys["function"] not in FUNCTIONS:
            raise RejectedError(f"{where}.function is none of {', '.join(FUNCTIONS)}")
        given["function"] = keys["function"]
    tokens, width = shapes[inputs[0]]
    name = f"network.{number}"
    if kind == "affine":
        stored = tensors.stored.tensors.get(f"{name}.weight")
        out = max(1, stored.shape[0]) if stored is not None and stored.ndim else 1
        given["weight"] = tensors.need(f"{name}.weight", [(out, width)])
        given["bias"] = tensors.need(f"{name}.bias", [(out,)])
        given["least"] = _least(before[inputs[0]], given["weight"], given["bias"])
    elif kind == "diagonal":
        given |= {part: tensors.need(f"{name}.{part}", [(width,)]) for part in ("weight", "bias")}
    elif kind == "offset":
        given["bias"] = tensors.need(f"{name}.bias", [(tokens, width)])
    return Step(kind, inputs, given)


def _positive(value: float, where: str) -> float:
    """Sizes of products are taken times it."""
    if not value > 0:
        raise RejectedError(f"{where} must be > 0")
    return value


def _least(source: Step, weight: Array, bias: Array) -> float:
    """No entry of an affine map falls below this: known where it adds squares."""
    square = source.kind == "apply" and source.fields["function"] == "square"
    return float(bias.min()) if square and (weight >= 0).all() else -math.inf


def _check_attention(step: Step, before: Sequence[Step], where: str) -> None:
    """Softmax is of scores, to which constants may have been added, and its weights are mixed with."""
    if step.kind == "softmax":
        source = before[step.inputs[0]]
        while source.kind == "offset":
            source = before[source.inputs[0]]
        if source.kind != "scores" or source.fields["heads"] != step.fields["heads"]:
            raise RejectedError(f"{where}: a softmax has to be of attention scores of as many heads")
    if step.kind == "mix" and before[step.inputs[0]].kind != "softmax":
        raise RejectedError(f"{where}: a mix has to be with the weights of a softmax")


def _shape(step: Step, inputs: Sequence[Shape], where: str) -> Shape:
    """The shape of what a step gives; its inputs must fit each other."""
    (tokens, width), other = inputs[0], inputs[-1]
    heads = step.fields.get("heads", 1)

    def need(fits: bool) -> None:
        if not fits:
            found = " and ".join(f"{a} × {b}" for a, b in inputs)
            raise RejectedError(f"{where}: {step.kind} cannot read values of {found}")

    need(heads >= 1 and width % max(heads, 1) == 0)
    match step.kind:
        case "affine":
            return tokens, len(step.fields["bias"])
        case "first" | "mean":
            return 1, width
        case "add":
            need(inputs[0] == other)
        case "scores":
            need(width == other[1])
            return tokens, heads * other[0]
        case "mix":
            need(width == heads * other[0] and other[1] % heads == 0)
            return tokens, other[1]
        case "rescale":
            need(other == (tokens, heads))
    return tokens, width
