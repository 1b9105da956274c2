"""Answers the tasks of one sentence; a job gives the same numbers in every process."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import lru_cache

import torch

from buffet.attack import AttackSettings, attacked_radius
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.experiments.plan import ModelSource, Setting, WorkUnit, model_digest
from buffet.loading import Model, load_checkpoint
from buffet.regions import LpBall
from buffet.search.radius import radius
from buffet.system.devices import device_named
from buffet.verification.verify import verify

Radii = tuple[float, ...]


@dataclass(frozen=True)
class AttackAnswer:
    """What an attack on a setting found: the same for all methods, one entry per set of words."""

    attacked: Radii | None = None  # infinite where nothing was found
    attack_seconds: float | None = None
    trouble: str | None = None  # why there is no more


@dataclass(frozen=True)
class TaskAnswer:
    """The answer to one task."""

    certified: float
    margin: float
    evaluations: int
    verdict: str
    eps: float | None = None


@dataclass(frozen=True)
class UnitAnswer:
    """The answers to all tasks of a unit, in their order."""

    tasks: tuple[TaskAnswer, ...]
    seconds: float  # spent on proofs (`Workplace.clock`)


@dataclass(frozen=True)
class Workplace:
    """The device on which a job runs, and how many bytes its bounds may take there."""

    memory: int | None = None
    device: str = "cpu"

    def model(self, source: ModelSource) -> Model:
        return _model(source, self.device)

    def clock(self) -> float:
        """CPU seconds, which other work on the machine hardly changes; on another device, wall seconds."""
        return time.process_time() if self.device == "cpu" else time.perf_counter()


@dataclass(frozen=True)
class AttackJob:
    """Attack a setting."""

    setting: Setting
    place: Workplace

    def run(self) -> AttackAnswer:
        setting = self.setting
        model, start = self.place.model(setting.model), self.place.clock()
        region = region_of(model, setting, setting.words)
        found = attacked_radius(model.program64, region, setting.label, AttackSettings(seed=setting.seed))
        return AttackAnswer(tuple(found.tolist()), self.place.clock() - start)


@dataclass(frozen=True)
class UnitJob:
    """Answer the tasks of a unit."""

    unit: WorkUnit
    attack: AttackAnswer
    place: Workplace

    def run(self) -> UnitAnswer:
        self.place.model(self.unit.setting.model)  # is read once, for all units
        start = self.place.clock()
        answers = self._radii() if self.unit.question.what == "radius" else self._verdicts()
        return UnitAnswer(answers, self.place.clock() - start)

    def _radii(self) -> tuple[TaskAnswer, ...]:
        unit, asked = self.unit, self.unit.question
        model = self.place.model(unit.setting.model)
        found = radius(
            model,
            region_of(model, unit.setting, unit.setting.words),
            unit.method,
            label=unit.setting.label,
            search=asked.search,
            tolerance=asked.tolerance,
            attack=False,
            attacked=self.attack.attacked,
            engine=Engine(memory=self.place.memory),
        )
        return tuple(
            TaskAnswer(t.certified, t.margin, t.evaluations, "certified" if t.certified > 0 else "unknown")
            for t in found.tasks
        )

    def _verdicts(self) -> tuple[TaskAnswer, ...]:
        setting, tasks = self.unit.setting, self.unit.tasks
        sizes = [task.eps for task in tasks]
        attacked = dict(zip(setting.words, self.attack.attacked or (), strict=False))
        model = self.place.model(setting.model)
        found = verify(
            model,
            region_of(model, setting, tuple(task.words for task in tasks)),
            torch.tensor(sizes, dtype=torch.float64),
            self.unit.method,
            label=setting.label,
            falsify=False,
            best=True,  # rows hold margins to compare methods by
            engine=Engine(memory=self.place.memory),
        )
        answers = []
        for task, eps, verdict, margins in zip(tasks, sizes, found.verdicts, found.margins, strict=True):
            assert eps is not None
            # The attack's point lies in every ball that is no smaller.
            if verdict == "unknown" and attacked.get(task.words, math.inf) <= eps:
                verdict = "falsified"
            certified = eps if verdict == "certified" else 0.0
            answers.append(TaskAnswer(certified, float(margins.min()), 1, verdict, eps))
        return tuple(answers)


@lru_cache(maxsize=2)
def _model(source: ModelSource, device: str) -> Model:
    """The model, checked to be the one the plan was made for."""
    model = load_checkpoint(source.source)
    if model_digest(source.source) != source.digest:
        raise BuffetError(f"{source.source}: is not the model the sweep began with; start the sweep again")
    return model.to(device_named(device))


def region_of(model: Model, setting: Setting, words: tuple[tuple[int, ...], ...]) -> LpBall:
    """The ball around the sentence of a setting in which each of the sets of words moves."""
    return LpBall(model.embed(setting.sentence), [list(each) for each in words], setting.norm)
