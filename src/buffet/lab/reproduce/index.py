"""The page that ties figures and tables together, with all that is needed to repeat them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from buffet.lab.reproduce.claims import progress
from buffet.lab.reproduce.figures import Figure
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.tables import Table

ORDER = (
    ("Certified radii (RQ1)", ("gains", "scatter", "boxes", "ours")),
    ("How margins grow while α are learned (RQ2)", ("margin-curves",)),
    ("Time (RQ3)", ("times",)),
    ("With log-sum-exp softmax, at a fixed radius", ("margins",)),
    ("Models and data", ("accuracy", "datasets")),
    ("Every model and method", ("radii",)),
)
"""The sections of the page, and how the names of what belongs there begin."""


def index_page(results: Results, figures: Sequence[Figure], tables: Sequence[Table]) -> str:
    """The page in Markdown; pictures are linked where `reproduce` puts them."""
    parts = ["# Results", *_introduction(results)]
    for title, names in ORDER:
        found = []
        for name in names:
            found += [_table(table) for table in tables if table.name.startswith(name)]
            found += [_figure(figure) for figure in figures if figure.name.startswith(name)]
        if found:
            parts += [f"## {title}", *found]
    parts += ["## To repeat this", _repeat(results)]
    return "\n\n".join(parts) + "\n"


def _introduction(results: Results) -> list[str]:
    run = results.records.run
    answers = [answer for task in results.records.tasks for answer in task.answers.values()]
    failed = sum(answer.certified is None for answer in answers)
    norm = f"L{run.norm}".replace("inf", "∞")
    told = [
        f"Scale *{run.scale}*: {run.summary}. A task is one word, drawn at random, of a correctly "
        f"classified test sentence; it moves within an {norm} ball. {len(answers) - failed:,} radii of "
        f"{len(results.records.tasks):,} tasks were found, {failed} failed. Certified numbers are proven; "
        "ratios are rounded down. [What the paper claims, and what came out](claims.md).",
        progress(results),
    ]
    if run.absent:
        told.append(f"Not run, as they are not trained yet: {', '.join(run.absent)}.")
    return told


def _figure(figure: Figure) -> str:
    return f"![{figure.caption}](figures/{figure.name}.svg)\n\n*{figure.caption}*"


def _table(table: Table) -> str:
    return f"{table.markdown()}\n*{table.caption}*"


def _repeat(results: Results) -> str:
    run = results.records.run
    lines = [
        f"```console\n{run.command}\n```",
        "\n".join(
            [
                f"- Versions: buffet {run.versions.buffet}, PyTorch {run.versions.torch}, "
                f"Python {run.versions.python}.",
                f"- Seed of training, the choice of tasks and the attack: {run.seed}.",
                *(f"- Data `{data.folder}`: sha256 `{data.sha256}`." for data in results.records.data),
                *([f"- {_cost(run.cpu_minutes)}"] if run.cpu_minutes else []),
                f"- Every number here is drawn from [{results.records.name}]({results.records.name}): "
                "`buffet reproduce --draw-from DIR --out DIR`, DIR the directory of that file.",
            ]
        ),
    ]
    notes = [data.note for data in results.records.data if data.note]
    return "\n\n".join([*lines, *notes])


def _cost(minutes: Mapping[str, float]) -> str:
    parts = ", ".join(f"{stage} {spent:.1f}" for stage, spent in minutes.items())
    return f"CPU minutes, all runs of the command together: {sum(minutes.values()):.1f} ({parts})."
