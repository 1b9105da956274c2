"""Whether substitutions can change an answer: all shapes proven, or the sentence that does."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.attack import AttackSettings
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.methods import Method
from buffet.printing import round_down, round_up
from buffet.propagation.rigorous_run import RigorousRun, batch_size
from buffet.properties import margin_of
from buffet.query import checked_budget
from buffet.regions.combinations import Combinations
from buffet.system.precision import full_precision
from buffet.verdicts import Verdict
from buffet.verification.verify import verify

if TYPE_CHECKING:
    from buffet.words.sets import Shape, Substitutions

LEAST_SECONDS = 1e-3
"""The budget of a shape for which no time is left: it is answered with "unknown"."""


@dataclass(frozen=True)
class Flip:
    """A sentence to which the model gives another answer."""

    sentence: str
    changes: tuple[tuple[str, str], ...]  # every exchanged word, and what for
    answer: int  # the class that the model gives it
    margin: float  # of the label; it is negative


@dataclass(frozen=True)
class Answer:
    """What is known of all sentences that substitutions make."""

    verdict: Verdict
    label: int
    clean_margin: float
    count: int  # of the sentences, the text itself included
    margin: float | None  # no sentence has a smaller one; None: no such bound is known
    flip: Flip | None
    unknown: int  # sentences of shapes that are neither proven nor flipped
    shapes: int
    seconds: float
    at_most: int  # words exchanged at once

    def __repr__(self) -> str:
        return f"Answer({self.headline})"

    @property
    def headline(self) -> str:
        """The answer in a few words."""
        if self.flip is not None:
            return f"falsified by {self.flip.sentence!r}, margin {round_up(self.flip.margin)}"
        if self.verdict == "certified":
            assert self.margin is not None
            return f"proven for all {self.count:,} sentences, margin {round_down(self.margin)}"
        return f"unknown for {self.unknown:,} of {self.count:,} sentences"


@full_precision()
def answered(
    found: Substitutions,
    method: str | Method,
    *,
    label: int | None,
    budget: float | None,
    attack: bool,
    seed: int,
    engine: Engine,
) -> Answer:
    """Go through all shapes until one is broken: single sentences are run, larger sets verified."""
    begin = time.perf_counter()
    end = None if budget is None else begin + checked_budget(budget)
    program = found.model.program64
    logits = program.evaluate(found.shapes[0].rows.double())
    label = int(logits.argmax()) if label is None else label
    single = [shape for shape in found.shapes if shape.region is None]
    moving = [shape for shape in found.shapes if shape.region is not None]
    flip, margins = _run_single(found, single, label)
    unknown = 0
    for shape in moving:
        if flip is not None:
            break
        assert shape.region is not None
        left = None if end is None else max(end - time.perf_counter(), LEAST_SECONDS)
        falsify = AttackSettings(seed=seed) if attack else False
        one = verify(
            found.model, shape.region, method=method, label=label, budget=left, falsify=falsify, engine=engine
        )
        if one.interrupted:
            raise KeyboardInterrupt  # of the other shapes nothing is known
        margins.append(one.margin if one.verdict == "certified" else -math.inf)
        if one.counterexamples[0] is not None:
            flip = _flip(found, found.choices_at(shape, one.counterexamples[0]), label)
        if one.verdict != "certified":
            unknown += _sentences(found, shape)
    least = min(margins, default=-math.inf)
    verdict: Verdict = "falsified" if flip else "certified" if least > 0 else "unknown"
    return Answer(
        verdict=verdict,
        label=label,
        clean_margin=float(margin_of(logits, label)),
        count=found.count,
        margin=least if verdict != "falsified" and math.isfinite(least) else None,
        flip=flip,
        unknown=0 if flip or verdict == "certified" else unknown or len(single),
        shapes=len(found.shapes),
        seconds=time.perf_counter() - begin,
        at_most=found.at_most,
    )


@full_precision()
def answered_each(
    found: Substitutions,
    budgets: Sequence[int],
    answer: Callable[[Substitutions, float | None], Answer],
    seconds: float | None,
) -> tuple[Answer, ...]:
    """What is known if at most k words are exchanged, for every k of `budgets`, in their order.

    What is proven for some words holds for fewer, and a sentence that flips the answer counts for all budgets
    that it is within. So the smallest budget is asked first, which costs least and often has a flip; then
    the largest of those that are open. Each may take its share of the `seconds` that are left.
    """
    if wrong := [k for k in budgets if k < 1]:
        raise BuffetError(f"at_most is {wrong[0]}: at least 1 word has to be exchanged")
    end = None if seconds is None else time.perf_counter() + checked_budget(seconds)
    sets = {k: found.within(k) for k in budgets}
    known: dict[int, Answer] = {}
    while rest := sorted(sets.keys() - known.keys()):
        asked = rest[-1] if known else rest[0]
        left = None if end is None else max(end - time.perf_counter(), LEAST_SECONDS) / len(rest)
        known[asked] = told = answer(sets[asked], left)
        for k, one in sets.items():
            flips = told.flip is not None and len(told.flip.changes) <= one.at_most
            settled = k in known and known[k].verdict != "unknown"
            if not settled and (flips or (told.verdict == "certified" and k <= asked)):
                known[k] = replace(told, count=one.count, shapes=one.shape_count, at_most=one.at_most)
    return tuple(known[k] for k in budgets)


def _sentences(found: Substitutions, shape: Shape) -> int:
    """How many sentences there are of a shape."""
    room = found.at_most - sum(map(bool, shape.choices))
    return Combinations(tuple((0, *some) for some in shape.options), room).count()


def _run_single(found: Substitutions, shapes: Sequence[Shape], label: int) -> tuple[Flip | None, list[float]]:
    """Sentences alone in their shape, those of a length together: the worst flip, and lower bounds."""
    lengths: dict[int, list[Shape]] = {}
    for shape in shapes:
        lengths.setdefault(len(shape.rows), []).append(shape)
    program = found.model.program64.margins(label)
    run = RigorousRun(program, torch.float64)
    lower: list[float] = []
    worst: tuple[float, Shape] | None = None
    for some in lengths.values():
        value, error = _margins(run, torch.stack([shape.rows.double() for shape in some]))
        least = value.amin(-1)
        lower += (least - error).nan_to_num(-math.inf).tolist()
        for shape, margin, off in zip(some, least.tolist(), error.tolist(), strict=True):
            if margin < -off and (worst is None or margin < worst[0]):
                worst = margin, shape
    return (None if worst is None else _flip(found, worst[1].choices, label)), lower


def _margins(run: RigorousRun, x: Float[Tensor, "points tokens width"]) -> tuple[Tensor, Tensor]:
    parts = []
    size = batch_size(run.program, x.shape[1], x.shape[2])
    with torch.inference_mode():
        for some in x.split(size):
            table = run.table(some.flatten(0, 1))
            index = torch.arange(some.shape[0] * some.shape[1], device=x.device).view(some.shape[:2])
            parts.append(run.margins(table, index))
    value, error = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return value, error + 2 * torch.finfo(torch.float64).eps * value.abs().amax(-1)


def _flip(found: Substitutions, choices: tuple[int, ...], label: int) -> Flip | None:
    """The sentence of these choices, read and run once more; None if its answer is the label."""
    sentence = found.reading.exchanged(
        {w.span: w.named(c) for w, c in zip(found.words, choices, strict=True) if c}
    )
    logits = found.model.logits(found.model.embed(*sentence).double())
    margin = float(margin_of(logits, label))
    if not margin < 0:
        return None
    changes = tuple((w.text, w.named(c)) for w, c in zip(found.words, choices, strict=True) if c)
    return Flip(found.sentence(choices), changes, int(logits.argmax()), margin)
