"""The figures.

Colours are those of Okabe and Ito, which people with any colour vision tell apart; markers differ as well.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from buffet.lab.reproduce.drawing import FAINT, INK, SETTINGS, svg
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.scales import CURVE_SHARE, CURVES, OURS, PUBLISHED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

STYLES = {
    PUBLISHED: ("#000000", "o"),
    "crown-baf+r": ("#8a8a8a", "v"),
    "crown-baf+o": ("#CC79A7", "<"),
    OURS: ("#56B4E9", "P"),
    "r-buffet": ("#a0522d", "X"),
    "o-buffet": ("#0072B2", "o"),
    "lse": ("#F0C000", "^"),
    "lse+o-buffet": ("#009E73", "s"),
    "backward": ("#E69F00", "P"),
    "buffet": ("#D55E00", "D"),
}
"""Colour and marker of every method, the same in all figures."""
SCATTERED = ("crown-baf+r", "crown-baf+o", OURS, "o-buffet", "lse+o-buffet", "buffet")
COLUMNS = 3
"""Panels side by side."""
TICKS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0, 3.0, 5.0, 7.0, 10.0, 20.0, 50.0, 100.0)
"""Where an axis of ratios has names."""


@dataclass(frozen=True)
class Figure:
    """A figure of `panels` axes, at most `COLUMNS` side by side, and how they are drawn."""

    name: str
    caption: str
    panels: int
    draw: Callable[[Canvas, Sequence[Axes]], None]
    size: tuple[float, float] = (3.1, 3.1)  # of one panel, in inches

    def svg(self) -> bytes:
        """The picture."""
        import matplotlib
        from matplotlib.figure import Figure as Canvas

        columns = min(COLUMNS, self.panels)
        lines = math.ceil(self.panels / columns)
        with matplotlib.rc_context(SETTINGS):
            size = self.size[0] * columns, self.size[1] * lines + 0.5
            canvas = Canvas(figsize=size, layout="constrained")
            axes = canvas.subplots(lines, columns, squeeze=False).ravel().tolist()
            for unused in axes[self.panels :]:
                unused.set_visible(False)
            self.draw(canvas, axes[: self.panels])
            return svg(canvas)


def figures(results: Results) -> list[Figure]:
    """Every figure there is something to draw in: scatter and box plots per dataset, the margin curves."""
    found: list[Figure] = []
    for data, record in results.data.items():
        if models := [m.model for m in results.about(data) if len(results.methods(m.model)) > 1]:
            found += [
                _scatter(results, data, record.title, models),
                _boxes(results, data, record.title, models),
            ]
    if learned := [
        m.model for m in results.models if any(results.learning(m.model, method) for method in CURVES)
    ]:
        found.append(_curves(results, learned))
    return found


def _legend(canvas: Canvas, axes: Sequence[Axes]) -> None:
    """One legend for all panels, above them."""
    entries = [axis.get_legend_handles_labels() for axis in axes]
    found = {label: handle for entry in entries for handle, label in zip(*entry, strict=True)}
    where: Any = {"loc": "outside upper center", "ncols": len(found), "frameon": False, "handletextpad": 0.3}
    canvas.legend(list(found.values()), list(found), **where)


def _scatter(results: Results, data: str, title: str, models: Sequence[str]) -> Figure:
    """Certified radius against the published baseline's, both divided by the largest one of the latter."""
    reach = {
        model: max((p.reference for p in results.pairs(model, PUBLISHED)), default=0.0) or 1.0
        for model in models
    }

    def draw(canvas: Canvas, axes: Sequence[Axes]) -> None:
        for axis, (model, unit) in zip(axes, reach.items(), strict=True):
            top = 1.0
            for method in SCATTERED:
                colour, marker = STYLES[method]
                if not (pairs := results.pairs(model, method)):
                    continue
                x, y = [p.reference / unit for p in pairs], [p.certified / unit for p in pairs]
                look: dict[str, Any] = {"s": 22, "alpha": 0.85, "linewidths": 0.5, "edgecolors": "white"}
                axis.scatter(x, y, c=colour, marker=marker, label=method, clip_on=False, zorder=3, **look)
                top = max([top, *y])
            axis.plot([0, 1.05], [0, 1.05], color=FAINT, linewidth=1)
            axis.annotate("y = x", (1.02, 0.84), color=FAINT, fontsize=8, ha="right", va="top")
            axis.set(
                title=model, xlim=(0, 1.05), ylim=(0, 1.05 * top), xlabel=f"ε of {PUBLISHED}, normalised"
            )
        axes[0].set_ylabel("certified ε, normalised")
        _legend(canvas, axes)

    caption = (
        f"{title}: the largest certified ε of every task against that of {PUBLISHED}, both divided by the "
        f"largest one of {PUBLISHED}. Above the line y = x a method proves more."
    )
    return Figure(f"scatter-{data}", caption, len(models), draw)


def _boxes(results: Results, data: str, title: str, models: Sequence[str]) -> Figure:
    """How the ratios to the published baseline's radius are spread: quartiles, extremes, every task."""

    def draw(canvas: Canvas, axes: Sequence[Axes]) -> None:
        for axis, model in zip(axes, models, strict=True):
            methods = [m for m in results.methods(model)[1:] if results.ratios(model, m)]
            for place, method in enumerate(methods):
                _box(axis, place, STYLES[method][0], results.ratios(model, method))
            axis.axhline(1, color=FAINT, linewidth=1, zorder=0)
            axis.set_yscale("log")
            low, high = axis.get_ylim()
            axis.set_yticks(named := [t for t in TICKS if low < t < high], [f"{t:g} ×" for t in named])
            axis.set_yticks([], minor=True)
            axis.set_xticks(range(len(methods)), methods, rotation=40, ha="right", rotation_mode="anchor")
            axis.set_title(model)
        axes[0].set_ylabel(f"certified ε / {PUBLISHED}")

    caption = (
        f"{title}: certified ε divided by that of {PUBLISHED}, task by task. Boxes are quartiles, "
        f"whiskers reach the extremes, points are tasks; 1 × is {PUBLISHED}."
    )
    return Figure(f"boxes-{data}", caption, len(models), draw, (3.1, 3.4))


def _box(axis: Axes, place: int, colour: str, values: Sequence[float]) -> None:
    """One box with its points."""
    axis.boxplot(
        [list(values)],
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


def _curves(results: Results, models: Sequence[str]) -> Figure:
    """Margins at every step of learning, divided by the size of the first method's, which is −1 in all."""

    def normalised(model: str, method: str) -> list[list[float]]:
        return [
            [math.nan if m is None else m / -(curve.reference or -1.0) for m in curve.steps]
            for curve in results.learning(model, method)
        ]

    def draw(canvas: Canvas, axes: Sequence[Axes]) -> None:
        for axis, model in zip(axes, models, strict=True):
            last, lowest = 1, -1.15
            for method in CURVES:
                if not (curves := normalised(model, method)):
                    continue
                colour, _ = STYLES[method]
                for curve in curves:
                    axis.plot(curve, color=colour, linewidth=0.8, alpha=0.45)
                typical = [statistics.median(values) for values in zip(*curves, strict=True)]
                axis.plot(typical, color=colour, linewidth=2.2, label=method)
                last = max(last, len(typical) - 1)
                lowest = min([lowest, *(v for c in curves for v in c if not math.isnan(v))])
            axis.axhline(0, color=INK, linewidth=1)
            axis.axhline(-1, color=STYLES["buffet"][0], linewidth=1.2, linestyle=(0, (5, 3)))
            note: dict[str, Any] = {
                "textcoords": "offset points",
                "ha": "right",
                "va": "bottom",
                "fontsize": 8,
            }
            axis.annotate("without learning", (last, -1), (0, 2), color=STYLES["buffet"][0], **note)
            axis.annotate("proven above 0", (last, 0), (0, 2), **note)
            axis.set(title=model, xlabel="step", xlim=(0, last))
            axis.set_ylim(bottom=lowest)
        axes[0].set_ylabel("margin, normalised")
        _legend(canvas, axes)

    counts = ", ".join(
        f"{model} {max(len(results.learning(model, method)) for method in CURVES)}" for model in models
    )
    caption = (
        f"Lower bound of the margin while α are learned, at an ε {CURVE_SHARE:g} times what the method it "
        "starts from certifies, divided by the size of its margin there (dashed, −1): "
        + ", ".join(f"{method} from {against}" for method, against in CURVES.items())
        + f". Thin: one task each; thick: their median. Tasks: {counts}."
    )
    return Figure("margin-curves", caption, len(models), draw, (3.1, 2.7))
