"""The work of an evaluation besides its sweeps: training, measuring accuracy, recording margins."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from buffet.data import read_data
from buffet.experiments.plan import digest, model_digest
from buffet.loading import load_checkpoint
from buffet.methods import METHODS, method_named
from buffet.regions import LpBall
from buffet.training import TrainSettings, train
from buffet.training.corpus import encode, make_batches
from buffet.training.network import Network
from buffet.verification.verify import verify

BATCH = 64


class _Answer(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Accuracy(_Answer):
    """The shares of dev and test sentences that a model classifies correctly, and its size."""

    dev: float
    test: float
    layers: int
    width: int
    parameters: int


class Curve(_Answer):
    """Lower bounds of the margin of one task at one size."""

    model: str
    sentence: str
    token: str
    word: int
    method: str
    against: str  # the method it is compared with
    share: float  # of the radius of that
    eps: float
    reference: float | None  # the margin of that; None: no bound
    steps: tuple[float | None, ...]  # before every step of the optimiser; none without one
    margin: float | None  # the best, computed once more without gradients


@dataclass(frozen=True)
class TrainJob:
    """Train a model; an interrupted run of the same settings is continued."""

    settings: TrainSettings

    def run(self) -> None:
        train(self.settings)


@dataclass(frozen=True)
class AccuracyJob:
    """Measure a trained model on the data it belongs to."""

    model: Path
    data: Path
    sha256: str  # of the data

    @cached_property
    def key(self) -> str:
        return digest(["accuracy", model_digest(str(self.model)), self.sha256])

    def run(self) -> Accuracy:
        model, data = load_checkpoint(self.model), read_data(self.data)
        assert model.tokenizer is not None  # `buffet train` writes one
        network = Network(model.config, dict(model.tensors), model.tokenizer)

        def right(part: str) -> float:
            rows = encode(getattr(data, part), network.tokenizer, model.config.max_position_embeddings)
            return network.accuracy(make_batches(rows, BATCH, network.pad))

        return Accuracy(
            dev=right("dev"),
            test=right("test"),
            layers=model.config.num_hidden_layers,
            width=model.config.hidden_size,
            parameters=sum(tensor.numel() for tensor in model.tensors.values()),
        )


@dataclass(frozen=True)
class CurveJob:
    """Bound the margin of one task at `share` of `radius`, learning without stopping at a proof."""

    model: Path
    sentence: str
    label: int
    word: int
    norm: float
    method: str
    against: str
    share: float
    radius: float  # that `against` certifies
    steps: int

    @cached_property
    def key(self) -> str:
        values = {name: str(value) for name, value in asdict(self).items() if name != "model"}
        return digest(["curve", model_digest(str(self.model)), values])

    def run(self) -> Curve:
        model, eps = load_checkpoint(self.model), self.share * self.radius
        ball = LpBall(model.embed(self.sentence), [[self.word]], self.norm)
        reference = verify(model, ball, eps, self.against, label=self.label, falsify=False).margin
        steps: list[float] = []
        method = METHODS[self.method]
        if method.optimise != "none":
            method = method_named(method, steps=self.steps)
        found = verify(
            model,
            ball,
            eps,
            method,
            label=self.label,
            trace=lambda tasks, step, margins: steps.append(float(margins[0])),
            falsify=False,
        )
        return Curve(
            model=model.name,
            sentence=self.sentence,
            token=model.tokens(self.sentence)[self.word],
            word=self.word,
            method=self.method,
            against=self.against,
            share=self.share,
            eps=eps,
            reference=_finite(reference),
            steps=tuple(_finite(value) for value in steps),
            margin=_finite(found.margin),
        )


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
