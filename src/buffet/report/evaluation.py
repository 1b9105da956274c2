"""The page of `buffet evaluate --html`: three accuracies, their curve, and the sentences behind them."""

from __future__ import annotations

import math

from buffet.evaluation.accuracy import Share
from buffet.evaluation.result import Evaluation
from buffet.evaluation.rows import SentenceRow
from buffet.printing import at_least, duration, listed, round_down, round_up
from buffet.report.headline import Tile
from buffet.report.page import render

SENTENCES = (
    *("text", "label", "answer", "clean", "state", "verdicts", "margins", "broken", "change", "flipped"),
    *("flip_margin", "seconds", "reason", "texts"),
)
"""A sentence: what became of it at every level, the level that breaks it, its margins as they are shown."""


def evaluation_page(found: Evaluation, command: str) -> str:
    """One self-contained page about an evaluation.

    Args:
        command: what was typed, to repeat it.
    """
    return render(
        "evaluation.html.j2",
        _data(found),
        ["evaluation.js"],
        title=found.sentences[0].model,
        sentence=_sentence(found),
        tiles=_tiles(found),
        exchanged=found.question.kind == "at_most",
        several=len(found.curve) > 1,
        sampled=found.sampled,
        notes=found.notes,
        setup=_setup(found),
        command=command,
    )


def _sentence(found: Evaluation) -> str:
    """What the numbers say."""
    worst, many = found.worst, len(found.sentences)
    of = f"{many:,} sentences drawn from {found.total:,}" if found.sampled else f"{many:,} sentences"
    text = (
        f"Of {of}, {worst.clean.count:,} are classified correctly. {worst.certified.count:,} of these answers"
        f" are proven: {found.question.promise(worst.level)}."
    )
    falsified = worst.clean.count - worst.attacked.count
    text += f" {falsified:,} can be changed, and {worst.open.count:,} are open."
    return text


def _tiles(found: Evaluation) -> list[Tile]:
    worst = found.worst
    at = f"{found.question.axis}: {found.question.level_text(worst.level)}"
    return [
        _tile(worst.clean, "classified correctly (clean)", up=True),
        _tile(worst.certified, f"and proven (certified, {at})", up=False),
        _tile(worst.attacked, f"and not broken (under attack, {at})", up=True),
        Tile(duration(sum(row.seconds or 0.0 for row in found.sentences)), "of work"),
    ]


def _tile(share: Share, meaning: str, *, up: bool) -> Tile:
    value, _, interval = share.text(up=up).partition(" ")
    return Tile(value, f"{meaning}; of all {interval} with 95 % confidence" if interval else meaning)


def _data(found: Evaluation) -> dict[str, object]:
    """What the page is drawn from; sentences and reasons are data and are never read as markup."""
    return {
        "kind": found.question.kind,
        "axis": found.question.axis,
        "levels": [found.question.level_text(at.level) for at in found.curve],
        "sizes": [
            at.level if math.isfinite(found.worst.level) else place for place, at in enumerate(found.curve)
        ],
        "curve": [
            {
                **{name: getattr(at, name).to_dict() for name in ("clean", "certified", "attacked", "open")},
                "texts": cells[1:],
            }
            for at, cells in zip(found.curve, found.table(), strict=True)
        ],
        "columns": SENTENCES,
        "rows": [_row(found, row) for row in found.sentences],
    }


def _row(found: Evaluation, row: SentenceRow) -> list[object]:
    verdicts, broken = [answer.verdict for answer in row.levels], row.counterexample
    first = verdicts.index("falsified") if "falsified" in verdicts else None
    margins = [answer.margin for answer in row.levels]
    texts = {
        "clean": at_least(row.clean_margin),
        "margins": [at_least(margin) for margin in margins],
        "flip": "—" if broken is None else round_up(broken.margin),
    }
    return [
        row.sentence,
        found.labels[row.gold],
        "—" if row.answer is None else found.labels[row.answer],
        row.clean_margin,
        _state(row),
        verdicts,
        margins,
        first,
        broken and broken.change,
        broken and broken.sentence,
        broken and broken.margin,
        row.seconds,
        "; ".join(row.reasons),
        texts,
    ]


def _state(row: SentenceRow) -> str:
    if not row.ok:
        return "failed"
    if row.refused is not None:
        return "refused"
    return "right" if row.right else "wrong"


def _setup(found: Evaluation) -> list[tuple[str, str]]:
    """What one needs to know to get the same numbers again."""
    first = found.sentences[0]
    versions = dict.fromkeys(str(row.versions) for row in found.sentences)
    question = found.question
    levels = ", ".join(listed([question.level_text(level) for level in question.levels]))
    sample = f"{len(found.sentences):,} of {found.total:,} sentences" if found.sampled else "all of it"
    return [
        ("model", f"{first.model}, digest {first.model_digest}"),
        ("data", f"{found.source}, {sample}"),
        ("asked", f"{question.describe()}; {question.axis}: {levels}"),
        ("method", first.method),
        ("budget", "none" if first.budget is None else f"{round_down(first.budget)} s a sentence"),
        ("seed", str(first.seed)),
        ("versions", "; ".join(versions)),
    ]
