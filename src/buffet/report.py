"""What `buffet certify` found, as one plain structure, and the page it makes.

`CertifyReport` is exactly what ``--json`` prints; `render_html` turns the same structure into one
self-contained page (no network, everything escaped). Numbers in the structure are exact; what is shown to
people goes through `shown`, which rounds to the safe side.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import BaseModel, ConfigDict

from buffet.errors import BuffetError
from buffet.rounding import round_down, round_up

Verdict = Literal["certified", "falsified", "unknown"]

RAMP = ("#fde725", "#a5db36", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e")
"""From fragile to robust: viridis, whose lightness falls steadily, so it also reads without hue."""
DARK_INK_STEPS = 4
"""How many steps of the ramp, from its light end, carry dark letters (contrast above 5.5 everywhere)."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class Token(_Frozen):
    """One row of the input."""

    index: int
    token: str
    special: bool
    unknown: bool  # stands for a word outside the vocabulary


class TaskResult(_Frozen):
    """What is known about moving some words together."""

    words: tuple[int, ...]
    tokens: tuple[str, ...]
    verdict: Verdict
    certified: float  # proven: no move up to this size changes the answer
    attacked: float | None  # a move of at most this size was seen to change it; None: none found
    margin: float | None  # lower bound of the margin at `certified` (with a given ε: at ε); None: no bound
    margins: dict[str, float | None] | None  # with a given ε: the lower bound against every other class
    counterexample: list[list[float]] | None  # with a given ε, if falsified: the moved rows that do it
    evaluations: int


class Query(_Frozen):
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
    search: str | None
    budget: float | None  # seconds
    label: int  # the class that is defended
    attack: bool
    seed: int
    threads: int
    memory: int  # bytes


class ModelInfo(_Frozen):
    """Which classifier."""

    name: str
    labels: tuple[str, ...]
    layers: int
    width: int


class Versions(_Frozen):
    """What the numbers were computed with."""

    buffet: str
    torch: str
    python: str

    @classmethod
    def current(cls) -> Versions:
        return cls(buffet=version("buffet"), torch=version("torch"), python=platform.python_version())


class CertifyReport(_Frozen):
    """The whole answer of `buffet certify`."""

    format: Literal["buffet certify 1"] = "buffet certify 1"
    text: str
    tokens: tuple[Token, ...]
    model: ModelInfo
    query: Query
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

    @property
    def norm_name(self) -> str:
        return "L∞" if self.query.norm == "inf" else f"L{self.query.norm:g}"

    @property
    def method_name(self) -> str:
        window = "" if self.query.window is None else f", window {self.query.window}"
        return f"{self.query.method} ({self.query.propagation}{window})"

    def strength(self, task: TaskResult) -> float:
        """What colours a task: its certified radius, or at a given ε the part of its margin that is left."""
        if self.query.eps is None:
            return task.certified
        return max(task.margin or 0.0, 0.0) if task.verdict == "certified" else 0.0


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of all tasks: certified only if every one is."""
    if verdicts and all(v == "certified" for v in verdicts):
        return "certified"
    return "falsified" if "falsified" in verdicts else "unknown"


def shades(report: CertifyReport) -> dict[int, int]:
    """For every word that was moved, its step of `RAMP`, relative to the sentence.

    A word in several tasks takes the weakest. The ramp is logarithmic and spans at least a factor of two, so
    that words that hardly differ look alike; nothing proven is its fragile end.
    """
    strengths: dict[int, float] = {}
    for task in report.tasks:
        for word in task.words:
            strengths[word] = min(report.strength(task), strengths.get(word, math.inf))
    logs = {word: math.log(value) for word, value in strengths.items() if value > 0}
    if not logs:
        return dict.fromkeys(strengths, 0)
    middle = (min(logs.values()) + max(logs.values())) / 2
    span = max(max(logs.values()) - min(logs.values()), math.log(2))
    share = {word: (value - middle) / span + 0.5 for word, value in logs.items()}
    return {word: min(int(share.get(word, 0.0) * len(RAMP)), len(RAMP) - 1) for word in strengths}


class Shown(_Frozen):
    """The cells of one row of the table, rounded to the safe side."""

    words: str
    text: str
    certified: str
    attacked: str
    margin: str
    verdict: Verdict


def shown(task: TaskResult, eps: float | None) -> Shown:
    """A task as it is printed: lower bounds rounded down, the attacked radius up.

    A given `eps` was not computed, so it is repeated as it was given.
    """
    given = {eps: repr(eps)}
    attacked = "—" if task.attacked is None else given.get(task.attacked) or round_up(task.attacked)
    return Shown(
        words="+".join(map(str, task.words)),
        text=" + ".join(task.tokens),
        certified=given.get(task.certified) or round_down(task.certified),
        attacked=attacked,
        margin="—" if task.margin is None else round_down(task.margin),
        verdict=task.verdict,
    )


class Bar(_Frozen):
    """One line of the chart; positions are percentages of the axis."""

    label: str
    solid: float  # up to here: proven
    open: float  # from there to here: neither proven nor broken
    tick: float | None  # an attack succeeded here
    note: str
    shade: int


@dataclass(frozen=True)
class Axis:
    """From values to percentages of the chart's width: linear from 0, or logarithmic from `low`."""

    low: float
    high: float
    log: bool

    @classmethod
    def over(cls, values: Sequence[float]) -> Axis:
        """An axis that holds the values; logarithmic when a linear one would squeeze the smallest."""
        positive = [value for value in values if value > 0] or [1.0]
        low, high = min(positive), max(positive)
        if high > 20 * low:
            return cls(low / 2, high * 1.2, log=True)
        return cls(0.0, high * 1.04, log=False)

    def place(self, value: float) -> float:
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = value / self.high
        return 100 * min(max(share, 0.0), 1.0)

    def ticks(self) -> tuple[tuple[float, str], ...]:
        """A few round values: (percent, text)."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.floor(math.log10(self.high))
            skip = 1 + (last - first) // 6
            factors = (1, 2, 5) if last - first <= 1 else (1, 3) if last - first == 2 else (1,)
            values = [m * 10.0**k for k in range(first, last + 1, skip) for m in factors]
            values = [value for value in values if self.low <= value <= self.high]
        else:
            power = 10.0 ** math.floor(math.log10(self.high / 4))
            step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= self.high / 4)
            values = [k * step for k in range(int(self.high / step) + 1)]
        return tuple((self.place(value), f"{value:.6g}") for value in values)


def bars(report: CertifyReport) -> tuple[tuple[Bar, ...], Axis]:
    """The chart of the tasks, and the axis they share."""
    at_eps = report.query.eps is not None
    if at_eps:
        axis = Axis.over([report.clean_margin])
    else:
        axis = Axis.over([x for t in report.tasks for x in (t.certified, t.attacked) if x is not None])
    colours = shades(report)

    def bar(task: TaskResult) -> Bar:
        cells = shown(task, report.query.eps)
        solid = axis.place(report.strength(task))
        tick, end, note = None, solid, f"{task.verdict}, margin {cells.margin}"
        if not at_eps:
            tick = None if task.attacked is None else axis.place(task.attacked)
            end, note = 100.0 if tick is None else max(tick, solid), f"{cells.certified} … {cells.attacked}"
        shade = min(colours[word] for word in task.words)
        return Bar(label=cells.text, solid=solid, open=end, tick=tick, note=note, shade=shade)

    return tuple(bar(task) for task in report.tasks), axis


def render_html(report: CertifyReport) -> str:
    """One self-contained page about the report."""
    environment = Environment(
        loader=PackageLoader("buffet"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    chart, axis = bars(report)
    word_tasks: dict[int, list[Shown]] = {}
    for task in report.tasks:
        for word in task.words:
            word_tasks.setdefault(word, []).append(shown(task, report.query.eps))
    return environment.get_template("certify.html.j2").render(
        report=report,
        rows=[(task, shown(task, report.query.eps)) for task in report.tasks],
        shades=shades(report),
        word_tasks=word_tasks,
        bars=chart,
        axis=axis,
        ramp=RAMP,
        dark_ink_steps=DARK_INK_STEPS,
        label=report.model.labels[report.query.label],
        answer=report.model.labels[report.answer],
        round_down=round_down,
        round_up=round_up,
    )


def check_writable(path: Path) -> None:
    """Refuse, before any work is done, a path that `write_atomically` could not write."""
    if path.exists() and not path.is_file():
        raise BuffetError(f"{path}: exists and is not a file; choose another name")
    if not path.parent.is_dir():
        raise BuffetError(f"{path}: there is no directory {path.parent}; create it first")
    probe = _partial(path)
    try:
        probe.open("x").close()
        probe.unlink()
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write the whole file or nothing: a temporary file beside it is renamed at the end."""
    partial = _partial(path)
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # A link is followed, so that it stays a link.
        os.replace(partial, path.resolve())
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _partial(path: Path) -> Path:
    target = path.resolve()
    return target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
