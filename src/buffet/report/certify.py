"""The page of `buffet certify --html`."""

from __future__ import annotations

from buffet.report.answer import CertifyReport, shades, shown
from buffet.report.page import render
from buffet.report.scale import Scale
from buffet.rounding import round_down, round_up


def render_html(report: CertifyReport) -> str:
    """One self-contained page about the report."""
    label = report.model.labels[report.query.label]
    return render(
        "certify.html.j2",
        _data(report),
        ["certify.js"],
        report=report,
        label=label,
        answer=report.model.labels[report.answer],
        together=max(len(task.words) for task in report.tasks),
        round_down=round_down,
        round_up=round_up,
    )


def _data(report: CertifyReport) -> dict[str, object]:
    """What the components draw: exact numbers for places, texts that are rounded to the safe side."""
    eps = report.query.eps
    scale = Scale.over(map(report.strength, report.tasks))
    colours = shades(report)
    tasks = [
        {
            "words": task.words,
            "text": cells.text,
            "rows": cells.words,
            "verdict": task.verdict,
            "strength": report.strength(task),
            "certified": task.certified,
            "attacked": task.attacked,
            "margin": task.margin,
            "texts": {"certified": cells.certified, "attacked": cells.attacked, "margin": cells.margin},
            "shade": min(colours[word] for word in task.words),
        }
        for task, cells in ((task, shown(task, eps)) for task in report.tasks)
    ]
    return {
        "norm": report.norm_name,
        "at_eps": eps is not None,
        "clean_margin": report.clean_margin,
        "tokens": [token.token for token in report.tokens],
        "tasks": tasks,
        "edges": [f"{edge:.2g}" for edge in scale.edges()] if scale else [],
    }
