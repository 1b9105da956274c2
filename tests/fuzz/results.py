"""Experiments and data put wrong: what sweeps, pages, benchmarks and training read."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path

from safetensors.torch import load, save

from buffet.data import read_splits
from buffet.experiments.store import seal
from buffet.lab.bench.cases import USUAL, shaped
from buffet.lab.bench.comparison import compare
from buffet.lab.bench.measuring import Measurement
from buffet.lab.bench.running import BenchRow, document, read_document
from buffet.training import TrainSettings, train
from buffet.training.results import TrainProgress
from buffet.training.state import resume_file
from fuzz.models import hostile_weights
from fuzz.mutate import NUMBERS, hostile_bytes, hostile_json, hostile_text
from fuzz.place import FoundError, Place, command

INJECTED = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"

SWEEP = """
models = ["{model}"]
methods = ["baseline", {{ name = "backward", window = 2 }}]
norms = [1, 2, "inf"]
seed = 3
what = "radius"
[sentences]
file = "{data}"
count = 2
max_words = 20
[words]
count = 2
together = 1
[radius]
search = "secant"
tolerance = 0.01
[run]
workers = 1
limit = 60.5
"""


def sweep(rng: random.Random, place: Place) -> None:
    text = SWEEP.format(model=place.model, data=place.root / "dev.tsv")
    if rng.random() < 0.5:
        lines = [line for line in text.split("\n") if line]
        at = rng.randrange(len(lines))
        value = rng.choice(
            (*map(str, NUMBERS), "nan", "inf", "[]", "{}", '""', "true", "1979-05-27", "[[1]]", "-1")
        )
        lines[at] = f"{lines[at].split('=')[0]} = {value}"
        data = "\n".join(lines).encode()
    else:
        data = hostile_text(rng, text)
    path = place.root / "sweep.toml"
    path.write_bytes(data)
    command(["sweep", str(path), "--dry-run", "--json"])


EXAMPLE: dict[str, object] = {
    **dict.fromkeys(("key", "model", "model_digest", "sentence", "label_name", "config", "finished"), "x"),
    **dict.fromkeys(("clean_margin", "certified", "attacked", "margin", "seconds", "task_seconds"), 0.5),
    **dict.fromkeys(("reason", "attack_seconds")),
    "gold": 1,
    "label": 1,
    "evaluations": 3,
    "batch": 1,
    "seed": 0,
    "threads": 1,
    "sentence_tokens": ["a"],
    "words": [1],
    "tokens": ["a"],
    "parts": {"steps": 1},
    "status": "ok",
    "norm": "2",
    "method": "baseline",
    "what": "radius",
    "versions": {"buffet": "0", "torch": "2", "python": "3"},
}
"""A row of a sweep as it is written."""


def rows(rng: random.Random, place: Place) -> None:
    """What `buffet summary`, and a sweep that goes on, read back."""
    command(
        [
            "summary",
            str(_hostile_rows(rng, place)),
            rng.choice(("--json", "--reference=baseline")),
        ]
    )


def _hostile_rows(rng: random.Random, place: Place) -> Path:
    base = EXAMPLE
    if rng.random() < 0.3:
        base = {**base, rng.choice(("model", "sentence", "method", "label_name", "reason")): INJECTED}
    lines = [json.dumps({**base, "key": f"k{i}"}, separators=(",", ":")).encode() for i in range(3)]
    lines[rng.randrange(3)] = hostile_json(rng, base).replace(b'": ', b'":')
    if rng.random() < 0.9:  # with the right check, so that what is in them is looked at
        lines = [seal(line) for line in lines]
    data = b"\n".join(lines) + b"\n" * rng.randrange(2)
    path = place.root / "rows.ndjson"
    path.write_bytes(hostile_bytes(rng, data) if rng.random() < 0.3 else data)
    return path


def report(rng: random.Random, place: Place) -> None:
    """The same rows as a page, in which nothing of the data may become markup or code."""
    page = place.root / "page.html"
    page.unlink(missing_ok=True)
    command(["report", str(_hostile_rows(rng, place)), "-o", str(page)])
    text = page.read_text()
    if text.count("<script") != text.count("</script>") or INJECTED in text:
        raise FoundError("data became a part of the page")


def table(rng: random.Random, place: Place) -> None:
    """Training data."""
    directory = place.root / "data"
    directory.mkdir(exist_ok=True)
    text = (place.root / "dev.tsv").read_text()
    for part in ("train", "dev", "test"):
        (directory / f"{part}.tsv").write_bytes(
            hostile_text(rng, text) if rng.random() < 0.5 else text.encode()
        )
    read_splits(directory)


# --- measurements -------------------------------------------------------------------------------------------


@cache
def _measured() -> tuple[BenchRow, ...]:
    numbers = Measurement(0.1, 0.1, 5.0, (4.9, 5.0, 5.2), 0.02, 30.0, 10**9, 10**8, 0.5)
    cases = [shaped(method, *USUAL, 1) for method in ("baseline", "backward")]
    return BenchRow(cases[0], numbers), BenchRow(cases[1], None, "more than 60 s")


def measurements(rng: random.Random, place: Place) -> None:
    """What `buffet bench --against` reads and compares."""
    valid = json.loads(json.dumps(document(_measured(), "cpu")))
    text = hostile_json(rng, valid).decode(errors="replace")
    changes, _ = compare(read_document(text, "before.json"), _measured())
    for change in changes:
        asdict(change), change.ratio, change.real, change.memory


# --- training -----------------------------------------------------------------------------------------------

SMALL = {"layers": 1, "heads": 2, "width": 8, "inner": 8, "epochs": 2, "min_count": 1, "batch": 4}


def resume(rng: random.Random, place: Place) -> None:
    """What an interrupted `buffet train` left behind."""
    settings = small_training(place, overwrite=True)
    left = resume_file(settings.out)
    data = interrupted(place)
    if rng.random() < 0.5:
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        name = rng.choice(("at", "at", "identity"))
        text = hostile_json(rng, json.loads(metadata[name])).decode(errors="replace")
        data = save(load(data), {**metadata, name: text})
    else:
        data = hostile_weights(rng, data)
    left.write_bytes(data)
    try:
        train(settings)
    finally:
        left.unlink(missing_ok=True)


def small_training(place: Place, **housekeeping: object) -> TrainSettings:
    return TrainSettings.of(data=place.corpus, out=place.root / "trained", **SMALL, **housekeeping)


@cache
def interrupted(place: Place) -> bytes:
    """The snapshot of a run that is stopped at the end of its first epoch."""

    def stop(now: TrainProgress) -> None:
        if now.dev_accuracy is not None:
            raise KeyboardInterrupt

    settings = small_training(place, save_minutes=1e-9)
    with suppress(KeyboardInterrupt):
        train(settings, stop)
    return resume_file(settings.out).read_bytes()
