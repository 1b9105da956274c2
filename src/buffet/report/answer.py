"""What `buffet certify` found, as one plain structure: exactly what ``--json`` prints.

Numbers in it are exact; what is shown to people goes through `shown`, which rounds to the safe side.
"""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import Literal

from pydantic import BaseModel, ConfigDict

from buffet.loading import Model
from buffet.printing import at_least, at_most, listed, norm_name, round_down, round_up
from buffet.report.scale import steps
from buffet.verdicts import Verdict
from buffet.words.nearest import Neighbour


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Token(Frozen):
    """One row of the input."""

    index: int
    token: str
    special: bool
    unknown: bool  # stands for a word outside the vocabulary


class TaskResult(Frozen):
    """What is known about moving some words together."""

    words: tuple[int, ...]
    tokens: tuple[str, ...]
    verdict: Verdict
    certified: float  # proven: no move up to this size changes the answer
    attacked: float | None  # a move of at most this size was seen to change it; None: none found
    margin: float | None  # lower bound of the margin at `certified` (with a given ε: at ε); None: no bound
    margins: dict[str, float | None] | None = None  # with a given ε: lower bounds against every other class
    counterexample: list[list[float]] | None = None  # with a given ε, if falsified: the moved rows that do it
    evaluations: int
    nearest: tuple[Neighbour, ...] = ()  # to every word that moves; none for an image
    held: int = 0  # words of the vocabulary within the certified ball of some word that moves


class QueryInfo(Frozen):
    """What was asked, defaults filled in."""

    norm: float | Literal["inf"]
    eps: float | None  # None: the largest ε was searched for
    method: str
    propagation: str
    product: str
    softmax: str
    optimise: str
    steps: int | None
    rate: float | None
    start: str | None
    window: int | None
    cells: int = 1
    search: str | None
    budget: float | None  # seconds
    label: int  # the class that is defended
    attack: bool
    seed: int
    threads: int
    memory: int | None  # bytes that were allowed
    device: str = "cpu"


class ModelInfo(Frozen):
    """Which classifier."""

    name: str
    labels: tuple[str, ...]
    layers: int
    width: int

    @classmethod
    def of(cls, model: Model) -> ModelInfo:
        config = model.config
        return cls(
            name=model.name,
            labels=model.labels,
            layers=config.num_hidden_layers,
            width=config.hidden_size,
        )


class Versions(Frozen):
    """What the numbers were computed with."""

    buffet: str
    torch: str
    python: str

    def __str__(self) -> str:
        return f"buffet {self.buffet}, torch {self.torch}, Python {self.python}"

    @classmethod
    def current(cls) -> Versions:
        return cls(buffet=version("buffet"), torch=version("torch"), python=platform.python_version())


class Picture(Frozen):
    """The image that was asked about: the pixels of its patches."""

    side: int  # patches in a line, and lines of patches
    patch: int  # pixels in a line of a patch, and lines of pixels
    channels: int  # 1: grey; 3: red, green and blue
    pixels: str  # base64 of bytes: patch after patch, in each channel after channel, line by line


class CertifyReport(Frozen):
    """The whole answer of `buffet certify`."""

    format: Literal["buffet certify 1"] = "buffet certify 1"
    text: str
    tokens: tuple[Token, ...]
    model: ModelInfo
    query: QueryInfo
    answer: int  # the class the model gives the unmoved text
    logits: tuple[float, ...]
    clean_margin: float
    verdict: Verdict  # of all tasks together
    certified: float  # the smallest over the tasks
    attacked: float | None  # the smallest over the tasks
    tasks: tuple[TaskResult, ...]
    evaluations: int
    seconds: float
    attack_seconds: float | None  # None: not timed apart
    command: str
    versions: Versions
    picture: Picture | None = None  # of an image classifier: its words are the patches of this

    @property
    def unit(self) -> str:
        """What a row of the input is called."""
        return "word" if self.picture is None else "patch"

    @property
    def units(self) -> str:
        """What several are called."""
        return "words" if self.picture is None else "patches"

    @property
    def norm_name(self) -> str:
        return norm_name(self.query.norm)

    @property
    def method_name(self) -> str:
        window = "" if self.query.window is None else f", window {self.query.window}"
        cells = "" if self.query.cells == 1 else f", {self.query.cells} cells"
        return f"{self.query.method} ({self.query.propagation}{window}{cells})"

    def strength(self, task: TaskResult) -> float:
        """What colours a task: its certified radius, or at a given ε the part of its margin that is left."""
        if self.query.eps is None:
            return task.certified
        return max(task.margin or 0.0, 0.0) if task.verdict == "certified" else 0.0


def shades(report: CertifyReport) -> dict[int, int]:
    """For every word that was moved, its step of the ramp, relative to the sentence.

    A word in several tasks takes the weakest.
    """
    strengths: dict[int, float] = {}
    for task in report.tasks:
        for word in task.words:
            strengths[word] = min(report.strength(task), strengths.get(word, float("inf")))
    return steps(strengths)


class Shown(Frozen):
    """The cells of one row of the table, rounded to the safe side."""

    words: str
    text: str
    certified: str
    attacked: str
    margin: str
    verdict: Verdict
    nearest: str


def shown(task: TaskResult, eps: float | None) -> Shown:
    """A task as it is printed: lower bounds rounded down, the attacked radius up.

    A given `eps` was not computed, so it is repeated as it was given.
    """
    return Shown(
        words="+".join(listed(task.words)),
        text=" + ".join(listed(task.tokens)),
        certified=at_least(task.certified, eps),
        attacked=at_most(task.attacked, eps),
        margin=at_least(task.margin),
        verdict=task.verdict,
        nearest=", ".join(listed([_near(word) for word in task.nearest])),
    )


def _near(word: Neighbour) -> str:
    """A word, how far away it is, and whether that is inside the ball."""
    return f"{word.token} {round_up(word.distance, 3) if word.inside else round_down(word.distance, 3)}" + (
        " (inside)" if word.inside else ""
    )
