"""Draws the pictures of `how-it-works.md` from buffet's own relaxations: python docs/draw.py"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch
from torch import Tensor

from buffet.bounds.intervals import Box
from buffet.lab.reproduce.drawing import FAINT, INK, SETTINGS
from buffet.network import Rescale, Softmax
from buffet.network.functions import FUNCTIONS
from buffet.relaxations.elementwise import relax
from buffet.relaxations.products import planes
from buffet.relaxations.softmax import softmax_enclosure

HERE = Path(__file__).parent / "pictures"
BLUE, ORANGE, GREEN = "#0072B2", "#D55E00", "#009E73"
NUMBER = torch.float64


def number(value: float) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=NUMBER)


def save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


def plane(alpha: float, side: str, x: Tensor, y: Tensor) -> Tensor:
    """The fused plane of x·y over [0, 1]², around the clean point (½, ½)."""
    box, clean = Box(number(-0.5), number(0.5)), torch.full((1, 1), 0.5, dtype=NUMBER)
    enclosure = planes(Rescale(), (clean, clean), box, box, alpha_lower=alpha, alpha_upper=alpha)
    slope_x, slope_y, constant = (
        float(getattr(enclosure, name)) for name in (f"x_{side}", f"y_{side}", side)
    )
    return 0.25 + slope_x * (x - 0.5) + slope_y * (y - 0.5) + constant


def draw_planes() -> None:
    figure = Figure(figsize=(9, 5.6), layout="constrained")
    grid = figure.add_gridspec(2, 6, height_ratios=[1.25, 1])
    t = torch.linspace(0, 1, 101, dtype=NUMBER)
    cuts: Sequence[tuple[str, Any, Tensor, str]] = (
        ("lower", grid[0, :3], t, "below, along x = y"),
        ("upper", grid[0, 3:], 1 - t, "above, along y = 1 − x"),
    )
    for side, place, y, title in cuts:
        axis = figure.add_subplot(place)
        axis.plot(t, t * y, color=INK, linewidth=2.2)
        for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
            colour = {0.0: BLUE, 0.5: GREEN, 1.0: ORANGE}.get(alpha, FAINT)
            wide = 1.8 if colour != FAINT else 0.9
            axis.plot(t, plane(alpha, side, t, y), color=colour, linewidth=wide, label=f"α = {alpha:g}")
        axis.set(title=title, xlabel="x")
        axis.legend(frameon=False, fontsize=8)
    coarse = torch.linspace(0, 1, 25, dtype=NUMBER)
    x, y = torch.meshgrid(coarse, coarse, indexing="xy")
    panels = []
    for column, alpha in enumerate((0.0, 0.5, 1.0)):
        axis = figure.add_subplot(grid[1, 2 * column : 2 * column + 2])
        gap = (x * y - plane(alpha, "lower", x, y)).clamp(0, 1)
        drawn = axis.contourf(coarse, coarse, gap, levels=torch.linspace(0, 1, 11).tolist(), cmap="viridis_r")
        axis.set(title=f"x·y − plane below, α = {alpha:g}", xlabel="x", ylabel="y", aspect="equal")
        panels.append(axis)
    figure.colorbar(drawn, ax=panels, shrink=0.9, label="gap")
    save(figure, "planes")


def draw_lines() -> None:
    cases = (
        ("exp", -1.0, 1.5),
        ("reciprocal", 0.5, 3.0),
        ("relu", -1.0, 1.6),
        ("tanh", 0.2, 2.2),
        ("tanh", -1.0, 2.2),
        ("gelu", -2.0, 1.4),
    )
    figure = Figure(figsize=(9, 5), layout="constrained")
    for axis, (name, low, high) in zip(figure.subplots(2, 3).flat, cases, strict=True):
        center = torch.tensor(0.5 * (low + high), dtype=NUMBER)
        lines = relax(name, center, low - center, high - center)
        x = torch.linspace(low, high, 201, dtype=NUMBER)
        f = FUNCTIONS[name].value
        axis.plot(x, f(x), color=INK, linewidth=2.2)
        for side, colour in (("lower", BLUE), ("upper", ORANGE)):
            slope, intercept = (float(getattr(lines, f"{side}_{part}")) for part in ("slope", "intercept"))
            axis.plot(x, float(f(center)) + slope * (x - center) + intercept, color=colour, linewidth=1.5)
        axis.set_title(f"{name} on [{low:g}, {high:g}]".replace("-", "−"))
    save(figure, "lines")


def draw_softmax() -> None:
    """Weight 1 of three scores while its score rises and the others fall: from its least to its largest."""
    reach = 1.2
    clean = torch.tensor([[0.4, 0.0, -0.3]], dtype=NUMBER)
    box = Box(torch.full((1, 1, 3), -reach, dtype=NUMBER), torch.full((1, 1, 3), reach, dtype=NUMBER))
    t = torch.linspace(-reach, reach, 201, dtype=NUMBER)
    path = torch.stack([t, -t, -t], -1)
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    weight = (clean + path).softmax(-1)[:, 0]
    for axis, point in zip(panels, (0.5, None), strict=True):
        axis.plot(t, weight, color=INK, linewidth=2.2, label="weight p₁")
        for mixture, name, colour in ((0.0, "L_LSE", BLUE), (1.0, "L_ER", GREEN)):
            share = torch.full((1, 1, 1, 3), mixture, dtype=NUMBER)
            for place in (0.2, 0.5, 0.8) if point is None else (point,):
                # touch along the path: score 1 at `place` of its range, the others at 1 − `place`
                touch = torch.full((1, 1, 1, 3, 3), 1 - place, dtype=NUMBER)
                touch[..., 0] = place
                enclosure = softmax_enclosure(Softmax(1), clean, box, point=touch, mixture=share)
                below = weight_line(enclosure.lower_slope, enclosure.lower, clean, path)
                above = weight_line(enclosure.upper_slope, enclosure.upper, clean, path)
                label = name if place == 0.5 else None
                axis.plot(t, below, color=colour, linewidth=1.4, label=label)
                if mixture == 0.0:
                    axis.plot(t, above, color=ORANGE, linewidth=1.4, label="U_LSE" if label else None)
        axis.set(xlabel="score 1 (the others move the other way)", ylim=(-0.75, 1.5))
    panels[0].set(title="tangents at the middle", ylabel="weight")
    panels[1].set_title("any other point is sound too")
    panels[0].legend(frameon=False, fontsize=8)
    save(figure, "softmax")


def weight_line(slopes: Tensor, constants: Tensor, clean: Tensor, path: Tensor) -> Tensor:
    """The line of weight 1 along the path."""
    return clean.softmax(-1)[0, 0] + path @ slopes[0, 0, 0, 0] + constants[0, 0, 0]


def draw_walks() -> None:
    """Which nodes stop a backward substitution: those of attention (BaF), or the input alone."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    titles = ("baseline: backward within a token, forward through attention", "backward: to the input")
    for axis, title, deep in zip(figure.subplots(1, 2), titles, (False, True), strict=True):
        axis.set(xlim=(-0.6, 3.6), ylim=(-0.6, 5.5), title=title)
        axis.set_axis_off()
        for level, name in ((0, "input"), (1, ""), (2, "attention"), (3, ""), (4, "attention"), (5, "FFN")):
            keeps = level == 0 or (name == "attention" and not deep)
            for token in range(4):
                box(axis, token, level, ORANGE if keeps else FAINT, filled=keeps)
            axis.text(-0.5, level, name, fontsize=8, ha="right", va="center")
        arrows = [((1, 5), (1, 4))]
        if deep:
            arrows += [((1, 4), (token, 3)) for token in range(4)]
            arrows += [((token, 3), (token, 2)) for token in range(4)]
            arrows += [((a, 2), (b, 1)) for a in range(4) for b in range(4)]
            arrows += [((token, 1), (token, 0)) for token in range(4)]
        for start, end in arrows:
            arrow(axis, start, end, BLUE)
        if not deep:
            for level in (4, 2):
                for token in range(4):
                    arrow(axis, (token, level - 2), (1, level), ORANGE, dashed=True)
    save(figure, "walks")


def box(axis: Axes, x: float, y: float, colour: str, filled: bool) -> None:
    face = colour if filled else "white"
    axis.add_patch(
        FancyBboxPatch(
            (x - 0.22, y - 0.16), 0.44, 0.32, boxstyle="round,pad=0.02", edgecolor=colour, facecolor=face
        )
    )


def arrow(
    axis: Axes, start: tuple[float, float], end: tuple[float, float], colour: str, dashed: bool = False
) -> None:
    axis.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            color=colour,
            linewidth=1.2 if not dashed else 0.9,
            linestyle="--" if dashed else "-",
            shrinkA=9,
            shrinkB=9,
        )
    )


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    with matplotlib.rc_context(SETTINGS):
        for draw in (draw_planes, draw_lines, draw_softmax, draw_walks):
            draw()
