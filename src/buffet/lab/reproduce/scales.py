"""How much is evaluated: on a laptop within half an hour, or as in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

PUBLISHED = "crown-baf"
"""What the paper compares with."""
OURS = "baseline"
"""The same without its losses, which our other methods are built on."""
COMPARED: tuple[str, ...] = (
    PUBLISHED,
    "crown-baf+r",
    "crown-baf+o",
    OURS,
    "r-buffet",
    "o-buffet",
    "lse",
    "lse+o-buffet",
)
"""The paper's comparison, on its baseline and on ours; every task is asked to all of them."""
THOROUGH: tuple[str, ...] = ("backward", "buffet")
"""What goes beyond the paper, and costs ten to thirty times as much: asked about the first tasks only."""
AT_MARGINS = ("lse", "o-buffet", "lse+o-buffet")
"""Whose margins are compared with `OURS` at a given size."""
MARGIN_SHARES = (0.5, 0.9)
"""That size, as a share of the radius that `OURS` certifies."""
CURVES: Mapping[str, str] = {"crown-baf+o": PUBLISHED, "o-buffet": OURS}
"""The methods whose margins are drawn while they learn, and what each starts from."""
CURVE_SHARE = 1.1
"""Where a margin curve is drawn: beyond the radius of what it starts from, so that it begins below 0."""
FOLDERS: Mapping[str, str] = {"sst": "sst2", "yelp": "yelp"}
"""The data of a preset, and the folder it is in."""
EPOCHS: Mapping[str, int] = {"sst": 2, "yelp": 1}
"""Of the paper's models: as accurate as the paper's are, in a fraction of the hours that a preset takes."""


@dataclass(frozen=True)
class Subject:
    """A model and the number of its tasks: one word each of as many correctly classified test sentences."""

    preset: str  # of `buffet train`
    tasks: int  # asked to all methods of `COMPARED`
    thorough: int  # the first of them, asked to the thorough methods too
    curves: int  # the first of them, with margin curves
    margins: int = 0  # the first of them, with margins at given sizes
    first: int | None = None  # those that come before the rest of any model; None: all
    curve_steps: int = 1000
    training: Mapping[str, object] = field(default_factory=dict)  # in place of settings of the preset

    @property
    def data(self) -> str:
        return self.preset.partition("-")[0]

    def turn(self, place: int) -> float:
        """When a task is due. All models advance alike, to 1 with what comes first, to 2 with the rest."""
        first = self.tasks if self.first is None else self.first
        if place < first:
            return (place + 0.5) / first
        return 1 + (place - first + 0.5) / (self.tasks - first)

    def thorough_turn(self, place: int) -> float:
        """The same of the thorough methods."""
        return (place + 1) / self.thorough


@dataclass(frozen=True)
class Scale:
    """What is evaluated."""

    name: str
    summary: str
    subjects: tuple[Subject, ...]
    min_words: int  # of a sentence
    max_words: int
    margin_steps: int
    norm: float = 1.0
    seed: int = 0
    thorough: tuple[str, ...] = THOROUGH

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(subject.data for subject in self.subjects))

    def about(self, data: str) -> tuple[Subject, ...]:
        """The subjects trained on one dataset."""
        return tuple(subject for subject in self.subjects if subject.data == data)


def _paper(data: str) -> tuple[Subject, ...]:
    subjects = (
        Subject(f"{data}-1", tasks=140, thorough=20, curves=5, margins=10),
        Subject(f"{data}-2", tasks=140, thorough=8, curves=3, margins=6),
        Subject(f"{data}-3", tasks=140, thorough=3, curves=1, margins=4, first=30),
        Subject(f"{data}-tinybert", tasks=140, thorough=2, curves=1, margins=2, first=15, curve_steps=300),
        Subject(f"{data}-6", tasks=140, thorough=1, curves=1, margins=1, first=8, curve_steps=100),
    )
    return tuple(replace(subject, training={"epochs": EPOCHS[data]}) for subject in subjects)


SCALES: Mapping[str, Scale] = {
    "small": Scale(
        name="small",
        # trained like the paper's models: strong weight decay brings all methods closer together
        summary="models of width 128 trained with the usual weight decay, sentences of 4 to 10 words",
        subjects=(
            Subject("sst-small-1-usual", tasks=16, thorough=4, curves=3, curve_steps=100),
            Subject("sst-small-3-usual", tasks=12, thorough=4, curves=3, margins=4, curve_steps=100),
            Subject("sst-small-6-usual", tasks=2, thorough=0, curves=1, curve_steps=100),
            Subject("yelp-small-1-usual", tasks=16, thorough=4, curves=3, curve_steps=100),
            Subject("yelp-small-3-usual", tasks=12, thorough=4, curves=3, margins=4, curve_steps=100),
        ),
        min_words=4,
        max_words=10,
        margin_steps=25,
    ),
    "paper": Scale(
        name="paper",
        summary="the 10 models of the paper (width 512, and TinyBERT's architecture), up to 140 tasks each",
        subjects=(*_paper("sst"), *_paper("yelp")),
        min_words=1,
        max_words=30,
        margin_steps=100,
        thorough=("buffet",),
    ),
}
