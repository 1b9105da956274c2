"""The tables, each in Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from buffet.lab.reproduce.results import METHODS, Results
from buffet.lab.reproduce.scales import AT_MARGINS, COMPARED, MARGIN_SHARES, REFERENCE

MISSING = "–"
ESCAPES = {
    "\\": r"\textbackslash{}",
    **{letter: f"\\{letter}" for letter in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "Δ": r"$\Delta$",
    "ε": r"$\varepsilon$",
    "×": r"$\times$",
    "–": "--",
    "∞": r"$\infty$",
}


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

    def latex(self) -> str:
        """A floating table; it needs the package booktabs."""
        body = [" & ".join(map(_escaped, row)) + r" \\" for row in (self.header, *self.rows)]
        lines = [
            r"\begin{table}",
            r"  \centering",
            rf"  \caption{{{_escaped(self.caption)}}}",
            rf"  \label{{tab:{self.name}}}",
            rf"  \begin{{tabular}}{{{'l' * self.labels}{'r' * (len(self.header) - self.labels)}}}",
            r"    \toprule",
            f"    {body[0]}",
            r"    \midrule",
            *(f"    {line}" for line in body[1:]),
            r"    \bottomrule",
            r"  \end{tabular}",
            r"\end{table}",
        ]
        return "\n".join(lines) + "\n"

    @property
    def files(self) -> Mapping[str, str]:
        """The content of its files by their endings."""
        return {"md": self.markdown(), "tex": self.latex(), "csv": csv_text(self.header, self.rows)}


def csv_text(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as CSV; numbers in full."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerows([header, *rows])
    return text.getvalue()


def _escaped(text: str) -> str:
    return "".join(ESCAPES.get(letter, letter) for letter in text)


def ratio(value: float | None, digits: int = 2) -> str:
    """A ratio rounded down, so that no claim grows by printing it."""
    return MISSING if value is None else f"{math.floor(value * 10**digits) / 10**digits:.{digits}f}"


def tables(results: Results) -> list[Table]:
    """Every table there is something to fill with."""
    made = (make(results) for make in (_data, _accuracy, _radii, _lse, _margins, _times))
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
        caption="The models: their size, and the share of dev and test sentences they answer rightly.",
        header=("model", "layers", "width", "parameters", "dev", "test"),
        rows=tuple(
            (model, str(a.layers), str(a.width), f"{a.parameters:,}", f"{a.dev:.2%}", f"{a.test:.2%}")
            for model, a in results.accuracies.items()
        ),
    )


def _radii(results: Results) -> Table:
    """One line per model and method."""
    rows = []
    for subject in results.subjects:
        for method in results.methods(subject.preset):
            line = results.lines[subject.preset, method]
            shares = (line.mean_ratio, line.median_ratio, line.worst_ratio, line.mean_bracket)
            rows.append((subject.preset, method, str(line.tasks), *map(ratio, shares)))
    return Table(
        name="radii",
        caption="Certified radii: mean, median and worst ratio to the baseline's on the same tasks, and the "
        "mean share of the attacked radius, above which the answer is known to change.",
        header=("model", "method", "tasks", "mean ×", "median ×", "worst ×", "of attacked"),
        rows=tuple(rows),
        labels=2,
    )


def _across(results: Results, model: str, methods: Sequence[str], field: str) -> list[str]:
    """A field of the comparison with the baseline, for one model and several methods."""
    lines = [results.lines.get((model, method)) for method in methods]
    return [ratio(getattr(line, field)) if line else MISSING for line in lines]


def _lse(results: Results) -> Table:
    rows = []
    for subject in results.subjects:
        tasks = results.lines[subject.preset, REFERENCE].tasks
        rows.append((subject.preset, str(tasks), *_across(results, subject.preset, COMPARED, "mean_ratio")))
    return Table(
        name="lse",
        caption="Bound fusing and log-sum-exp softmax bounds, alone and combined: mean ratio of the "
        "certified radius to the baseline's.",
        header=("model", "tasks", *COMPARED),
        rows=tuple(rows),
    )


def _times(results: Results) -> Table:
    methods = [method for method in METHODS if method != REFERENCE]
    rows = []
    for subject in results.subjects:
        own = results.lines[subject.preset, REFERENCE]
        ratios = _across(results, subject.preset, methods, "seconds_ratio")
        rows.append((subject.preset, str(own.tasks), f"{own.seconds / max(1, own.tasks):.2f}", *ratios))
    return Table(
        name="times",
        caption="Time of a radius search: the baseline's in seconds per task, of the others the ratio Δ to "
        "it on the same tasks. One thread; thorough methods were asked about the first tasks only.",
        header=("model", "tasks", f"{REFERENCE} s", *(f"Δ {method}" for method in methods)),
        rows=tuple(rows),
    )


def _margins(results: Results) -> Table:
    """Margins at shares of the baseline's radius, in the form of the paper."""
    rows = []
    for subject in results.scale.subjects:
        for share in MARGIN_SHARES:
            found = {m: results.margin_ratios(subject.preset, m, share) for m in AT_MARGINS}
            if counts := [len(values) for values in found.values() if values]:
                means = (ratio(statistics.fmean(v), 3) if v else MISSING for v in found.values())
                rows.append((subject.preset, f"{share:g}", str(min(counts)), ratio(1.0, 3), *means))
    return Table(
        name="margins",
        caption="Average normalised margin: the lower bound of the margin divided by the baseline's, at ε as "
        f"a share of the radius the baseline certifies. Learning does not stop at a proof "
        f"({results.scale.margin_steps} steps).",
        header=("model", "ε / baseline's", "tasks", REFERENCE, *AT_MARGINS),
        rows=tuple(rows),
    )
