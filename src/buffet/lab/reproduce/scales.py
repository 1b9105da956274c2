"""How much is evaluated: on a laptop within half an hour, or as in the paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from buffet.training.presets import USUAL

REFERENCE = "baseline"
COMPARED: tuple[str, ...] = (REFERENCE, "r-buffet", "o-buffet", "lse", "lse+r-buffet", "lse+o-buffet")
"""The paper's comparison; every task is asked to all of them."""
THOROUGH: tuple[str, ...] = ("backward", "buffet")
"""What goes beyond the paper, and costs ten to thirty times as much: asked about the first tasks only."""
AT_MARGINS = ("lse", "o-buffet", "lse+o-buffet")
"""Whose margins are compared with the reference's at a given size."""
MARGIN_SHARES = (0.5, 0.9)
"""That size, as a share of the radius the reference certifies."""
CURVE_SHARE = 1.1
"""Where a margin curve is drawn: beyond the reference's radius, so that its margin is below 0."""
FOLDERS: Mapping[str, str] = {"sst": "sst2", "yelp": "yelp"}
"""The data of a preset, and the folder it is in."""


@dataclass(frozen=True)
class Subject:
    """A model and the number of tasks it gets: one word each of as many test sentences it answers rightly."""

    preset: str  # of `buffet train`
    tasks: int  # asked to all methods of `COMPARED`
    thorough: int  # the first of them, asked to the thorough methods too
    curves: int  # the first of them, with a margin curve
    margins: int = 0  # the first of them, with margins at given sizes

    @property
    def data(self) -> str:
        return self.preset.partition("-")[0]


@dataclass(frozen=True)
class Scale:
    """What is evaluated. `training` replaces settings of the presets."""

    name: str
    summary: str
    subjects: tuple[Subject, ...]
    min_words: int  # of a sentence
    max_words: int
    curve_steps: int
    margin_steps: int
    norm: float = 2.0
    seed: int = 0
    thorough: tuple[str, ...] = THOROUGH
    training: Mapping[str, object] = field(default_factory=dict)

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(subject.data for subject in self.subjects))

    @property
    def radii(self) -> int:
        """How many are searched."""
        return sum(s.tasks * len(COMPARED) + s.thorough * len(self.thorough) for s in self.subjects)

    def about(self, data: str) -> tuple[Subject, ...]:
        """The subjects trained on one dataset."""
        return tuple(subject for subject in self.subjects if subject.data == data)


def _paper(data: str, architecture: str) -> Subject:
    return Subject(
        f"{data}-{architecture}",
        tasks=140,
        thorough=20,
        curves=10,
        margins=140 if architecture == "3" else 0,
    )


SCALES: Mapping[str, Scale] = {
    "small": Scale(
        name="small",
        summary="models of width 128 trained with the usual weight decay, sentences of 4 to 10 words",
        subjects=(
            Subject("sst-small-1", tasks=16, thorough=4, curves=3),
            Subject("sst-small-3", tasks=12, thorough=4, curves=3, margins=4),
            Subject("sst-small-6", tasks=2, thorough=0, curves=1),
            Subject("yelp-small-1", tasks=16, thorough=4, curves=3),
            Subject("yelp-small-3", tasks=12, thorough=4, curves=3, margins=4),
        ),
        min_words=4,
        max_words=10,
        curve_steps=100,
        margin_steps=25,
        training=USUAL,  # like the paper's models; strong weight decay brings all methods closer together
    ),
    "paper": Scale(
        name="paper",
        summary="the 10 models of the paper (width 512, and TinyBERT's architecture), 140 tasks each",
        subjects=tuple(
            _paper(data, architecture)
            for data in ("sst", "yelp")
            for architecture in ("1", "2", "3", "6", "tinybert")
        ),
        min_words=1,
        max_words=30,
        curve_steps=1000,
        margin_steps=1000,
    ),
}
