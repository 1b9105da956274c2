"""Finite sets, decided by running the network on every sentence of them.

Runs come with a bound on their rounding (`propagation.rigorous_run`): a margin above it is a proof for its
sentence, one below its negative a counterexample, and only what lies between is not decided.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.network import Affine, Program
from buffet.propagation.rigorous_run import Computed, RigorousRun, batch_size, multiplications
from buffet.regions import CandidateSet
from buffet.regions.combinations import Choice, Choices, Combinations
from buffet.system.parallel import side_by_side, threads

EXACT = torch.float64
WORTH_SPLITTING = 8_000_000_000
"""Numbers to be multiplied, from which on several processes share the sentences."""
BLOCK = 4
"""Batches that are listed at a time; the clock is looked at in between."""
SHARE = 32
"""Blocks that a process is given at most, before the others are told what it has found."""
NEAREST = 512
"""At most this many sentences, those with the smallest margins, are run again in double precision, to say
what the smallest margin is."""


@dataclass(frozen=True, eq=False)
class Sentences:
    """The finite set of one task: the rows that occur, and which of them every sentence has.

    `rows` are those of the sentence, then of every word the candidates that differ from it and each other.
    """

    program: Program  # in float64, ending in margins
    rows: Float[Tensor, "rows width"]
    moved: tuple[int, ...]
    starts: tuple[int, ...]  # where the candidates of every word begin
    tokens: int
    whole: Combinations

    @classmethod
    def of(cls, program: Program, region: CandidateSet) -> Sentences:
        """The set of the only task of a region."""
        center, moved = region.center.double(), region.moved[0].tolist()
        rows, starts, allowed = [center], [], []
        for row, candidates in zip(moved, region.candidates[0], strict=True):
            distinct = _distinct(center[row], candidates.double().to(center.device))
            starts.append(sum(map(len, rows)))
            rows.append(distinct)
            allowed.append(tuple(range(len(distinct) + 1)))
        whole = Combinations(tuple(allowed), region.budget)
        return cls(program, torch.cat(rows), tuple(moved), tuple(starts), len(center), whole)

    @property
    def count(self) -> int:
        """How many different sentences there are, the unchanged one included."""
        return self.whole.count()

    @property
    def others(self) -> int:
        """How many margins there are."""
        last = self.program.nodes[-1].op
        assert isinstance(last, Affine)
        return last.weight.shape[0]

    @cached_property
    def work(self) -> int:
        """About how many numbers are multiplied to run one."""
        return multiplications(self.program, self.tokens)

    @cached_property
    def batch(self) -> int:
        return batch_size(self.program, self.tokens, self.rows.shape[1])

    def index(self, choices: Choices) -> Int[Tensor, "points tokens"]:
        """The row of the table that every token of these sentences is."""
        found = torch.arange(self.tokens).repeat(len(choices), 1)
        first = torch.tensor(self.starts) - 1
        found[:, list(self.moved)] = torch.where(choices > 0, first + choices, torch.tensor(self.moved))
        return found.to(self.rows.device)

    def points(self, choices: Choices) -> Float[Tensor, "points tokens width"]:
        """The rows of these sentences (float64)."""
        return self.rows[self.index(choices)]

    def point(self, choice: Choice) -> Float[Tensor, "tokens width"]:
        """The rows of one sentence (float64)."""
        return self.points(choice[None])[0]

    def margins(
        self, choices: Choices, dtype: torch.dtype = EXACT
    ) -> tuple[Float[Tensor, "points others"], Float[Tensor, " points"]]:
        """Their margins, and how far each of these may be off."""
        with torch.inference_mode(), threads(1):  # the operations are too small to be split
            index = self.index(choices)
            if dtype == self.quick:
                run, table = self.prepared
            else:  # few sentences, as a rule, with few of the rows
                used, index = index.unique(return_inverse=True)
                run = RigorousRun(self.program, dtype)
                table = run.table(self.rows[used])
            parts = [run.margins(table, part) for part in index.split(self.batch)]
            value, error = (torch.cat(pieces).cpu() for pieces in zip(*parts, strict=True))
            # The sum of a margin and its error is rounded too.
            return value, error + 2 * torch.finfo(EXACT).eps * value.abs().amax(-1)

    @cached_property
    def quick(self) -> torch.dtype:
        """The precision that most sentences are decided in."""
        suits = RigorousRun.suits_single(self.program, self.rows.shape[1])
        return torch.float32 if suits and self.rows.device.type == "cpu" else EXACT

    @cached_property
    def prepared(self) -> tuple[RigorousRun, dict[int, Computed]]:
        """What all runs in the quick precision share: all that depends on single rows."""
        with torch.inference_mode():
            run = RigorousRun(self.program, self.quick)
            return run, run.table(self.rows)


def _distinct(original: Float[Tensor, "width"], rows: Float[Tensor, "_ width"]) -> Float[Tensor, "_ width"]:
    """The rows that are not the original, every one once, in their order."""
    every = torch.cat([original[None], rows]) + 0.0  # −0 and 0 are the same
    seen: dict[bytes, int] = {}
    for number, row in enumerate(every.cpu().numpy()):
        seen.setdefault(row.tobytes(), number - 1)
    return rows[[number for number in seen.values() if number >= 0]]


@dataclass(frozen=True, eq=False)
class Outcome:
    """What is known of sentences that were run."""

    margins: Float[Tensor, "others"]  # lower bounds for all that were run
    run: int
    complete: bool  # whether that is all of them
    flip: Choice | None = None  # a sentence with another answer for certain: its choices, words
    least: float = math.inf  # the smallest margin found, in double precision

    @property
    def proven(self) -> bool:
        good = (self.margins > 0) & self.margins.isfinite()
        return self.complete and self.flip is None and bool(good.all()) and len(good) > 0


class Tally:
    """The smallest margins of what was run so far, in single precision first and then where that matters."""

    def __init__(self, sentences: Sentences) -> None:
        self.sentences = sentences
        self.run = 0
        self.flip: Tensor | None = None
        self.least = math.inf
        self.lower: Tensor | None = None  # of those that need not be looked at again
        self._ceiling = math.inf  # the smallest margin is no larger
        self._near: list[tuple[Tensor, Tensor]] = []  # sentences that may have it, and lower bounds

    def add(self, choices: Choices) -> None:
        """Run some sentences; what single precision does not prove is run again at once."""
        quick = self.sentences.quick
        value, error = self.sentences.margins(choices, quick)
        self.run += len(choices)
        lower = value - error.unsqueeze(-1)
        sure = (lower > 0).all(-1) & lower.isfinite().all(-1)
        if quick == EXACT:
            return self._settle(choices, value, error)
        if not bool(sure.all()):
            unsure = choices[~sure][value[~sure].amin(-1).nan_to_num(math.inf).argsort()]
            for some in (unsure[:1], unsure[1:]):  # the worst may be all that is asked for
                if len(some) and self.flip is None:
                    self._settle(some, *self.sentences.margins(some))
        if bool(sure.any()):
            self._ceiling = min(self._ceiling, float((value[sure].amin(-1) + error[sure]).min()))
            near = lower[sure].amin(-1) <= self._ceiling
            self._keep(lower[sure][~near])
            if bool(near.any()):
                self._near.append((choices[sure][near], lower[sure][near]))
        return None

    def merge(self, other: Tally) -> None:
        """Add what another run of some sentences of the same set has found."""
        self.run += other.run
        self._near += other._near
        self._ceiling = min(self._ceiling, other._ceiling)
        if other.lower is not None:
            self._keep(other.lower[None])
        if other.least < self.least:
            self.least = other.least
        self.flip = self.flip if other.flip is None else other.flip

    def __getstate__(self) -> dict[str, object]:
        """What another process is told: it has the sentences."""
        return {**vars(self), "sentences": None}

    def _settle(self, choices: Choices, value: Tensor, error: Tensor) -> None:
        """What double precision says is final."""
        smallest = value.amin(-1)
        self._keep(value - error.unsqueeze(-1))
        worst = int(smallest.nan_to_num(math.inf, math.inf).argmin())
        if float(smallest[worst]) < self.least:
            self.least = float(smallest[worst])
            if self.least < -float(error[worst]):
                self.flip = choices[worst]
        self._ceiling = min(self._ceiling, float((smallest + error).nan_to_num(math.inf).min()))

    def _keep(self, lower: Tensor) -> None:
        if not len(lower):
            return
        least = lower.amin(0)  # NaN stays NaN
        self.lower = least if self.lower is None else torch.minimum(self.lower, least)

    def outcome(self, complete: bool) -> Outcome:
        """All that is known, after a second look at those that may have the smallest margin."""
        if self._near:
            choices, lower = (torch.cat(pieces) for pieces in zip(*self._near, strict=True))
            near = lower.amin(-1) <= self._ceiling
            order = lower.amin(-1).argsort()
            first = order[near[order]][:NEAREST]
            again = torch.zeros(len(lower), dtype=torch.bool)
            again[first] = True
            self._keep(lower[~again])
            if len(first):
                self._settle(choices[first], *self.sentences.margins(choices[first]))
            self._near = []
        nothing = torch.full((self.sentences.others,), -math.inf, dtype=EXACT)
        margins = nothing if self.lower is None else self.lower
        return Outcome(margins, self.run, complete, self.flip, self.least)


def enumerate_all(
    sentences: Sentences, part: Combinations | None = None, deadline: float | None = None
) -> Outcome:
    """Run all sentences, or those of a part, until one has another answer or the time is up."""
    tally, part = Tally(sentences), part or sentences.whole

    def run(some: Sequence[Choices]) -> Tally:
        """A share of the work, maybe in a process of its own."""
        own = Tally(sentences)
        for block in some:
            if own.flip is None and (deadline is None or time.perf_counter() < deadline):
                own.add(block)
        return own

    count = part.count()
    blocks = part.blocks(BLOCK * sentences.batch)
    workers = torch.get_num_threads() if count * sentences.work > WORTH_SPLITTING else 1
    length = 1 if workers == 1 else min(SHARE, math.ceil(count / (BLOCK * sentences.batch * workers)))
    _ = sentences.prepared  # once, for all processes
    while shares := [share for _ in range(workers) if (share := list(islice(blocks, length)))]:
        for found in side_by_side(run, shares):
            tally.merge(found)
        if tally.flip is not None:
            break
    return tally.outcome(tally.run == count and tally.flip is None)
