"""Answers: of a query, and of a search for radii. Each can be read on its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from buffet.compositions import Composition, title
from buffet.errors import optional
from buffet.printing import at_least, at_most, finite, html_table, listed, norm_name, round_down, round_up
from buffet.regions import Region
from buffet.verdicts import Verdict, together

if TYPE_CHECKING:
    import polars

DIGITS = 3
"""Of numbers in a `repr`."""


@runtime_checkable
class Named(Protocol):
    """A model that has names: its own, those of its classes, and those of rows it knows."""

    @property
    def name(self) -> str: ...

    @property
    def labels(self) -> tuple[str, ...]: ...

    def read(self, x: Tensor, rows: Sequence[int]) -> list[str | None]:
        """The tokens at these rows of `x`; None where it cannot tell."""


@dataclass(frozen=True)
class Subject:
    """What a result is about."""

    model: str
    labels: tuple[str, ...] | None  # names of the classes, if the model has any
    method: str  # its name, and what was changed
    region: str  # the kind: LpBall, Box, CandidateSet, …
    norm: float | None  # of a ball
    sizes: tuple[float, ...] | None  # ε of every task; None: the region has no such size, or it was searched
    words: tuple[tuple[int, ...], ...]  # the rows that move in every task, as the caller counts them
    tokens: tuple[tuple[str | None, ...], ...]  # what these rows are called; None: not known
    asked: tuple[str, ...] | None = None  # the cases of a property; None: that the answer stays the same

    @classmethod
    def of(
        cls, model: object, region: Region, method: Composition, asked: tuple[str, ...] | None = None
    ) -> Subject:
        """What is asked of a model about a region whose padding, if any, is still there."""
        words = tuple(map(tuple, region.moved.tolist()))
        moved = sorted({row for task in words for row in task})
        named = model if isinstance(model, Named) else None
        found = named.read(region.center, moved) if named else [None] * len(moved)
        tokens = dict(zip(moved, found, strict=True))
        eps = getattr(region, "eps", None)
        return cls(
            model=named.name if named else type(model).__name__,
            labels=named.labels if named else None,
            method=title(method),
            region=type(region).__name__,
            norm=getattr(region, "p", None),
            sizes=None if eps is None else tuple(eps.tolist()),
            words=words,
            tokens=tuple(tuple(tokens[row] for row in task) for task in words),
            asked=asked,
        )

    @property
    def place(self) -> str:
        """The region in a few words: L2 ball of 0.3 around 'gripping'."""
        kind = f"{norm_name(self.norm)} ball" if self.region == "LpBall" and self.norm else self.region
        sizes = sorted(set(self.sizes or ()))
        size = f" of {' to '.join(map(repr, dict.fromkeys((sizes[0], sizes[-1]))))}" if sizes else ""
        around = ", ".join(listed([self.moved(task, repr) for task in range(len(self.words))]))
        return f"{kind}{size} around {around}"

    @property
    def question(self) -> str:
        """The property in a few words: y0 > −1 and −y0 > −1."""
        return " and ".join(listed(self.asked or ()))

    def moved(self, task: int, quote: Callable[[str], str] = str) -> str:
        """What moves in a task: its tokens, or the numbers of rows whose tokens are not known."""
        pairs = zip(self.words[task], self.tokens[task], strict=True)
        return " + ".join(listed([f"row {row}" if token is None else quote(token) for row, token in pairs]))

    def to_dict(self) -> dict[str, Any]:
        """Model, method and region in plain JSON types."""
        norm = "inf" if self.norm == math.inf else self.norm
        labels = None if self.labels is None else list(self.labels)
        named = {"model": self.model, "labels": labels, "method": self.method}
        asked = {} if self.asked is None else {"property": list(self.asked)}
        return {**named, **asked, "region": self.region, "norm": norm}


class Result(ABC):
    """What every answer can do: be printed, become plain types or a table, and show itself in a notebook.

    Texts round to the side on which a claim stays true; `to_dict` and `to_frame` do not round.
    """

    label: int | None  # None: something else than an answer is to be proven
    clean_margin: float
    about: Subject

    @property
    @abstractmethod
    def verdict(self) -> Verdict:
        """The verdict of all tasks together: certified only if every one is."""

    @abstractmethod
    def records(self) -> Iterator[dict[str, Any]]:
        """Every task in plain types."""

    @abstractmethod
    def headline(self, digits: int) -> str:
        """The answer in a few words."""

    def __repr__(self) -> str:
        asked = () if self.about.asked is None else (self.about.question,)
        words = (self.headline(DIGITS), *asked, self.about.place, self.about.method)
        return f"{type(self).__name__}({', '.join(words)})"

    def to_dict(self) -> dict[str, Any]:
        """Everything in plain JSON types: numbers as they are, None for what is infinite or not known."""
        about = {**self.about.to_dict(), "label": self.label, "clean_margin": finite(self.clean_margin)}
        return {**about, "verdict": self.verdict, **self._numbers(), "tasks": list(self.records())}

    @abstractmethod
    def _numbers(self) -> dict[str, Any]:
        """What is known of all tasks together, in plain types."""

    def to_frame(self) -> polars.DataFrame:
        """One row per task, as a table of polars (extra ``tables``)."""
        polars = optional("polars", "tables", "tables need polars")
        text, number = polars.String, polars.Float64
        columns: dict[str, Any] = {
            **dict.fromkeys(("model", "method", "region", "norm"), text),
            "label": polars.Int64,
            "words": polars.List(polars.Int64),
            "tokens": polars.List(text),
            "verdict": text,
            **dict.fromkeys(("eps", "certified", "attacked", "margin"), number),
        }
        norm = None if self.about.norm is None else f"{self.about.norm:g}"
        common = {**self.about.to_dict(), "norm": norm, "label": self.label}
        rows = [{**common, **row} for row in self.records()]
        return polars.DataFrame([{name: row[name] for name in columns} for row in rows], schema=columns)

    def _repr_html_(self) -> str:
        """A small table for notebooks: what moved, and what is known about it."""
        about = self.about
        label = self.label if about.labels is None or self.label is None else about.labels[self.label]
        what = label if about.asked is None else about.question
        answer = f"{about.model}: {what} (clean margin {round_down(self.clean_margin)})"
        heading = " · ".join((self.headline(4), about.place, about.method, answer))
        names = ("words", "certified", "attacked", "margin", "verdict")
        rows = (
            (
                about.moved(task),
                at_least(row["certified"], row["eps"]),
                at_most(row["attacked"], row["eps"]),
                at_least(row["margin"]),
                row["verdict"],
            )
            for task, row in enumerate(self.records())
        )
        return f"<p>{escape(heading)}</p>{html_table(names, rows)}"

    def _task(self, task: int) -> dict[str, Any]:
        """What moves in a task."""
        return {"words": list(self.about.words[task]), "tokens": list(self.about.tokens[task])}


@dataclass(frozen=True, repr=False)
class Verification(Result):
    """The answer to a query with one or more tasks.

    `margins` are lower bounds of ``logit[label] − logit[other]``, or of the cases of a property
    (`Property.by_case`), valid everywhere in the region.
    """

    label: int | None
    verdicts: tuple[Verdict, ...]
    margins: Float[Tensor, "tasks cases"]
    clean_margin: float  # at the unmoved rows; negative: the label is not what the model answers
    counterexamples: tuple[Tensor | None, ...]  # rows of a flipped input, per falsified task
    seconds: float  # spent on bounds
    about: Subject
    unfinished: tuple[str | None, ...] = ()  # per task, how far its tree had come when it was given up
    interrupted: bool = False  # by whoever asked, before the budget was spent

    @property
    def verdict(self) -> Verdict:
        return together(self.verdicts)

    @property
    def progress(self) -> str | None:
        """How far the trees of tasks that are open had come, in a line."""
        trees = [
            text for text, v in zip(self.unfinished, self.verdicts, strict=False) if text and v == "unknown"
        ]
        parts = (["interrupted"] if self.interrupted else []) + listed(trees)
        return "; ".join(parts) or None

    @property
    def margin(self) -> float:
        """The smallest lower bound over tasks and other classes or cases; NaN if there is none."""
        return float(self.margins.min())

    def headline(self, digits: int) -> str:
        bound = f"margin {round_down(self.margin, digits)}" if math.isfinite(self.margin) else "no bound"
        return f"{self.verdict}, {bound}"

    def _numbers(self) -> dict[str, Any]:
        about = {"interrupted": True} if self.interrupted else {}
        return {"margin": finite(self.margin), "seconds": self.seconds, **about}

    def records(self) -> Iterator[dict[str, Any]]:
        """Every task in plain types; `certified` is its ε if that is proven, `attacked` if it is broken."""
        names = self.about.labels or [str(c) for c in range(self.margins.shape[1] + 1)]
        others = self.about.asked or [name for c, name in enumerate(names) if c != self.label]
        least = self.margins.amin(-1).tolist()  # NaN if any is, unlike min()
        for task, (verdict, margins) in enumerate(zip(self.verdicts, self.margins.tolist(), strict=True)):
            eps = None if self.about.sizes is None else self.about.sizes[task]
            point, moved = self.counterexamples[task], self._task(task)
            yield {
                **moved,
                "eps": eps,
                "verdict": verdict,
                "certified": eps if verdict == "certified" or eps is None else 0.0,
                "attacked": eps if verdict == "falsified" else None,
                "margin": finite(least[task]),
                "margins": dict(zip(others, map(finite, margins), strict=True)),
                "counterexample": None if point is None else point[moved["words"]].tolist(),
                **({"tree": tree} if (tree := dict(enumerate(self.unfinished)).get(task)) else {}),
            }


@dataclass(frozen=True)
class TaskRadius:
    """The bracket around the true radius of one task."""

    words: tuple[int, ...]
    certified: float  # proven: no smaller move changes the answer
    attacked: float  # a move of this size was seen to change it (inf: none found)
    margin: float  # lower bound of the margin at `certified`; if that is 0, the clean margin or 0
    evaluations: int  # engine evaluations of this task


@dataclass(frozen=True, repr=False)
class Radius(Result):
    """The radii of all tasks; `certified` and `attacked` bracket the smallest true one."""

    label: int | None
    clean_margin: float  # negative: the model does not give this label even to the unmoved rows
    tasks: tuple[TaskRadius, ...]
    evaluations: int  # calls of the engine, each for all unfinished tasks that share their work
    seconds: float  # spent on proofs
    attack_seconds: float
    about: Subject
    interrupted: bool = False  # by whoever asked, before the budget was spent

    @property
    def certified(self) -> float:
        """An ε proven for every task."""
        return min(t.certified for t in self.tasks)

    @property
    def attacked(self) -> float:
        """The smallest ε at which some task was attacked successfully."""
        return min(t.attacked for t in self.tasks)

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """Certified: some move is proven; falsified: the answer is wrong without any."""
        unproven: Verdict = "falsified" if self.clean_margin < 0 else "unknown"
        return tuple("certified" if task.certified > 0 else unproven for task in self.tasks)

    @property
    def verdict(self) -> Verdict:
        return together(self.verdicts)

    def headline(self, digits: int) -> str:
        broken = math.isfinite(self.attacked)
        attacked = f"attacked {round_up(self.attacked, digits)}" if broken else "no attack found"
        return f"certified {round_down(self.certified, digits)}, {attacked}"

    def _numbers(self) -> dict[str, Any]:
        about = {"interrupted": True} if self.interrupted else {}
        return {
            **about,
            "certified": self.certified,
            "attacked": finite(self.attacked),
            "evaluations": self.evaluations,
            "seconds": self.seconds,
            "attack_seconds": self.attack_seconds,
        }

    def records(self) -> Iterator[dict[str, Any]]:
        for place, (task, verdict) in enumerate(zip(self.tasks, self.verdicts, strict=True)):
            yield {
                **self._task(place),
                "eps": None,
                "verdict": verdict,
                "certified": task.certified,
                "attacked": finite(task.attacked),
                "margin": finite(task.margin),
                "evaluations": task.evaluations,
            }
