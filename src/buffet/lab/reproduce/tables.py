"""The tables."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from buffet.lab.reproduce import paper
from buffet.lab.reproduce.records import ModelRecord
from buffet.lab.reproduce.results import METHODS, Results
from buffet.lab.reproduce.scales import AT_MARGINS, MARGIN_SHARES, OURS, PUBLISHED

MISSING = "–"


@dataclass(frozen=True)
class Table:
    """A table as text: the first `labels` columns are words, the others numbers."""

    name: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    labels: int = 1

    def markdown(self) -> str:
        rule = ["---"] * self.labels + ["---:"] * (len(self.header) - self.labels)
        lines = (self.header, rule, *self.rows)
        return "".join(
            f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in lines
        )


def ratio(value: float | None, digits: int = 2) -> str:
    """A ratio rounded down, so that no claim grows by printing it."""
    return MISSING if value is None else f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def tables(results: Results) -> list[Table]:
    """Every table there is something to fill with."""
    made = [_data(results), _accuracy(results)]
    for data, record in results.data.items():
        if models := results.about(data):
            made += [
                _gains(results, data, record.title, models),
                _ours(results, data, record.title, models),
                _times(results, data, record.title, models),
            ]
    made += [_radii(results), _margins(results)]
    return [table for table in made if table.rows]


def _data(results: Results) -> Table:
    return Table(
        name="datasets",
        caption="The datasets: sentences for training (cleaned: nothing of dev or test, nothing twice), dev "
        "and test, and of test the mean number of words and the share of positive sentences.",
        header=("dataset", "train", "dev", "test", "words", "positive"),
        rows=tuple(
            (d.title, f"{d.train:,}", f"{d.dev:,}", f"{d.test:,}", f"{d.words:.1f}", f"{d.positive:.1%}")
            for d in results.data.values()
        ),
    )


def _accuracy(results: Results) -> Table:
    return Table(
        name="accuracy",
        caption="The models: their size, the share of dev and test sentences they classify correctly and the "
        f"paper's range of the latter, the minutes their training took and their digest. {paper.YELP}",
        header=("model", "layers", "width", "parameters", "dev", "test", "paper", "minutes", "digest"),
        rows=tuple(
            (
                m.model,
                str(a.layers),
                str(a.width),
                f"{a.parameters:,}",
                f"{a.dev:.2%}",
                f"{a.test:.2%}",
                paper.accuracy_range(m.model.partition("-")[0]),
                MISSING if m.minutes is None else f"{m.minutes:.0f}",
                m.digest,
            )
            for m in results.records.models
            if (a := m.accuracy)
        ),
    )


Cell = Callable[[str, str], str]
"""What a table says of a model and a method."""


def _by_model(
    name: str, caption: str, models: Sequence[ModelRecord], methods: Sequence[str], cell: Cell, **first: Cell
) -> Table:
    """A line per method, a column per model, behind lines that stand for themselves."""
    lines = [(title.replace("_", " "), *(make(m.model, "") for m in models)) for title, make in first.items()]
    for method in methods:
        cells = [cell(m.model, method) for m in models]
        if any(c != MISSING for c in cells):
            lines.append((method, *cells))
    return Table(name, caption, ("", *(m.model for m in models)), tuple(lines))


def _gains(results: Results, data: str, title: str, models: Sequence[ModelRecord]) -> Table:
    def cell(model: str, method: str) -> str:
        values = results.ratios(model, method)
        if not values:
            return MISSING
        count = "" if len(values) == _compared(results, model) else f" ({len(values)})"
        return f"{ratio(statistics.fmean(values))}{count}"

    return _by_model(
        f"gains-{data}",
        f"{title}: mean ratio of the certified radius to that of {PUBLISHED} on the same tasks (in "
        f"brackets, how many, where it is not all). {paper.GAINS}",
        models,
        METHODS,
        cell,
        tasks=lambda model, _: str(_compared(results, model)),
    )


def _ours(results: Results, data: str, title: str, models: Sequence[ModelRecord]) -> Table:
    return _by_model(
        f"ours-{data}",
        f"{title}: mean ratio of the certified radius to that of {OURS}, which our methods are built on.",
        models,
        METHODS[METHODS.index(OURS) :],
        lambda model, method: ratio(results.mean_ratio(model, method, OURS)),
    )


def _times(results: Results, data: str, title: str, models: Sequence[ModelRecord]) -> Table:
    def seconds(model: str, _: str) -> str:
        found = [p.seconds for p in results.pairs(model, PUBLISHED)]
        return f"{statistics.fmean(found):.2f}" if found else MISSING

    return _by_model(
        f"times-{data}",
        f"{title}: CPU time of a radius search, that of {PUBLISHED} in seconds per task, of the "
        f"others the ratio Δ to it on the same tasks. {paper.TIMES}",
        models,
        METHODS[1:],
        lambda model, method: ratio(results.time_ratio(model, method)),
        **{f"{PUBLISHED},_seconds": seconds},
    )


def _compared(results: Results, model: str) -> int:
    """Tasks of which the published baseline certifies anything."""
    return len(results.ratios(model, PUBLISHED))


def _radii(results: Results) -> Table:
    """One line per model and method."""
    rows = []
    for m in results.models:
        for method in results.methods(m.model):
            values = results.ratios(m.model, method) or (math.nan,)
            shares = (statistics.fmean(values), statistics.median(values), min(values), max(values))
            told = (None if math.isnan(v) else v for v in shares)
            tasks = str(len(results.answered(m.model, method)))
            bracket = ratio(results.bracket(m.model, method))
            rows.append((m.model, method, tasks, *map(ratio, told), bracket))
    return Table(
        name="radii",
        caption=f"Certified radii: mean, median, worst and best ratio to those of {PUBLISHED} on the same "
        "tasks, and the mean share of the attacked radius, above which the answer is known to change.",
        header=("model", "method", "tasks", "mean ×", "median ×", "worst ×", "best ×", "of attacked"),
        rows=tuple(rows),
        labels=2,
    )


def _margins(results: Results) -> Table:
    """Margins at shares of our baseline's radius, in the form of the paper."""
    rows = []
    for m in results.models:
        for share in MARGIN_SHARES:
            found = {method: results.margin_ratios(m.model, method, share) for method in AT_MARGINS}
            if counts := [len(values) for values in found.values() if values]:
                means = (ratio(statistics.fmean(v), 3) if v else MISSING for v in found.values())
                rows.append((m.model, f"{share:g}", str(min(counts)), ratio(1.0, 3), *means))
    return Table(
        name="margins",
        caption=f"Average normalised margin: the lower bound of the margin divided by that of {OURS}, at ε "
        f"as a share of the radius that {OURS} certifies. Learning starts at α = 0, takes "
        f"{results.records.run.margin_steps} steps and does not stop at a proof.",
        header=("model", f"ε / {OURS}", "tasks", OURS, *AT_MARGINS),
        rows=tuple(rows),
    )
