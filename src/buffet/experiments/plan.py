"""The tasks that a configuration asks for. The same configuration, files and seed always give the same plan.

Every random choice is made by hashing what is chosen together with the seed. So it does not depend on the
machine or on the order of anything, and asking for more sentences or words keeps those that were asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import combinations, islice
from pathlib import Path

from buffet.data import read_tsv
from buffet.errors import BuffetError
from buffet.experiments.config import SweepConfig
from buffet.loading import Model, load_checkpoint
from buffet.loading.checkpoint import WEIGHTS
from buffet.loading.directories import MODELS, available
from buffet.methods import Method
from buffet.properties import margin_of

MOST_TASKS = 100_000
"""The most tasks of one sentence; "all" combinations of words beyond it were surely not intended."""


@dataclass(frozen=True)
class ModelSource:
    """A model that any process can load and recognise."""

    source: str  # what `load` takes
    name: str
    digest: str  # of its files


@dataclass(frozen=True)
class Setting:
    """One sentence of one model under one norm: what all methods have in common."""

    model: ModelSource
    sentence: str
    sentence_tokens: tuple[str, ...]
    gold: int | None  # the label in the file
    label: int  # the class that is defended: the model's answer
    label_name: str
    clean_margin: float
    words: tuple[tuple[int, ...], ...]
    norm: float
    seed: int

    @property
    def norm_name(self) -> str:
        return f"{self.norm:g}"


@dataclass(frozen=True)
class SweepQuestion:
    """How the radius of every task is searched for."""

    attack: bool
    search: str = "secant"
    tolerance: float | None = None


@dataclass(frozen=True)
class WorkUnit:
    """All tasks of one sentence under one norm and method: they run as one batch."""

    setting: Setting
    title: str  # of the method
    method: Method
    question: SweepQuestion

    @property
    def tasks(self) -> tuple[tuple[int, ...], ...]:
        """The words that each of them is about."""
        return self.setting.words

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """The name of every task: the same for the same meaning, whatever else is in the configuration."""
        setting, question = self.setting, self.question
        common = {
            "model": setting.model.digest,
            "sentence": setting.sentence,
            "label": setting.label,
            "norm": setting.norm_name,
            "seed": setting.seed,
            "method": self.title,
            "parts": parts(self.method),
            "attack": question.attack,
            "search": question.search,
            "tolerance": question.tolerance,
            # Fields of earlier versions, whose rows are still found by their keys.
            "what": "radius",
            "eps": None,
            "share": None,
        }
        return tuple(digest({**common, "words": words}) for words in self.tasks)


def parts(method: Method) -> dict[str, str | int | float | None]:
    """What a method is made of."""
    given = asdict(method) | {"rivals": ",".join(method.rivals)}
    return {name: value for name, value in given.items() if name != "summary"}


def digest(value: object) -> str:
    """A short name of a value that JSON can express."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@dataclass(frozen=True)
class SweepPlan:
    """What there is to do. Units of one setting come one after the other: they share the attack on it."""

    units: tuple[WorkUnit, ...]
    notes: tuple[str, ...]  # what a user should know about the choice of sentences

    @cached_property
    def tasks(self) -> int:
        return sum(len(unit.tasks) for unit in self.units)

    @cached_property
    def digest(self) -> str:
        """The name of the configuration: the same when it means the same tasks."""
        return digest(sorted(key for unit in self.units for key in unit.keys))


def make_plan(config: SweepConfig) -> SweepPlan:
    """The units of every model, sentence, norm and method, in this order."""
    question = SweepQuestion(config.attack, config.radius.search, config.radius.tolerance)
    units: list[WorkUnit] = []
    notes: list[str] = []
    examples = _examples(config)
    for source in config.models:
        model = load_checkpoint(source)
        where = ModelSource(source, model.name, model_digest(source))
        chosen = list(islice(_fitting(config, model, where, examples), config.sentences.count))
        if not chosen:
            raise BuffetError(
                f"{source}: no sentence of {config.sentences.file} fits: min_words, max_words, correct,"
                f" words of its vocabulary ({config.words.together} at least)"
            )
        if config.sentences.count is not None and len(chosen) < config.sentences.count:
            notes.append(f"{model.name}: only {len(chosen)} of {config.sentences.count} sentences fit")
        units += [
            WorkUnit(replace(setting, norm=norm), choice.title, choice.method, question)
            for setting in chosen
            for norm in config.norms
            for choice in config.methods
        ]
    return SweepPlan(tuple(units), tuple(notes))


def model_digest(source: str) -> str:
    """A short name of what is in the files of a model."""
    directory = MODELS / source if source in available() else Path(source)
    files = {
        name: hashlib.sha256((directory / name).read_bytes()).hexdigest()
        for name in ("config.json", "tokenizer.json", WEIGHTS)
    }
    return digest(files)


def _examples(config: SweepConfig) -> list[tuple[str, int | None]]:
    """The candidates with their labels, each sentence once, in the order in which they are tried."""
    asked = config.sentences
    if asked.file is None:
        return [(text, None) for text in dict.fromkeys(asked.texts)]
    labels = {
        example.sentence: example.label
        for example in reversed(read_tsv(asked.file))
        if asked.min_words <= len(example.sentence.split()) <= asked.max_words
    }
    return sorted(labels.items(), key=lambda entry: digest([config.seed, entry[0]]))


def _fitting(
    config: SweepConfig, model: Model, where: ModelSource, examples: list[tuple[str, int | None]]
) -> Iterator[Setting]:
    """The settings (under the first norm) of the sentences a model can be asked about."""
    given = config.sentences.file is None
    for sentence, gold in examples:
        try:
            encoding = model.encode(sentence)
            words = choose_words(
                encoding.words,
                config.words.count,
                config.words.together,
                f"{config.seed} {sentence}",
            )
        except BuffetError as error:
            if given:
                raise BuffetError(f"sentences: {sentence[:60]!r}: {error}") from None
            continue
        logits = model.program64.evaluate(model.embed(sentence).double())
        label = int(logits.argmax())
        if gold is not None and config.sentences.correct and label != gold:
            continue
        yield Setting(
            model=where,
            sentence=sentence,
            sentence_tokens=encoding.tokens,
            gold=gold,
            label=label,
            label_name=model.labels[label],
            clean_margin=float(margin_of(logits, label)),
            words=words,
            norm=config.norms[0],
            seed=config.seed,
        )


def choose_words(rows: list[int], count: int | None, together: int, seed: str) -> tuple[tuple[int, ...], ...]:
    """Every set of `together` rows, or `count` of them drawn at random; in order."""
    total = math.comb(len(rows), together)
    if total == 0:
        raise BuffetError(f"has {len(rows)} words of the vocabulary; {together} are to move together")
    if count is None or count >= total:
        if total > MOST_TASKS:
            raise BuffetError(f"has {total} sets of {together} words; give words.count, at most {MOST_TASKS}")
        return tuple(combinations(rows, together))
    drawn: dict[tuple[int, ...], None] = {}
    attempt = 0
    while len(drawn) < count:
        ranked = sorted(rows, key=lambda row: digest([seed, attempt, row]))
        # The blocks of one shuffle are disjoint sets, each as likely as any other.
        for start in range(0, len(rows) - together + 1, together):
            if len(drawn) < count:
                drawn[tuple(sorted(ranked[start : start + together]))] = None
        attempt += 1
    return tuple(sorted(drawn))
