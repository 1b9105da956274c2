"""Mistakes in what nonlinearities are replaced by: functions, products, softmax, intervals."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from buffet.bounds import intervals
from buffet.bounds.forms import Rows
from buffet.bounds.intervals import Box
from buffet.lab.soundness.mutants import (
    Mutant,
    Patch,
    Wrong,
    changed_fields,
    changed_result,
    forced,
    narrowed,
)
from buffet.network import Affine, Normalise, Softmax
from buffet.network.functions import FUNCTIONS
from buffet.propagation import walk as propagation
from buffet.relaxations import elementwise as relaxations
from buffet.relaxations import products, softmax
from buffet.relaxations import table as choices
from buffet.relaxations.linear import SoftmaxPiece


def _nowhere(slope: Tensor) -> tuple[Tensor, ...]:
    return ()


# --- relaxations of functions -------------------------------------------------------------------------------


def _raised(lines: Any) -> Any:
    gap = (lines.upper_intercept - lines.lower_intercept).abs()
    return replace(lines, lower_intercept=lines.lower_intercept + 0.05 * gap)


def _lowered(lines: Any) -> Any:
    gap = (lines.upper_intercept - lines.lower_intercept).abs()
    return replace(lines, upper_intercept=lines.upper_intercept - 0.05 * gap)


def _exchanged_lines(lines: Any) -> Any:
    return replace(
        lines,
        lower_slope=lines.upper_slope,
        upper_slope=lines.lower_slope,
        lower_intercept=lines.upper_intercept,
        upper_intercept=lines.lower_intercept,
    )


def _without_intercepts(lines: Any) -> Any:
    nothing = torch.zeros_like(lines.lower_intercept)
    return replace(lines, lower_intercept=nothing, upper_intercept=nothing)


def _ends_only(right: Any) -> Any:
    return lambda f, *rest: right(replace(f, minima=_nowhere, maxima=_nowhere), *rest)


def _short_interval(right: Any) -> Any:
    def wrong(f: Any, c: Tensor, ends: Tensor, slopes: Tensor) -> Tensor:
        return right(f, c, torch.lerp(ends[:1], ends, 0.9), slopes)

    return wrong


def _other_extrema(f: Any) -> Any:
    return replace(f, minima=f.maxima, maxima=f.minima)


LINES = ("baseline", "backward")
_RELAXATIONS = (
    Mutant(
        "raised line", "lower lines 5 % too high", Patch(choices, "relax", changed_result(_raised)), LINES
    ),
    Mutant(
        "lowered line", "upper lines 5 % too low", Patch(choices, "relax", changed_result(_lowered)), LINES
    ),
    Mutant(
        "exchanged lines",
        "lower for upper",
        Patch(choices, "relax", changed_result(_exchanged_lines)),
        LINES,
    ),
    Mutant("no intercepts", "dropped", Patch(choices, "relax", changed_result(_without_intercepts)), LINES),
    Mutant(
        "shifted tangent", "touching points ignored", Patch(relaxations, "_intercepts", _ends_only), LINES
    ),
    Mutant(
        "wrong chord",
        "drawn to nine tenths",
        Patch(relaxations, "_intercepts", _short_interval),
        LINES,
        (185,),
    ),
    Mutant("tanh side", "minima for maxima", Patch(FUNCTIONS, "tanh", _other_extrema), LINES),
    Mutant(
        "gelu tangent",
        "minima unknown",
        Patch(FUNCTIONS, "gelu", changed_fields(minima=_nowhere)),
        LINES,
        (185,),
    ),
    Mutant("exp tangent", "minima unknown", Patch(FUNCTIONS, "exp", changed_fields(minima=_nowhere)), LINES),
    Mutant(
        "1/x tangent",
        "minima unknown",
        Patch(FUNCTIONS, "reciprocal", changed_fields(minima=_nowhere)),
        LINES,
        (311,),
    ),
    Mutant(
        "1/√x tangent", "minima unknown", Patch(FUNCTIONS, "rsqrt", changed_fields(minima=_nowhere)), LINES
    ),
    Mutant(
        "x² tangent", "minima unknown", Patch(FUNCTIONS, "square", changed_fields(minima=_nowhere)), LINES
    ),
    Mutant(
        "x² valley",
        "range from the ends only",
        Patch(FUNCTIONS, "square", changed_fields(valley=-math.inf)),
        ("interval", "baseline"),
    ),
)

# --- products -----------------------------------------------------------------------------------------------


def _exchanged_planes(piece: Any) -> Any:
    return replace(
        piece,
        x_lower=piece.x_upper,
        x_upper=piece.x_lower,
        y_lower=piece.y_upper,
        y_upper=piece.y_lower,
        lower=piece.upper,
        upper=piece.lower,
    )


def _one_slope(piece: Any) -> Any:
    return replace(piece, x_upper=piece.x_lower)


def _constants(factor: float) -> Wrong:
    return changed_result(
        lambda piece: replace(piece, lower=factor * piece.lower, upper=factor * piece.upper)
    )


def _constant_at_zero(right: Any) -> Any:
    return lambda op, alpha, *corners: right(op, 0.0, *corners)


def _reach(factor: float) -> Wrong:
    return changed_result(lambda whole: whole and replace(whole, reach=factor * whole.reach))


def _alpha(value: float) -> Wrong:
    return forced(alpha_lower=value, alpha_upper=value)


PLANES = ("baseline", "backward")
_PRODUCTS = (
    Mutant(
        "exchanged planes", "L for U", Patch(choices, "planes", changed_result(_exchanged_planes)), PLANES
    ),
    Mutant(
        "one slope", "U1 with L1's slope in x", Patch(choices, "planes", changed_result(_one_slope)), PLANES
    ),
    Mutant("no constants", "planes through 0", Patch(choices, "planes", _constants(0.0)), PLANES),
    Mutant("wrong sign", "of the constants", Patch(choices, "planes", _constants(-1.0)), PLANES),
    Mutant("small constants", "a tenth smaller", Patch(choices, "planes", _constants(0.9)), PLANES),
    Mutant("α above 1", "α = 1.5", Patch(choices, "planes", _alpha(1.5)), PLANES),
    Mutant("α below 0", "α = −0.5", Patch(choices, "planes", _alpha(-0.5)), PLANES),
    Mutant(
        "two α",
        "constant for another α",
        Patch(products, "_constant", _constant_at_zero),
        ("middle", "dual"),
    ),
    Mutant("nothing left", "of products as a whole", Patch(choices, "whole_of", _reach(0.0)), PLANES),
    Mutant("half left", "of products as a whole", Patch(choices, "whole_of", _reach(0.5)), PLANES),
)

# --- softmax ------------------------------------------------------------------------------------------------


def _narrow_differences(right: Any) -> Any:
    return lambda *args: narrowed(right(*args))


def _narrow_above(right: Any) -> Any:
    return lambda differences, touch: right(narrowed(differences), touch)


def _low_intercept(right: Any) -> Any:
    def wrong(*args: Any) -> tuple[Tensor, Tensor]:
        slope, constant = right(*args)
        return slope, constant - 1e-3

    return wrong


def _tangent_for_chord(right: Any) -> Any:
    def wrong(low: Tensor, high: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return right((low + high) / 2, (low + high) / 2, x)

    return wrong


def _part_of_the_shift(right: Any) -> Any:
    def wrong(self: SoftmaxPiece, rows: Rows) -> Any:
        a = self._split(rows.coefs).clone()
        a[:, :, :, :1] += a.median(3, keepdim=True).values
        return right(self, rows.like(a.flatten(2, 3)))

    return wrong


def _mixed_twice(right: Any) -> Any:
    return forced(mixture=torch.full((1, 1, 1, 1), 2.0, dtype=torch.float64))(right)


LSE = ("lse", "backward, differences")
_SOFTMAX = (
    Mutant("LSE intercept", "0.001 too low", Patch(softmax, "_above", _low_intercept), LSE),
    Mutant("LSE chord", "over a range a fifth too small", Patch(softmax, "_above", _narrow_above), LSE),
    Mutant("ER chord", "a tangent instead", Patch(softmax, "_chord_at", _tangent_for_chord), LSE),
    Mutant(
        "mixture",
        "weight 2 for L_ER, −1 for L_LSE",
        Patch(choices, "softmax_piece", _mixed_twice),
        LSE,
        (32,),
    ),
    Mutant(
        "Σp shift",
        "not added back for one weight",
        Patch(SoftmaxPiece, "pull", _part_of_the_shift),
        ("backward, lse", "backward, differences"),
    ),
    Mutant(
        "difference range",
        "a fifth too small",
        Patch(softmax, "difference_range", _narrow_differences),
        LSE,
    ),
    Mutant(
        "weight range",
        "from differences a fifth too close",
        Patch(intervals, "difference_range", _narrow_differences),
        ("backward, differences",),
    ),
)

# --- intervals ----------------------------------------------------------------------------------------------


def _tight(kind: type, only: Callable[[Any], bool] = lambda op: True) -> Wrong:
    """Boxes of one kind of operation a fifth too small."""

    def wrong(right: Any) -> Any:
        def enclose(op: Any, clean: Any, *boxes: Any) -> Box:
            box = right(op, clean, *boxes)
            return Box(*narrowed((box.lower, box.upper))) if isinstance(op, kind) and only(op) else box

        return enclose

    return wrong


def _is_variance(op: Affine) -> bool:
    return op.least > -math.inf


BOXES = ("interval", "baseline")
_INTERVALS = (
    Mutant(
        "softmax range",
        "a fifth too small",
        Patch(propagation, "interval", _tight(Softmax)),
        ("interval",),
        (116,),
    ),
    Mutant("exp·1/Σ range", "a fifth too small", Patch(propagation, "interval", _tight(Normalise)), LINES),
    Mutant(
        "variance range",
        "a fifth too small",
        Patch(propagation, "interval", _tight(Affine, _is_variance)),
        BOXES,
    ),
)

MUTANTS = (*_RELAXATIONS, *_PRODUCTS, *_SOFTMAX, *_INTERVALS)
