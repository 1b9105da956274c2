"""Mistakes in what nonlinearities are replaced by: lines, planes, softmax, products as a whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from buffet_checker import (
    functions,
    known,
    pieces,
    softmax,
    wholes,
)
from buffet_checker.balls import Ball
from buffet_checker.functions import CONCAVE, CONVEX, FUNCTIONS, LINEAR, Function
from checker_mutants.wrong import (
    Mutant,
    Wrong,
    fixed,
    narrower,
    nothing,
    result,
)

# --- functions ----------------------------------------------------------------------------------------------


def _bent(change: Callable[[int], int]) -> Wrong:
    """Pieces of another curvature."""
    return lambda f: replace(f, pieces=tuple((a, b, change(c)) for a, b, c in f.pieces))


def _other_curvature(c: int) -> int:
    return {CONVEX: CONCAVE, CONCAVE: CONVEX, LINEAR: LINEAR}[c]


CURVED = ("gelu", "gelu_tanh", "tanh", "exp", "reciprocal", "rsqrt", "square")
_FUNCTIONS = (
    *(Mutant(f"curvature of {name}", FUNCTIONS, name, _bent(_other_curvature)) for name in CURVED),
    Mutant("kink of relu", FUNCTIONS, "relu", lambda f: replace(f, pieces=((-math.inf, math.inf, LINEAR),))),
    Mutant("turns of gelu", FUNCTIONS, "gelu", lambda f: replace(f, turns=None)),
    Mutant("turns of x²", FUNCTIONS, "square", lambda f: replace(f, turns=None)),
    Mutant("values of f", Function, "image", result(narrower)),
    Mutant("intercepts", Function, "intercept", lambda right: _moved_inward(right)),
    Mutant("bend of pieces", functions, "_BEND", fixed(-1e-3)),
)


def _moved_inward(right: Any) -> Any:
    def wrong(self: Function, x: Any, y: Any, low: Any, high: Any, slope: Any, side: int) -> Any:
        found = right(self, x, y, low, high, slope, side)
        return found + side * 1e-15 * np.abs(found)

    return wrong


# --- softmax and products -----------------------------------------------------------------------------------


def _lower_base(found: tuple[Any, Any]) -> tuple[Any, Any]:
    return found[0], found[1] * (1 - 1e-12)


def _constant(factor: float) -> Callable[[Any], Any]:
    def change(found: tuple[Ball, Ball]) -> tuple[Ball, Ball]:
        gradient, constant = found
        return gradient, Ball(constant.mid * factor, constant.rad)

    return change


def _no_leak(right: Any) -> Any:
    def wrong(self: pieces.SoftmaxPiece, given: Any) -> Any:
        settled, spent = right(self, given)
        return settled, None if spent is None else 0 * spent

    return wrong


def _shifted(right: Any) -> Any:
    """A constant that is not the same for all weights of a query is taken off."""

    def wrong(self: pieces.SoftmaxPiece, given: Any) -> Any:
        settled, spent = right(self, given)
        coefs = settled.coefs.copy()
        coefs[:, 0] *= 0.99
        return settled.like(coefs), spent

    return wrong


def _exchanged(piece: Any) -> Any:
    return replace(
        piece,
        x_lower=piece.x_upper,
        x_upper=piece.x_lower,
        y_lower=piece.y_upper,
        y_upper=piece.y_lower,
        lower=piece.upper,
        upper=piece.lower,
    )


def _constants(piece: Any) -> Any:
    return replace(piece, lower=0.99 * piece.lower, upper=0.99 * piece.upper)


_SOFTMAX = (
    Mutant("chord of exp", softmax, "_chord", result(_lower_base)),
    Mutant("upper line of softmax", softmax, "_above", result(_constant(1 - 1e-12))),
    Mutant("lower line of softmax", softmax, "_below", result(_constant(1 + 1e-12))),
    Mutant("range of scores", softmax, "magnitude", result(nothing)),
    Mutant("unit of softmax", softmax, "U", fixed(0.0)),
    Mutant("Σp is 1 up to rounding", pieces.SoftmaxPiece, "settle", _no_leak),
    Mutant("one constant for a query", pieces.SoftmaxPiece, "settle", _shifted),
    Mutant("planes exchanged", known, "planes", result(_exchanged)),
    Mutant("planes' constants", known, "planes", result(_constants)),
    Mutant("planes' residual", known, "planes", result(lambda p: replace(p, residual=0 * p.residual))),
    Mutant("rows of lines", pieces.Piece, "settle", lambda right: _scaled(right)),
)


def _scaled(right: Any) -> Any:
    def wrong(self: pieces.Piece, given: Any) -> Any:
        found, spent = right(self, given)
        if isinstance(self, pieces.LinesPiece):
            found = found.like(0.999 * found.coefs)
        return found, spent

    return wrong


# --- wholes -------------------------------------------------------------------------------------------------


def _smaller_left(right: Any) -> Any:
    def wrong(self: wholes.WholePiece, given: Any) -> Any:
        return right(replace(self, far=self.far * (1 - 1e-9)), given)

    return wrong


_WHOLES = (
    Mutant("what is left of a whole", wholes.WholePiece, "pull", _smaller_left),
    Mutant("sums of a whole", wholes, "_MORE", fixed(1 - 1e-9)),
    Mutant("unit of a whole", wholes, "U", fixed(0.0)),
    Mutant("range of weights", wholes, "magnitude", result(nothing)),
    Mutant("residual of a whole", known, "whole", result(lambda p: replace(p, residual=0.5 * p.residual))),
    Mutant("values' errors", known, "whole", lambda right: _no_local_error(right)),
    Mutant("middles counted twice", known, "whole", lambda right: _another_middle(right)),
    Mutant("constant of a whole", wholes.WholePiece, "constant", result(nothing)),
)


def _another_middle(right: Any) -> Any:
    """The constant of another middle than the slopes are of."""

    def wrong(planes: Any, share: Any, values: Any, boxes: Any, local: Any, region: Any) -> Any:
        found = right(planes, share, values, boxes, local, region)
        taken = (1 - share[..., None]) * planes.lower.reshape(*share.shape, -1)
        offset = found.lower - taken.reshape(found.lower.shape)
        return replace(found, lower=found.lower + 0.5 * np.abs(offset))

    return wrong


def _no_local_error(right: Any) -> Any:
    def wrong(planes: Any, share: Any, values: Any, boxes: Any, local: Any, ball: Any) -> Any:
        return right(planes, share, values, boxes, replace(local, error=0 * local.error), ball)

    return wrong


MUTANTS: tuple[Mutant, ...] = (*_FUNCTIONS, *_SOFTMAX, *_WHOLES)
