"""What may move: for a linear form of the input deviation, a lower bound of its minimum over the region."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from buffet_checker.balls import FUNCTION, TINY, Array, U, gamma

GOLDEN, STEPS = (math.sqrt(5) - 1) / 2, 44
"""Of the search for the weight of a plane: to a billionth of its range."""
_MORE = 1 + 1e-9
"""More than the relative error of any sum of non-negative terms in `Region.left` (up to 10⁶ terms)."""


@dataclass(frozen=True)
class Region:
    """Rows `moved` of the sentence deviate by δ; no entry of δ exceeds `reach` in absolute value."""

    moved: Array  # row numbers
    lower: Array  # moved, width: the smallest value of every entry of δ
    upper: Array

    @property
    def reach(self) -> Array:
        return np.maximum(np.abs(self.lower), np.abs(self.upper))

    def minimum(self, form: Array) -> Array:
        """At most ``min_δ Σ form·δ`` for ``form[moved, width, ...]``."""
        raise NotImplementedError

    @property
    def middle(self) -> Array:
        """Some δ that rows are near to, around which `left` is small."""
        return np.zeros_like(self.lower)

    def left(self, form: Array, far: Array) -> Array:
        """At least ``Σ_d far_d·max |form·(δ_d − middle_d)|``: ``form[width, ...]``, ``far[moved, ...]``."""
        raise NotImplementedError

    def size(self, form: Array) -> Array:
        """At least |form·δ_d| and |form·(δ_d − middle_d)|, ``[moved, ...]``, for ``form[width, ...]``."""
        most = self.reach + np.abs(self.middle)
        return np.tensordot(most, np.abs(form), 1) * (1 + gamma(form.shape[0] + 8)) + TINY

    def facts(self) -> dict[str, str | int | float]:
        """What kind of region it is, and how large."""
        raise NotImplementedError


@dataclass(frozen=True)
class Ball(Region):
    """``‖δ_d‖_p ≤ ε`` for every moved row; the minimum is ``−ε Σ_d ‖form_d‖_q`` with 1/p + 1/q = 1."""

    p: float
    eps: float

    def minimum(self, form: Array) -> Array:
        width, words = form.shape[1], form.shape[0]
        if self.p == 1:
            norms = np.abs(form).max(1)
        elif math.isinf(self.p):
            norms = np.abs(form).sum(1)
        elif self.p == 2:
            norms = np.sqrt(np.square(form).sum(1))
        else:
            # ‖x‖_q falls as q grows, so the exponent may be rounded, but only down
            q = np.nextafter(self.p / (self.p - 1), 1.0) * (1 - 4 * U)
            largest = np.abs(form).max(1, keepdims=True)
            shares = np.abs(form) / np.where(largest > 0, largest, 1.0)
            norms = largest[:, 0] * np.power(np.power(shares, q).sum(1), 1 / q)
        # powers, the sum and the root err relatively; squares that underflow add up to less than 1e-150
        grown = 1 + gamma(width + words + 16) + 8 * FUNCTION
        return -self.eps * (norms.sum(0) * grown + words * 1e-150) * (1 + 8 * U) - TINY

    def facts(self) -> dict[str, str | int | float]:
        return {"kind": "ball", "p": "inf" if math.isinf(self.p) else self.p, "eps": self.eps}

    def left(self, form: Array, far: Array) -> Array:
        return far.sum(0) * _MORE * self._largest(form) * _MORE

    def size(self, form: Array) -> Array:
        return np.broadcast_to(self._largest(form), (len(self.moved), *form.shape[1:]))

    def _largest(self, form: Array) -> Array:
        """At least ``max |form·δ_d|`` of any moved row d."""
        return -Ball.minimum(self, form[None])


@dataclass(frozen=True)
class Cell(Ball):
    """The part of a ball where ``low ≤ u·δ_d ≤ high`` for every cut: a direction u of one moved row d.

    For *every* weight w, of either sign, and with w⁺·low − w⁻·high ≤ w u·δ, the minimum is at least that of
    ``form − w u`` over the ball plus ``w⁺·low − w⁻·high``. So weights need not be computed rigorously.
    """

    rows: tuple[int, ...]  # places in `moved`
    directions: Array  # cuts, width
    low: tuple[float, ...]  # −inf: open on that side
    high: tuple[float, ...]

    def minimum(self, form: Array) -> Array:
        rest, gain, size = form.copy(), np.zeros(form.shape[2:]), np.zeros(form.shape[2:])
        for row, u, low, high in zip(self.rows, self.directions, self.low, self.high, strict=True):
            if low == -math.inf and high == math.inf:
                continue
            weight = (self._flat_weight if self.p == 2 else self._weight)(rest[row], u, low, high)
            worth = np.maximum(weight, 0) * (low if low > -math.inf else 0.0)
            worth = worth + np.minimum(weight, 0) * (high if high < math.inf else 0.0)
            taken = u.reshape(-1, *(1 for _ in weight.shape)) * weight
            # what rounding does to the form, at any δ of the ball, and to what was added up so far
            size += np.abs(weight) * (np.abs(u).sum() * self.eps) + np.abs(worth)
            rest[row] -= taken
            gain += worth
        size += self.eps * np.abs(form).sum((0, 1))
        error = gamma(4 * len(self.rows) + 8) * size * (1 + 1e-8) + 1e-150
        return np.fmax(super().minimum(rest) + (gain - error), super().minimum(form))

    def _flat_weight(self, form: Array, u: Array, low: float, high: float) -> Array:
        """About the best weight in L2; one that would need a plane on an open side is 0."""
        along = np.tensordot(u, form, 1)
        norm = np.sqrt(np.square(form).sum(0))
        across = np.sqrt(np.maximum(np.square(norm) - np.square(along), 0))
        free = -along / np.where(norm > 0, norm, 1.0)
        if self.eps > 0:
            place = np.minimum(np.maximum(free, min(low / self.eps, 0.9)), max(high / self.eps, -0.9))
        else:
            place = free
        weight = np.where(place == free, 0.0, along + place * across / np.sqrt(1 - np.square(place)))
        weight = np.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0)
        least = 0.0 if high == math.inf else -math.inf
        most = 0.0 if low == -math.inf else math.inf
        return np.clip(weight, least, most)

    def _weight(self, form: Array, u: Array, low: float, high: float) -> Array:
        """The same in any norm: the bound is a concave function of it (golden section)."""
        size, across = Ball(self.moved[:1], self.lower[:1], self.upper[:1], self.p, 1.0), u[None, :, None]
        flat = form.reshape(1, len(u), -1)
        reach = 3 * size.minimum(flat) / size.minimum(across)
        left = reach * (0.0 if high == math.inf else -1.0)
        right = reach * (0.0 if low == -math.inf else 1.0)
        worth = [end if math.isfinite(end) else 0.0 for end in (low, high)]

        def bound(weight: Array) -> Array:
            rest = self.eps * size.minimum(flat - across * weight)
            return rest + np.maximum(weight, 0) * worth[0] + np.minimum(weight, 0) * worth[1]

        a, b = (GOLDEN * x + (1 - GOLDEN) * y for x, y in ((left, right), (right, left)))
        at_a, at_b = bound(a), bound(b)
        for _ in range(STEPS):
            better = at_a > at_b
            left, right = np.where(better, left, a), np.where(better, b, right)
            new = np.where(better, GOLDEN * left + (1 - GOLDEN) * right, GOLDEN * right + (1 - GOLDEN) * left)
            at_new = bound(new)
            a, at_a, b, at_b = (
                np.where(better, x, y) for x, y in ((new, b), (at_new, at_b), (a, new), (at_a, at_new))
            )
        weight = (left + right) / 2
        weight = np.where(bound(weight) > bound(np.zeros_like(weight)), weight, 0.0)
        return np.nan_to_num(weight, nan=0.0, posinf=0.0, neginf=0.0).reshape(form.shape[1:])


@dataclass(frozen=True)
class Box(Region):
    """Every entry between two ends; the minimum is ``Σ A⁺l + A⁻u``."""

    def minimum(self, form: Array) -> Array:
        shape = (*self.lower.shape, *(1 for _ in form.shape[2:]))
        low, high, reach = (v.reshape(shape) for v in (self.lower, self.upper, self.reach))
        total = (np.maximum(form, 0) * low + np.minimum(form, 0) * high).sum((0, 1))
        error = gamma(self.lower.size + 8) * (np.abs(form) * reach).sum((0, 1))
        return total - error * (1 + 1e-8) - 1e-290

    @property
    def middle(self) -> Array:
        return (self.lower + self.upper) / 2

    def left(self, form: Array, far: Array) -> Array:
        """``Σ_i |form_i| Σ_d far_d·r_di`` with half-widths r."""
        middle = self.middle
        radius = np.nextafter(np.maximum(self.upper - middle, middle - self.lower), np.inf)
        weights = np.tensordot(radius, far, (0, 0)) * _MORE
        return (np.abs(form) * weights).sum(0) * _MORE + TINY

    def facts(self) -> dict[str, str | int | float]:
        return {"kind": "box", "reach": float(self.reach.max(initial=0.0))}


@dataclass(frozen=True)
class Candidates(Region):
    """Row d moves by one of ``offsets[d]`` (0 among them), or stays; at most `budget` rows move.

    An offset is known up to `error`: the difference of two rows, rounded.
    """

    offsets: Array  # moved, choices, width
    error: Array
    budget: int

    def minimum(self, form: Array) -> Array:
        words, _, width = self.offsets.shape
        flat = form.reshape(words, width, -1)
        gains = np.matmul(self.offsets, flat)
        sizes = np.abs(flat)
        lost = gamma(width + words + 8) * np.matmul(np.abs(self.offsets), sizes) + np.matmul(
            self.error, sizes
        )
        least = np.minimum((gains - lost * (1 + 1e-8)).min(1), 0.0)
        total = np.sort(least, 0)[: self.budget].sum(0) * (1 + gamma(words + 8))
        return (total - 1e-290).reshape(form.shape[2:])

    @property
    def middle(self) -> Array:
        ends = self.offsets.min(1, initial=0.0), self.offsets.max(1, initial=0.0)
        return (ends[0] + ends[1]) / 2

    def left(self, form: Array, far: Array) -> Array:
        """The largest of ``|form·(o − middle_d)|`` over the offsets o of a row, of which 0 is one."""
        middle = self.middle[:, None]
        width, flat = len(form), np.abs(form).reshape(len(form), -1)
        total: Array = np.zeros(())
        for offsets, error, at, weight in zip(self.offsets, self.error, middle, far, strict=True):
            apart = np.concatenate([offsets, 0 * at]) - at
            known = np.concatenate([error, 0 * at]) + U * np.abs(apart)
            value = np.abs(apart @ form.reshape(width, -1))
            lost = gamma(width + 8) * (np.abs(apart) @ flat) + known @ flat
            total = total + weight * ((value + lost * _MORE).max(0) * _MORE + TINY).reshape(form.shape[1:])
        return total * _MORE + TINY

    def facts(self) -> dict[str, str | int | float]:
        return {"kind": "candidates", "choices": self.offsets.shape[1], "budget": self.budget}
