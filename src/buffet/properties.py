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

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.network import Affine, Node, Program


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

    @property
    def label(self) -> int | None:
        """The class whose margins these are, if the property says that it has the largest output."""
        for label in range(self.outputs):
            if self.outputs < 2 or bool(self.offsets.any()) or any(len(case) > 1 for case in self.cases):
                return None
            expected = Property.margins(label, self.outputs).rows
            used = {tuple(self.rows[r].tolist()) for (r,) in self.cases}
            if used == {tuple(row) for row in expected.tolist()}:
                return label
        return None

    def values(self, y: Float[Tensor, "*batch outputs"]) -> Float[Tensor, "*batch rows"]:
        """The rows at the outputs `y`, in float64."""
        if y.shape[-1] != self.outputs:
            raise BuffetError(f"{y.shape[-1]} outputs, the property is about {self.outputs}")
        return y.double() @ self.rows.mT.to(y.device) + self.offsets.to(y.device)

    def margin(self, values: Float[Tensor, "*batch rows"]) -> Float[Tensor, "*batch"]:
        """``min_cases max_{r ∈ case} g_r``: the property holds where it is > 0.

        Of lower bounds of the rows over a region it is a lower bound over the region. NaN where a row that
        decides is NaN.
        """
        return torch.stack([values[..., list(case)].amax(-1) for case in self.cases], -1).amin(-1)

    def violated(self, y: Float[Tensor, "*batch outputs"]) -> Bool[Tensor, "*batch"]:
        """Whether the outputs `y` are unsafe: all rows of some case are ≤ 0."""
        values = self.values(y)
        return torch.stack([(values[..., list(case)] <= 0).all(-1) for case in self.cases], -1).any(-1)

    def proven(self, lower: Float[Tensor, "*batch rows"]) -> Bool[Tensor, "*batch"]:
        """Whether lower bounds of the rows prove the property: a finite one > 0 in every case."""
        safe = (lower > 0) & lower.isfinite()
        return torch.stack([safe[..., list(case)].any(-1) for case in self.cases], -1).all(-1)


def _differences(pairs: Sequence[tuple[int, int]], outputs: int) -> Tensor:
    rows = torch.zeros(len(pairs), outputs, dtype=torch.float64)
    for row, (larger, smaller) in zip(rows, pairs, strict=True):
        row[larger], row[smaller] = 1, -1
    return rows


def _each_alone(rows: int) -> tuple[Tensor, tuple[tuple[int, ...], ...]]:
    """No offsets, and a case for every row."""
    return torch.zeros(rows, dtype=torch.float64), tuple((r,) for r in range(rows))


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
