"""Finite sets of sentences, in the order in which an answer is likely to come cheaply.

1. a quick attack over words;
2. all sentences, if they are few;
3. the cheapest bound of all of them at once (by `verify`);
4. a thorough attack; then the set is cut where words matter most: parts are bounded, and those with few
   sentences run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.engine import bound_margins
from buffet.methods import Method
from buffet.query import Query
from buffet.regions import CandidateSet
from buffet.regions.combinations import Choice, Choices, Combinations
from buffet.search.policy import POLICY
from buffet.verification.enumeration import Outcome, Sentences, enumerate_all


@dataclass(frozen=True, eq=False)
class WordSearch:
    """The finite set of one task of a query."""

    query: Query  # of this task alone
    sentences: Sentences

    @classmethod
    def of(cls, query: Query) -> WordSearch:
        assert isinstance(query.region, CandidateSet)
        assert query.asked.label is not None
        program = query.model.program64.margins(query.asked.label)
        return cls(query, Sentences.of(program, query.region))

    def few(self, part: Combinations) -> bool:
        """Whether to run all sentences costs about as much as to bound them.

        Bounds look at every candidate in every form: where there are hardly more sentences than candidates,
        as when one word is exchanged at a time, running them is always cheaper.
        """
        count, candidates = part.count(), sum(map(len, part.allowed))
        work = count * max(self.sentences.work, POLICY.words_least)
        return work <= POLICY.words_at_once or count <= POLICY.words_each * candidates

    @property
    def countable(self) -> bool:
        """Whether all sentences can be run, if nothing cheaper proves them."""
        return self.sentences.count <= POLICY.words_in_all

    def first_look(self, *, attack: bool) -> Outcome | None:
        """What costs no more than a quick bound: an attack, and all sentences if they are few."""
        flip = self.quick_attack() if attack else None
        if flip is not None:
            return self._flipped(flip)
        return self.enumerate() if self.few(self.sentences.whole) else None

    def second_look(self, method: Method, *, attack: bool) -> Outcome | None:
        """After the whole set was bounded in vain: a longer attack, and all sentences if they can be run."""
        flip = self.thorough_attack() if attack else None
        if flip is not None:
            return self._flipped(flip)
        return self.tree(method) if self.countable else None

    def _flipped(self, flip: Choice) -> Outcome:
        return replace(self._partial(0), flip=flip)

    # --- attacks --------------------------------------------------------------------------------------------

    def quick_attack(self) -> Choice | None:
        """Every word changed alone; the best of these changes together; and what that can be improved to."""
        hunt = self._hunt(POLICY.words_quick)
        first = POLICY.words_first if self.few(self.sentences.whole) else POLICY.words_tried
        alone = hunt.run(hunt.changes(hunt.start, first))
        if hunt.flip is None and self.sentences.whole.room > 1:
            hunt.run(_together(alone, self.sentences.whole.budget, len(hunt.start)))
        if hunt.flip is None:
            hunt.improve(1)
        return hunt.flip

    def thorough_attack(self) -> Choice | None:
        """A beam of the most promising sentences, each changed in one more word at a time."""
        hunt = self._hunt(POLICY.words_thorough)
        hunt.improve(POLICY.words_beam)
        return hunt.flip

    def _hunt(self, most: int) -> Hunt:
        return Hunt(self.sentences, most, self.query.deadline)

    # --- proofs ---------------------------------------------------------------------------------------------

    def enumerate(self, part: Combinations | None = None) -> Outcome:
        return enumerate_all(self.sentences, part, self.query.deadline)

    def tree(self, method: Method) -> Outcome:
        """Parts that are bounded by a method, or run, or cut in two; the most dangerous first.

        Whatever can be counted is decided in the end, unless the time is up. Of larger sets, the policy says
        how many sentences are run and how many parts bounded.
        """
        rest, margins, run, bounded = [self.sentences.whole], list[Tensor](), 0, 0
        while rest:
            part = rest.pop()
            if self.query.expired or (not self.countable and run > POLICY.words_in_all):
                return self._partial(run)
            if self.few(part) or not part.open:
                found = self.enumerate(part)
                run += found.run
                if not found.proven:
                    return Outcome(found.margins, run, False, found.flip, found.least)
                margins.append(found.margins)
                continue
            if part != self.sentences.whole:  # which was bounded before
                if bounded >= POLICY.words_parts and not self.countable:
                    return self._partial(run)
                bound, bounded = self._bound(part, method), bounded + 1
                if bool(((bound > 0) & bound.isfinite()).all()):
                    margins.append(bound)
                    continue
            rest += self._cut(part)
        return Outcome(torch.stack(margins).amin(0), run, True)

    def _partial(self, run: int) -> Outcome:
        nothing = torch.full((self.sentences.others,), -math.inf, dtype=torch.float64)
        return Outcome(nothing, run, False)

    def _bound(self, part: Combinations, method: Method) -> Float[Tensor, "others"]:
        """Lower bounds of the margins of a part's sentences, and maybe of a few more."""
        query = self.query
        region = self.region(part)
        return bound_margins(query.model, region, method, query.asked, query.engine, None, query.context)[0]

    def region(self, part: Combinations) -> CandidateSet:
        """A region that holds the sentences of a part.

        Every word begins at the first of its choices, the original if that is one; one that is changed anyway
        may move for free, so it counts as one more in the budget.
        """
        sentences = self.sentences
        first = torch.tensor([[some[0] for some in part.allowed]])
        free = part.open
        rows = [
            sentences.rows[[sentences.starts[word] + c - 1 for c in part.allowed[word][1:]]] for word in free
        ]
        budget = part.room + sum(word in free for word in part.forced)
        return CandidateSet(sentences.points(first)[0], [sentences.moved[w] for w in free], rows, budget)

    def _cut(self, part: Combinations) -> tuple[Combinations, Combinations]:
        """Two halves by the word whose choices differ most in what they do alone: the dangerous ones last."""
        effects = [
            [0.0 if c == 0 else float(self._alone[word][c - 1]) for c in some]
            for word, some in enumerate(part.allowed)
        ]
        word = max(part.open, key=lambda w: (max(effects[w]) - min(effects[w]), len(effects[w])))
        ranked = sorted(zip(effects[word], part.allowed[word], strict=True), reverse=True)
        return part.halves(word, [choice for _, choice in ranked])

    @cached_property
    def _alone(self) -> list[Float[Tensor, " choices"]]:
        """By how much the margin changes with every candidate of every word, alone."""
        allowed = self.sentences.whole.allowed
        lists = []
        for word, some in enumerate(allowed):
            block = torch.zeros(len(some), len(allowed), dtype=torch.long)
            block[:, word] = torch.tensor(some)
            value = self.sentences.margins(block, self.sentences.quick)[0].amin(-1)
            lists.append((value[1:] - value[0]).nan_to_num(0.0, 0.0, 0.0))
        return lists


class Hunt:
    """A search for a sentence with another answer, that runs about `most` sentences."""

    def __init__(self, sentences: Sentences, most: int, deadline: float | None) -> None:
        self.sentences, self.most, self.deadline = sentences, most, deadline
        self.start = torch.zeros(len(sentences.moved), dtype=torch.long)
        self.flip: Choice | None = None
        self._known: dict[tuple[int, ...], float] = {}

    @property
    def over(self) -> bool:
        late = self.deadline is not None and time.perf_counter() > self.deadline
        return late or self.flip is not None or len(self._known) >= self.most

    def run(self, choices: Choices) -> list[tuple[float, tuple[int, ...]]]:
        """Margins of sentences, the smallest first; one that flips the answer for certain is kept."""
        new = [c for c in dict.fromkeys(map(tuple, choices.tolist())) if c not in self._known]
        if new:
            value = self.sentences.margins(torch.tensor(new), self.sentences.quick)[0]
            self._known.update(zip(new, value.amin(-1).nan_to_num(math.inf).tolist(), strict=True))
        ranked = sorted((self._known[c], c) for c in dict.fromkeys(map(tuple, choices.tolist())))
        if ranked and ranked[0][0] < 0:
            worst = torch.tensor([ranked[0][1]])
            value, error = self.sentences.margins(worst)
            if float(value.min()) < -float(error):
                self.flip = worst[0]
        return ranked

    def changes(self, current: Choice, room: int | None = None) -> Choices:
        """The sentences that differ in one word from this one; if those are many, the most promising.

        What is promising is told by the gradient of the margin.
        """
        whole = self.sentences.whole
        spent = int((current > 0).sum()) >= whole.budget
        pairs = [
            (word, choice)
            for word, some in enumerate(whole.allowed)
            if not spent or current[word] > 0
            for choice in some
            if choice != current[word]
        ]
        room = room or POLICY.words_tried
        if len(pairs) > room:
            gains = self._gains(current)
            pairs = sorted(pairs, key=lambda pair: gains[pair[0]][pair[1]])[:room]
        found = current.repeat(len(pairs), 1)
        if pairs:
            words, choices = torch.tensor(pairs).unbind(1)
            found[torch.arange(len(pairs)), words] = choices
        return found

    def _gains(self, current: Choice) -> list[list[float]]:
        """By how much every choice of every word changes the margin, to first order."""
        sentences = self.sentences
        x = sentences.points(current[None])[0]
        with torch.enable_grad():
            rows = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(sentences.program.evaluate(rows).min(), rows)
        found = []
        for word, start, some in zip(sentences.moved, sentences.starts, sentences.whole.allowed, strict=True):
            others = torch.cat([sentences.rows[word][None], sentences.rows[start : start + len(some) - 1]])
            found.append(((others - x[word]) @ slope[word]).nan_to_num(0.0).tolist())
        return found

    def improve(self, beam: int) -> None:
        """From the best sentences known, change one word after the other as long as that helps."""
        if not self._known:
            self.run(self.start[None])
        best = sorted((margin, c) for c, margin in self._known.items())[:beam]
        while not self.over:
            room = max(1, POLICY.words_tried // beam)
            trials = torch.cat([self.changes(torch.tensor(c), room) for _, c in best])
            better = sorted({*best, *self.run(trials)})[:beam]
            if better == best:
                return
            best = better


def _together(alone: Sequence[tuple[float, tuple[int, ...]]], budget: int, words: int) -> Choices:
    """The best change of every word, from the sentences with one change each: 2, 3, … of them at once."""
    found, current = [], [0] * words
    for _, choices in alone:
        word = next((w for w, c in enumerate(choices) if c), None)
        if word is None or current[word]:
            continue
        current[word] = choices[word]
        found.append(list(current))
        if len(found) == budget:
            break
    return torch.tensor(found or [current])
