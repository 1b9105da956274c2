"""Draws what was measured from committed rows.

On models of `buffet train`: how methods compare (`results/methods.md`), how accurate and how provable they
are (tables in `models.md`), what is proven of a data set with its words exchanged (`README.md`). Of the
competition VNN-COMP: how many instances are proven (`properties.md`).

buffet sweep docs/results/methods.toml --out sweep.ndjson   # and methods-6.toml
python docs/measured.py SWEEP...          # keeps what came out, without the sentences, and draws it
python docs/measured.py MODEL...          # keeps what the cards of checkpoints say, and draws it
python docs/measured.py evaluation.ndjson # keeps how many sentences an evaluation has proven, and draws it
python docs/measured.py                   # draws what is kept
"""

from __future__ import annotations

import csv
import json
import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from buffet.experiments import Row, read_rows
from buffet.lab.reproduce.records import task_records
from buffet.lab.reproduce.tables import MISSING, Table, ratio
from buffet.printing import round_down, round_up

RESULTS = Path(__file__).parent / "results"
ROWS, CARDS = RESULTS / "methods.ndjson", RESULTS / "models.ndjson"
EVALUATION, INSTANCES = RESULTS / "evaluation.ndjson", RESULTS / "vit_2023.csv"
PAGE, MODELS = RESULTS / "methods.md", RESULTS.parent / "models.md"
README, PROPERTIES = RESULTS.parents[1] / "README.md", RESULTS.parent / "properties.md"
REFERENCE = "baseline"
EVALUATE = (
    "buffet evaluate --data sst2/test.tsv --synonyms synonyms.json --most-synonyms 8 "
    "--model sst2-substitutions --budget 20"
)
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
buffet sweep docs/results/methods-6.toml --out sweep-6.ndjson
python docs/measured.py sweep.ndjson sweep-6.ndjson
```

The sweeps need the models and the data named in their files. Every number here is drawn from
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
        ends = dict.fromkeys(ratio(end, 1) for end in (min(times), max(times))) if times else ()
        told = f"{' to '.join(ends)} ×" if times else MISSING
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


def _mean(numbers: Iterable[float | None]) -> float:
    return statistics.fmean(number for number in numbers if number is not None)


def trained(cards: Sequence[Task]) -> str:
    """How accurate models are."""
    rows = [(f"`{card['recipe']}`", *(f"{card[part]:.2f} %" for part in ("dev", "test"))) for card in cards]
    return Table("trained", "", ("model", "dev", "test"), tuple(rows)).markdown()


def provable(tasks: Sequence[Task]) -> str:
    """Mean radii in L2, by a quick method and by the tightest."""
    rows = []
    for model in sorted({task["model"] for task in tasks}):
        own = [task for task in tasks if task["model"] == model and task["norm"] == "2" and task["attacked"]]
        certified = (
            round_down(
                _mean(task["answers"][method]["certified"] for task in own if method in task["answers"])
            )
            for method in ("lse", "buffet")
        )
        attacked = round_up(_mean(task["attacked"] for task in own))
        rows.append((f"`{model}`", str(len(own)), *certified, attacked))
    return Table("provable", "", ("model", "words", "`lse`", "`buffet`", "attacked"), tuple(rows)).markdown()


def evaluation(path: Path) -> dict[str, Any]:
    """How many sentences of a data set are classified correctly, and of these proven, open or broken."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    right = [row for row in rows if row["answer"] == row["gold"]]
    found = Counter(row["levels"][0]["verdict"] for row in right)
    counts = {verdict: found[verdict] for verdict in ("certified", "falsified", "unknown")}
    return {"model": rows[0]["model"], "sentences": len(rows), "right": len(right), **counts}


def told(found: Task) -> str:
    """What `buffet evaluate` prints of it: what is certified rounded down, all else up."""
    counts = {"clean": found["right"], "certified": found["certified"]}
    counts |= {"under attack": found["certified"] + found["unknown"], "open": found["unknown"]}
    cells = {
        name: (math.floor if name == "certified" else math.ceil)(10_000 * count / found["sentences"]) / 10_000
        for name, count in counts.items()
    }
    header = f"at most  {'  '.join(f'{name:>{max(6, len(name))}}' for name in cells)}"
    values = f"    all  {'  '.join(f'{cell:>{max(6, len(name))}.4f}' for name, cell in cells.items())}"
    about = f"{found['model']} · words exchanged for synonyms · buffet"
    about += f" · {found['sentences']:,} sentences of test.tsv"
    return f"```console\n$ {EVALUATE}\n{about}\n\n{header}\n{values}\n```\n"


def exchanged(found: Task) -> str:
    """The same as a table, in percent of all sentences."""
    shares = (
        100 * found[name] / found["sentences"] for name in ("right", "certified", "falsified", "unknown")
    )
    row = (f"`{found['model']}`, all {found['sentences']:,} sentences", *(f"{s:.2f} %" for s in shares))
    return Table("exchanged", "", ("", "clean", "certified", "falsified", "open"), (row,)).markdown()


def instances(rows: Sequence[Mapping[str, str]]) -> str:
    """How many instances of every network two verifiers have proven."""
    table = []
    for network in sorted({row["network"] for row in rows}):
        own = [row for row in rows if row["network"] == network]
        proven = [float(row["seconds"]) for row in own if row["buffet"] == "unsat"]
        theirs = sum(row["alpha-beta-CROWN 2023"] == "unsat" for row in own)
        numbers = (len(own), len(proven), theirs, f"{statistics.median(proven):.0f}", f"{max(proven):.0f}")
        table.append((f"`{network}`", *map(str, numbers)))
    header = ("network", "instances", "`buffet`", "alpha-beta-CROWN 2023", "median seconds", "most")
    return Table("instances", "", header, tuple(table)).markdown()


def drawn(page: str, tables: Mapping[str, str]) -> str:
    """A page with its tables in place: each stands between `<!-- NAME -->` and `<!-- end -->`."""
    for name, table in tables.items():
        pattern = rf"(?s)<!-- {name} -->\n.*?<!-- end -->"
        page, count = re.subn(pattern, lambda _, t=table, n=name: f"<!-- {n} -->\n\n{t}\n<!-- end -->", page)
        assert count == 1, f"<!-- {name} --> stands {count} times"
    return page


def card(model: Path) -> dict[str, Any]:
    """What the card of a checkpoint says."""
    text = (model / "README.md").read_text()

    def percent(part: str) -> float:
        found = re.search(rf"^\| {part} accuracy \| ([0-9.]+)%", text, re.M)
        assert found, f"{model}: no {part} accuracy"
        return float(found[1])

    command = re.search(r"^    buffet train (.*)$", text, re.M)
    assert command, f"{model}: no command"
    recipe = re.sub(r" ?--(data|out|synonyms|from) \S+", "", command[1])
    return {"recipe": recipe or model.name, "dev": percent("dev"), "test": percent("test")}


def read(rows: Path) -> list[Task]:
    return [json.loads(line) for line in rows.read_text().splitlines()]


def keep(rows: Path, things: Iterable[Task]) -> None:
    rows.write_text("".join(f"{json.dumps(t, ensure_ascii=False, separators=(',', ':'))}\n" for t in things))


def pages() -> dict[Path, str]:
    """All that is drawn from the rows that are kept."""
    tasks, cards, (found,) = read(ROWS), read(CARDS), read(EVALUATION)
    asked = list(csv.DictReader(INSTANCES.read_text().splitlines()))
    tables = {"trained": trained(cards), "provable": provable(tasks), "exchanged": exchanged(found)}
    return {
        PAGE: page(tasks),
        MODELS: drawn(MODELS.read_text(), tables),
        README: drawn(README.read_text(), {"evaluated": told(found)}),
        PROPERTIES: drawn(PROPERTIES.read_text(), {"instances": instances(asked)}),
    }


if __name__ == "__main__":
    given = [Path(argument) for argument in sys.argv[1:]]
    files = [path for path in given if path.is_file()]
    evaluations = [path for path in files if '"counterexample"' in path.open().readline()]
    if evaluations:
        keep(EVALUATION, map(evaluation, evaluations))
    if sweeps := [path for path in files if path not in evaluations]:
        keep(ROWS, compact(row for path in sweeps for row in read_rows(path)))
    if models := [path for path in given if path.is_dir()]:
        kept = {known["recipe"]: known for known in (read(CARDS) if CARDS.exists() else ())}
        kept |= {found["recipe"]: found for found in map(card, models)}
        keep(CARDS, kept.values())
    for path, text in pages().items():
        path.write_text(text)
