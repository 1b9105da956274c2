"""The page of `buffet certify --synonyms … --html`: a sentence, its swaps, and what is proven about them."""

from __future__ import annotations

from buffet.printing import plural, round_down, round_up
from buffet.report.page import render
from buffet.report.scale import RAMP
from buffet.report.words import WordsReport


def render_substitutions(report: WordsReport) -> str:
    """One self-contained page about the report."""
    return render(
        "substitutions.html.j2",
        _data(report),
        ["substitutions.js"],
        report=report,
        label=report.model.labels[report.label],
        answer=report.model.labels[report.answer],
        sentences=f"{report.sentences:,} {plural(report.sentences, 'sentence')}",
        notes=list(report.notes()),
        round_down=round_down,
        round_up=round_up,
    )


def _data(report: WordsReport) -> dict[str, object]:
    flipped = () if report.flip is None else dict(report.flip.changes)
    middle = len(RAMP) // 2
    usual = len(RAMP) - 1 if report.verdict == "certified" else middle
    return {
        "words": [
            {
                "word": word.word,
                "row": word.rows[0],
                "rows": "+".join(map(str, word.rows)),
                "count": len(word.substitutes),
                "some": word.some,
                "all": ", ".join(map(str, word.substitutes)) or "—",
                "flips": word.word in flipped,
                "shade": 0 if word.word in flipped else usual,
            }
            for word in report.words
        ]
    }
