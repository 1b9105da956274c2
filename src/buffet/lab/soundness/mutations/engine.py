"""Mistakes in what linear bounds go through, in what may move, in learning and in verdicts."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from buffet.bounds.forms import Form, Local, Rows
from buffet.bounds.intervals import Box as Enclosure
from buffet.lab.soundness.mutants import Mutant, Patch, changed_result
from buffet.network import Center, Mean
from buffet.optimisation.adam import Adam
from buffet.propagation import clean_run as scene
from buffet.propagation.substitution import Bounds
from buffet.regions import Box, CandidateSet, LpBall
from buffet.regions.base import Support
from buffet.relaxations.linear import AddPiece, LinesPiece, _Signed
from buffet.relaxations.parameters import Relaxer

LINES = ("baseline", "backward")
BOXES = ("interval",)
LEARNED = ("o-buffet", "lse+o-buffet", "backward, learned margin")
VERIFY = import_module("buffet.verification.verify")  # the package has a function of this name


# --- linear bounds ------------------------------------------------------------------------------------------


def _other_parts(right: Any) -> Any:
    return lambda self: right(self)[::-1]


def _other_sides(right: Any) -> Any:
    return lambda self, *args: right(Form(self.sides.flip(0)), *args)


def _no_bias(right: Any) -> Any:
    return lambda self, rows: (right(self, rows)[0], None)


def _nothing(right: Any) -> Any:
    return lambda *args: torch.zeros_like(right(*args))


def _one_branch(right: Any) -> Any:
    return lambda self, rows: ((rows,), None)


def _unmixed(right: Any) -> Any:
    return lambda self, other: self if self.diagonal != other.diagonal else right(self, other)


def _small_weights(right: Any) -> Any:
    return lambda self, coefs, y: right(self, 0.9 * coefs, y)


def _nothing_taken(right: Any) -> Any:
    return lambda self, coefs, y: y


def _first_words_only(right: Any) -> Any:
    def wrong(self: Local, rows: Rows) -> Any:
        form, constant = right(self, rows)
        width = self.matrix.shape[1]
        form[:, -width:] = 0
        return form, constant

    return wrong


def _forgotten_row(right: Any) -> Any:
    def wrong(self: Bounds, local: Local, tokens: int) -> Enclosure:
        box = right(self, local, tokens)
        still = torch.nn.functional.one_hot(local.moved[:, -1:], tokens).bool().mT
        return Enclosure(box.lower.masked_fill(still, 0.0), box.upper.masked_fill(still, 0.0))

    return wrong


FORMS = ("forward", "baseline")
_LINEAR = (
    Mutant("sign split", "the wrong side", Patch(Rows, "parts", _other_parts), LINES),
    Mutant("forms exchanged", "lower for upper, pulled", Patch(Form, "compose", _other_sides), FORMS),
    Mutant("forms pushed", "lower for upper, pushed", Patch(Form, "through", _other_sides), FORMS),
    Mutant("pushed constants", "lost", Patch(Form, "plus", lambda right: lambda self, *c: self), FORMS),
    Mutant("lines' constants", "lost when pulled", Patch(LinesPiece, "pull", _no_bias), LINES),
    Mutant("planes' constants", "lost when pulled", Patch(_Signed, "contract", _nothing), LINES),
    Mutant("residual", "one branch lost", Patch(AddPiece, "pull", _one_branch), LINES),
    Mutant("own token", "lost beside attention", Patch(Rows, "__add__", _unmixed), LINES, (231,)),
    Mutant("mean", "not taken off", Patch(Center, "act_transposed", _nothing_taken), LINES),
    Mutant("pooling", "weights that sum to 0.9", Patch(Mean, "act_transposed", _small_weights), LINES, (28,)),
    Mutant("one word", "the last moved one forgotten", Patch(Local, "compose", _first_words_only), LINES),
    Mutant(
        "one row", "the last moved one taken for still", Patch(Bounds, "box_of_local", _forgotten_row), LINES
    ),
    Mutant(
        "rounding",
        "allowance of the wrong sign",
        Patch(scene, "roundings", changed_result(lambda unit: -unit)),
        LINES,
        (32,),
    ),
)

# --- regions ------------------------------------------------------------------------------------------------


def _same_norm(right: Any) -> Any:
    return property(lambda self: self.p)


def _without_last_choice(right: Any) -> Any:
    def wrong(self: CandidateSet, form: Tensor) -> Tensor:
        smaller = object.__new__(CandidateSet)
        smaller.__dict__.update(self.__dict__, offsets=self.offsets[:, :, :-1])
        return right(smaller, form)

    return wrong


def _smaller_budget(right: Any) -> Any:
    def wrong(self: CandidateSet, form: Tensor) -> Tensor:
        smaller = object.__new__(CandidateSet)
        smaller.__dict__.update(self.__dict__, budget=max(self.budget - 1, 0))
        return right(smaller, form)

    return wrong


def _largest_word(right: Any) -> Any:
    def wrong(self: LpBall, form: Tensor) -> Tensor:
        return torch.stack([right(self, form * mask) for mask in _one_word_each(form)]).amin(0)

    return wrong


def _one_word_each(form: Tensor) -> list[Tensor]:
    words = torch.eye(form.shape[1], dtype=form.dtype)
    return [w.reshape(1, -1, *[1] * (form.ndim - 2)) for w in words]


def _other_ends(right: Any) -> Any:
    return lambda self, form: -right(self, -form)


def _smaller(ends: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return 0.9 * ends[0], 0.9 * ends[1]


def _narrow(right: Any) -> Any:
    return property(lambda self: 0.98 * right.fget(self))


def _half_support(found: Support) -> Support:
    return replace(found, weights=0.5 * found.weights)


def _off_middle(found: Support) -> Support:
    return replace(found, middle=None)


_REGIONS = (
    Mutant("box's half-widths", "a fiftieth small", Patch(Box, "_radius", _narrow), LINES, (28,)),
    Mutant("box's support", "half", Patch(Box, "support", changed_result(_half_support)), LINES, (7,)),
    Mutant("box's middle", "taken for 0", Patch(Box, "support", changed_result(_off_middle)), LINES, (7,)),
    Mutant(
        "candidates' support",
        "half",
        Patch(CandidateSet, "support", changed_result(_half_support)),
        LINES,
        (24,),
    ),
    Mutant(
        "candidates' extent",
        "a tenth small",
        Patch(CandidateSet, "extent", changed_result(_smaller)),
        ("interval",),
        (282,),
    ),
    Mutant(
        "box's extent", "a tenth small", Patch(Box, "extent", changed_result(_smaller)), ("interval",), (28,)
    ),
    Mutant("dual norm", "p for q", Patch(LpBall, "q", _same_norm), LINES, (185,)),
    Mutant(
        "small ball", "1 % too small", Patch(LpBall, "minimise", changed_result(lambda v: 0.99 * v)), LINES
    ),
    Mutant(
        "other tasks", "sizes exchanged", Patch(LpBall, "_outer", changed_result(lambda v: v.flip(0))), LINES
    ),
    Mutant("words", "the largest for the sum", Patch(LpBall, "minimise", _largest_word), LINES, (231,)),
    Mutant(
        "ball's extent", "a tenth small", Patch(LpBall, "extent", changed_result(_smaller)), ("interval",)
    ),
    Mutant("box ends", "the largest for the smallest", Patch(Box, "minimise", _other_ends), LINES, (28,)),
    Mutant(
        "last candidate", "forgotten", Patch(CandidateSet, "minimise", _without_last_choice), LINES, (282,)
    ),
    Mutant("budget", "one word too few", Patch(CandidateSet, "minimise", _smaller_budget), LINES, (282,)),
)

# --- learning and verdicts ----------------------------------------------------------------------------------


def _unprojected(right: Any) -> Any:
    def wrong(self: Relaxer, *args: Any) -> Any:
        learned = {i: {k: 1.5 * v for k, v in shares.items()} for i, shares in self.learned.items()}
        return right(replace(self, learned=learned), *args)

    return wrong


def _beyond(right: Any) -> Any:
    def wrong(self: Adam, *args: Any) -> None:
        right(self, *args)
        with torch.no_grad():
            self.sheet.values.mul_(2.0).sub_(0.5)

    return wrong


def _nan_proves(right: Any) -> Any:
    return lambda margins: ~(margins <= 0).any(-1)


def _first_class_only(right: Any) -> Any:
    return lambda margins: right(margins[:, :1])


_VERDICTS = (
    Mutant(
        "shares", "not kept in [0, 1]", Patch(Relaxer, "__call__", _unprojected), ("lse", "baseline"), (311,)
    ),
    Mutant("projection", "steps that leave [0, 1]", Patch(Adam, "descend", _beyond), LEARNED, (311,)),
    Mutant("NaN", "counts as a proof", Patch(VERIFY, "proven", _nan_proves), LINES, (43,)),
    Mutant(
        "one class", "the others not looked at", Patch(VERIFY, "proven", _first_class_only), LINES, (311,)
    ),
)

MUTANTS = (*_LINEAR, *_REGIONS, *_VERDICTS)
