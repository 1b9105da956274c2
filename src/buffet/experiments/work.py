"""Answers the tasks of one sentence; pure: the same job gives the same numbers in every process."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from buffet.attack import AttackSettings, attacked_radius
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.experiments.plan import ModelSource, Question, Setting, Unit, model_digest
from buffet.loading import Model, load
from buffet.regions import LpBall
from buffet.search.radius import radius
from buffet.system.devices import device_named
from buffet.verification.verify import verify


@dataclass(frozen=True)
class Ground:
    """What all methods of a setting have in common, one entry per set of words."""

    attacked: tuple[float, ...] | None = None  # radii, infinite where nothing was found
    attack_seconds: float | None = None
    reference: tuple[float, ...] | None = None  # radii certified by the reference method
    trouble: str | None = None  # why there is no more


@dataclass(frozen=True)
class GroundJob:
    """Find the ground of a setting."""

    setting: Setting
    question: Question
    memory: int | None
    device: str = "cpu"

    def run(self) -> Ground:
        model, region = _model(self.setting.model, self.device), _region(self.setting, self.device)
        attacked, seconds, reference = None, None, None
        if self.question.attack:
            start = time.perf_counter()
            settings = AttackSettings(seed=self.setting.seed)
            found = attacked_radius(model.program64, region, self.setting.label, settings)
            attacked, seconds = tuple(found.tolist()), time.perf_counter() - start
        if self.question.reference is not None:
            certified = radius(
                model,
                region,
                self.question.reference,
                label=self.setting.label,
                attack=False,
                attacked=attacked,
                engine=Engine(memory=self.memory),
            )
            reference = tuple(task.certified for task in certified.tasks)
        return Ground(attacked, seconds, reference)


@dataclass(frozen=True)
class Finding:
    """The answer to one task."""

    certified: float
    margin: float
    evaluations: int
    verdict: str
    eps: float | None = None


@dataclass(frozen=True)
class Findings:
    """The answers to all tasks of a unit, in their order."""

    tasks: tuple[Finding, ...]
    seconds: float  # spent on proofs


@dataclass(frozen=True)
class UnitJob:
    """Answer the tasks of a unit."""

    unit: Unit
    ground: Ground
    memory: int | None
    device: str = "cpu"

    def run(self) -> Findings:
        return self._radii() if self.unit.question.what == "radius" else self._verdicts()

    def _radii(self) -> Findings:
        setting, question = self.unit.setting, self.unit.question
        found = radius(
            _model(setting.model, self.device),
            _region(setting, self.device),
            self.unit.method,
            label=setting.label,
            search=question.search,
            tolerance=question.tolerance,
            attack=False,
            attacked=self.ground.attacked,
            engine=Engine(memory=self.memory),
        )
        tasks = tuple(
            Finding(t.certified, t.margin, t.evaluations, "certified" if t.certified > 0 else "unknown")
            for t in found.tasks
        )
        return Findings(tasks, found.seconds)

    def _verdicts(self) -> Findings:
        setting, tasks = self.unit.setting, self.unit.tasks
        sizes = [task.eps for task in tasks]
        if self.ground.reference is not None:
            radii = dict(zip(setting.words, self.ground.reference, strict=True))
            sizes = [radii[task.words] * (task.share or 0.0) for task in tasks]
        attacked = dict(zip(setting.words, self.ground.attacked or (), strict=False))
        model = _model(setting.model, self.device)
        region = LpBall(model.embed(setting.sentence), [list(task.words) for task in tasks], setting.norm)
        found = verify(
            model,
            region,
            torch.tensor(sizes, dtype=torch.float64),
            self.unit.method,
            label=setting.label,
            falsify=False,
            best=True,  # rows hold margins to compare methods by
            engine=Engine(memory=self.memory),
        )
        answers = []
        for task, eps, verdict, margins in zip(tasks, sizes, found.verdicts, found.margins, strict=True):
            assert eps is not None
            # The attack's point lies in every ball that is no smaller.
            if verdict == "unknown" and attacked.get(task.words, math.inf) <= eps:
                verdict = "falsified"
            certified = eps if verdict == "certified" else 0.0
            answers.append(Finding(certified, float(margins.min()), 1, verdict, eps))
        return Findings(tuple(answers), found.seconds)


@lru_cache(maxsize=2)
def _model(source: ModelSource, device: str) -> Model:
    """The model, checked to be the one the plan was made for."""
    model = load(source.source)
    if model_digest(source.source) != source.digest:
        raise BuffetError(f"{source.source}: is not the model the sweep began with; start the sweep again")
    return model.to(device_named(device))


def _region(setting: Setting, device: str) -> LpBall:
    x = _model(setting.model, device).embed(setting.sentence)
    return LpBall(x, [list(words) for words in setting.words], setting.norm)
