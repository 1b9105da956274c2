"""The page of `buffet certify --html`."""

from __future__ import annotations

from buffet.printing import plural, round_down, round_up
from buffet.report.answer import CertifyReport, shades, shown
from buffet.report.page import render
from buffet.report.scale import ColourScale


def render_html(report: CertifyReport) -> str:
    """One self-contained page about the report."""
    return render(
        "certify.html.j2",
        _data(report),
        ["picture.js", "certify.js"],
        report=report,
        label=report.model.labels[report.query.label],
        answer=report.model.labels[report.answer],
        subject=_subject(report),
        many=report.units,
        rows="embedding" if report.picture is None else "pixels",
        boxed=report.query.eps is not None and report.query.norm == "inf",
        together=max(len(task.words) for task in report.tasks),
        effort=_effort(report),
        held=sum(task.held for task in report.tasks) if any(task.nearest for task in report.tasks) else None,
        round_down=round_down,
        round_up=round_up,
    )


def _subject(report: CertifyReport) -> str:
    """What the smallest radius was proven for."""
    count, together = len(report.tasks), max(len(task.words) for task in report.tasks)
    one, many = report.unit, report.units
    if count == 1:
        return f"the {one}" if together == 1 else f"the {many} together"
    return f"every one of the {count} {many} on its own" if together == 1 else f"all {count} groups of {many}"


def _effort(report: CertifyReport) -> str:
    query = report.query
    parts = [
        f"{report.evaluations} {plural(report.evaluations, 'evaluation')}",
        f"{report.seconds:.2f} s of proofs",
        *([] if report.attack_seconds is None else [f"{report.attack_seconds:.2f} s of attacks"]),
        f"{query.threads} {plural(query.threads, 'thread')}",
    ]
    return ", ".join(parts)


def _data(report: CertifyReport) -> dict[str, object]:
    """What the components draw: exact numbers for places, texts that are rounded to the safe side."""
    eps = report.query.eps
    scale = ColourScale.over(map(report.strength, report.tasks))
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
            "nearest": cells.nearest,
            "away": min((word.distance for word in task.nearest), default=None),
            "shade": min(colours[word] for word in task.words),
        }
        for task, cells in ((task, shown(task, eps)) for task in report.tasks)
    ]
    return {
        "unit": report.unit,
        "picture": report.picture and report.picture.model_dump(),
        "norm": report.norm_name,
        "at_eps": eps is not None,
        "clean_margin": report.clean_margin,
        "tokens": [token.token for token in report.tokens],
        "tasks": tasks,
        "edges": [f"{edge:.2g}" for edge in scale.edges()] if scale else [],
    }
