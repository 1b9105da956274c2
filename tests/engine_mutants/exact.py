"""Claims that hold to the last bit, held against exact values: what a tolerance would hide.

Lines and ranges of functions are promised for the numbers as they are stored, and regions in single precision
contain those in double precision. The values of the functions are those of the `judge`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from buffet.bounds.intervals import Box as Enclosure
from buffet.bounds.intervals import interval
from buffet.lab.soundness.claims import Finding, Violation
from buffet.lab.soundness.judge import BITS, FUNCTIONS
from buffet.lab.soundness.spans import Span, span_of
from buffet.network import Apply
from buffet.network import functions as network
from buffet.regions import Box, LpBall, boxes
from buffet.relaxations.elementwise import relax

QUICK = ("relu", "square", "reciprocal", "rsqrt")
"""Functions whose exact values are quick to compute; the others get their lines from the same code."""
COUNT = 200
"""Random intervals of every function."""
Judged = Iterator[tuple[str, Span, Span]]
"""A claim, its bounds, and values that must not be below them."""


def _intervals(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Centres and deviations, all positive together, of very different widths."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(4, COUNT, dtype=torch.float64, generator=generator)
    center = 10 ** (3 * noise[0] - 1.5)
    width = center * 10 ** (-12 * noise[1])
    return center, -0.9 * width * noise[2], width * noise[3]


def _exact(values: Tensor) -> Span:
    return span_of(values.double().numpy())


def _rise(name: str, center: Tensor, point: Tensor) -> Span:
    """``f(c + a) − f(c)``."""
    f, c = FUNCTIONS[name], _exact(center)
    return f(c + _exact(point), BITS[0]) - f(c, BITS[0])


def _lines(dtype: torch.dtype) -> Judged:
    """Both lines, at the ends of the interval and where they touch."""
    center, lower, upper = _intervals(0)
    steep = 1e6 * (torch.rand(COUNT, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) - 0.5)
    for name, slope in product(QUICK, (None, steep)):  # default slopes, and any
        lines = relax(name, center, lower, upper, lower_slope=slope, upper_slope=slope, dtype=dtype)
        slopes = lines.lower_slope, lines.upper_slope
        touch = [p - center for k in slopes for p in network.FUNCTIONS[name].stationary(k.double())]
        for point in (lower, upper, *(p.nan_to_num(0.0).clamp(lower, upper) for p in touch)):
            rise, a = _rise(name, center, point), _exact(point)
            yield f"lower line of {name}", _exact(slopes[0]) * a + _exact(lines.lower_intercept), rise
            yield f"upper line of {name}", rise, _exact(slopes[1]) * a + _exact(lines.upper_intercept)


def _ranges() -> Judged:
    """The range of a function over an interval, at its ends."""
    center, *ends = _intervals(1)
    for name in QUICK:
        box = interval(Apply(name), (center[None],), Enclosure(*(end[None, None] for end in ends)))
        for end in ends:
            yield f"least {name}", _exact(box.lower[0, 0]), _rise(name, center, end)
            yield f"largest {name}", _rise(name, center, end), _exact(box.upper[0, 0])


def _regions() -> Judged:
    """Balls and boxes in single precision."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(2, 8, generator=generator)
    sizes = torch.rand(COUNT, generator=generator, dtype=torch.float64)
    yield "size of a ball", _exact(sizes), _exact(-LpBall(x, [[0]] * COUNT, 2, sizes)._outer(torch.float32))
    away = (
        torch.rand(2, 2, 8, generator=generator, dtype=torch.float64)
        * torch.tensor([-1.0, 1.0])[:, None, None]
    )
    # around the first row, and near 0, where the difference to the second row has more digits than a double
    ends = away * torch.tensor([1.0, 1e-3])[:, None] + x.double() * torch.tensor([1.0, 0.0])[:, None]
    box = Box(x, ends[0], ends[1])
    for dtype in (torch.float32, torch.float64):
        below, above = box._limits(dtype, inward=False)
        yield "lower end of a box", _exact(below[0]), _exact(ends[0]) - _exact(x)
        yield "upper end of a box", _exact(ends[1]) - _exact(x), _exact(above[0])
    middle, radius = box._around
    assert middle is not None
    around, reach = _exact(middle[0]), _exact(boxes.rounded(radius, torch.float32, up=True)[0])
    yield "middle and half-width of a box, below", around - reach, _exact(ends[0]) - _exact(x)
    yield "middle and half-width of a box, above", _exact(ends[1]) - _exact(x), around + reach


EXACT: Mapping[str, Callable[[], Judged]] = {
    "lines": partial(_lines, torch.float64),
    "lines in float32": partial(_lines, torch.float32),
    "ranges": _ranges,
    "regions": _regions,
}


def check_exactly(name: str) -> Finding:
    """Hold the claims of one kind against exact values; nothing is tolerated."""
    found = Finding()
    for claim, bound, value in EXACT[name]():
        wrong = np.argwhere((value - bound).upper < 0).tolist()
        ends = [(bound.about(tuple(place)), value.about(tuple(place))) for place in wrong]
        violations = (Violation(0, "exact arithmetic", name, claim, 0, *pair, ()) for pair in ends)
        found += Finding((value - bound).lower.size, True, tuple(violations))
    return found
