"""Linear enclosures: what a relaxed operation does to linear forms, backwards (`pull`) and forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.bounds.forms import Form, Rows
from buffet.bounds.medians import lower_median
from buffet.network import Add, Bilinear, Linear, Op

Pulled = tuple[tuple[Rows, ...], Tensor | None]
Moved = Int[Tensor, "tasks moved"] | None
"""The tokens of every task that are of interest; None: all."""


@runtime_checkable
class Account(Protocol):
    """What rounding may do to the output of a node (`propagation.rounding`)."""

    def of_sum(self, index: int) -> Float[Tensor, "_ _ _"]: ...

    def of_product(self, index: int) -> Float[Tensor, "_ _ _"]: ...

    def of_lines(self, index: int, slopes: tuple[Tensor, Tensor]) -> Float[Tensor, "_ _ _"]: ...


class Enclosure:
    """A (relaxed) operation as linear bounds of its output deviation in its input deviations."""

    def pull(self, rows: Rows) -> Pulled:
        """Forms of the output to forms of the inputs that are never larger, and the constant left over."""
        raise NotImplementedError

    def pull_moved(self, rows: Rows, moved: Sequence[Moved]) -> Pulled:
        """The same, where only the `moved` tokens of an input need be looked at, if it is worth it."""
        return self.pull(rows)

    def push(self, *forms: Form) -> Form:
        """Linear bounds of the inputs to linear bounds of the output."""
        raise NotImplementedError

    def widened(self, error: Float[Tensor, "tasks tokens features"]) -> Enclosure:
        """The enclosure with room for an error of its output on both sides."""
        raise NotImplementedError

    def error(self, account: Account, index: int) -> Float[Tensor, "tasks tokens features"] | None:
        """What rounding may do to the output of a node; linear operations on one value hand theirs on."""
        return None

    def steepness(self) -> tuple[Tensor, Tensor] | None:
        """The largest slopes and intercepts, below or above, where there are slopes of every entry."""
        return None

    def to(self, dtype: torch.dtype) -> Enclosure:
        """The same enclosure with its numbers in another precision."""
        tensors = {f.name: v for f in fields(self) if isinstance(v := getattr(self, f.name), Tensor)}  # type: ignore[arg-type]
        if all(v.dtype == dtype for v in tensors.values()):
            return self
        cast = {id(v): v.to(dtype) for v in tensors.values()}  # a tensor shared by two fields stays shared
        return replace(self, **{name: cast[id(v)] for name, v in tensors.items()})  # type: ignore[type-var]


@dataclass(frozen=True, eq=False)
class LinearEnclosure(Enclosure):
    """A linear operation of one value, which is its own enclosure."""

    op: Linear
    coefs: Tensor

    def pull(self, rows: Rows) -> Pulled:
        coefs = self.op.act_transposed(self.coefs, rows.coefs)
        return (Rows(coefs, rows.groups, rows.diagonal and not self.op.mixes, rows.moved),), None

    def push(self, *forms: Form) -> Form:
        return forms[0].through(self.op.act, self.coefs.unsqueeze(0))


@dataclass(frozen=True, eq=False)
class SumEnclosure(Enclosure):
    """The sum of two values, with what both may be off by (`rounding`), once it is known."""

    allowance: Float[Tensor, "tasks tokens features"] | None = None

    def pull(self, rows: Rows) -> Pulled:
        if self.allowance is None:
            return (rows, rows), None
        return (rows, rows), rows.like(rows.coefs.detach().abs()).contract(self.allowance).neg()

    def push(self, *forms: Form) -> Form:
        total = forms[0] + forms[1]
        return total if self.allowance is None else total.plus(torch.stack([-self.allowance, self.allowance]))

    def widened(self, error: Tensor) -> SumEnclosure:
        return SumEnclosure(error)

    def error(self, account: Account, index: int) -> Tensor:
        return account.of_sum(index)


def exact_enclosure(op: Op, clean: tuple[Tensor, ...], dtype: torch.dtype) -> Enclosure | None:
    """The enclosure of a linear operation; None for a nonlinear one, which has to be relaxed."""
    if isinstance(op, Linear):
        return LinearEnclosure(op, op.coefficients(clean[0]).to(dtype))
    return SumEnclosure() if isinstance(op, Add) else None


@dataclass(frozen=True, eq=False)
class LinesEnclosure(Enclosure):
    """An elementwise function between two lines: ``ls·x + li ≤ f ≤ us·x + ui``."""

    lower_slope: Float[Tensor, "tasks tokens features"]
    lower_intercept: Float[Tensor, "tasks tokens features"]
    upper_slope: Float[Tensor, "tasks tokens features"]
    upper_intercept: Float[Tensor, "tasks tokens features"]

    def pull(self, rows: Rows) -> Pulled:
        positive, negative = rows.parts()
        lower, upper = (rows.read(slope).unsqueeze(-1) for slope in (self.lower_slope, self.upper_slope))
        coefs = (positive.coefs * lower).addcmul_(negative.coefs, upper)
        bias = positive.contract(self.lower_intercept).add_(negative.contract(self.upper_intercept))
        return (rows.like(coefs),), bias

    def push(self, *forms: Form) -> Form:
        slopes = torch.stack([self.lower_slope, self.upper_slope]).unsqueeze(-1)
        constants = torch.stack([self.lower_intercept, self.upper_intercept])
        return forms[0].through(torch.mul, slopes).plus(constants)

    def error(self, account: Account, index: int) -> Tensor:
        return account.of_lines(index, self.steepness())

    def steepness(self) -> tuple[Tensor, Tensor]:
        intercepts = self.lower_intercept, self.upper_intercept
        return _largest(self.lower_slope, self.upper_slope), _largest(*intercepts)

    def widened(self, error: Tensor) -> LinesEnclosure:
        lower, upper = self.lower_intercept - error, self.upper_intercept + error
        return replace(self, lower_intercept=lower, upper_intercept=upper)


@dataclass(frozen=True, eq=False)
class PlanesEnclosure(Enclosure):
    """A sum of products between two planes per term (`products.planes`).

    Per term, ``x_lower·x + y_lower·y`` plus a constant bounds the product from below, and likewise from above
    (``y_upper is y_lower`` where the planes agree). The coefficients carry all term axes of `op`, of size 1
    where they do not depend on an axis.
    """

    op: Bilinear
    x_lower: Tensor
    x_upper: Tensor
    y_lower: Tensor
    y_upper: Tensor
    lower: Float[Tensor, "tasks tokens features"]
    upper: Float[Tensor, "tasks tokens features"]

    def pull(self, rows: Rows) -> Pulled:
        return self.pull_moved(rows, (None, None))

    def pull_moved(self, rows: Rows, moved: Sequence[Moved]) -> Pulled:
        signed = _Signed.of(self.op, rows)
        parts = self._pull_x(signed, moved[0]), self._pull_y(signed, moved[1])
        return parts, signed.contract(self.lower, self.upper)

    def pull_x(self, rows: Rows) -> tuple[Rows, Tensor]:
        """What `pull` finds for x alone, and the constant."""
        signed = _Signed.of(self.op, rows)
        return self._pull_x(signed, None), signed.contract(self.lower, self.upper)

    def _pull_x(self, signed: _Signed, moved: Moved) -> Rows:
        terms = (signed.above, self.x_lower), (signed.below, self.x_upper)
        return self._side(signed.rows, self.op.x, moved, *terms)

    def _pull_y(self, signed: _Signed, moved: Moved) -> Rows:
        if self.y_upper is self.y_lower:
            return self._side(signed.rows, self.op.y, moved, (signed.whole, self.y_lower))
        terms = (signed.above, self.y_lower), (signed.below, self.y_upper)
        return self._side(signed.rows, self.op.y, moved, *terms)

    def _side(self, rows: Rows, axes: str, moved: Moved, *terms: tuple[Tensor, Tensor]) -> Rows:
        """The rows that read the input with these axes: the sum of ``coefficients · planes`` over `terms`."""
        op = self.op
        own = rows.diagonal and "i" in axes  # rows go on to read their own token only
        moved = None if own else moved
        total: Tensor | None = None
        for coefs, planes in terms:
            planes = rows.read(planes)
            if moved is not None:
                coefs = _tokens(coefs, op.out, axes[0], moved)
                planes = _tokens(planes, op.terms, axes[0], moved)
            if axes == op.x:
                part = self._to_x(coefs, planes)
            else:
                groups = "i" if rows.diagonal and not own else ""
                part = torch.einsum(f"t{op.out}r,t{op.terms}->t{axes}{groups}r", coefs, planes)
            total = part if total is None else total + part
        assert total is not None
        if rows.diagonal and not own:
            total = total.flatten(-2)
        return Rows(total.flatten(2, -2), rows.groups, own, moved is not None)

    def _to_x(self, coefs: Tensor, planes: Tensor) -> Tensor:
        """``Σ coefs · planes`` over the axis `x` does not have, as one batched matrix product."""
        op = self.op
        if op.out == op.x:
            return coefs * planes.unsqueeze(-1)
        order = (*op.out[:-1], op.x[-1], op.out[-1])
        return planes.permute(0, *(op.terms.index(c) + 1 for c in order)) @ coefs

    def push(self, *forms: Form) -> Form:
        same_y = self.y_upper is self.y_lower
        x = forms[0].through(self._from_x, torch.stack([self.x_lower, self.x_upper]))
        y = forms[1].through(
            self._from_y, self.y_lower[None] if same_y else torch.stack([self.y_lower, self.y_upper])
        )
        return (x + y).plus(torch.stack([self.lower, self.upper]))

    def error(self, account: Account, index: int) -> Tensor:
        return account.of_product(index)

    def widened(self, error: Tensor) -> PlanesEnclosure:
        return replace(self, lower=self.lower - error, upper=self.upper + error)

    def _from_x(self, planes: Tensor, sides: Tensor) -> Tensor:
        """``Σ planes · form`` over the axis the output does not have: a product per entry or per head."""
        op = self.op
        sides = split_axes(op, sides, op.x)
        if op.out == op.x:
            return (planes.unsqueeze(-1) * sides).flatten(-3, -2)
        order = (*op.out, op.x[-1])
        return (planes.permute(0, 1, *(op.terms.index(c) + 2 for c in order)) @ sides).flatten(-3, -2)

    def _from_y(self, planes: Tensor, sides: Tensor) -> Tensor:
        op = self.op
        pattern = f"st{op.terms},st{op.y}d->st{op.out}d"
        return torch.einsum(pattern, planes, split_axes(op, sides, op.y)).flatten(-3, -2)


@dataclass(frozen=True, eq=False)
class SoftmaxEnclosure(Enclosure):
    """Attention weights between linear functions of all scores of their query (`softmax.softmax_enclosure`).

    ``lower_slope[..., j, k]`` is the slope of weight j in score k below, `upper_slope` above. Weights of one
    query sum to 1, so their deviations to 0: any constant may be taken off their coefficients before they
    are split by sign. It is the median, which leaves the least to be relaxed, or away from it by
    ``(shift − ½)`` of the range of the coefficients.
    """

    lower_slope: Float[Tensor, "tasks tokens heads keys keys"]
    upper_slope: Float[Tensor, "tasks tokens heads keys keys"]
    lower: Float[Tensor, "tasks tokens features"]
    upper: Float[Tensor, "tasks tokens features"]
    shift: Float[Tensor, "tasks tokens heads"] | None = None

    def pull(self, rows: Rows) -> Pulled:
        a = self._split(rows.coefs)
        constant = lower_median(a, 3)
        if self.shift is not None:
            size = a.amax(3, keepdim=True) - a.amin(3, keepdim=True)
            constant = constant + (rows.read(self.shift) - 0.5)[..., None, None] * size
        shifted = rows.like((a - constant).flatten(2, 3))
        positive, negative = shifted.parts()
        x = rows.read(self.lower_slope).mT @ self._split(positive.coefs)
        x = x.add_(rows.read(self.upper_slope).mT @ self._split(negative.coefs))
        bias = positive.contract(self.lower).add_(negative.contract(self.upper))
        return (rows.like(x.flatten(2, 3)),), bias.sub_(self._leak(rows, constant))

    def _leak(self, rows: Rows, constant: Tensor) -> Tensor:
        """What taking a constant off may cost: clean weights sum to 1 up to their rounding."""
        keys = self.lower_slope.shape[-1]
        taken = constant.detach().abs().squeeze(3).sum(2)  # tasks, tokens, rows
        if not rows.diagonal:
            taken = taken.sum(1, keepdim=True).unflatten(2, (rows.groups, -1)).squeeze(1)
        return (2 * keys + 16) * torch.finfo(torch.float64).eps * taken

    def push(self, *forms: Form) -> Form:
        def apply(slopes: Tensor, sides: Tensor) -> Tensor:
            return (slopes @ self._split(sides)).flatten(-3, -2)

        slopes, constants = (self.lower_slope, self.upper_slope), (self.lower, self.upper)
        return forms[0].through(apply, torch.stack(slopes)).plus(torch.stack(constants))

    def error(self, account: Account, index: int) -> Tensor:
        return account.of_lines(index, self.steepness())

    def steepness(self) -> tuple[Tensor, Tensor]:
        return _largest(self.lower_slope, self.upper_slope), _largest(self.lower, self.upper)

    def widened(self, error: Tensor) -> SoftmaxEnclosure:
        return replace(self, lower=self.lower - error, upper=self.upper + error)

    def _split(self, value: Tensor) -> Tensor:
        return value.unflatten(-2, (self.lower_slope.shape[2], -1))


def _largest(lower: Tensor, upper: Tensor) -> Tensor:
    return torch.maximum(lower.detach().abs(), upper.detach().abs())


@dataclass(frozen=True)
class _Signed:
    """Rows of a product and their parts by sign; the coefficients of each with the axes of its output."""

    rows: Rows
    positive: Rows
    negative: Rows
    whole: Tensor
    above: Tensor
    below: Tensor

    @classmethod
    def of(cls, op: Bilinear, rows: Rows) -> _Signed:
        every = rows, *rows.parts()
        return cls(*every, *(split_axes(op, one.coefs, op.out) for one in every))

    def contract(self, lower: Tensor, upper: Tensor) -> Tensor:
        """The least constants, where the product is between these."""
        return self.positive.contract(lower).add_(self.negative.contract(upper))


def _tokens(value: Tensor, axes: str, axis: str, moved: Tensor) -> Tensor:
    """The entries of the moved tokens of every task on one axis of ``[task, *axes, ...]``, if it has it."""
    place = axes.find(axis) + 1
    if not place or value.shape[place] == 1:
        return value
    if len(moved) == 1:
        return value.index_select(place, moved[0])
    each = zip(value.expand(len(moved), *value.shape[1:]), moved, strict=True)
    return torch.stack([one.index_select(place - 1, tokens) for one, tokens in each])


def split_axes(op: Bilinear, value: Tensor, axes: str) -> Tensor:
    """View ``[..., tokens, features, last]`` with the features split into the axes of `op`."""
    return value.unflatten(-2, (op.heads, -1)) if len(axes) == 3 else value
