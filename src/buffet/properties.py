"""What is to be proven of a network's outputs: linear rows, and which combinations of them are unsafe.

Classification margins, "class a is never preferred to b", bounds of a regression and the safety conditions of
a controller are one mechanism: *rows* ``g_r(y) = a_r·y + c_r`` of the outputs y, and *cases*, sets of rows.
The unsafe outputs are those where all rows of some case are at most 0:

    unsafe = ⋃_cases ⋂_{r ∈ case} { y : g_r(y) ≤ 0 }

So a network is safe over a region if for every case there is a row with ``g_r > 0`` all over the region.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buffet.errors import BuffetError
from buffet.network import Affine, Node, Program
from buffet.printing import listed


@dataclass(frozen=True, eq=False)
class Property:
    """The outputs y are *unsafe* where all rows ``rows·y + offsets`` of some case are ≤ 0, safe elsewhere.

    Attributes:
        rows: the coefficients a_r, float64.
        offsets: the constants c_r, float64.
        cases: for every case, the indices of its rows.

    Example:
        >>> from buffet import Property
        >>> robust = Property.margins(label=0, classes=3)     # y0 − y1 > 0 and y0 − y2 > 0
        >>> robust.violated(torch.tensor([1.0, 0.5, 2.0]))
        tensor(True)
    """

    rows: Float[Tensor, "rows outputs"]
    offsets: Float[Tensor, "rows"]
    cases: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        rows, offsets = (torch.as_tensor(v, dtype=torch.float64) for v in (self.rows, self.offsets))
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "offsets", offsets)
        if rows.ndim != 2 or offsets.shape != rows.shape[:1]:
            raise BuffetError(
                f"a property of rows {list(rows.shape)} and offsets {list(offsets.shape)}: expected rows × "
                "outputs, and one offset per row"
            )
        if not bool(rows.isfinite().all() and offsets.isfinite().all()):
            raise BuffetError("a property has rows or offsets that are not finite numbers")
        if not self.cases or not all(self.cases):
            raise BuffetError("a property needs at least one unsafe case, and every case at least one row")
        if any(not 0 <= r < len(rows) for case in self.cases for r in case):
            raise BuffetError(f"a case of the property names a row that is not there; rows: {len(rows)}")

    def __repr__(self) -> str:
        rows, outputs = self.rows.shape
        return f"Property(outputs={outputs}, rows={rows}, cases={len(self.cases)})"

    @property
    def outputs(self) -> int:
        """The number of outputs it is about."""
        return self.rows.shape[1]

    @classmethod
    def margins(cls, label: int, classes: int) -> Property:
        """Class `label` has the largest output: ``y_label − y_c > 0`` for every other class c."""
        if not 0 <= label < classes or classes < 2:
            raise BuffetError(f"label {label} is not one of {classes} classes; at least two are needed")
        others = [c for c in range(classes) if c != label]
        return cls(_differences([(label, c) for c in others], classes), *_each_alone(len(others)))

    @classmethod
    def never_preferred(cls, a: int, b: int, outputs: int) -> Property:
        """Output `a` stays below output `b`: ``y_b − y_a > 0``."""
        if a == b or not (0 <= a < outputs and 0 <= b < outputs):
            raise BuffetError(f"outputs {a} and {b} are not two of {outputs}")
        return cls(_differences([(b, a)], outputs), *_each_alone(1))

    @classmethod
    def within(cls, lower: Sequence[float], upper: Sequence[float]) -> Property:
        """Every output strictly between its bounds: ``y_i − l_i > 0`` and ``u_i − y_i > 0``.

        An infinite bound leaves that side open.
        """
        if len(lower) != len(upper) or any(not low < high for low, high in zip(lower, upper, strict=False)):
            raise BuffetError("bounds of outputs: give one lower and one upper per output, lower < upper")
        eye = torch.eye(len(lower), dtype=torch.float64)
        sides = [
            (sign * eye[i], -sign * end)
            for sign, ends in ((1.0, lower), (-1.0, upper))
            for i, end in enumerate(ends)
            if not math.isinf(end)
        ]
        if not sides:
            raise BuffetError("bounds of outputs: all of them are infinite, there is nothing to prove")
        rows, offsets = zip(*sides, strict=True)
        return cls(torch.stack(rows), torch.tensor(offsets, dtype=torch.float64), _each_alone(len(rows))[1])

    @cached_property
    def label(self) -> int | None:
        """The class whose margins these are, if the property says that it has the largest output."""
        if self.outputs < 2 or bool(self.offsets.any()) or any(len(case) > 1 for case in self.cases):
            return None
        used = self.rows[sorted({r for (r,) in self.cases})]
        larger, smaller = used == 1, used == -1
        plain = (larger.sum(-1) == 1) & (smaller.sum(-1) == 1) & ((used != 0).sum(-1) == 2)
        label = int(larger[0].int().argmax())
        others = smaller.any(0).sum() == self.outputs - 1
        return label if bool(plain.all() & larger[:, label].all() & others) else None

    def usual(self) -> Property:
        """The same; margins of a class are in the order of the classes."""
        return self if self.label is None else Property.margins(self.label, self.outputs)

    @cached_property
    def _plain(self) -> bool:
        """Whether every row is a case of its own, in the same order."""
        return self.cases == tuple((r,) for r in range(len(self.rows)))

    def values(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch rows"]:
        """The rows at the outputs `y`, in float64."""
        if y.shape[-1] != self.outputs:
            raise BuffetError(f"{y.shape[-1]} outputs, the property is about {self.outputs}")
        return y.double() @ self.rows.mT.to(y.device) + self.offsets.to(y.device)

    def by_case(self, values: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch cases"]:
        """``max_{r ∈ case} g_r`` of every case: no output is unsafe where all of them are > 0.

        Of lower bounds of the rows over a region they are lower bounds over the region. Rows that are NaN
        count for nothing; a case of such rows only is NaN.
        """
        if self._plain:
            return values
        known = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        best = torch.stack([known[..., list(case)].amax(-1) for case in self.cases], -1)
        nothing = [values[..., list(case)].isnan().all(-1) for case in self.cases]
        return best.masked_fill(torch.stack(nothing, -1), torch.nan)

    def margin(self, values: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch"]:
        """``min_cases max_{r ∈ case} g_r``: the property holds where it is > 0.

        Of lower bounds of the rows over a region it is a lower bound over the region. NaN where a case is.
        """
        return self.by_case(values).amin(-1)

    def deciding(
        self, values: Float[Tensor, "*batch rows"]
    ) -> tuple[Float[Tensor, "*batch"], Int[Tensor, "*batch"]]:
        """The margin, and the row that has this value."""
        if self._plain:
            least = values.min(-1)
            return least.values, least.indices
        known = values.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
        rows = torch.stack(
            [
                torch.tensor(case, device=values.device)[known[..., list(case)].argmax(-1)]
                for case in self.cases
            ],
            -1,
        )
        case = self.by_case(values).argmin(-1, keepdim=True)
        row = rows.gather(-1, case)
        return values.gather(-1, row).squeeze(-1), row.squeeze(-1)

    def __str__(self) -> str:
        return " and ".join(listed(self.texts))

    @property
    def texts(self) -> tuple[str, ...]:
        """What has to be true, case by case, in the outputs y0, y1, …"""
        rows = [
            _text(row, offset) for row, offset in zip(self.rows.tolist(), self.offsets.tolist(), strict=True)
        ]
        return tuple(" or ".join(listed([rows[r] for r in case])) for case in self.cases)

    def violated(self, y: Float[Tensor, "*batch outputs"]) -> Bool[Tensor, "*batch"]:
        """Whether the outputs `y` are unsafe: all rows of some case are ≤ 0."""
        values = self.values(y)
        return torch.stack([(values[..., list(case)] <= 0).all(-1) for case in self.cases], -1).any(-1)

    def proven(self, lower: Float[Tensor, "*batch rows"]) -> Bool[Tensor, "*batch"]:
        """Whether lower bounds of the rows prove the property: a finite one > 0 in every case."""
        safe = (lower > 0) & lower.isfinite()
        return torch.stack([safe[..., list(case)].any(-1) for case in self.cases], -1).all(-1)


def margin_of(logits: Float[Tensor, "*batch classes"], label: int) -> Float[Tensor, "*batch"]:
    """``logit[label] − max_other logit``."""
    others = torch.cat([logits[..., :label], logits[..., label + 1 :]], -1)
    return logits[..., label] - others.amax(-1)


def _differences(pairs: Sequence[tuple[int, int]], outputs: int) -> Tensor:
    rows = torch.zeros(len(pairs), outputs, dtype=torch.float64)
    for row, (larger, smaller) in zip(rows, pairs, strict=True):
        row[larger], row[smaller] = 1, -1
    return rows


def _each_alone(rows: int) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """No offsets, and a case for every row."""
    return torch.zeros(rows, dtype=torch.float64), tuple((r,) for r in range(rows))


def _text(row: Sequence[float], offset: float) -> str:
    """``2·y0 − y1 > 3`` for a row with its offset; numbers are not rounded."""
    named = [
        ("−" if value < 0 else "+", f"y{index}" if abs(value) == 1 else f"{_number(abs(value))}·y{index}")
        for index, value in enumerate(row)
        if value
    ]
    text = " ".join(f"{sign} {name}" for sign, name in named).removeprefix("+ ") or "0"
    text = text.replace("− ", "−", 1) if text.startswith("−") else text
    return f"{text} > {_number(-offset)}"


def _number(value: float) -> str:
    return repr(value + 0.0).removesuffix(".0").replace("-", "−")


def program_of(program: Program, goal: Property | int) -> Program:
    """The program ending in the rows of a property; an integer stands for the margins of that class."""
    if isinstance(goal, int):
        return program.margins(goal)
    usual = goal.usual()
    if usual.label is not None and torch.equal(usual.rows, goal.rows) and usual.cases == goal.cases:
        return program.margins(usual.label)
    return program_of_rows(program, goal.rows, goal.offsets)


def program_of_rows(
    program: Program, rows: Float[Tensor, "rows outputs"], offsets: Float[Tensor, "rows"]
) -> Program:
    """The program ending in ``rows·y + offsets`` instead of its outputs y.

    Where every row is an output or a difference of two, the rows are taken in the weights of the last layer,
    as `Program.margins` does, so that no bound sees the two outputs apart. This is done only if no sum is
    rounded; otherwise the rows are a layer of their own, the rounding of which bounds account for.
    """
    *body, last = program.nodes
    if isinstance(last.op, Affine):
        outputs = last.op.weight.shape[0]
        if rows.shape[-1] != outputs:
            raise BuffetError(f"the rows are about {rows.shape[-1]} outputs, the network has {outputs}")
        weight, bias = last.op.weight, last.op.bias
        rows, offsets = (v.to(weight.device, weight.dtype) for v in (rows, offsets))
        taken = [_taken(row, offset, weight, bias) for row, offset in zip(rows, offsets, strict=True)]
        if all(t is not None for t in taken):
            weights, biases = zip(*(t for t in taken if t is not None), strict=True)
            return Program((*body, Node(Affine(torch.stack(weights), torch.stack(biases)), last.inputs)))
    return Program((*program.nodes, Node(Affine(rows, offsets), (len(program.nodes) - 1,))))


def _taken(row: Tensor, offset: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor] | None:
    """Weight and bias of one row of the outputs, if it adds at most two of them, exactly."""
    used = row.nonzero()[:, 0].tolist()
    if not 1 <= len(used) <= 2 or bool((row[used].abs() != 1).any()):
        return None
    total = row[used[0]] * torch.cat([weight[used[0]], bias[used[0]][None]])
    if len(used) == 2:
        other = row[used[1]] * torch.cat([weight[used[1]], bias[used[1]][None]])
        total, error = _two_sum(total, other)
        if bool(error.any()):
            return None
    shifted, error = _two_sum(total[-1], offset)
    return None if bool(error) else (total[:-1], shifted)


def _two_sum(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The rounded sum and what was rounded away, exactly (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)
