"""What is to be proven of a network's outputs: linear rows, and which combinations of them are unsafe.

A property has rows ``g_r(y) = a_r·y + c_r`` of the outputs y and *cases*, sets of rows. Outputs are unsafe
where all rows of some case are ≤ 0. So a network is safe over a region if for every case there is one row
that is > 0 all over it. That a class is the answer is the property of which every margin is a case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffet_checker import fields
from buffet_checker.balls import Array
from buffet_checker.errors import RejectedError
from buffet_checker.graph import Builder


@dataclass(frozen=True)
class Property:
    rows: Array  # rows × outputs
    offsets: Array
    cases: tuple[tuple[int, ...], ...]
    layer: bool  # whether the rows are an operation of their own, behind the outputs

    @property
    def texts(self) -> tuple[str, ...]:
        """What has to be true, case by case, in the outputs y0, y1, …; no number is rounded."""
        rows = [_text(row, end) for row, end in zip(self.rows.tolist(), self.offsets.tolist(), strict=True)]
        return tuple(" or ".join(rows[r] for r in case) for case in self.cases)

    @property
    def largest(self) -> int | None:
        """The output that is larger than all others, if that is what the property says."""
        if self.offsets.any() or any(len(case) > 1 for case in self.cases):
            return None
        used = self.rows[[r for (r,) in self.cases]]
        first = int(used[0].argmax())
        eye = np.eye(self.rows.shape[1])
        wanted = {tuple(eye[first] - eye[c]) for c in range(len(eye)) if c != first}
        return first if wanted == set(map(tuple, used.tolist())) else None


Goal = int | Property
"""A class that is to be the answer, or a property."""


def cases_of(goal: Goal, rows: int) -> Sequence[tuple[int, ...]]:
    """Which of the margins have to be positive: of every case, one."""
    return [(r,) for r in range(rows)] if isinstance(goal, int) else goal.cases


def by_case(goal: Goal, margins: Sequence[float]) -> tuple[float, ...]:
    """The largest margin of every case."""
    return tuple(max(margins[r] for r in case) for case in cases_of(goal, len(margins)))


def read_property(raw: Any, where: str) -> Property:
    keys = fields.mapping(raw, where, {"rows", "offsets", "cases", "layer"})
    rows = [_numbers(row, f"{where}.rows") for row in fields.sequence(keys["rows"], f"{where}.rows")]
    offsets = _numbers(keys["offsets"], f"{where}.offsets")
    cases = tuple(
        fields.counts(case, f"{where}.cases") for case in fields.sequence(keys["cases"], f"{where}.cases")
    )
    if not rows or not rows[0] or any(len(row) != len(rows[0]) for row in rows) or len(offsets) != len(rows):
        raise RejectedError(f"{where}: rows of one length, and an offset for each, are expected")
    if not cases or not all(cases) or any(r >= len(rows) for case in cases for r in case):
        raise RejectedError(
            f"{where}.cases must be lists of numbers of rows (0 to {len(rows) - 1}), none empty"
        )
    if not isinstance(keys["layer"], bool):
        raise RejectedError(f"{where}.layer is true or false")
    return Property(np.array(rows), np.array(offsets), cases, keys["layer"])


def _numbers(raw: Any, where: str) -> list[float]:
    return [fields.number(value, where) for value in fields.sequence(raw, where)]


def finish(net: Builder, x: int, weight: Array, bias: Array, goal: Goal) -> None:
    """Add the margins of a goal: rows of the outputs ``weight·x + bias``.

    Differences of outputs are taken in the weights. Coefficients then err by one rounding each, relative to
    themselves, which `intervals.residual` and `substitution` have room for; so does the constant, as where it
    takes two additions, the first has to be exact.
    """
    outputs = len(bias)
    if isinstance(goal, int):
        others = [c for c in range(outputs) if c != goal]
        sizes = np.abs(weight[goal]) + np.abs(weight[others]), np.abs(bias[goal]) + np.abs(bias[others])
        lead, gap = weight[goal] - weight[others], bias[goal] - bias[others]
        net.add("affine", "margin", x, weight=lead, bias=gap, sizes=sizes)
        return
    if goal.rows.shape[1] != outputs:
        raise RejectedError(f"the property is about {goal.rows.shape[1]} outputs, the network has {outputs}")
    if goal.layer:
        y = net.add("affine", "outputs", x, weight=weight, bias=bias)
        net.add("affine", "margin", y, weight=goal.rows, bias=goal.offsets)
        return
    lead, gap, wide, long = [], [], [], []
    for row, offset in zip(goal.rows, goal.offsets, strict=True):
        used = np.flatnonzero(row)
        if not 1 <= len(used) <= 2 or not (np.abs(row[used]) == 1).all():
            raise RejectedError(
                "property: rows that are no difference of two outputs are a layer of their own"
            )
        signs = row[used]
        parts = signs * bias[used]
        total = parts.sum()
        if offset and not _exact(*parts):
            raise RejectedError(
                "property: the constant of a row is rounded twice; make it a layer of its own"
            )
        lead.append((signs[:, None] * weight[used]).sum(0))
        gap.append(total + offset)
        wide.append(np.abs(weight[used]).sum(0))
        long.append(np.abs(parts).sum() + abs(offset))
    net.add(
        "affine",
        "margin",
        x,
        weight=np.array(lead),
        bias=np.array(gap),
        sizes=(np.array(wide), np.array(long)),
    )


def _exact(a: float, b: float = 0.0) -> bool:
    """Whether the sum of two numbers is not rounded."""
    return math.fsum((a, b, -(a + b))) == 0


def _text(row: Sequence[float], offset: float) -> str:
    """``2·y0 − y1 > 3`` for a row with its offset."""
    text = ""
    for index, value in enumerate(row):
        if value:
            name = f"y{index}" if abs(value) == 1 else f"{_number(abs(value))}·y{index}"
            sign = "−" if value < 0 else "+" if text else ""
            text += f" {sign} {name}" if text else sign + name
    return f"{text or '0'} > {_number(-offset)}"


def _number(value: float) -> str:
    return repr(value + 0.0).removesuffix(".0").replace("-", "−")
