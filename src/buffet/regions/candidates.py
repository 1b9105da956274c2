"""Words that may be exchanged for others: a finite set of deviations for every one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions import arguments
from buffet.regions.arguments import Words
from buffet.regions.regions import Delta, Form, Region


@dataclass(frozen=True, eq=False, init=False)
class CandidateSet(Region):
    """Every moved word is the original or one of its candidates; at most `budget` words change.

    Args:
        x: the clean rows, tokens × width.
        words: as for `LpBall`.
        candidates: for the d-th word a tensor choices × width of rows; for several tasks one such list
            per task. The original need not be among them.
        budget: how many words may change (default: all).

    The minimum of a form is the sum of the `budget` most negative ``min_j A_d·(e_dj − x_d)``.
    """

    candidates: tuple[tuple[Tensor, ...], ...]
    budget: int
    offsets: Float[Tensor, "tasks moved choices width"]

    def __init__(
        self,
        x: Tensor,
        words: Words,
        candidates: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        budget: int | None = None,
    ) -> None:
        self._start(x, words)
        if budget is not None and budget < 0:
            raise BuffetError(
                f"CandidateSet: budget is {budget}; give a number of words ≥ 0, or None for all"
            )
        moved = self.moved.shape[1]
        object.__setattr__(self, "budget", moved if budget is None else min(budget, moved))
        checked = arguments.checked_candidates(candidates, self.tasks, moved, self.width)
        object.__setattr__(self, "candidates", checked)
        # Choice 0 is the original; words with fewer choices repeat it.
        most = max(len(rows) for task in self.candidates for rows in task)
        offsets = self.center.new_zeros(*self.moved.shape, most + 1, self.width, dtype=torch.float64)
        rows = self._rows()
        for t, task in enumerate(self.candidates):
            for d, choices in enumerate(task):
                offsets[t, d, 1 : len(choices) + 1] = choices.double().to(rows.device) - rows[t, d]
        object.__setattr__(self, "offsets", offsets)

    def select(self, index: Sequence[int] | Tensor) -> CandidateSet:
        index = self._index(index)
        chosen = [self.candidates[t] for t in index.tolist()]
        return CandidateSet(self.center, self.moved[index], chosen, self.budget)

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        # In float64: the products may cancel. A NaN for one word is a NaN for all, whatever the budget.
        gains = torch.einsum("tmcw,tmw...->tmc...", self.offsets, form.double()).amin(2)
        total = gains.topk(self.budget, dim=1, largest=False).values.sum(1) + 0 * gains.sum(1)
        return (total - torch.finfo(form.dtype).eps * total.abs()).to(form.dtype)

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        moves = torch.einsum("tmcw,tmw...->tmc...", self.offsets.abs().to(form.dtype), form.abs()).amax(2)
        return moves.topk(self.budget, dim=1).values.sum(1)

    def extent(self) -> tuple[Float[Tensor, "tasks moved width"], Float[Tensor, "tasks moved width"]]:
        reachable = self.offsets if self.budget else torch.zeros_like(self.offsets)
        slack = torch.finfo(torch.float64).eps * reachable.abs()  # offsets are differences of rows, rounded
        return (reachable - slack).amin(2), (reachable + slack).amax(2)

    def extreme(self, form: Delta) -> Delta:
        values = torch.einsum("tmcw,...tmw->...tmc", self.offsets.to(form.dtype), form)
        return self._pick(-values).to(form.dtype)

    def project(self, delta: Delta) -> Delta:
        """The nearest point in L2: the nearest candidates, kept for the `budget` words where that gains most.

        With ``g_d = ‖δ_d‖² − min_j ‖δ_d − o_j‖²`` the squared distance of a choice is a constant minus the
        g_d of the changed words, so keeping the largest is optimal.
        """
        offsets = self.offsets.to(delta.dtype).double()
        gains = 2 * torch.einsum("tmcw,...tmw->...tmc", offsets, delta.double()) - offsets.square().sum(-1)
        return self._pick(gains).to(delta.dtype)

    def sample(self, count: int, generator: torch.Generator) -> Float[Tensor, "count tasks moved width"]:
        gains = torch.rand((count, *self.offsets.shape[:3]), generator=generator, dtype=torch.float64)
        # Candidates beat the original, except for words left alone at random.
        still = torch.rand((count, *self.moved.shape), generator=generator) < 0.25
        gains[..., 0] = torch.where(still, 2.0, 0.0)
        gains[:1, ..., 0] = 2.0
        return self._pick(gains.to(self.center.device))

    def contains(self, delta: Delta, slack: float = 0.0) -> Bool[Tensor, "*restarts tasks"]:
        offsets = self.offsets.to(delta.dtype).double()
        wide = delta.double()
        known = [((wide - offsets[:, :, c]).abs() <= slack).all(-1) for c in range(offsets.shape[2])]
        changed = (~known[0]).sum(-1)
        return torch.stack(known).any(0).all(-1) & (changed <= self.budget)

    def _pick(self, gains: Tensor) -> Tensor:
        """The choice with the largest gain of every word, for the `budget` words that gain most."""
        best = gains.argmax(-1)
        gain = gains.gather(-1, best[..., None])[..., 0] - gains[..., 0]
        keep = torch.zeros_like(gain, dtype=torch.bool)
        keep.scatter_(-1, gain.topk(self.budget, dim=-1).indices, True)
        choice = torch.where(keep & (gain > 0), best, 0)
        task, word = torch.arange(self.tasks)[:, None], torch.arange(self.moved.shape[1])
        return self.offsets[task.to(choice.device), word.to(choice.device), choice]
