"""Numbers as people read them, rounded only to the side on which the claim stays true.

A lower bound (a certified radius, a margin) is printed rounded down, an upper bound (an attacked radius)
rounded up. The digits are taken from the exact value of the float, so no second rounding sneaks in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from html import escape

DIGITS = 4
NAMED = 12
"""Of more things than this, such as the patches of an image, not all are named."""


def round_down(value: float, digits: int = DIGITS) -> str:
    """The largest number with `digits` significant digits that is ≤ `value`."""
    return _rounded(value, digits, ROUND_FLOOR)


def round_up(value: float, digits: int = DIGITS) -> str:
    """The smallest number with `digits` significant digits that is ≥ `value`."""
    return _rounded(value, digits, ROUND_CEILING)


def _rounded(value: float, digits: int, rounding: str) -> str:
    if digits < 1:
        raise ValueError(f"digits is {digits}; a number has at least one")
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    if value == 0:
        return "0"
    short = Context(prec=digits, rounding=rounding).plus(Decimal(value))
    power = short.adjusted()
    if -4 <= power < digits + 2:
        return f"{short:f}"
    return f"{short:.{digits - 1}e}"


def finite(value: float | None) -> float | None:
    """The number as JSON can have it; None if it is infinite or NaN."""
    return value if value is not None and math.isfinite(value) else None


def html_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A small table for notebooks; texts are escaped."""
    lines = [("th", columns), *(("td", row) for row in rows)]
    marked = ("".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) for tag, cells in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in marked)}</table>"


def plural(count: int, word: str) -> str:
    """The word as it goes with the count."""
    return word if count == 1 else f"{word}s"


def counted(count: int, word: str) -> str:
    """The count and the word as it goes with it: 1 layer, 3 layers."""
    return f"{count} {plural(count, word)}"


def at_least(bound: float | None, given: float | None = None) -> str:
    """A lower bound as it is printed: rounded down, or a dash where there is none.

    A `given` size was not computed, so it is repeated as it was given.
    """
    return "—" if bound is None else repr(given) if bound == given else round_down(bound)


def at_most(bound: float | None, given: float | None = None) -> str:
    """An upper bound as it is printed: rounded up, or a dash where there is none; a `given` one as it is."""
    return "—" if bound is None else repr(given) if bound == given else round_up(bound)


def norm_name(norm: float | str) -> str:
    """A norm as people write it: L2, L∞."""
    p = float(norm)
    return "L∞" if p == float("inf") else f"L{p:g}"


def listed(parts: Sequence[object]) -> list[str]:
    """The parts by name; of very many, the first ones and the last."""
    names = [str(part) for part in parts]
    return names if len(names) <= NAMED else [*names[:3], "…", names[-1]]


def duration(seconds: float) -> str:
    """A time as people say it."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    if seconds < 6000:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
