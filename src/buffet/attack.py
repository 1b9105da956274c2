"""Gradient attacks: points of a region that the network answers differently.

Steps are taken in float32; whatever is reported was evaluated again in float32 *and* float64, and counts as
a success only if the margin ``logit[label] − max_other logit`` is strictly negative in both; of any other
property, if the float64 outputs violate it. A success is a counterexample; a failure proves nothing. A
deadline (on the clock of `time.perf_counter`) ends an attack after the gradient step that is under way, with
what was found by then; where nothing was, that is a failure.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.network import Program
from buffet.properties import Property, margin_of
from buffet.regions import Region
from buffet.system.parallel import threads

# Tasks are attacked in groups of about this many numbers in all values of the graph (float32: 0.5 GB).
GROUP_NUMBERS = 2**27
# With fewer numbers in one value an operation is too small to be split over threads.
SPLIT_NUMBERS = 2**17
# The approach to the boundary ends after this many steps that bring no task closer by 0.05 %.
PATIENCE = 6
# Sizes are kept in the range of float32.
LARGEST = 1e30


@dataclass(frozen=True)
class AttackSettings:
    """How hard to try. The same settings give the same result."""

    steps: int = 40  # gradient steps of every restart
    restarts: int = 4  # starting points; the first is the clean input, the others are random
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.restarts < 1:
            found = f"steps {self.steps} and restarts {self.restarts}"
            raise BuffetError(f"attack: {found} must both be at least 1")


DEFAULT = AttackSettings()


@dataclass(frozen=True, eq=False)
class Attack:
    """The best point found in every task; all tensors float64."""

    success: Bool[Tensor, "tasks"]
    margin: Float[Tensor, "tasks"]
    deltas: Float[Tensor, "tasks moved width"]
    points: Float[Tensor, "tasks tokens width"]


@dataclass(frozen=True, eq=False)
class _Target:
    """The network under attack in both precisions."""

    single: Program
    double: Program
    goal: Property | int
    mask: Tensor | None
    deadline: float | None

    @classmethod
    def of(
        cls, program: Program, goal: Property | int, mask: Tensor | None, deadline: float | None
    ) -> _Target:
        return cls(program.to(torch.float32), program.to(torch.float64), goal, mask, deadline)

    @property
    def label(self) -> int | None:
        """The class whose margin is to become negative, if it is about one."""
        return self.goal.label if isinstance(self.goal, Property) else self.goal

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def margin(self, region: Region, delta: Tensor) -> Tensor:
        """``logit[label] − max_other logit`` or the margin of a property, in the precision of `delta`."""
        x = region.points(delta)
        mask = None if self.mask is None else self.mask.expand(x.shape[:-1])
        logits = (self.double if x.dtype == torch.float64 else self.single).evaluate(x, mask)
        label = self.label
        if label is None:
            assert isinstance(self.goal, Property)
            return self.goal.margin(self.goal.values(logits)).to(logits.dtype)
        return margin_of(logits, label)

    def gradient(self, region: Region, delta: Tensor) -> tuple[Tensor, Tensor]:
        """The margin and its gradient; entries that overflow are 0."""
        with torch.enable_grad():
            delta = delta.detach().requires_grad_()
            margin = self.margin(region, delta)
            (slope,) = torch.autograd.grad(margin.sum(), delta)
        return margin.detach(), slope.nan_to_num(0.0, 0.0, 0.0)

    def flipped(self, region: Region, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the float64 point `delta` flips the answer in both precisions, and its float64 margin.

        A property that is not about the largest output is violated or not: float64 decides.
        """
        with torch.no_grad():
            margin = self.margin(region, delta)
            if self.label is None:
                return margin <= 0, margin
            return (margin < 0) & (self.margin(region, delta.float()) < 0), margin


def attack(
    program: Program,
    region: Region,
    goal: Property | int,
    settings: AttackSettings = DEFAULT,
    *,
    mask: Bool[Tensor, "tokens"] | None = None,
    deadline: float | None = None,
) -> Attack:
    """Look in every task of `region` for a point that violates a property, or is not of the given class.

    Frank–Wolfe steps ``δ ← δ + η (argmin_{δ'} ∇margin·δ' − δ)`` with η falling from 1: the exact linear
    minimiser of the region suits every norm. Finite candidate sets also get all single substitutions in turn.
    Stops as soon as every task has a confirmed success.
    """
    target = _Target.of(program, goal, mask, deadline)
    generator = torch.Generator().manual_seed(settings.seed)
    found: list[Tensor] = []
    for tasks, split in _groups(program, region, settings):
        part = region.select(tasks)
        if found and target.expired:
            found.append(part.project(_still(part)))
            continue
        with split:
            delta = _descend(target, part, settings, generator)
            if part.finite:
                delta = _substitute(target, part, delta, settings.steps)
        found.append(part.project(delta.double()))
    return _judged(target, region, torch.cat(found))


def nearest_attack(
    program: Program,
    region: Region,
    goal: Property | int,
    settings: AttackSettings = DEFAULT,
    *,
    deadline: float | None = None,
) -> Attack:
    """For every task the smallest counterexample found; where there is none, the unmoved input (no success).

    The size of `region`, if any, is ignored.
    """
    target = _Target.of(program, goal, None, deadline)
    generator = torch.Generator().manual_seed(settings.seed)
    still = _still(region)
    if bool(target.flipped(region, still)[0].all()):
        return _judged(target, region, still)
    found: list[Tensor] = []
    for tasks, split in _groups(program, region, settings):
        part = region.select(tasks)
        if target.expired:
            found.append(_still(part))
            continue
        with split:
            delta = _nearest(target, part, settings, generator)
            lost = _lost(delta)
            if bool(lost.any()):
                delta[lost] = _widen(target, part.select(lost), settings, generator)
            delta = _tighten(target, part, delta)
            found.append(_polish(target, part, settings, delta, generator))
    delta = torch.cat(found)
    return _judged(target, region, torch.where(_lost(delta)[:, None, None], 0.0, delta))


def attacked_radius(
    program: Program,
    region: Region,
    goal: Property | int,
    settings: AttackSettings = DEFAULT,
    *,
    deadline: float | None = None,
) -> Float[Tensor, "tasks"]:
    """For every task the size of the smallest counterexample found, rounded up (inf: none found).

    The number is ``max_d ‖δ_d‖_p`` of a δ that was seen to flip the answer (see `nearest_attack`), so the
    ball of that size is certainly not robust. It is 0 if the clean input does already.
    """
    found = nearest_attack(program, region, goal, settings, deadline=deadline)
    size = region.size_of(found.deltas) * (1 + 16 * torch.finfo(torch.float64).eps)
    return torch.where(found.success, size, math.inf)


def _descend(target: _Target, region: Region, settings: AttackSettings, generator: torch.Generator) -> Tensor:
    """The float32 δ of smallest margin among all steps and restarts, for every task."""
    delta = region.project(region.sample(settings.restarts, generator).float())
    best, lowest = delta.clone(), delta.new_full(delta.shape[:2], math.inf)
    for step in range(settings.steps + 1):
        margin, slope = target.gradient(region, delta)
        better = margin < lowest
        lowest = torch.where(better, margin, lowest)
        best = torch.where(better[..., None, None], delta, best)
        winner = _per_task(best, lowest)
        done = bool((lowest.amin(0) < 0).all())
        if done and bool(target.flipped(region, region.project(winner.double()))[0].all()):
            break
        if target.expired:
            break
        corner = region.extreme(slope)
        if region.finite:
            delta = corner
        else:
            delta = region.project(delta + _decay(step, settings.steps, 0.02) * (corner - delta))
    return winner


def _substitute(target: _Target, region: Region, delta: Tensor, passes: int) -> Tensor:
    """Greedy search: change one word at a time to the choice that lowers the margin most.

    Starts from the unchanged sentence and from `delta`; ends when nothing improves or all tasks flipped.
    """
    winners, margins = [], []
    for current in (torch.zeros_like(delta), delta):
        lowest = _margins(target, region, current[None])[0]
        for _ in range(passes):
            if bool((lowest < 0).all()) or target.expired:
                break
            trials = region.changed_words(current)
            value = _margins(target, region, trials)
            value = torch.where(region.contains(trials), value, math.inf)
            better = value.amin(0) < lowest
            if not bool(better.any()):
                break
            lowest = torch.where(better, value.amin(0), lowest)
            current = torch.where(better[:, None, None], _per_task(trials, value), current)
        winners.append(current)
        margins.append(lowest)
    return _per_task(torch.stack(winners), torch.stack(margins))


def _margins(target: _Target, region: Region, delta: Tensor) -> Tensor:
    """Margins without gradients, a few starts at a time."""
    size = max(1, 256 // region.tasks)
    with torch.no_grad():
        return torch.cat([target.margin(region, part) for part in delta.split(size)])


def _nearest(target: _Target, region: Region, settings: AttackSettings, generator: torch.Generator) -> Tensor:
    """Approach the nearest point of the decision boundary; float64 δ per task, NaN where none flipped.

    At δ with margin m and gradient g the linearised margin vanishes in the ball of size
    ``ε = (m − g·δ) / Σ_d ‖g_d‖_q``, at its linear minimiser. Every step goes a fraction η towards that point
    (the Hasofer–Lind iteration for any norm), ε overshooting a little so that the boundary is crossed.
    """
    restarts, tasks = settings.restarts, region.tasks
    many = region.select(torch.arange(tasks).repeat(restarts))
    margin, slope = target.gradient(region, _still(region).float())
    guess = (margin.double().clamp(min=0) / region.growth(slope)).nan_to_num(0.0, 1.0)
    guess = guess.clamp(max=LARGEST)
    delta = region.with_eps(guess).sample(restarts, generator).float().flatten(0, 1)
    eps, best = guess.repeat(restarts), torch.full_like(delta, math.nan)
    smallest = torch.full_like(eps, math.inf)
    overshoot = torch.full_like(eps, 1.001)
    # Long steps converge fast, short ones do not oscillate: the restarts share them out.
    first = torch.linspace(0.5, 0.25, restarts, device=eps.device).repeat_interleave(tasks)[:, None, None]
    before, idle = smallest, 0
    for step in range(settings.steps + 1):
        margin, slope = target.gradient(many, delta)
        size = region.size_of(delta)
        closer = (margin < 0) & (size < smallest)
        smallest = torch.where(closer, size, smallest)
        best = torch.where(closer[:, None, None], delta, best)
        found = smallest.reshape(restarts, tasks).amin(0).repeat(restarts)
        idle = 0 if bool((found.isinf() | (found < 0.9995 * before)).any()) else idle + 1
        before = found if idle == 0 else before
        if idle == PATIENCE or target.expired:
            break
        # A trajectory that oscillates in front of the boundary is pushed harder until it crosses.
        overshoot = torch.where(found.isinf() & (step > 8), overshoot * 1.05, 1.001)
        aim = overshoot * (margin.double() - (slope * delta).double().sum((1, 2))) / region.growth(slope)
        growth = 2 * torch.maximum(eps, size)
        eps = torch.minimum(torch.minimum(aim.nan_to_num(0.0).clamp(min=0), growth), found)
        corner = many.with_eps(eps.clamp(max=LARGEST)).extreme(slope)
        delta = delta + first * _decay(step, settings.steps, 0.2) * (corner - delta)
    return _per_task(*(found.unflatten(0, (restarts, tasks)) for found in (best, smallest))).double()


def _widen(target: _Target, region: Region, settings: AttackSettings, generator: torch.Generator) -> Tensor:
    """Attacks in larger and larger balls, where the direct approach failed; NaN where none flips."""
    delta = _still(region) * math.nan
    quick = replace(settings, steps=min(settings.steps, 10))
    for power in range(-4, 5):
        size = _scale(region) * 4.0**power
        lost = _lost(delta)
        if not bool(lost.any()) or target.expired:
            break
        part = region.select(lost).with_eps(size)
        found = part.project(_descend(target, part, quick, generator).double())
        flipped, _ = target.flipped(part, found)
        delta[lost] = torch.where(flipped[:, None, None], found, math.nan)
    return delta


def _tighten(target: _Target, region: Region, delta: Tensor) -> Tensor:
    """Shrink every δ along its ray as far as it still flips the answer; NaN where it does not."""
    # Float64 may put the boundary a hair further out than float32 did.
    stretch = torch.tensor([1.0, 1.0001, 1.001, 1.01, 1.1], dtype=torch.float64, device=delta.device)
    flips = torch.stack([target.flipped(region, delta * s)[0] for s in stretch])
    high = stretch[flips.int().argmax(0)]  # the first that flips
    low = torch.zeros_like(high)
    # Most rays were already cut close to the boundary: look just below the end before halving the whole ray.
    for step in range(16):
        if target.expired:
            break
        middle = high * 0.99 if step == 0 else (low + high) / 2
        flipped, _ = target.flipped(region, delta * middle[:, None, None])
        high, low = torch.where(flipped, middle, high), torch.where(flipped, low, middle)
    return torch.where(flips.any(0), high, math.nan)[:, None, None] * delta


def _polish(
    target: _Target, region: Region, settings: AttackSettings, delta: Tensor, generator: torch.Generator
) -> Tensor:
    """Attack again in slightly smaller balls, as long as that helps some task."""
    quick = replace(settings, steps=min(settings.steps, 10))
    tasks = (~_lost(delta)).nonzero()[:, 0]
    for _ in range(3):
        if not len(tasks) or target.expired:
            break
        part = region.select(tasks)
        part = part.with_eps(0.98 * part.size_of(delta[tasks]))
        closer = part.project(_descend(target, part, quick, generator).double())
        helped, _ = target.flipped(part, closer)
        tasks = tasks[helped]
        if len(tasks):
            delta[tasks] = _tighten(target, part.select(helped), closer[helped])
    return delta


def _lost(delta: Tensor) -> Tensor:
    """The tasks that have no δ yet: theirs is NaN."""
    return delta.isnan().flatten(1).any(1)


def _judged(target: _Target, region: Region, delta: Tensor) -> Attack:
    """The final word: `delta` evaluated once more in both precisions."""
    success, margin = target.flipped(region, delta)
    return Attack(success, margin, delta, region.points(delta))


def _still(region: Region) -> Tensor:
    """The deviation of the clean input."""
    return torch.zeros(*region.moved.shape, region.width, dtype=torch.float64, device=region.center.device)


def _per_task(delta: Tensor, score: Tensor) -> Tensor:
    """The δ of the start with the smallest score, for every task."""
    return delta[score.argmin(0), torch.arange(delta.shape[1], device=delta.device)]


def _decay(step: int, steps: int, last: float) -> float:
    """A step length falling from 1 to `last` along half a cosine."""
    return last + (1 - last) * (1 + math.cos(math.pi * step / steps)) / 2


def _scale(region: Region) -> float:
    """The typical size of a row in the region's norm: embeddings moved by much more are meaningless."""
    size = region.size_of(region.center.double().unsqueeze(1)).mean()
    return float(size) if size > 0 else 1.0


def _groups(
    program: Program, region: Region, settings: AttackSettings
) -> Iterator[tuple[Tensor, AbstractContextManager[None]]]:
    """Tasks in groups that fit into memory together, and the threads that are of use to each group."""
    each = settings.restarts * region.center.numel()
    for tasks in torch.arange(region.tasks).split(max(1, GROUP_NUMBERS // (each * len(program.nodes)))):
        yield tasks, threads(torch.get_num_threads() if each * len(tasks) >= SPLIT_NUMBERS else 1)
