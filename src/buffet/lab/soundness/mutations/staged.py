"""Mistakes that take a case of their own to show: split keys, cells and their tree, rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from buffet.bounds import intervals
from buffet.lab.soundness.mutants import Mutant, Patch, changed_result
from buffet.lab.soundness.staged import ABSORBING, CANCELLING
from buffet.network.functions import Function
from buffet.propagation import clean_run as scene
from buffet.propagation import substitution
from buffet.propagation.key_split import Keys
from buffet.regions import Cell, balls, boxes, cells
from buffet.relaxations import elementwise as relaxations
from buffet.search.branching import Leaf, Tree

# --- keys ---------------------------------------------------------------------------------------------------


def _without_constants(keys: Keys) -> Keys:
    forms = keys.forms.clone()
    forms[:, :, -1] = 0
    return replace(keys, forms=forms)


def _other_planes(right: Any) -> Any:
    return lambda piece, keys: right(replace(piece, y_lower=piece.y_upper, y_upper=piece.y_lower), keys)


def _static(change: Any) -> Any:
    return lambda right: staticmethod(lambda *args: change(right.__func__(*args)))


def _own_too(right: Any) -> Any:

    def wrong(self: Keys, positive: Any, negative: Any) -> Any:
        found = right(self, positive, negative)
        return found.like(2 * found.coefs)

    return wrong


KEYS = ("backward, differences",)
SPLIT = (329, 26, 392, 113, 281)
_KEYS = (
    Mutant("split keys", "the own one counted twice", Patch(Keys, "_own", _own_too), KEYS, SPLIT),
    Mutant(
        "own key", "lost", Patch(Keys, "_own", changed_result(lambda r: r.like(0 * r.coefs))), KEYS, SPLIT
    ),
    Mutant("other keys' constants", "lost", Patch(Keys, "of", _static(_without_constants)), KEYS, SPLIT),
    Mutant("keys' planes", "lower for upper", Patch(substitution, "key_rows", _other_planes), KEYS, SPLIT),
)

# --- cells --------------------------------------------------------------------------------------------------


def _nearer(right: Any) -> Any:
    """Planes moved into the cell by a fiftieth of the ball."""

    def wrong(self: Cell, dtype: torch.dtype) -> Any:
        step = 0.02 * self._sizes().to(dtype)
        return [(row, u, low + step, high - step) for row, u, low, high in right(self, dtype)]

    return wrong


def _worth_more(right: Any) -> Any:
    def wrong(self: Cell, form: Any) -> Any:
        rest, gain = right(self, form)
        return rest, gain + 0.02 * gain.abs()

    return wrong


def _open_sides_bear(right: Any) -> Any:
    """A weight for a plane that is not there, which is then worth 0."""
    return lambda form, direction, size, low, high, *q: (
        right(form, direction, size, low.clamp_min(-1e3), high.clamp_max(1e3), *q) + 0.1 * form.abs().amax()
    )


def _gain_only(right: Any) -> Any:
    def wrong(self: Cell, form: Any) -> Any:
        rest, gain = right(self, form)
        return rest, gain.clamp_min(0)

    return wrong


LINES = ("baseline", "backward")
CUT = ("cells", "cells in L∞")
_CELLS = (
    Mutant("small cell", "planes a fiftieth too near", Patch(Cell, "_planes", _nearer), LINES, CUT, True),
    Mutant("planes' worth", "2 % too much", Patch(Cell, "_reduced", _worth_more), LINES, CUT, True),
    Mutant("planes that cost", "taken for free", Patch(Cell, "_reduced", _gain_only), LINES, CUT, True),
    Mutant(
        "open sides", "bear weight (L2)", Patch(cells, "_best_weight", _open_sides_bear), LINES, CUT, True
    ),
    Mutant(
        "open sides, L∞", "bear weight", Patch(cells, "_weight_found", _open_sides_bear), LINES, CUT, True
    ),
)

# --- their tree ---------------------------------------------------------------------------------------------


def _one_half_twice(right: Any) -> Any:
    def wrong(self: Cell, cut: int, place: float) -> tuple[Cell, Cell]:
        lower, _ = right(self, cut, place)
        return lower, lower

    return wrong


def _other_half_twice(right: Any) -> Any:
    def wrong(self: Cell, cut: int, place: float) -> tuple[Cell, Cell]:
        _, upper = right(self, cut, place)
        return upper, upper

    return wrong


def _gap(right: Any) -> Any:
    def wrong(self: Cell, cut: int, place: float) -> tuple[Cell, Cell]:
        apart = 0.4 * float(self._sizes()[0])
        return right(self, cut, place - apart)[0], right(self, cut, place + apart)[1]

    return wrong


def _any_sign_proves(right: Any) -> Any:
    def wrong(self: Leaf, eps: float, margins: Any) -> None:
        right(self, eps, margins + 0.05)

    return wrong


def _other_eps(right: Any) -> Any:
    return lambda self, leaves, eps: right(self, leaves, 0.9 * eps)


def _best_leaf(right: Any) -> Any:
    return property(
        lambda self: torch.stack([leaf.proof for leaf in self.leaves if leaf.proof is not None]).amax(0)
    )


WITH_CELLS = ("lse, cells", "baseline, cells")
PLANTED = (203, 32, 311, 116, 185)
_TREE = (
    Mutant(
        "upper halves", "never looked at", Patch(Cell, "halves", _one_half_twice), WITH_CELLS, PLANTED, True
    ),
    Mutant(
        "lower halves", "never looked at", Patch(Cell, "halves", _other_half_twice), WITH_CELLS, (32,), True
    ),
    Mutant("a gap", "between the halves", Patch(Cell, "halves", _gap), WITH_CELLS, PLANTED, True),
    Mutant("leaves", "proven too easily", Patch(Leaf, "hear", _any_sign_proves), WITH_CELLS, PLANTED, True),
    Mutant(
        "leaves' size",
        "asked at nine tenths of ε",
        Patch(Tree, "_hear", _other_eps),
        WITH_CELLS,
        PLANTED,
        True,
    ),
    Mutant("best leaf", "for the worst", Patch(Tree, "margins", _best_leaf), WITH_CELLS, PLANTED, True),
)

# --- the account of rounding --------------------------------------------------------------------------------


def _nothing(found: Any) -> Any:
    return 0 * found


def _rowless(right: Any) -> Any:
    """What errors of the clean run are left without those of the rows."""
    return lambda program, clean, dtype: 0.0


_ACCOUNT = (
    Mutant(
        "residuals of the clean run",
        "forgotten",
        Patch(scene, "residual", changed_result(_nothing)),
        LINES,
        ABSORBING,
        True,
    ),
    Mutant(
        "rounding of rows", "forgotten", Patch(scene, "roundings", _rowless), ("forward",), CANCELLING, True
    ),
)

# --- rounding -----------------------------------------------------------------------------------------------


FLOATS = ("lines in float32", "lines")


def _zero(value: Any) -> Any:
    return 0 * value


def _as_it_is(right: Any) -> Any:
    return lambda pair: pair


def _nearest(x: Tensor, dtype: torch.dtype, *, up: bool) -> Tensor:
    return x.to(dtype)


_ROUNDING = tuple(
    Mutant(name, what, patch, methods=(), only=True, exact=claims)
    for name, what, patch, claims in (
        ("outward rounding", "to nearest", Patch(relaxations, "_stepped", _as_it_is), FLOATS),
        ("rounding of f", "forgotten", Patch(Function, "rounding", changed_result(_zero)), FLOATS),
        ("rounding of ranges", "forgotten", Patch(intervals, "EPS", _zero), ("ranges",)),
        ("size of a ball", "to nearest", Patch(balls, "rounded", lambda _: _nearest), ("regions",)),
        ("size of a box", "to nearest", Patch(boxes, "rounded", lambda _: _nearest), ("regions",)),
    )
)

MUTANTS = (*_KEYS, *_CELLS, *_TREE, *_ACCOUNT, *_ROUNDING)
