"""Asks one question about one sentence; a job gives the same answer in every process."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

from buffet.data import Example
from buffet.errors import BuffetError
from buffet.evaluation.questions import Effort, Found, Question, Sentence, answered
from buffet.loading import Model, load_checkpoint
from buffet.system.devices import device_named

NOTHING = Found((), None)


@runtime_checkable
class Where(Protocol):
    """How a job gets its model."""

    def model(self) -> Model: ...


@dataclass(frozen=True)
class StoredModel:
    """A model in files that every process can read."""

    source: str
    digest: str  # of the model that the evaluation began with
    device: str = "cpu"

    def model(self) -> Model:
        return _loaded(self)


@lru_cache(maxsize=1)
def _loaded(stored: StoredModel) -> Model:
    model = load_checkpoint(stored.source, check=False)  # which the driver has done
    if digest_of(model) != stored.digest:
        raise BuffetError(f"{stored.source}: is not the model the evaluation began with; start it again")
    return model.to(device_named(stored.device))


@dataclass(frozen=True, eq=False)
class HeldModel:
    """A model in the memory of this process."""

    it: Model

    def model(self) -> Model:
        return self.it


def digest_of(model: Model) -> str:
    """A short name of all that decides what a model answers: its configuration, tokenizer and weights."""
    found = hashlib.sha256(json.dumps(model.config.model_dump(mode="json"), sort_keys=True).encode())
    if model.tokenizer is not None:
        found.update(model.tokenizer.inner.to_str().encode())
    for name, tensor in sorted(model.tensors.items()):
        found.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        found.update(tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:24]


@dataclass(frozen=True)
class SentenceAnswer:
    """What is known of a sentence."""

    found: Found
    seconds: float | None = None
    answer: int | None = None
    clean_margin: float | None = None
    refused: str | None = None


@dataclass(frozen=True, eq=False)
class SentenceJob:
    """Ask about one sentence; a misclassified one costs a single run."""

    where: Where
    example: Example
    question: Question
    effort: Effort

    def run(self) -> SentenceAnswer:
        begin, text, label = time.perf_counter(), self.example.sentence, self.example.label
        model = self.where.model()
        try:
            x = model.embed(text)
        except BuffetError as error:
            return SentenceAnswer(NOTHING, time.perf_counter() - begin, refused=str(error))
        answer, margin = answered(model, x, label)
        found = NOTHING
        if margin > 0:
            found = self.question.ask(Sentence(model, text, label), self.effort)
        return SentenceAnswer(found, time.perf_counter() - begin, answer, margin)
