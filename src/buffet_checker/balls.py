"""Elementwise arithmetic with rigorous errors: a ball holds every real number within `rad` of `mid`.

The rules assume IEEE double precision, rounding to nearest with gradual underflow, and elementary functions
of numpy and of the C library that err by at most `FUNCTION` of their value (8 units in the last place; the
tests compare with mpmath). Every radius is computed in floating point too, and enlarged by more than the
roundings made on the way.

Underflow: a product or quotient is ``exact·(1 + δ) + η`` with |δ| ≤ u and |η| ≤ 2⁻¹⁰⁷⁵; sums have no η. So n
products lose at most n·2⁻¹⁰⁷⁵ on top of their relative errors, whatever their own size. `TINY` is added where
that may happen: it exceeds 10²³ of these losses, more than any sum here has terms, and what computing the
error itself may have lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
U = 2.0**-53
"""The unit roundoff of float64."""
FUNCTION = 16 * U
"""Relative error allowed for exp, expm1, log, tanh, erfc and powers."""
TINY = 1e-300
"""More than 10²³ products lose by underflow."""
_ROUNDED = 2.0**-1072
"""More than a number may have lost by underflow before it is multiplied or divided again."""
_UP = 1 + 16 * U


def gamma(count: int) -> float:
    """An upper bound of ``n·u / (1 − n·u)``, by which a sum of n products errs relative to ``Σ |a||b|``.

    True for every order of summation, with or without fused multiply-add.
    """
    return count * U / (1 - count * U) * _UP


def underflows_gradually() -> bool:
    """Whether this process keeps numbers below 2⁻¹⁰²², as is assumed here; a library may have turned that
    off.
    """
    small = np.array([2.0**-1030, 2.0**-1073])
    return bool((small * 0.5 > 0).all() and (small + small == small * 2).all())


def down(x: Array) -> Array:
    """The next float below."""
    return np.nextafter(x, -np.inf)


def up(x: Array) -> Array:
    """The next float above."""
    return np.nextafter(x, np.inf)


@dataclass(frozen=True)
class Ball:
    """All reals within `rad` of `mid`, for every entry. NaN and infinite radii mean: nothing is known."""

    mid: Array
    rad: Array

    @staticmethod
    def exact(x: Array | float) -> Ball:
        mid = np.asarray(x, dtype=np.float64)
        return Ball(mid, np.zeros_like(mid))

    @property
    def low(self) -> Array:
        return down(self.mid - self.rad)

    @property
    def high(self) -> Array:
        return up(self.mid + self.rad)

    @property
    def size(self) -> Array:
        """No number in the ball is larger in absolute value."""
        return up(np.abs(self.mid) + self.rad)

    def __add__(self, other: Ball) -> Ball:
        mid = self.mid + other.mid
        return Ball(mid, (self.rad + other.rad + U * np.abs(mid)) * _UP + TINY)

    def __neg__(self) -> Ball:
        return Ball(-self.mid, self.rad)

    def __sub__(self, other: Ball) -> Ball:
        return self + -other

    def __mul__(self, other: Ball) -> Ball:
        mid = self.mid * other.mid
        spread = np.abs(self.mid) * other.rad + self.rad * (np.abs(other.mid) + other.rad)
        return Ball(mid, (spread + U * np.abs(mid)) * _UP + TINY)

    def __truediv__(self, other: Ball) -> Ball:
        """The quotient; nothing is known where the divisor may be 0."""
        mid = self.mid / other.mid
        least = down(np.abs(other.mid) - other.rad)
        spread = (self.rad + (np.abs(mid) + _ROUNDED) * other.rad + _ROUNDED) / np.where(
            least > 0, least, np.nan
        )
        return Ball(mid, (spread + U * np.abs(mid)) * _UP + TINY)

    def __getitem__(self, index: Any) -> Ball:
        return Ball(self.mid[index], self.rad[index])

    def exp(self) -> Ball:
        mid = np.exp(self.mid)
        grown = np.expm1(self.rad) * (1 + 2 * FUNCTION) + FUNCTION
        return Ball(mid, (mid + _ROUNDED) * grown * (1 + 2 * FUNCTION) + TINY)

    def log(self) -> Ball:
        mid = np.log(self.mid)
        least = down(self.mid - self.rad)
        spread = self.rad / np.where(least > 0, least, np.nan)
        return Ball(mid, (spread + FUNCTION * np.abs(mid)) * _UP + TINY)

    def tanh(self) -> Ball:
        """|tanh'| ≤ 1."""
        mid = np.tanh(self.mid)
        return Ball(mid, (self.rad + FUNCTION * np.abs(mid)) * _UP + TINY)

    def erfc(self) -> Ball:
        """|erfc'| ≤ 2/√π < 1.13."""
        mid = _erfc(self.mid)
        return Ball(mid, (1.13 * self.rad + FUNCTION * mid) * _UP + TINY)

    def sqrt(self) -> Ball:
        """The root is rounded correctly; ``√x − √y = (x − y) / (√x + √y)``."""
        mid = np.sqrt(self.mid)
        spread = self.rad / np.where((mid > 0) & (self.mid > self.rad), mid, np.nan)
        return Ball(mid, (np.where(self.rad > 0, spread, 0.0) + U * mid) * _UP + TINY)

    def sum(self, axis: int = -1) -> Ball:
        mid = self.mid.sum(axis)
        error = gamma(self.mid.shape[axis])
        spread = self.rad.sum(axis) + error * np.abs(self.mid).sum(axis)
        return Ball(mid, spread * (1 + 4 * error + 16 * U) + TINY)


def where(mask: npt.NDArray[np.bool_], a: Ball, b: Ball) -> Ball:
    """Entry by entry one of two balls."""
    return Ball(np.where(mask, a.mid, b.mid), np.where(mask, a.rad, b.rad))


_one: Callable[[Array], Array] = np.frompyfunc(math.erfc, 1, 1)


def _erfc(x: Array) -> Array:
    return np.asarray(_one(x), dtype=np.float64)
