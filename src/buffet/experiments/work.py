"""Answers the tasks of one sentence; a job gives the same numbers in every process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache

from buffet.attack import AttackSettings, attacked_radius
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.experiments.plan import ModelSource, Setting, WorkUnit, model_digest
from buffet.loading import Model, load_checkpoint
from buffet.regions import LpBall
from buffet.search.radius import radius
from buffet.system.devices import device_named

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
        region = region_of(model, setting)
        found = attacked_radius(model.program64, region, setting.label, AttackSettings(seed=setting.seed))
        return AttackAnswer(tuple(found.tolist()), self.place.clock() - start)


@dataclass(frozen=True)
class UnitJob:
    """Answer the tasks of a unit."""

    unit: WorkUnit
    attack: AttackAnswer
    place: Workplace

    def run(self) -> UnitAnswer:
        unit, asked = self.unit, self.unit.question
        model = self.place.model(unit.setting.model)  # is read once, for all units
        start = self.place.clock()
        found = radius(
            model,
            region_of(model, unit.setting),
            unit.method,
            label=unit.setting.label,
            search=asked.search,
            tolerance=asked.tolerance,
            attack=False,
            attacked=self.attack.attacked,
            engine=Engine(memory=self.place.memory),
        )
        answers = tuple(TaskAnswer(task.certified, task.margin, task.evaluations) for task in found.tasks)
        return UnitAnswer(answers, self.place.clock() - start)


@lru_cache(maxsize=2)
def _model(source: ModelSource, device: str) -> Model:
    """The model, checked to be the one the plan was made for."""
    model = load_checkpoint(source.source)
    if model_digest(source.source) != source.digest:
        raise BuffetError(f"{source.source}: is not the model the sweep began with; start the sweep again")
    return model.to(device_named(device))


def region_of(model: Model, setting: Setting) -> LpBall:
    """The ball around the sentence of a setting in which each of its sets of words moves."""
    return LpBall(model.embed(setting.sentence), [list(each) for each in setting.words], setting.norm)
