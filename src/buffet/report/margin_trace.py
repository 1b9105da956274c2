"""The margin at every step of an optimiser: recorded, written as CSV, drawn against 0 and the baseline."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from buffet.errors import optional

PICTURES = (".svg", ".png", ".pdf")


@dataclass
class MarginTrace:
    """Collects what `buffet.verify(..., trace=...)` tells, one curve per task."""

    names: Sequence[str]  # of the tasks
    references: Sequence[float]  # the baseline's margin of every task
    curves: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.curves = [[] for _ in self.names]

    @staticmethod
    def together(traces: Sequence[MarginTrace]) -> MarginTrace:
        """The curves of all tasks of several traces."""
        whole = MarginTrace(
            [name for trace in traces for name in trace.names],
            [reference for trace in traces for reference in trace.references],
        )
        whole.curves = [curve for trace in traces for curve in trace.curves]
        return whole

    def __call__(self, tasks: list[int], step: int, margins: Tensor) -> None:
        for task, margin in zip(tasks, margins.tolist(), strict=True):
            self.curves[task].append(margin)

    def csv(self) -> str:
        """Columns ``task, step, margin, baseline``."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["task", "step", "margin", "baseline"])
        for name, curve, reference in zip(self.names, self.curves, self.references, strict=True):
            writer.writerows([name, step, repr(m), repr(reference)] for step, m in enumerate(curve))
        return text.getvalue()

    def picture(self, kind: str) -> bytes:
        """The curves with the line 0 and, dotted in the same colour, the baseline's margin."""
        drawing = optional("matplotlib.figure", "plots", "drawing a trace needs matplotlib")
        figure = drawing.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        axes.axhline(0, color="0.3", linewidth=1)
        for name, curve, reference in zip(self.names, self.curves, self.references, strict=True):
            (line,) = axes.plot(range(len(curve)), curve, label=name, linewidth=1.5)
            axes.axhline(reference, color=line.get_color(), linestyle=":", linewidth=1)
        axes.set(xlabel="step", ylabel="lower bound of the margin", title="dotted: baseline")
        if len(self.names) <= 12:
            axes.legend(fontsize="small")
        data = io.BytesIO()
        figure.savefig(data, format=kind, metadata={"Date": None} if kind == "svg" else None)
        return data.getvalue()

    def render(self, path: Path) -> bytes:
        """The content of a file of this name: a picture, or else CSV."""
        suffix = path.suffix.lower()
        return self.picture(suffix[1:]) if suffix in PICTURES else self.csv().encode()
