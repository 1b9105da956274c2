"""Claims that hold to the last bit, held against rational arithmetic: what a tolerance would hide.

Lines and ranges of functions are promised for the numbers as they are stored, and regions in single precision
contain those in double precision. Squares and quotients of floats are rational, so `Fraction` judges them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from itertools import product

import torch
from torch import Tensor

from buffet.bounds.intervals import Box as Enclosure
from buffet.bounds.intervals import interval
from buffet.lab.soundness.claims import Finding, Violation
from buffet.network import Apply
from buffet.network.functions import FUNCTIONS
from buffet.regions import Box, LpBall, boxes
from buffet.relaxations.elementwise import relax

COUNT = 200
"""Random intervals of every function."""
RATIONAL: Mapping[str, Callable[[Fraction], Fraction]] = {
    "square": lambda x: x * x,
    "reciprocal": lambda x: 1 / x,
    "relu": lambda x: max(x, Fraction(0)),
}
Judged = Iterator[tuple[str, Fraction, Fraction]]
"""A claim, its bound, and a value that must not be below it."""


def _intervals(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Centers and deviations, all positive together, of very different widths."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(4, COUNT, dtype=torch.float64, generator=generator)
    center = 10 ** (3 * noise[0] - 1.5)
    width = center * 10 ** (-12 * noise[1])
    return center, -0.9 * width * noise[2], width * noise[3]


def _exact(value: Tensor) -> list[Fraction]:
    return [Fraction(v) for v in value.tolist()]


def _lines(dtype: torch.dtype) -> Judged:
    """Both lines, at the ends of the interval and where they touch."""
    where = _intervals()
    steep = 1e6 * (torch.rand(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.5)
    for (name, f), slope in product(RATIONAL.items(), (None, steep)):  # default slopes, and any
        lines = relax(name, *where, lower_slope=slope, upper_slope=slope, dtype=dtype)
        kept = (lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)
        touch = [p - where[0] for k in kept[::2] for p in FUNCTIONS[name].stationary(k.double())]
        points = [where[1], where[2], *(p.nan_to_num(0.0).clamp(where[1], where[2]) for p in touch)]
        columns = [_exact(v) for v in (where[0], *(v.double() for v in kept))]
        for point in points:
            for c, k, i, m, j, a in zip(*columns, _exact(point), strict=True):
                rise = f(c + a) - f(c)
                yield f"lower line of {name}", k * a + i, rise
                yield f"upper line of {name}", rise, m * a + j


def _ranges() -> Judged:
    """The range of a function over an interval, at its ends."""
    center, lower, upper = _intervals(1)
    for name, f in RATIONAL.items():
        box = interval(Apply(name), (center[None],), Enclosure(lower[None, None], upper[None, None]))
        columns = (_exact(v) for v in (center, box.lower[0, 0], box.upper[0, 0], lower, upper))
        for c, least, most, a, b in zip(*columns, strict=True):
            for point in (a, b):
                yield f"least {name}", least, f(c + point) - f(c)
                yield f"largest {name}", f(c + point) - f(c), most


def _regions() -> Judged:
    """Balls and boxes in single precision."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 8, generator=generator)
    sizes = torch.rand(COUNT, generator=generator, dtype=torch.float64)
    ball = LpBall(x, [[0]] * COUNT, 2, sizes)
    for kept, size in zip(_exact(-ball._outer(torch.float32).double()), _exact(sizes), strict=True):
        yield "size of a ball", size, kept
    ends = [x.double() + sign * torch.rand(2, 8, generator=generator).double() for sign in (-1, 1)]
    box = Box(x, ends[0], ends[1])
    below, above = (v.double().flatten() for v in box._limits(torch.float32, inward=False))
    numbers = (below, above, ends[0].flatten(), ends[1].flatten(), x.double().flatten())
    for low, high, a, b, c in zip(*map(_exact, numbers), strict=True):
        yield "lower end of a box", low, a - c
        yield "upper end of a box", b - c, high
    middle, radius = box._around
    assert middle is not None
    numbers = (
        middle.flatten(),
        boxes.rounded(radius, torch.float32, up=True).double().flatten(),
        *numbers[2:],
    )
    for m, r, a, b, c in zip(*map(_exact, numbers), strict=True):
        yield "middle and half-width of a box, below", m - r, a - c
        yield "middle and half-width of a box, above", b - c, m + r


EXACT: Mapping[str, Callable[[], Judged]] = {
    "lines": lambda: _lines(torch.float64),
    "lines in float32": lambda: _lines(torch.float32),
    "ranges": _ranges,
    "regions": _regions,
}


def check_exactly(name: str) -> Finding:
    """Hold the claims of one kind against exact values; nothing is tolerated."""
    judged = list(EXACT[name]())
    wrong = tuple(
        Violation(0, "rational arithmetic", name, claim, 0, float(bound), float(value), ())
        for claim, bound, value in judged
        if bound > value
    )
    return Finding(len(judged), True, wrong)
