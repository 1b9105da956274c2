"""The figures, each as SVG and PNG with its data as CSV.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; markers differ as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buffet.lab.drawing import FAINT, INK, SETTINGS, pictures
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.scales import REFERENCE, Subject
from buffet.lab.reproduce.tables import csv_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

STYLES = {
    REFERENCE: ("#000000", "o"),
    "r-buffet": ("#56B4E9", "v"),
    "o-buffet": ("#0072B2", "o"),
    "lse": ("#F0C000", "^"),
    "lse+r-buffet": ("#CC79A7", "<"),
    "lse+o-buffet": ("#009E73", "s"),
    "backward": ("#E69F00", "P"),
    "buffet": ("#D55E00", "D"),
}
"""Colour and marker of every method, the same in all figures."""
SCATTERED = ("r-buffet", "o-buffet", "lse+o-buffet", "buffet")
COLUMNS = 3
"""Panels side by side."""
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)
"""Where an axis of ratios has names."""


@dataclass(frozen=True)
class Figure:
    """A drawn figure and the numbers in it."""

    name: str
    caption: str
    files: Mapping[str, str | bytes]  # by their endings


def figures(results: Results) -> list[Figure]:
    """Every figure there is something to draw in: scatter and box plots per dataset, the margin curves."""
    drawn: list[Figure] = []
    for data in results.scale.data:
        subjects = [s for s in results.subjects if s.data == data and len(results.methods(s.preset)) > 1]
        if subjects:
            title = results.data[data].title
            drawn += [_scatter(results, data, title, subjects), _boxes(results, data, title, subjects)]
    if learned := [s for s in results.scale.subjects if results.learning(s.preset)]:
        drawn.append(_curves(results, learned))
    return drawn


def _drawn(
    name: str,
    caption: str,
    panels: int,
    draw: Callable[[Canvas, Sequence[Axes]], None],
    data: str,
    size: tuple[float, float] = (3.1, 3.1),
) -> Figure:
    """A figure of `panels` axes, at most `COLUMNS` side by side."""
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    columns = min(COLUMNS, panels)
    lines = math.ceil(panels / columns)
    with matplotlib.rc_context(SETTINGS):
        canvas = Canvas(figsize=(size[0] * columns, size[1] * lines + 0.5), layout="constrained")
        axes = canvas.subplots(lines, columns, squeeze=False).ravel().tolist()
        for unused in axes[panels:]:
            unused.set_visible(False)
        draw(canvas, axes[:panels])
        return Figure(name, caption, {**pictures(canvas), "csv": data})


def _legend(canvas: Canvas, axes: Sequence[Axes]) -> None:
    """One legend for all panels, above them."""
    entries = [axis.get_legend_handles_labels() for axis in axes]
    found = {label: handle for entry in entries for handle, label in zip(*entry, strict=True)}
    where: Any = {"loc": "outside upper center", "ncols": len(found), "frameon": False, "handletextpad": 0.3}
    canvas.legend(list(found.values()), list(found), **where)


def _scatter(results: Results, data: str, title: str, subjects: Sequence[Subject]) -> Figure:
    """Certified radius against the baseline's, both divided by the largest one of the baseline."""
    reach = {
        s.preset: max((p.reference for p in results.pairs(s.preset, REFERENCE)), default=0.0) or 1.0
        for s in subjects
    }

    def draw(canvas: Canvas, axes: Sequence[Axes]) -> None:
        for axis, (model, unit) in zip(axes, reach.items(), strict=True):
            top = 1.0
            for method in SCATTERED:
                colour, marker = STYLES[method]
                if not (pairs := results.pairs(model, method)):
                    continue
                x, y = [p.reference / unit for p in pairs], [p.certified / unit for p in pairs]
                look: dict[str, Any] = {"s": 28, "alpha": 0.9, "linewidths": 0.5, "edgecolors": "white"}
                axis.scatter(x, y, c=colour, marker=marker, label=method, clip_on=False, zorder=3, **look)
                top = max([top, *y])
            axis.plot([0, 1.05], [0, 1.05], color=FAINT, linewidth=1)
            axis.annotate("y = x", (1.02, 0.84), color=FAINT, fontsize=8, ha="right", va="top")
            axis.set(title=model, xlim=(0, 1.05), ylim=(0, 1.05 * top), xlabel="baseline's ε, normalised")
        axes[0].set_ylabel("certified ε, normalised")
        _legend(canvas, axes)

    header = ("model", "method", "task", "baseline", "certified", "baseline_norm", "certified_norm")
    records = [
        (
            model,
            method,
            results.number(model, p.row.sentence, p.row.words),
            *(value / unit for unit in (1.0, reach[model]) for value in (p.reference, p.certified)),
        )
        for model in reach
        for method in SCATTERED
        for p in results.pairs(model, method)
    ]
    caption = (
        f"{title}: the largest certified ε of every task against the baseline's, both divided by the largest "
        "one of the baseline. Above the line y = x a method proves more than the baseline."
    )
    return _drawn(f"scatter-{data}", caption, len(subjects), draw, csv_text(header, records))


def _boxes(results: Results, data: str, title: str, subjects: Sequence[Subject]) -> Figure:
    """How the ratios to the baseline's radius are spread: quartiles, whiskers to the extremes, every task."""

    def draw(canvas: Canvas, axes: Sequence[Axes]) -> None:
        for axis, subject in zip(axes, subjects, strict=True):
            methods = [m for m in results.methods(subject.preset)[1:] if results.ratios(subject.preset, m)]
            for place, method in enumerate(methods):
                colour, _ = STYLES[method]
                values = results.ratios(subject.preset, method)
                axis.boxplot(
                    [values],
                    positions=[place],
                    widths=0.55,
                    whis=(0, 100),
                    patch_artist=True,
                    boxprops={"facecolor": colour + "40", "edgecolor": colour},
                    medianprops={"color": colour, "linewidth": 2},
                    whiskerprops={"color": colour},
                    capprops={"color": colour},
                )
                spots = [place + 0.16 * math.sin(7.0 * i) for i in range(len(values))]
                axis.scatter(spots, values, s=7, c=colour, linewidths=0, alpha=0.8, zorder=3)
            axis.axhline(1, color=FAINT, linewidth=1, zorder=0)
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            axis.set_yticks(named := [t for t in TICKS if low < t < high], [f"{t:g} ×" for t in named])
            axis.set_yticks([], minor=True)
            axis.set_xticks(range(len(methods)), methods, rotation=40, ha="right", rotation_mode="anchor")
            axis.set_title(subject.preset)
        axes[0].set_ylabel("certified ε / baseline's")

    header = ("model", "method", "ratio")
    records = [
        (s.preset, method, value)
        for s in subjects
        for method in results.methods(s.preset)[1:]
        for value in results.ratios(s.preset, method)
    ]
    caption = (
        f"{title}: certified ε divided by the baseline's, task by task. Boxes are quartiles, whiskers reach "
        "the extremes, points are tasks; 1 × is the baseline."
    )
    return _drawn(f"boxes-{data}", caption, len(subjects), draw, csv_text(header, records), (3.1, 3.4))


def _curves(results: Results, subjects: Sequence[Subject]) -> Figure:
    """The margin at every step of o-BuFFeT, divided by the size of the baseline's, which is −1 in all."""

    def normalised(model: str) -> list[list[float]]:
        return [
            [math.nan if m is None else m / -(curve.reference or -1.0) for m in curve.steps]
            for curve in results.learning(model)
        ]

    def draw(canvas: Canvas, axes: Sequence[Axes]) -> None:
        colour, _ = STYLES["o-buffet"]
        for axis, subject in zip(axes, subjects, strict=True):
            curves = normalised(subject.preset)
            for curve in curves:
                axis.plot(curve, color=colour, linewidth=0.8, alpha=0.45)
            typical = [statistics.median(values) for values in zip(*curves, strict=True)]
            axis.plot(typical, color=colour, linewidth=2.2)
            axis.axhline(0, color=INK, linewidth=1)
            axis.axhline(-1, color=STYLES["buffet"][0], linewidth=1.2, linestyle=(0, (5, 3)))
            last = len(typical) - 1
            note: dict[str, Any] = {
                "textcoords": "offset points",
                "ha": "right",
                "va": "bottom",
                "fontsize": 8,
            }
            axis.annotate("baseline", (last, -1), (0, 2), color=STYLES["buffet"][0], **note)
            axis.annotate("proven above 0", (last, 0), (0, 2), **note)
            axis.set(title=subject.preset, xlabel="step of o-BuFFeT", xlim=(0, last))
            axis.set_ylim(bottom=min(-1.15, *(v for c in curves for v in c)))
        axes[0].set_ylabel("margin, normalised")

    header = ("model", "task", "eps", "baseline", "step", "margin")
    records = [
        (c.model, results.number(c.model, c.sentence, (c.word,)), c.eps, c.reference, step, margin)
        for s in subjects
        for c in results.learning(s.preset)
        for step, margin in enumerate(c.steps)
    ]
    caption = (
        "Lower bound of the margin while o-BuFFeT learns, at an ε 1.1 times what the baseline certifies, "
        "divided by the size of the baseline's margin (dashed, −1). Thin: one task each; thick: their median."
    )
    return _drawn("margin-curves", caption, len(subjects), draw, csv_text(header, records), (3.1, 2.7))
