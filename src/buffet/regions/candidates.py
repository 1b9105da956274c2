"""Words that may be exchanged for others: a finite set of deviations for every one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.regions import arguments
from buffet.regions.arguments import Words
from buffet.regions.base import SUMS_BYTES, Delta, Description, Form, Halve, Region, Support


@dataclass(frozen=True, eq=False, init=False, repr=False)
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
    offsets: Float[Tensor, "tasks moved choices width"]  # choice 0 is the original
    origin: CandidateSet | None = None  # of a part, what was cut
    picked: tuple[tuple[int, ...], ...] = ()  # and which of its candidates every word of the part has

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
        object.__setattr__(self, "offsets", self._offsets())

    def _offsets(self) -> Float[Tensor, "tasks moved choices width"]:
        """The original first, then the candidates; words with fewer candidates repeat the original."""
        rows, most = self._rows(), max(len(choices) for task in self.candidates for choices in task)
        offsets = rows.new_zeros(*self.moved.shape, most + 1, self.width)
        for t, task in enumerate(self.candidates):
            for d, choices in enumerate(task):
                offsets[t, d, 1 : len(choices) + 1] = choices.double().to(rows.device) - rows[t, d]
        return offsets

    def select(self, index: Sequence[int] | Tensor) -> CandidateSet:
        index = self._index(index)
        chosen = tuple(self.candidates[t] for t in index.tolist())
        found: CandidateSet = self._with(
            moved=self.moved[index], candidates=chosen, offsets=self.offsets[index]
        )
        return found

    def minimise(self, form: Form) -> Float[Tensor, "tasks *rows"]:
        # In float64: the products may cancel.
        total = self._least(torch.einsum("tmcw,tmw...->tmc...", self.offsets, form.double()).amin(2), 1)
        return (total - torch.finfo(form.dtype).eps * total.abs()).to(form.dtype)

    def minimise_sums(
        self, a: Float[Tensor, "tasks groups i inputs"], b: Float[Tensor, "tasks groups j inputs"]
    ) -> Float[Tensor, "tasks groups i j"]:
        """What every choice adds is linear in the form: the gains of a and of b add up."""
        moved, choices = self.offsets.shape[1:3]
        shape = moved, self.width
        gains = [
            torch.einsum("tmcw,tgimw->tgmci", self.offsets.to(v.dtype), v.unflatten(-1, shape))
            for v in (a, b)
        ]
        per_group = self.tasks * moved * choices * a.shape[2] * b.shape[2] * a.element_size()
        parts = [
            self._least((x.unsqueeze(-1) + y.unsqueeze(-2)).amin(3), 2)
            for x, y in zip(*(v.split(max(1, SUMS_BYTES // per_group), 1) for v in gains), strict=True)
        ]
        return torch.cat(parts, 1)

    def _least(self, gains: Tensor, words: int) -> Tensor:
        """The sum of the `budget` least of the gains along an axis, none of which is positive.

        A NaN for one word is a NaN for all, whatever the budget.
        """
        if self.budget == gains.shape[words]:
            return gains.sum(words)
        return gains.topk(self.budget, dim=words, largest=False).values.sum(words) + 0 * gains.sum(words)

    def spread(self, form: Form, least: Float[Tensor, "tasks *rows"]) -> Float[Tensor, "tasks *rows"]:
        moves = torch.einsum("tmcw,tmw...->tmc...", self.offsets.abs().to(form.dtype), form.abs()).amax(2)
        return moves.topk(self.budget, dim=1).values.sum(1)

    def support(self) -> Support:
        """Around the middle of the choices: ``max_j |a·(o_j − middle)|``, a group of columns per word."""
        reachable = self.offsets if self.budget else torch.zeros_like(self.offsets)
        middle = (reachable.amin(2) + reachable.amax(2)) / 2
        columns = (reachable - middle.unsqueeze(2)).flatten(1, 2).mT
        words = torch.eye(self.moved.shape[1], dtype=torch.float64, device=middle.device)
        return Support(math.inf, words.expand(self.tasks, -1, -1), columns, middle)

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

    @property
    def finite(self) -> bool:
        return True

    def changed_words(
        self, delta: Float[Tensor, "tasks moved width"]
    ) -> Float[Tensor, "changes tasks moved width"]:
        words, choices = self.offsets.shape[1:3]
        trials = delta.expand(words, choices, *delta.shape).clone()
        for word in range(words):
            trials[word, :, :, word] = self.offsets[:, word].transpose(0, 1).to(delta.dtype)
        return trials.flatten(0, 1)

    def probes(self, row: int) -> tuple[Float[Tensor, "probes width"], Float[Tensor, "probes width"]]:
        """From the original to every candidate."""
        chosen = self.offsets[0, row, 1 : len(self.candidates[0][row]) + 1]
        return chosen, torch.zeros_like(chosen)

    def cuttable(self, changes: Sequence[Float[Tensor, "_ some"]]) -> tuple[Region, Halve]:
        """Parts are candidate sets: half of the candidates of a word each, the original with both.

        That of the word whose candidates change the scores most differently is halved, those with similar
        changes together. The budget stays as it is, so every sentence of the whole is one of a part.
        """
        placed: list[Tensor] = []  # of every candidate, along the direction in which changes differ most
        for change in changes:
            apart = (change - change.mean(0)).nan_to_num(0.0, 0.0, 0.0) if len(change) else change
            placed.append(
                torch.linalg.svd(apart, full_matrices=False).U[:, 0] if len(apart) > 1 else apart.sum(1)
            )
            placed[-1] = placed[-1] * apart.square().sum().sqrt()

        def halve(part: CandidateSet) -> tuple[Region, Region] | None:
            picked = part.picked or tuple(tuple(range(len(choices))) for choices in self.candidates[0])
            wide = [
                float(place[list(some)].max() - place[list(some)].min()) if len(some) > 1 else -1.0
                for place, some in zip(placed, picked, strict=True)
            ]
            word = max(range(len(wide)), key=lambda d: (wide[d], len(picked[d])))
            if len(picked[word]) < 2:
                return None
            order = sorted(picked[word], key=lambda j: float(placed[word][j]))
            first, second = order[: len(order) // 2], order[len(order) // 2 :]
            return self.only(picked, word, first), self.only(picked, word, second)

        return self, halve

    def only(self, picked: Sequence[Sequence[int]], word: int, some: Sequence[int]) -> CandidateSet:
        """The part of a whole of one task with the candidates `picked`, but of a word only `some`."""
        left = tuple(tuple(sorted(some)) if d == word else tuple(p) for d, p in enumerate(picked))
        chosen = tuple(rows[list(p)] for rows, p in zip(self.candidates[0], left, strict=True))
        part: CandidateSet = self._with(candidates=(chosen,), origin=self.origin or self, picked=left)
        object.__setattr__(part, "offsets", part._offsets())
        return part

    def describe(self) -> Description:
        facts: dict[str, object] = {
            "kind": "candidates",
            "moved": self.moved[0].tolist(),
            "budget": self.budget,
        }
        if self.origin is None:
            return Description(facts, {"rows": self._filled()}, choices=self.candidates[0])
        facts |= {"whole": None, "choices": [list(some) for some in self.picked]}
        common = {"whole.{}.rows": self.origin._filled()}
        return Description(facts, {}, common, self.origin, self.origin.candidates[0])

    def _filled(self) -> Float[Tensor, "moved choices width"]:
        """The candidates of every word of the only task, as many for each: some repeat the original."""
        most = max(len(choices) for choices in self.candidates[0])
        filled = self._rows()[0].unsqueeze(1).repeat(1, most, 1)
        for d, choices in enumerate(self.candidates[0]):
            filled[d, : len(choices)] = choices.double()
        return filled

    def _details(self) -> str:
        counts = [len(choices) for task in self.candidates for choices in task]
        few, most = min(counts), max(counts)
        return f"{few if few == most else f'{few} to {most}'} candidates, budget={self.budget}"

    def _pick(self, gains: Tensor) -> Tensor:
        """The choice with the largest gain of every word, for the `budget` words that gain most."""
        best = gains.argmax(-1)
        gain = gains.gather(-1, best[..., None])[..., 0] - gains[..., 0]
        keep = torch.zeros_like(gain, dtype=torch.bool)
        keep.scatter_(-1, gain.topk(self.budget, dim=-1).indices, True)
        choice = torch.where(keep & (gain > 0), best, 0)
        task, word = torch.arange(self.tasks)[:, None], torch.arange(self.moved.shape[1])
        return self.offsets[task.to(choice.device), word.to(choice.device), choice]
