"""Sentences of finite sets: for every word a list of choices, of which some stand for the original."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from jaxtyping import Int
from torch import Tensor

Choices = Int[Tensor, "points words"]
"""The number of the choice of every word; 0 is the original."""
Choice = Int[Tensor, "words"]
"""The same of one sentence."""


@dataclass(frozen=True)
class Combinations:
    """All ways to choose for every word one of `allowed`, such that at most `budget` words are changed.

    Choice 0 is the word itself. A word that must not keep it, as it is not among the allowed ones, is changed
    in any case.
    """

    allowed: tuple[tuple[int, ...], ...]
    budget: int

    @property
    def forced(self) -> list[int]:
        """The words that are changed in all of them."""
        return [word for word, some in enumerate(self.allowed) if 0 not in some]

    @property
    def optional(self) -> list[int]:
        """The words that may be changed, or not."""
        return [word for word, some in enumerate(self.allowed) if 0 in some and len(some) > 1]

    @property
    def room(self) -> int:
        """How many of the optional words may be changed at once."""
        return min(self.budget - len(self.forced), len(self.optional))

    @property
    def open(self) -> list[int]:
        """The words of which not all of them have the same choice."""
        some = [*self.forced, *(self.optional if self.room > 0 else ())]
        return sorted(word for word in some if len(self.allowed[word]) > 1)

    def count(self) -> int:
        """How many there are: Σ of products over all sets of changed words, an elementary symmetric sum."""
        if self.room < 0:
            return 0
        sums = [1] + [0] * self.room
        for word in self.optional:
            ways = len(self.allowed[word]) - 1
            for changed in range(self.room, 0, -1):
                sums[changed] += ways * sums[changed - 1]
        return sum(sums) * math.prod(len(self.allowed[word]) for word in self.forced)

    def blocks(self, size: int) -> Iterator[Choices]:
        """All of them, about `size` at a time; those with few changes first."""
        pending: list[Tensor] = []
        waiting = 0
        for changed in range(self.room + 1):
            for some in combinations(self.optional, changed):
                for block in self._products((*self.forced, *some), size):
                    pending.append(block)
                    waiting += len(block)
                    if waiting >= size:
                        yield from torch.cat(pending).split(size)
                        pending, waiting = [], 0
        if pending:
            yield from torch.cat(pending).split(size)

    def _products(self, words: Sequence[int], size: int) -> Iterator[Choices]:
        """All choices of some words, none of them the original; the others keep theirs."""
        lists = [torch.tensor([c for c in self.allowed[word] if c]) for word in words]
        total = math.prod(map(len, lists))
        for start in range(0, total, size):
            numbers = torch.arange(start, min(start + size, total))
            block = torch.zeros(len(numbers), len(self.allowed), dtype=torch.long)
            for word, some in zip(words, lists, strict=True):
                block[:, word] = some[numbers % len(some)]
                numbers = numbers // len(some)
            yield block

    def halves(self, word: int, order: Sequence[int]) -> tuple[Combinations, Combinations]:
        """Two parts with no sentence in common: the first half of a word's choices in this order, and the
        others."""
        middle = len(order) // 2
        return self._only(word, order[:middle]), self._only(word, order[middle:])

    def _only(self, word: int, some: Sequence[int]) -> Combinations:
        lists = (tuple(sorted(some)) if w == word else old for w, old in enumerate(self.allowed))
        return replace(self, allowed=tuple(lists))
