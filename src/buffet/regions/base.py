"""What every region answers: the questions that a proof, an attack and a certificate ask.

A region holds the clean rows of one sentence and T *tasks*; a task moves m of the rows, row d by δ_d. Whoever
uses a region asks for the least value of linear forms ``Σ_d A_d·δ_d`` over it and where that is, how large a
form of a single row can get, for points of it, how it can be cut in two, and how to write it down. Nobody
asks which kind of region it is. Every operation is batched over the tasks.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions import arguments
from buffet.regions.arguments import Words

SUMS_BYTES = 1 << 20
"""Numbers in the sums of forms that `Region.minimise_sums` builds at a time: about what fits in a cache."""
Form = Float[Tensor, "tasks moved width *rows"]
Delta = Float[Tensor, "*restarts tasks moved width"]
Halve = Callable[[Any], "tuple[Region, Region] | None"]
"""Two parts that together cover a part; None: it cannot be cut any further."""


@dataclass(frozen=True, eq=False)
class Support:
    """How large forms of single rows can get: for every vector a, task t and moved row d,

        |a·(δ_d − middle_d)|  ≤  Σ_g weights[t, d, g] · ‖a·F_g‖_q

    with the columns of F = `columns` (the identity, if None) in equal groups F_g. `columns` and `middle` are
    rounded to float64, and the bound holds for them before that.
    """

    exponent: float  # q
    weights: Float[Tensor, "tasks words groups"]  # one word: the same for all
    columns: Float[Tensor, "tasks width columns"] | None = None
    middle: Float[Tensor, "tasks moved width"] | None = None  # None: 0


@dataclass(frozen=True, eq=False)
class Description:
    """A region of one task in the words of a certificate (`docs/certificates.md`).

    Parts of a whole that was cut say so: `whole` is the same object for all of them, and `common` are arrays
    that are stored once for all. The ``{}`` in their names is the number of the whole, which goes into the
    fact called like the first part of these names (None until then).
    """

    facts: dict[str, object]
    arrays: Mapping[str, Tensor] = field(default_factory=dict)  # of this region alone
    common: Mapping[str, Tensor] = field(default_factory=dict)
    whole: object = None
    choices: Sequence[Tensor] | None = None  # rows that may be those of tokens, for every moved row


@dataclass(frozen=True, eq=False, repr=False)
class Region(ABC):
    """Rows `moved[t]` of `center` may move in task t; the subclass says how far."""

    center: Float[Tensor, "tokens width"]
    moved: Int[Tensor, "tasks moved"]
    eps: Float[Tensor, "tasks"] | None  # the size of every task, if the region has one

    @property
    def tasks(self) -> int:
        """The number of tasks."""
        return self.moved.shape[0]

    @property
    def width(self) -> int:
        """The number of features of a row."""
        return self.center.shape[1]

    # --- linear forms ---------------------------------------------------------------------------------------

    @abstractmethod
    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        """``min_δ Σ_d form_d·δ_d`` for every task and row, in the precision of `form`; differentiable."""

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        """``minimise(a_i + b_j)`` for all pairs of forms of a group, up to rounding; no bound to rely on."""
        shape = self.moved.shape[1], self.width
        per_group = a[:, 0].numel() * b.shape[2] * a.element_size()
        parts = [
            self.minimise((x.unsqueeze(3) + y.unsqueeze(2)).movedim(-1, 1).unflatten(1, shape))
            for x, y in zip(*(v.split(max(1, SUMS_BYTES // per_group), 1) for v in (a, b)), strict=True)
        ]
        return torch.cat(parts, 1)

    @abstractmethod
    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        """``max_δ Σ |form·δ|`` or more, which rounding errors scale with; `least` is ``minimise(form)``."""

    @abstractmethod
    def support(self) -> Support:
        """How large a form of a single moved row can get."""

    @abstractmethod
    def extent(self) -> tuple[Float[Tensor, "tasks moved width"], Float[Tensor, "tasks moved width"]]:
        """The smallest and the largest value of every entry of δ (float64)."""

    @property
    def symmetric(self) -> bool:
        """Whether −δ may happen wherever δ may, up to less than a thousandth."""
        return False

    # --- points ---------------------------------------------------------------------------------------------

    @abstractmethod
    def extreme(self, form: Delta) -> Delta:
        """A δ of the region that attains the minimum of ``Σ_d form_d·δ_d``."""

    def lowest(self, form: Delta) -> Delta:
        """The δ that attains the minimum, up to rounding."""
        return self.extreme(form)

    @abstractmethod
    def project(self, delta: Delta) -> Delta:
        """A δ of the region near `delta`; a δ already inside comes back unchanged."""

    @abstractmethod
    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "count tasks moved width"]:
        """Random float64 points: interior, boundary, vertices. The first is ``project(0)``."""

    @abstractmethod
    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        """Whether `delta` is in the region enlarged by `slack`, judged in float64."""

    @property
    def finite(self) -> bool:
        """Whether words have finitely many choices, which `changed_words` lists."""
        return False

    def changed_words(
        self, delta: Float[Tensor, "tasks moved width"]
    ) -> Float[Tensor, "changes tasks moved width"]:
        """Every δ that differs from `delta` in one word, some of which may be outside of the region."""
        raise BuffetError(f"a {type(self).__name__} has infinitely many points")

    def points(self, delta: Delta) -> Float[Tensor, "*restarts tasks tokens width"]:
        """The sentence's rows with the moved ones shifted by `delta`, in the precision of `delta`."""
        rows = self.center.to(delta.dtype).expand(*delta.shape[:-2], -1, -1)
        index = self.moved[..., None].expand_as(delta)
        return rows.scatter_add(-2, index, delta)

    # --- tasks and sizes ------------------------------------------------------------------------------------

    @abstractmethod
    def select(self, index: Sequence[int] | Tensor) -> Region:
        """The region of the tasks `index` only (integers, or one bool per task)."""

    @property
    def resizable(self) -> bool:
        """Whether the region is one of a family of sizes ε; if not, `with_eps` refuses."""
        return False

    def with_eps(self, eps: float | int | Sequence[float] | Tensor) -> Region:
        """The same region with another size, one for all tasks or one per task."""
        raise self._no_size()

    def size_of(self, delta: Delta) -> Float[Tensor, "*restarts tasks"]:
        """The least ε at which the region holds `delta`."""
        raise self._no_size()

    def growth(self, form: Delta) -> Float[Tensor, "*restarts tasks"]:
        """By how much the least value of a form falls per ε."""
        raise self._no_size()

    def _no_size(self) -> BuffetError:
        return BuffetError(f"a {type(self).__name__} has no size: leave eps out, or use an LpBall")

    def names(self) -> list[Hashable]:
        """What tells the tasks apart, whatever their size: the rows that move."""
        return [tuple(rows) for rows in self.moved.tolist()]

    def parents(self) -> list[Hashable]:
        """The names of the tasks that these are parts of: themselves, if they are whole."""
        return self.names()

    # --- cutting --------------------------------------------------------------------------------------------

    @abstractmethod
    def probes(self, row: int) -> tuple[Float[Tensor, "probes width"], Float[Tensor, "probes width"]]:
        """Pairs of deviations of a moved row of the only task, between which scores are compared."""

    @abstractmethod
    def cuttable(self, changes: Sequence[Float[Tensor, "_ some"]]) -> tuple[Region, Halve]:
        """The region of one task as the first of its parts, and how to cut a part in two.

        `changes` are what the network's scores change by between the probes of every moved row: a part is cut
        where they change most.
        """

    # --- words ----------------------------------------------------------------------------------------------

    @abstractmethod
    def describe(self) -> Description:
        """The region of a single task as a certificate has it."""

    @abstractmethod
    def _details(self) -> str:
        """What sets the region apart, in a few words."""

    def __repr__(self) -> str:
        words = self.moved.tolist()
        named = words[0] if len(words) == 1 else words
        if self.moved.numel() > 12:
            named = f"{self.tasks} × {self.moved.shape[1]} of {len(self.center)}"
        return f"{type(self).__name__}(words={named}, {self._details()})"

    # --- for subclasses -------------------------------------------------------------------------------------

    def without_padding(self, mask: Bool[Tensor, "tokens"]) -> Region:
        """The same region of the sentence without its padding rows (False in `mask`).

        Padding is never read, so a network answers both alike.
        """
        if mask.shape[0] != len(self.center):
            raise BuffetError(f"the mask has {mask.shape[0]} entries, the sentence {len(self.center)} rows")
        if not bool(mask[self.moved].all()):
            raise BuffetError("a moved word is padding; only unmasked rows can change the answer")
        return self._with(center=self.center[mask], moved=(mask.cumsum(0) - 1)[self.moved])

    def _with(self, **changed: object) -> Any:
        """The same region with other fields; nothing that was derived from the old ones is kept."""
        other = copy.copy(self)
        kept = {f: v for f, v in vars(self).items() if f in self.__dataclass_fields__}
        other.__dict__.clear()
        other.__dict__.update(kept | changed)
        return other

    def _start(self, x: Tensor, words: Words) -> None:
        object.__setattr__(self, "center", arguments.checked_rows(x))
        object.__setattr__(self, "moved", arguments.checked_words(words, len(x)).to(x.device))
        object.__setattr__(self, "eps", None)

    def _rows(self) -> Float[Tensor, "tasks moved width"]:
        return self.center.double()[self.moved]

    def _index(self, index: Sequence[int] | Tensor) -> Tensor:
        index = torch.as_tensor(index, device=self.moved.device)
        return index.nonzero()[:, 0] if index.dtype == torch.bool else index.long()
