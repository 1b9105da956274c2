"""The page of `buffet report`: what the rows of a sweep say, to look at, filter and sort."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffet.errors import BuffetError
from buffet.experiments.rows import Row
from buffet.experiments.store import Content, distinct
from buffet.experiments.summary import FAIR, GOOD, known_method
from buffet.printing import norm_name, round_down, round_up
from buffet.report.headline import best_of, headline
from buffet.report.page import render
from buffet.report.scale import ColourScale
from buffet.system.files import read_bytes

RADII = ("sentence", "norm", "method", "words", "certified", "attacked", "seconds", "shade", "texts")
"""One radius: places in the lists of sentences, norms and methods, exact numbers, then what is shown of
certified and attacked."""
TROUBLES = ("sentence", "norm", "method", "words", "status", "reason")
"""One row with a reason: no answer, or an answer without its attack."""


@dataclass(frozen=True)
class Source:
    """A file of rows, recognisable later."""

    name: str
    sha256: str
    rows: int


def read_sources(paths: Sequence[Path]) -> tuple[list[Row], list[Source]]:
    """The rows of all files, each task once."""
    rows: list[Row] = []
    sources = []
    for path in paths:
        content = read_bytes(path)  # once: a sweep may be writing it meanwhile
        found = distinct(Content.of(path, content, Row).rows)
        if not found:
            raise BuffetError(f"{path}: has no rows yet")
        rows += found
        digest = hashlib.sha256(content).hexdigest()
        sources.append(Source(os.path.basename(path), digest, len(found)))
    return distinct(rows), sources


def sweep_page(rows: Sequence[Row], sources: Sequence[Source] = (), reference: str | None = None) -> str:
    """One self-contained page about the rows.

    Args:
        reference: the method the others are compared with; by default baseline, or else the first there is.
    """
    rows = _latest(rows)
    if not rows:
        raise BuffetError("there are no rows to report on")
    known = list(dict.fromkeys(row.method for row in rows))
    if reference is None:
        reference = "baseline" if "baseline" in known else known[0]
    known_method(reference, known)
    return render(
        "sweep.html.j2",
        _data(rows, reference),
        ["figures.js", "sweep.js"],
        headline=headline(rows, reference),
        reference=reference,
        failures=any(row.reason or not row.ok for row in rows),
        sources=sources,
        setup=_setup(rows),
        methods=_methods(rows),
    )


def _latest(rows: Iterable[Row]) -> list[Row]:
    """One row per model, norm, method, sentence and words: the last, as `summarise` counts."""
    found: dict[tuple[object, ...], Row] = {}
    for row in rows:
        found[row.model_digest, row.norm, row.method, row.sentence, row.words] = row
    return list(found.values())


def _names(rows: Sequence[Row]) -> dict[str, str]:
    """What every model is called; its digest is added where two share a name."""
    names = {row.model_digest: row.model for row in rows}
    shared = [name for name in names.values() if list(names.values()).count(name) > 1]
    return {key: f"{name} ({key[:6]})" if name in shared else name for key, name in names.items()}


def _data(rows: Sequence[Row], reference: str) -> dict[str, object]:
    """What the page is drawn from; words, texts and reasons are data and are never read as markup."""
    names = _names(rows)
    models = list(names)
    norms = sorted({row.norm for row in rows}, key=float)
    methods = list(dict.fromkeys([reference, *(row.method for row in rows)]))
    sentences = {(row.model_digest, row.sentence): row for row in rows}
    place = {key: number for number, key in enumerate(sentences)}
    scales = _scales(rows)

    def start(row: Row) -> list[object]:
        sentence = place[row.model_digest, row.sentence]
        return [sentence, norms.index(row.norm), methods.index(row.method), row.words]

    def radius(row: Row) -> list[object]:
        certified = row.certified or 0.0
        scale = scales[row.model_digest, row.norm]
        texts = [round_down(certified), "—" if row.attacked is None else round_up(row.attacked)]
        shade = scale.step(certified) if scale else 0
        return [*start(row), certified, row.attacked, row.task_seconds or 0.0, shade, texts]

    return {
        "reference": methods.index(reference),
        "fair": FAIR,
        "good": GOOD,
        "models": list(names.values()),
        "norms": list(map(norm_name, norms)),
        "methods": methods,
        "sentences": [
            {
                "model": models.index(digest),
                "text": text,
                "tokens": row.sentence_tokens,
                "label": row.label_name,
                "margin": round_down(row.clean_margin),
            }
            for (digest, text), row in sentences.items()
        ],
        "edges": [
            [models.index(digest), norms.index(norm), [f"{edge:.2g}" for edge in scale.edges()]]
            for (digest, norm), scale in scales.items()
            if scale
        ],
        "columns": RADII,
        "rows": [radius(row) for row in rows if row.ok],
        "failure_columns": TROUBLES,
        "failures": [[*start(row), row.status, row.reason] for row in rows if row.reason or not row.ok],
    }


def _scales(rows: Sequence[Row]) -> dict[tuple[str, str], ColourScale | None]:
    """One scale of colours for all sentences of a model and a norm, so that they compare."""
    radii: dict[tuple[str, str], list[float]] = {(row.model_digest, row.norm): [] for row in rows}
    for (digest, norm, *_), task in best_of(rows).items():
        radii[digest, norm].append(task.certified)
    return {key: ColourScale.over(values) for key, values in radii.items()}


def _setup(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What one needs to know to get the same numbers again."""
    names = _names(rows)
    finished = sorted(row.finished for row in rows)
    attacks = "with" if any(row.attack_seconds is not None for row in rows) else "without"
    facts: list[tuple[str, Iterable[object]]] = [
        ("models", (f"{name}, digest {digest}" for digest, name in names.items())),
        ("configurations", dict.fromkeys(row.config for row in rows)),
        ("seeds", dict.fromkeys(row.seed for row in rows)),
        ("threads per task", dict.fromkeys(row.threads for row in rows)),
        ("attacks", [attacks]),
        ("finished", [" to ".join(dict.fromkeys([finished[0], finished[-1]]))]),
        ("versions", dict.fromkeys(row.versions for row in rows)),
    ]
    return [(name, "; ".join(map(str, values))) for name, values in facts]


def _methods(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """What every method was made of; how it learns is said only of those that do."""
    learning = ("steps", "rate", "start")
    return [
        (
            name,
            ", ".join(
                f"{key} {value}"
                for key, value in made.items()
                if value not in (None, "") and not (key in learning and made.get("optimise") == "none")
            ),
        )
        for name, made in {row.method: row.parts for row in rows}.items()
    ]
