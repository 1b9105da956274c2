"""Draws `results/methods.md`, how methods compare on models of `buffet train`, from committed rows.

buffet sweep docs/results/methods.toml --out sweep.ndjson
python docs/measured.py sweep.ndjson      # keeps what came out, without the sentences, and draws it
python docs/measured.py                   # draws what is kept
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from buffet.experiments import Row, read_rows
from buffet.lab.reproduce.records import task_records
from buffet.lab.reproduce.tables import MISSING, Table, ratio

RESULTS = Path(__file__).parent / "results"
ROWS, PAGE = RESULTS / "methods.ndjson", RESULTS / "methods.md"
REFERENCE = "baseline"
NORMS = {"1": "L1", "2": "L2", "inf": "L∞"}
INTRODUCTION = """# Methods compared

Certified radii of one word each of test sentences of SST-2 (6 to 12 words, drawn at random, correctly
classified), on models of width 128 that `buffet train` makes; `-usual` are trained with the usual weight
decay, the others with a strong one. For every norm: the mean radius, as a multiple of `baseline`'s on
the same tasks, in brackets the worst; and the mean share of the attacked radius, above which the answer
is known to change. Time is the CPU time of all searches in a norm against `baseline`'s (least and
largest of the norms). Ratios are rounded down.
"""
REPEAT = """## To repeat this

```console
buffet sweep docs/results/methods.toml --out sweep.ndjson
python docs/measured.py sweep.ndjson
```

The first needs the models and the data named in that file. Every number here is drawn from
[methods.ndjson](methods.ndjson).
"""
Task = Mapping[str, Any]


def compact(rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
    """What is known of every task, by norm and without its sentence."""
    ordered = sorted(rows, key=lambda row: (row.norm, row.model, row.sentence))
    for norm, own in groupby(ordered, key=lambda row: row.norm):
        for record in task_records(list(own))[0]:
            yield {"norm": norm, **record.model_dump(mode="json", exclude={"kind"})}


def page(tasks: Sequence[Task]) -> str:
    """The page in Markdown: a table for every model."""
    models = sorted({task["model"] for task in tasks}, key=lambda name: ("usual" in name, name))
    return "\n".join([INTRODUCTION, *(_section(model, tasks) for model in models), REPEAT])


def _section(model: str, tasks: Sequence[Task]) -> str:
    own = [task for task in tasks if task["model"] == model]
    methods = list(dict.fromkeys(method for task in own for method in task["answers"]))
    norms = [norm for norm in NORMS if any(task["norm"] == norm for task in own)]
    by_norm = {norm: [task for task in own if task["norm"] == norm] for norm in norms}
    header = ["", *(cell for norm in norms for cell in (f"{NORMS[norm]}: radius", "of attacked")), "time"]
    rows = []
    for method in methods:
        cells = [cell for norm in norms for cell in _cells(method, by_norm[norm])]
        times = [time for norm in norms if (time := _time(method, by_norm[norm])) is not None]
        told = f"{ratio(min(times), 1)} to {ratio(max(times), 1)} ×" if times else MISSING
        rows.append((_spelt(method), *cells, told))
    counts = ", ".join(f"{len(by_norm[norm])} in {NORMS[norm]}" for norm in norms)
    table = Table(model, "", tuple(header), tuple(rows))
    return f"## {model}\n\nTasks: {counts}.\n\n{table.markdown()}"


def _answers(method: str, tasks: Sequence[Task]) -> Iterator[tuple[Task, Task, Task]]:
    """The tasks that a method and the reference have answered, with both answers."""
    for task in tasks:
        ours, theirs = task["answers"].get(method), task["answers"].get(REFERENCE)
        if ours and theirs and ours["certified"] is not None and theirs["certified"]:
            yield task, ours, theirs


def _cells(method: str, tasks: Sequence[Task]) -> tuple[str, str]:
    both = list(_answers(method, tasks))
    ratios = [ours["certified"] / theirs["certified"] for _, ours, theirs in both]
    shares = [ours["certified"] / task["attacked"] for task, ours, _ in both if task["attacked"]]
    if not ratios:
        return MISSING, MISSING
    return (
        f"{ratio(statistics.fmean(ratios))} × ({ratio(min(ratios))})",
        ratio(statistics.fmean(shares)) if shares else MISSING,
    )


def _time(method: str, tasks: Sequence[Task]) -> float | None:
    both = list(_answers(method, tasks))
    theirs = sum(answer["seconds"] for _, _, answer in both)
    return sum(answer["seconds"] for _, answer, _ in both) / theirs if theirs else None


def _spelt(method: str) -> str:
    """As it is typed on the command line."""
    name, _, parts = method.rstrip("]").partition("[")
    options = "".join(f" --{part.replace('=', ' ')}" for part in parts.split(", ") if part)
    return f"`{name}{options}`"


def read() -> list[Task]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        kept = compact(row for path in sys.argv[1:] for row in read_rows(Path(path)))
        ROWS.write_text(
            "".join(f"{json.dumps(task, ensure_ascii=False, separators=(',', ':'))}\n" for task in kept)
        )
    PAGE.write_text(page(read()))
