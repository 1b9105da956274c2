"""What all figures have in common: their style, and pictures of which the same data gives the same bytes."""

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


def pictures(canvas: Canvas) -> dict[str, bytes]:
    """A figure as SVG and PNG."""
    found = {}
    for kind, nothing in (("svg", "Date"), ("png", "Software")):
        data = io.BytesIO()
        canvas.savefig(data, format=kind, dpi=180, metadata={nothing: None})
        found[kind] = data.getvalue()
    return found
