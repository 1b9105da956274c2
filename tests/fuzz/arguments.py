"""Arguments nobody would give."""

from __future__ import annotations

import random

from fuzz.mutate import LINES, NUMBERS
from fuzz.place import Place, command
from tiny_checkpoint import SENTENCES

VALUES = (
    *map(str, NUMBERS),
    *LINES,
    *("nan", "inf", "-inf", "1e400", "all", "1", "1,2", "1+2", "1+1", "0", "2GB", "1TB", "9" * 400, "none"),
    *(
        "baseline",
        "interval",
        "backward",
        "buffet",
        "forward",
        "lse",
        "rule",
        "decomposed",
        "final",
        "positive",
    ),
    *("--json", "--help", "-h", "--", "-", "..", "/", "/etc/passwd", "/dev/null", "\ud800"),
)
OPTIONS = (
    *(
        "--words",
        "--norm",
        "--eps",
        "--method",
        "--propagation",
        "--product",
        "--softmax",
        "--optimise",
        "--steps",
    ),
    *("--rate", "--start", "--window", "--search", "--label", "--seed", "--threads", "--memory", "--special"),
    *("--no-attack", "--json", "--model", "--unknown", "--help"),
)


def arguments(rng: random.Random, place: Place) -> None:
    """`buffet certify` with options nobody would give; quick where they are taken."""
    text = rng.choice((*SENTENCES[:3], *LINES, "[CLS] [SEP] [PAD]", "good " * 40, "\ud800"))
    given = [
        "certify",
        text,
        "--model",
        str(place.model),
        "--method",
        "interval",
        "--budget",
        "0.2",
        "--json",
    ]
    given += ["--words", "1", "--no-attack"]
    for _ in range(rng.randrange(4)):
        given += [rng.choice(OPTIONS), rng.choice(VALUES)]
    if rng.random() < 0.1:
        given[0] = rng.choice(("summary", "methods", "models", "nothing", "", "--version", "-x"))
    if "--help" in given or "-h" in given:
        given = [word for word in given if word not in ("--help", "-h")]
    if "--method" in given[6:] or "--optimise" in given:
        given += ["--steps", "1"]
    # Nothing outside of the place is written.
    command(["--label" if word == "--html" else word for word in given])
