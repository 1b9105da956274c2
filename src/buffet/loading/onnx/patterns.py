"""Operations that a graph spells out: GELU by erf or tanh, LayerNorm by its mean and deviation.

Matched by structure, on the names of tensors, and whatever the order of factors and summands.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from buffet.loading.onnx.file import OnnxNode
from buffet.loading.onnx.views import Value

DEEPEST = 4
"""Products inside products that are taken apart."""
CLOSE = 1e-5
"""How far a constant may be from the one of the formula, relatively: they are stored in float32 at best."""
TRANSPARENT = ("Identity", "Cast", "Dropout")


def close(a: float, b: float) -> bool:
    return math.isclose(a, b, rel_tol=CLOSE)


@dataclass(frozen=True)
class Patterns:
    """The nodes by what they give, and the values of tensors known so far."""

    producers: Mapping[str, OnnxNode]
    values: Mapping[str, Value]

    def origin(self, name: str) -> str:
        """The tensor that a name is a mere copy of."""
        while (node := self.producers.get(name)) and node.op in TRANSPARENT:
            name = node.inputs[0]
        return name

    def node(self, name: str, *ops: str) -> OnnxNode | None:
        """What gives a tensor, if it is one of these operations."""
        node = self.producers.get(self.origin(name))
        return node if node is not None and node.op in ops else None

    def number(self, name: str) -> float | None:
        """A constant of one number."""
        value = self.values.get(name)
        if isinstance(value, np.ndarray) and value.size == 1 and value.dtype.kind in "fiu":
            return float(value.reshape(()))
        return None

    def factors(self, name: str, depth: int = DEEPEST) -> tuple[float, tuple[str, ...]]:
        """A tensor as a number times other tensors."""
        if (node := self.node(name, "Mul")) and depth:
            total = 1.0
            names: tuple[str, ...] = ()
            for part in node.inputs:
                if (constant := self.number(part)) is not None:
                    total *= constant
                else:
                    inner, more = self.factors(part, depth - 1)
                    total, names = total * inner, (*names, *more)
            return total, names
        if (node := self.node(name, "Div")) and depth and (divisor := self.number(node.inputs[1])):
            inner, more = self.factors(node.inputs[0], depth - 1)
            return inner / divisor, more
        if (node := self.node(name, "Pow")) and self.number(node.inputs[1]) in (2.0, 3.0):
            power = int(self.number(node.inputs[1]) or 0)
            return 1.0, (self.origin(node.inputs[0]),) * power
        return 1.0, (self.origin(name),)

    def plus_number(self, name: str) -> tuple[str, float] | None:
        """A tensor as another one plus a number."""
        if node := self.node(name, "Add"):
            for one, other in (node.inputs, node.inputs[::-1]):
                if (constant := self.number(other)) is not None:
                    return self.origin(one), constant
        return None

    def gelu(self, name: str) -> tuple[str, str, float] | None:
        """``c · gelu(x)`` as (x, which form of gelu, c), from ``c/2 · x · (1 + g(x))``."""
        number, names = self.factors(name)
        if len(names) != 2:
            return None
        for x, other in (names, names[::-1]):
            shifted = self.plus_number(other)
            if shifted is None or not close(shifted[1], 1.0):
                continue
            if node := self.node(shifted[0], "Erf"):
                scale, inner = self.factors(node.inputs[0])
                if inner == (x,) and close(scale, math.sqrt(0.5)):
                    return x, "gelu", 2 * number
            node = self.node(shifted[0], "Tanh")
            if node and self._cubic(node.inputs[0], x):
                return x, "gelu_tanh", 2 * number
        return None

    def _cubic(self, name: str, x: str) -> bool:
        """Whether a tensor is ``√(2/π)(x + 0.044715x³)``."""
        scale, names = self.factors(name)
        if not close(scale, math.sqrt(2 / math.pi)):
            return False
        if len(names) == 1 and (node := self.node(names[0], "Add")):
            return any(
                self.origin(one) == x and self._term(other, (x, x, x))
                for one, other in (node.inputs, node.inputs[::-1])
            )
        if len(names) == 2 and x in names:
            shifted = self.plus_number(names[1] if names[0] == x else names[0])
            return shifted is not None and close(shifted[1], 1.0) and self._term(shifted[0], (x, x))
        return False

    def _term(self, name: str, names: tuple[str, ...]) -> bool:
        scale, found = self.factors(name)
        return found == names and close(scale, 0.044715)

    def mean_of(self, name: str) -> str | None:
        """What a tensor is the mean of, along the last axis."""
        if (node := self.node(name, "ReduceMean")) is None or not node.attributes.get("keepdims", 1):
            return None
        axes = node.attributes.get("axes")
        if axes is None and len(node.inputs) > 1:
            value = self.values.get(node.inputs[1])
            axes = value.reshape(-1).tolist() if isinstance(value, np.ndarray) else None
        read = self.values.get(node.inputs[0])
        last = read.places.ndim - 1 if read is not None and hasattr(read, "places") else None
        return self.origin(node.inputs[0]) if axes in ([-1], [last]) else None

    def deviation(self, name: str) -> tuple[str, float] | None:
        """``√(mean(d²) + ε)`` as (d, ε)."""
        node = self.node(name, "Sqrt", "Pow")
        if node is None or (node.op == "Pow" and self.number(node.inputs[1]) != 0.5):
            return None
        shifted = self.plus_number(node.inputs[0])
        if shifted is None or not shifted[1] > 0 or (squares := self._mean_square(shifted[0])) is None:
            return None
        return squares, shifted[1]

    def _mean_square(self, name: str) -> str | None:
        squares = self.mean_of(name)
        if squares is None:
            return None
        scale, names = self.factors(squares)
        return names[0] if scale == 1 and len(names) == 2 and names[0] == names[1] else None

    def inverse_deviation(self, name: str) -> tuple[str, float] | None:
        """``1/√(mean(d²) + ε)`` as (d, ε)."""
        if node := self.node(name, "Reciprocal"):
            return self.deviation(node.inputs[0])
        if (node := self.node(name, "Div")) and self.number(node.inputs[0]) == 1:
            return self.deviation(node.inputs[1])
        return None
