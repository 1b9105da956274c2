"""The functions of `network.functions` once more, in multiple precision: what tests hold them to."""

from __future__ import annotations

from collections.abc import Callable

import mpmath
from mpmath import mpf

REFERENCE: dict[str, Callable[[mpf], mpf]] = {
    "relu": lambda x: max(x, mpf(0)),
    "gelu": lambda x: x * mpmath.erfc(-x / mpmath.sqrt(2)) / 2,
    "gelu_tanh": lambda x: (
        x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpf("0.044715") * x**3)))
    ),
    "tanh": mpmath.tanh,
    "exp": mpmath.exp,
    "reciprocal": lambda x: 1 / x,
    "sqrt": mpmath.sqrt,
    "rsqrt": lambda x: 1 / mpmath.sqrt(x),
    "square": lambda x: x * x,
}
