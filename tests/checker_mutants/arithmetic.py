"""Mistakes in arithmetic: balls, what rounding does to sums, intervals."""

from __future__ import annotations

from typing import Any

from buffet_checker import (
    balls,
    functions,
    intervals,
    known,
    pieces,
    regions,
    rows,
    softmax,
    substitution,
    wholes,
)
from buffet_checker.balls import Ball
from buffet_checker.known import Known
from buffet_checker.substitution import Claimed
from checker_mutants.wrong import (
    NONE,
    Mutant,
    Wrong,
    fixed,
    half,
    half_radius,
    narrower,
    nothing,
    of_kind,
    only,
    result,
    unmoved,
)

# --- arithmetic ---------------------------------------------------------------------------------------------

_BALLS = (
    *(
        Mutant(f"radius of {name}", Ball, name, result(half_radius))
        for name in ("__add__", "__mul__", "__truediv__", "exp", "tanh", "erfc", "sqrt", "sum", "log")
    ),
    Mutant("low end of a ball", Ball, "low", fixed(property(lambda self: self.mid))),
    Mutant("high end of a ball", Ball, "high", fixed(property(lambda self: self.mid))),
    Mutant("low end, rounded", Ball, "low", fixed(property(lambda self: self.mid - self.rad))),
    Mutant("high end, rounded", Ball, "high", fixed(property(lambda self: self.mid + self.rad))),
    Mutant("size of a ball", Ball, "size", result(half)),
    Mutant("error of exp", balls, "FUNCTION", half),
    Mutant("sums of balls", balls, "gamma", NONE),
    *(
        Mutant(f"constant {name}", functions, name, lambda ball: Ball(ball.mid, 0 * ball.rad))
        for name in ("_ROOT_HALF", "_INVERSE_ROOT", "_TWICE_C", "_CUBIC")
    ),
    *(
        Mutant(f"{name} in {module.__name__.rpartition('.')[2]}", module, name, unmoved)
        for module, name in (
            (intervals, "up"),
            (intervals, "down"),
            (functions, "down"),
            (substitution, "up"),
            (substitution, "down"),
        )
    ),
)


# --- sums of products ---------------------------------------------------------------------------------------

LINEAR_KINDS = ("affine", "diagonal", "center", "add", "offset", "mean")
PRODUCTS = ("scores", "mix", "rescale", "normalise")
PIECES = (
    pieces.AffinePiece,
    pieces.DiagonalPiece,
    pieces.CenterPiece,
    pieces.SumPiece,
    pieces.PoolPiece,
    pieces.LinesPiece,
    pieces.SoftmaxPiece,
    pieces.PlanesPiece,
)
_SUMS = (
    *(
        Mutant(f"γ in {module.__name__.rpartition('.')[2]}", module, "gamma", NONE)
        for module in (intervals, known, regions, substitution, wholes)
    ),
    *(
        Mutant(f"residual of {kind}", substitution, "residual", only(of_kind(kind), nothing))
        for kind in (*LINEAR_KINDS, *PRODUCTS)
    ),
    *(Mutant(f"reach of {kind.__name__}", kind, "reach", result(nothing)) for kind in PIECES),
    *(
        Mutant(f"depth of {kind.__name__}", kind, "depth", fixed(property(lambda self: -60)))
        for kind in (pieces.AffinePiece, pieces.CenterPiece, pieces.SoftmaxPiece, pieces.PlanesPiece)
    ),
    *(
        Mutant(f"constant of {kind.__name__}", kind, "constant", result(nothing))
        for kind in (pieces.LinesPiece, pieces.SoftmaxPiece, pieces.PlanesPiece)
    ),
    Mutant("roundings on the way", Known, "steps", fixed(property(lambda self: 0))),
    *(
        Mutant(f"sums of errors in {module.__name__.rpartition('.')[2]}", module, "INFLATE", fixed(1 - 1e-6))
        for module in (known, substitution)
    ),
    Mutant("size of a form", rows.Form, "size", result(nothing)),
    Mutant("size of an exact form", Claimed, "_local_size", result(nothing)),
    Mutant("unit of pushed forms", substitution, "U", fixed(0.0)),
    Mutant("unit of planes", pieces, "U", fixed(0.0)),
)


# --- intervals ----------------------------------------------------------------------------------------------


def _exact_ends(right: Any) -> Any:
    return lambda value, box: (value + box[0], value + box[1])


def _without_error(kind: str) -> Wrong:
    def wrong(right: Any) -> Any:
        return lambda node, value, values, boxes, error: right(
            node, value, values, boxes, 0 * error if node.kind == kind else error
        )

    return wrong


_INTERVALS = (
    Mutant("ends of an interval", intervals, "ends", _exact_ends),
    Mutant("ends of lines", known, "ends", _exact_ends),
    *(
        Mutant(f"interval of {kind}", substitution, "interval", only(of_kind(kind), narrower))
        for kind in (*LINEAR_KINDS, *PRODUCTS, "first", "apply", "softmax")
    ),
    *(
        Mutant(f"error of the interval of {kind}", substitution, "interval", _without_error(kind))
        for kind in ("affine", "diagonal", "center", "add", "mix", "scores")
    ),
    Mutant("differences of scores", intervals, "differences", result(narrower)),
    Mutant("differences under softmax", softmax, "differences", result(narrower)),
    Mutant("exp·1/Σ", intervals, "_normalise", result(narrower)),
    Mutant("products of intervals", intervals, "_bilinear", result(narrower)),
)

MUTANTS: tuple[Mutant, ...] = (*_BALLS, *_SUMS, *_INTERVALS)
