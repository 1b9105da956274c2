"""What a sweep is to do, read from TOML; every mistake is one `BuffetError` that names the value at fault."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from buffet.errors import BuffetError, one_line, validated
from buffet.loading.directories import available
from buffet.methods import Method, method_named
from buffet.search.root_finding import ROOT_FINDERS
from buffet.system.files import read_text

Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MethodChoice(_Table):
    """A method by name, with parts of it replaced."""

    name: str
    propagation: str | None = None
    product: str | None = None
    softmax: str | None = None
    optimise: str | None = None
    steps: int | None = None
    window: int | None = None
    cells: int | None = None
    rate: float | None = None
    start: str | None = None

    @property
    def title(self) -> str:
        """What rows call it: the name, and in brackets what was replaced."""
        parts = ", ".join(f"{key}={value}" for key, value in self.parts.items())
        return f"{self.name}[{parts}]" if parts else self.name

    @property
    def parts(self) -> dict[str, str | int | float]:
        return self.model_dump(exclude={"name"}, exclude_none=True)

    @property
    def method(self) -> Method:
        return method_named(self.name, **self.parts)

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _known(self) -> MethodChoice:
        try:
            self.method  # noqa: B018 (raises for what does not exist)
        except BuffetError as error:
            raise ValueError(f"methods: {error}") from None
        return self


class SentenceChoice(_Table):
    """Which sentences: some of those in a labelled file, or exactly the ones given."""

    file: Path | None = None  # sentence<TAB>label, with that header
    texts: tuple[str, ...] = ()
    count: Count | None = None  # of the file, per model; none: all
    min_words: Count = 1  # separated by spaces
    max_words: Count = 1_000_000
    correct: bool = True  # of the file, only those the model classifies as the file does

    @model_validator(mode="after")
    def _one_source(self) -> SentenceChoice:
        if (self.file is None) == (not self.texts):
            raise ValueError("sentences: give either file, a path of a TSV file, or texts, a list")
        if self.texts and self.count is not None:
            raise ValueError("sentences: count goes with file; texts are all taken")
        if self.min_words > self.max_words:
            raise ValueError(
                f"sentences: min_words is {self.min_words} and max_words {self.max_words}: none fit"
            )
        return self


class WordChoice(_Table):
    """Which words of a sentence move: words of the vocabulary, never special tokens."""

    count: Count | None = None  # tasks per sentence, drawn with the seed; none ("all"): every one
    together: Annotated[int, Field(ge=1, le=64)] = 1  # words that move at the same time in one task

    @field_validator("count", mode="before")
    @classmethod
    def _all(cls, value: Any) -> Any:
        if isinstance(value, str) and value != "all":
            raise ValueError(f"words: count is {value!r}; give a number or 'all'")
        return None if value == "all" else value


class RadiusQuestion(_Table):
    """How the largest certified size is searched for."""

    search: str = "secant"
    tolerance: Annotated[float, Field(gt=0, lt=1)] | None = None  # that of `buffet.radius`

    @field_validator("search")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in ROOT_FINDERS:
            raise ValueError(f"radius: unknown search {value!r}; choose one of: {', '.join(ROOT_FINDERS)}")
        return value


class Running(_Table):
    """How the work is done; nothing here changes what a task means."""

    workers: Annotated[int, Field(ge=1, le=4096)] | None = None  # processes; none: as many as fit the cores
    threads: Annotated[int, Field(ge=1, le=4096)] = 1  # per worker
    limit: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = (
        None  # seconds, per batch of a sentence
    )
    retries: Annotated[int, Field(ge=0, le=100)] = 2  # after a worker died
    memory: Annotated[int, Field(ge=1 << 20)] | None = None  # bytes the bounds of a worker may take
    gpus: Annotated[float, Field(ge=0, le=64)] = 0.0  # per worker, with ray
    device: str = "cpu"  # where a worker computes; a name, or auto


class SweepConfig(_Table):
    """A whole sweep: every model × sentence × norm × method × word."""

    models: Annotated[tuple[str, ...], Field(min_length=1)]  # embedded names or checkpoint directories
    methods: Annotated[tuple[MethodChoice, ...], Field(min_length=1)]
    norms: Annotated[tuple[float, ...], Field(min_length=1)] = (2.0,)
    sentences: SentenceChoice
    words: WordChoice = WordChoice()
    radius: RadiusQuestion = RadiusQuestion()
    attack: bool = True  # also look for moves that change the answer, once for all methods
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = (
        0  # of the choice of sentences and words, and the attack
    )
    out: Path | None = None  # the file of rows
    run: Running = Running()

    @field_validator("norms", mode="before")
    @classmethod
    def _norms(cls, value: Any) -> Any:
        return [math.inf if p == "inf" else p for p in value] if isinstance(value, list) else value

    @model_validator(mode="after")
    def _consistent(self) -> SweepConfig:
        for p in self.norms:
            if not p >= 1:
                raise ValueError(f"norms: got {p}; give 1, 2, inf or any other number ≥ 1")
        _distinct("models", self.models)
        _distinct("norms", self.norms)
        _distinct("methods", [choice.title for choice in self.methods])
        return self

    def located(self, directory: Path) -> SweepConfig:
        """The same, with relative paths taken from `directory`; embedded models take precedence."""
        known = available()
        models = tuple(name if name in known else str(directory / name) for name in self.models)
        sentences = self.sentences
        if sentences.file is not None:
            sentences = sentences.model_copy(update={"file": directory / sentences.file})
        out = None if self.out is None else directory / self.out
        return self.model_copy(update={"models": models, "sentences": sentences, "out": out})


def _distinct(where: str, values: Any) -> None:
    for value in values:
        if list(values).count(value) > 1:
            raise ValueError(f"{where}: {value!r} is given twice; name each once")


def read_sweep(path: Path) -> SweepConfig:
    """The configuration in a TOML file; relative paths in it start at the directory of the file."""
    try:
        raw = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise BuffetError(f"{path}: not a TOML file: {one_line(error)}") from None
    return validated(SweepConfig, raw, str(path)).located(path.parent)
