"""All sentences that substitutions make of a text, as regions.

Substitutes of one token, for words of one token, are candidates of a region. Every other substitute changes
how many tokens there are, or several of them at once: a sentence with such ones is of another *shape*, with a
region of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.engine import Engine
from buffet.errors import BuffetError, one_line
from buffet.loading import Model
from buffet.methods import Method
from buffet.printing import listed, plural
from buffet.regions import CandidateSet
from buffet.regions.combinations import Combinations
from buffet.synonyms import Synonyms, checked_synonyms, read_synonyms
from buffet.words.answer import Answer, answered, answered_each
from buffet.words.reading import (
    LeftOut,
    Reading,
    Word,
    offers,
    substitutes_of,
)

MOST_SHAPES = 1000
"""The most shapes that are listed; more than this were surely not intended."""
MOST_PAIRS = 5000
"""Substitutes of two words that touch are read together, if there are no more pairs of them."""


class NoSubstitutesError(BuffetError):
    """Nothing may be exchanged: the text is the only sentence there is."""

    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True, eq=False)
class Shape:
    """The sentences with certain substitutes that change the shape: the others are exchanged one by one."""

    choices: tuple[int, ...]  # of every word; 0 also for those that are free
    rows: Float[Tensor, "tokens width"]  # of the sentence in which nothing else is exchanged
    free: tuple[int, ...]  # the words that may still be exchanged
    options: tuple[tuple[int, ...], ...]  # and the choices that each has, the original not among them
    region: CandidateSet | None  # None: there is one sentence only


@dataclass(frozen=True, eq=False)
class Substitutions:
    """What a text may become by exchanging at most `at_most` of its words."""

    reading: Reading
    words: tuple[Word, ...]
    at_most: int
    left_out: tuple[LeftOut, ...]

    def __repr__(self) -> str:
        moving = [w.text for w in self.words if w.substitutes]
        return (
            f"Substitutions({self.count:,} {plural(self.count, 'sentence')}, {', '.join(listed(moving))},"
            f" at_most={self.at_most})"
        )

    @property
    def model(self) -> Model:
        return self.reading.model

    @property
    def text(self) -> str:
        return self.reading.texts[0]

    @cached_property
    def whole(self) -> Combinations:
        """All choices, by words."""
        return Combinations(tuple(tuple(range(len(word.choices))) for word in self.words), self.at_most)

    @property
    def count(self) -> int:
        """How many different sentences there are for the model, the text itself included."""
        return self.whole.count()

    @property
    def region(self) -> CandidateSet:
        """All sentences as one region, if all of them have as many tokens as the text."""
        (first, *others) = self.shapes
        if others or first.region is None:
            raise BuffetError(
                f"the substitutions are not one region: the sentences have {len(self.shapes)} shapes;"
                " ask Substitutions.verify, or go through their shapes"
            )
        return first.region

    def sentence(self, choices: Sequence[int]) -> str:
        """The sentence of these choices of the words, in words; two texts are separated by a bar."""
        pairs = zip(self.words, choices, strict=True)
        return " | ".join(self.reading.exchanged({w.span: w.named(c) for w, c in pairs if c}))

    def choices_at(self, shape: Shape, point: Float[Tensor, "tokens width"]) -> tuple[int, ...]:
        """The choice of every word at a point of a shape's region."""
        found = list(shape.choices)
        if shape.region is not None:
            for row, word, some, rows in zip(
                shape.region.moved[0].tolist(),
                shape.free,
                shape.options,
                shape.region.candidates[0],
                strict=True,
            ):
                every = torch.cat([shape.region.center[row][None], rows]).double()
                nearest = int((every - point[row].double()).abs().amax(-1).argmin())
                found[word] = (0, *some)[nearest]
        return tuple(found)

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Every shape that sentences may have, that of the text first."""
        return tuple(self._shapes())

    @property
    def shape_count(self) -> int:
        """How many shapes there are."""
        return self._reshaping().count()

    def within(self, at_most: int) -> Substitutions:
        """The same with fewer words exchanged at once."""
        if at_most > self.at_most and self.at_most < sum(bool(word.substitutes) for word in self.words):
            raise BuffetError(
                f"at_most is {at_most}, but these substitutions exchange at most {self.at_most} words: make"
                " them with a larger at_most"
            )
        return replace(self, at_most=min(at_most, self.at_most))

    def _reshaping(self) -> Combinations:
        """The choices that change the shape."""
        lists = (
            (0, *(c for c, ids in enumerate(word.choices) if c and not (len(ids) == len(word.ids) == 1)))
            for word in self.words
        )
        return Combinations(tuple(lists), self.at_most)

    def _shapes(self) -> Iterator[Shape]:
        reshaping = self._reshaping()
        if (count := reshaping.count()) > MOST_SHAPES:
            guilty = [
                f"{word.text} → {word.named(c)}"
                for word, some in zip(self.words, reshaping.allowed, strict=True)
                for c in some[1:]
            ]
            raise BuffetError(
                f"{len(guilty)} substitutes are of several tokens and make sentences of {count:,} shapes; at"
                f" most {MOST_SHAPES:,} are gone through: {one_line(', '.join(listed(guilty)), 300)};"
                " leave them out, or exchange fewer words at once (--at-most)"
            )
        for block in reshaping.blocks(MOST_SHAPES):
            yield from (self._shape(tuple(choices), reshaping) for choices in block.tolist())

    def _shape(self, choices: tuple[int, ...], reshaping: Combinations) -> Shape:
        encoding, tables = self.reading.encoding, self.model.embeddings
        ids, types = list[int](), list[int]()
        place: dict[int, int] = {}  # where every word begins
        swapped = {word.rows[0]: number for number, word in enumerate(self.words)}
        inside = {row for word in self.words for row in word.rows[1:]}
        for row, (token, kind) in enumerate(zip(encoding.ids, encoding.types, strict=True)):
            if row in inside:
                continue
            number = swapped.get(row)
            tokens = (token,) if number is None else self.words[number].choices[choices[number]]
            if number is not None:
                place[number] = len(ids)
            ids += tokens
            types += [kind] * len(tokens)
        if len(ids) > (limit := self.model.config.max_position_embeddings):
            raise BuffetError(
                f"{self.sentence(choices)!r} has {len(ids)} tokens, {self.model.name} takes at most {limit}"
            )
        device = tables.words.device
        rows = tables.rows(torch.tensor(ids, device=device), torch.tensor(types, device=device))
        free, options, candidates = [], [], []
        room = self.at_most - sum(map(bool, choices))
        for number, word in enumerate(self.words):
            some = tuple(c for c in range(1, len(word.choices)) if c not in reshaping.allowed[number])
            if room > 0 and choices[number] == 0 and some:
                at = place[number]
                first = torch.tensor([word.choices[c][0] for c in some], device=device)
                free.append(number)
                options.append(some)
                # In the order of `Embeddings.rows`: these are the rows of the sentence, to the last bit.
                candidates.append(tables.words[first] + tables.types[types[at]] + tables.positions[at])
        region = CandidateSet(rows, [place[n] for n in free], candidates, room) if free else None
        return Shape(choices, rows, tuple(free), tuple(options), region)

    def verify(
        self,
        method: str | Method = "buffet",
        *,
        label: int | None = None,
        budget: float | None = None,
        attack: bool = True,
        seed: int = 0,
        engine: Engine | None = None,
    ) -> Answer:
        """Prove that no sentence changes the model's answer, or name one that does.

        `budget` is a number of seconds for all of them; the other arguments are those of `buffet.verify`.
        """
        return answered(
            self, method, label=label, budget=budget, attack=attack, seed=seed, engine=engine or Engine()
        )

    def verify_each(
        self,
        at_most: Sequence[int],
        method: str | Method = "buffet",
        *,
        budget: float | None = None,
        **options: Any,
    ) -> tuple[Answer, ...]:
        """An answer for each of several numbers of words exchanged at once, in less time than one by one.

        What is proven for some words holds for fewer, and a sentence that flips the answer counts for all
        that allow its changes. `budget` is a number of seconds for all; the `options` are those of `verify`.

        Example:
            >>> import buffet
            >>> swap = {"gripping": ["good", "fine"], "film": ["movie"]}
            >>> found = buffet.substitutions(buffet.load(), "a gripping film", swap=swap)
            >>> [answer.verdict for answer in found.verify_each([1, 2])]
            ['certified', 'certified']
        """
        return answered_each(
            self, at_most, lambda some, left: some.verify(method, budget=left, **options), budget
        )


def substitutions(
    model: Model,
    text: str,
    *,
    synonyms: Synonyms | str | Path | None = None,
    most: int | None = None,
    swap: Synonyms | None = None,
    typos: int = 0,
    at_most: int | None = None,
    pair: str | None = None,
    skip_unknown: bool = False,
    seed: int = 0,
) -> Substitutions:
    """What a text may become by exchanging its words.

    Args:
        model: a loaded model that reads texts.
        text: the sentence.
        synonyms: word → words it may be exchanged for, or a JSON file with that.
        most: use only the first `most` synonyms of every word (default: all).
        swap: the same, of words of this text: one that it does not have is an error.
        typos: the largest number of misspellings of every word; the `seed` chooses them.
        at_most: how many words may be exchanged at once (default: all).
        pair: the second text of a pair; its words may be exchanged too.
        skip_unknown: leave out what is not in the vocabulary. By default it is what the model reads: [UNK].

    Example:
        >>> import buffet
        >>> swap = {"gripping": ["dull", "good"]}
        >>> found = buffet.substitutions(buffet.load(), "a gripping film", swap=swap)
        >>> found.count
        3
        >>> found.verify().flip.sentence
        'a dull film'
    """
    if at_most is not None and at_most < 1:
        raise BuffetError(
            f"at_most is {at_most}: at least 1 word has to be exchanged, or there is nothing to prove"
        )
    if typos < 0:
        raise BuffetError(f"typos is {typos}: give a number of misspellings per word, 0 or more")
    reading = Reading.of(model, text, pair)
    words = reading.words()
    table = None
    if isinstance(synonyms, str | Path):
        table = read_synonyms(synonyms, most)
    elif synonyms is not None:
        mentioned = {word.text.lower() for word in words}
        table = checked_synonyms(synonyms, "synonyms", most, mentioned)
    offered = offers(words, table, swap and checked_synonyms(swap, "swap"), typos, seed)
    left_out: list[LeftOut] = []
    found: list[Word] = []
    for word in words:
        kept, left = substitutes_of(reading, word, offered(word), skip_unknown=skip_unknown)
        found.append(replace(word, substitutes=kept))
        left_out += left
    moving = [word for word in found if word.substitutes]
    if not moving:
        reasons = ", ".join(f"{out.text} ({out.reason})" for out in left_out)
        why = f"; left out: {one_line(reasons, 200)}" if left_out else ""
        nothing = NoSubstitutesError(
            f"no word of the text has a substitute{why}: give --synonyms, --swap or --typos that have"
        )
        nothing.left_out = tuple(left_out)
        raise nothing
    for first, second in pairwise(moving):
        _check_apart(reading, first, second)
    budget = len(moving) if at_most is None else min(at_most, len(moving))
    return Substitutions(reading, tuple(found), budget, tuple(left_out))


def _check_apart(reading: Reading, first: Word, second: Word) -> None:
    """Words without a space between them may be tokenised differently together than apart: try all pairs."""
    if first.span.text != second.span.text or first.span.end < second.span.start:
        return
    pairs = list(product(first.substitutes, second.substitutes))
    tokenizer = reading.model.tokenizer
    assert tokenizer is not None
    if len(pairs) <= MOST_PAIRS:
        ids = reading.encoding.ids
        before, between, after = (
            ids[: first.rows[0]],
            ids[first.rows[-1] + 1 : second.rows[0]],
            ids[second.rows[-1] + 1 :],
        )
        texts = [reading.exchanged({first.span: a.text, second.span: b.text}) for a, b in pairs]
        found = tokenizer.inner.encode_batch([t if len(t) > 1 else t[0] for t in texts])
        expected = [(*before, *a.ids, *between, *b.ids, *after) for a, b in pairs]
        if all(tuple(raw.ids) == want for raw, want in zip(found, expected, strict=True)):
            return
    raise BuffetError(
        f"{first.text!r} and {second.text!r} touch, and the tokenizer reads their substitutes otherwise"
        " together than each on its own: write a space between them, or exchange one of them only"
    )
