"""The page that ties figures and tables together, with all that is needed to repeat them."""

from __future__ import annotations

from collections.abc import Sequence

from buffet.lab.reproduce.figures import Figure
from buffet.lab.reproduce.results import Results
from buffet.lab.reproduce.tables import Table
from buffet.report import Versions

ORDER = (
    ("Certified radii", ("scatter", "boxes", "radii")),
    ("With log-sum-exp softmax", ("lse", "margins")),
    ("How o-BuFFeT learns", ("margin-curves",)),
    ("Time", ("times",)),
    ("Models and data", ("accuracy", "datasets")),
)
"""The sections of the page, and how the names of what belongs there begin."""


def index_page(results: Results, figures: Sequence[Figure], tables: Sequence[Table], command: str) -> str:
    """The page in Markdown; pictures and data are linked where `reproduce` puts them."""
    parts = ["# Results", _introduction(results)]
    for title, names in ORDER:
        found = [_figure(figure) for name in names for figure in figures if figure.name.startswith(name)]
        found += [_table(table) for name in names for table in tables if table.name == name]
        if found:
            parts += [f"## {title}", *found]
    parts += ["## To repeat this", _repeat(results, command)]
    return "\n\n".join(parts) + "\n"


def _introduction(results: Results) -> str:
    scale = results.scale
    answered = sum(row.ok for row in results.rows)
    failed = len(results.rows) - answered
    norm = f"L{scale.norm:g}".replace("inf", "∞")
    return (
        f"Scale *{scale.name}*: {scale.summary}. A task is one word of a test sentence the model answers "
        f"rightly; it moves within an {norm} ball. {answered:,} of {scale.radii:,} radii were found, "
        f"{failed} failed. Certified numbers are proven; ratios are rounded down."
    )


def _figure(figure: Figure) -> str:
    path = f"figures/{figure.name}"
    return (
        f"![{figure.caption}]({path}.svg)\n\n*{figure.caption}* "
        f"([SVG]({path}.svg), [PNG]({path}.png), [data]({path}.csv))"
    )


def _table(table: Table) -> str:
    path = f"tables/{table.name}"
    return (
        f"{table.markdown()}\n*{table.caption}* "
        f"([Markdown]({path}.md), [LaTeX]({path}.tex), [data]({path}.csv))"
    )


def _repeat(results: Results, command: str) -> str:
    now = Versions.current()
    seeds = sorted({row.seed for row in results.rows}) or [results.scale.seed]
    models = {row.model: row.model_digest for row in results.rows}
    lines = [
        f"```console\n{command}\n```",
        "\n".join(
            [
                f"- Versions: buffet {now.buffet}, PyTorch {now.torch}, Python {now.python}.",
                f"- Seed of training, the choice of tasks and the attack: {', '.join(map(str, seeds))}.",
                *(f"- Model `{name}`: digest `{digest}`." for name, digest in models.items()),
                *(f"- Data `{data.name}`: sha256 `{data.sha256}`." for data in results.data.values()),
                *([f"- {_cost(results)}"] if results.times else []),
            ]
        ),
    ]
    notes = [data.note for data in results.data.values() if data.note]
    return "\n\n".join([*lines, *notes])


def _cost(results: Results) -> str:
    parts = ", ".join(f"{stage} {cpu / 60:.1f}" for stage, (cpu, _) in results.times.items())
    total = sum(cpu for cpu, _ in results.times.values())
    return f"CPU minutes, all runs of the command together: {total / 60:.1f} ({parts})."
