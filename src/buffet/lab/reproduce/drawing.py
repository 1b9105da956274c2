"""What all figures have in common: their style, and that the same data gives the same bytes."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from buffet.errors import optional

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

INK, FAINT = "#222222", "#8a8a8a"
SETTINGS: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.linewidth": 0.8,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "svg.hashsalt": "buffet",  # the same data gives the same file
    "svg.fonttype": "none",
}


def check_drawing() -> None:
    """Refuse, before any work is done, to draw without matplotlib."""
    optional("matplotlib", "plots", "drawing figures needs matplotlib")


def svg(canvas: Canvas) -> bytes:
    """A figure as SVG."""
    data = io.BytesIO()
    canvas.savefig(data, format="svg", metadata={"Date": None})
    return data.getvalue()
