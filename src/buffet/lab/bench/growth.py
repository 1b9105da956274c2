"""How cost grows with layers, tokens and width: fitted exponents and log-log plots."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from buffet.lab.bench.cases import CENTRE
from buffet.lab.bench.measuring import Measurement
from buffet.lab.bench.running import Row
from buffet.lab.drawing import check_drawing, pictures

AXES = ("layers", "tokens", "width")
QUANTITIES: Mapping[str, tuple[str, Callable[[Measurement], float]]] = {
    "time": ("CPU time in M", lambda m: m.units),
    "memory": ("peak memory in MB", lambda m: m.peak_megabytes),
    "flops": ("GFLOP of matrix products", lambda m: m.flops / 1e9),
}


@dataclass(frozen=True)
class Curve:
    """The measurements of one method along one axis, the other axes at the centre."""

    method: str
    axis: str
    sizes: tuple[int, ...]
    measurements: tuple[Measurement, ...]

    def exponent(self, quantity: str) -> float:
        """The exponent of the power of the size that fits best (least squares of the logarithms)."""
        xs = [math.log(size) for size in self.sizes]
        ys = [math.log(max(value, 1e-9)) for value in self.values(quantity)]
        return statistics.linear_regression(xs, ys).slope

    def values(self, quantity: str) -> list[float]:
        return [QUANTITIES[quantity][1](measurement) for measurement in self.measurements]


def curves(rows: Sequence[Row]) -> list[Curve]:
    """The curves through the centre, or else through the first shape there is, with two points or more."""
    shapes = [row.case.shape for row in rows if row.measurement]
    centre = CENTRE if CENTRE in shapes else next(iter(shapes), CENTRE)
    found = []
    by_method: dict[tuple[str, int, str], dict[tuple[int, int, int], Measurement]] = {}
    for row in rows:
        if row.measurement:
            key = row.case.name, row.case.words, row.case.pooling
            by_method.setdefault(key, {})[row.case.shape] = row.measurement
    for (name, _, _), points in by_method.items():
        for axis, label in enumerate(AXES):
            rest = centre[:axis] + centre[axis + 1 :]
            line = sorted(
                (shape[axis], m) for shape, m in points.items() if shape[:axis] + shape[axis + 1 :] == rest
            )
            if len(line) > 1:
                found.append(Curve(name, label, tuple(s for s, _ in line), tuple(m for _, m in line)))
    return found


def draw(lines: Sequence[Curve]) -> dict[str, bytes]:
    """Log-log plots, ``growth.svg`` and ``growth.png``: an axis of growth per column, a quantity per row."""
    check_drawing()
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    figure: Any = Figure(figsize=(13, 11), layout="constrained")
    grid = figure.subplots(len(QUANTITIES), len(AXES), squeeze=False)
    methods = list(dict.fromkeys(line.method for line in lines))
    for axes, (quantity, axis) in zip(grid.ravel(), product(QUANTITIES, AXES), strict=True):
        shown = [line for line in lines if line.axis == axis]
        if not shown:
            axes.set_visible(False)
            continue
        for line in shown:
            name = f"{line.method}  ~ {axis}^{line.exponent(quantity):.2f}"
            colour = f"C{methods.index(line.method) % 10}"
            axes.loglog(line.sizes, line.values(quantity), marker="o", color=colour, label=name)
        axes.set(xlabel=axis, ylabel=QUANTITIES[quantity][0])
        ticks = sorted({size for line in shown for size in line.sizes})
        axes.set_xticks(ticks, [str(size) for size in ticks])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    return {f"growth.{kind}": picture for kind, picture in pictures(figure).items()}
