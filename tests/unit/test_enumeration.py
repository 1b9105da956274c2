"""Finite sets of sentences: how many there are, which, and what running all of them says."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import buffet
from buffet.regions import CandidateSet
from buffet.regions.combinations import Combinations
from buffet.system.parallel import threads
from buffet.verification import enumeration
from buffet.verification.enumeration import Sentences, enumerate_all
from buffet.verification.word_search import Hunt
from random_encoders import encoder

WORDS = [1, 2, 3]


def region_of(
    model, scale: float, budget: int | None = None, choices: int = 4, seed: int = 0
) -> CandidateSet:
    generator = torch.Generator().manual_seed(seed)
    width = model.program64.input_width
    x = torch.randn(5, width, generator=generator)
    rows = [x[w] + scale * torch.randn(choices, width, generator=generator) for w in WORDS]
    return CandidateSet(x, WORDS, rows, budget)


def naive(model, region: CandidateSet, label: int) -> float:
    """The smallest margin of all sentences, one after the other."""
    program, least = model.program64.margins(label), math.inf
    lists = [[None, *rows.double()] for rows in region.candidates[0]]
    for chosen in itertools.product(*lists):
        if sum(row is not None for row in chosen) <= region.budget:
            x = region.center.double().clone()
            for word, row in zip(WORDS, chosen, strict=True):
                if row is not None:
                    x[word] = row
            least = min(least, float(program.evaluate(x).min()))
    return least


@given(
    st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=4).flatmap(
        lambda lists: st.tuples(st.just(lists), st.integers(0, 5), st.integers(1, 7))
    )
)
def test_combinations_are_counted_and_listed_once_each(drawn):
    lists, budget, size = drawn
    found = Combinations(tuple(tuple(sorted(some)) for some in lists), budget)
    expected = {c for c in itertools.product(*lists) if sum(map(bool, c)) <= budget}
    listed = [tuple(row) for block in found.blocks(size) for row in block.tolist()]
    assert len(listed) == len(set(listed)) == found.count()
    assert set(listed) == expected
    assert all(len(block) <= size for block in found.blocks(size))


def test_parts_share_no_sentence_and_lose_none():
    whole = Combinations(((0, 1, 2, 3), (0, 1, 2)), 2)
    first, second = whole.halves(0, [2, 0, 3, 1])
    assert first.allowed[0] == (0, 2)
    assert second.allowed[0] == (1, 3)
    assert first.count() + second.count() == whole.count()


@pytest.mark.parametrize("budget", [None, 0, 1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_running_all_sentences_agrees_with_one_after_the_other(budget, seed):
    model = encoder(seed)
    region = region_of(model, 0.3, budget, seed=seed)
    label = int(model.program64.evaluate(region.center.double()).argmax())
    sentences = Sentences.of(model.program64.margins(label), region)
    found, least = enumerate_all(sentences), naive(model, region, label)
    assert sentences.count == sum(math.comb(3, k) * 4**k for k in range(region.budget + 1))
    assert found.proven == (least > 0)
    if least > 0:
        assert found.complete
        assert found.least == pytest.approx(least, abs=1e-10)
        assert 0 <= least - float(found.margins.min()) < 1e-6
    else:
        assert found.flip is not None
        assert float(model.program64.margins(label).evaluate(sentences.point(found.flip)).min()) < 0


def test_candidates_that_are_the_same_are_counted_once():
    model = encoder(0)
    x = torch.randn(4, model.program64.input_width, generator=torch.Generator().manual_seed(0))
    other = x[1] + 1
    region = CandidateSet(x, [1], [torch.stack([other, x[1], other])])
    assert Sentences.of(model.program64.margins(0), region).count == 2


@pytest.mark.parametrize("seed", range(6))
def test_verify_decides_whatever_can_be_run(seed):
    model = encoder(seed)
    region = region_of(model, 0.5, seed=seed)
    found = buffet.verify(model, region)
    least = naive(model, region, found.label)
    assert found.verdict == ("certified" if least > 0 else "falsified")
    if found.verdict == "certified":
        assert 0 < found.margin <= least
    else:
        (point,) = found.counterexamples
        assert float(model.program64.margins(found.label).evaluate(point).min()) < 0
        assert bool(region.contains((point - region.center.double())[None, WORDS], 1e-12).all())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", [None, 2])
def test_cutting_decides_as_running_all_does(seed, budget, monkeypatch):
    from buffet.search import policy
    from buffet.verification import word_search

    model = encoder(seed)
    region = region_of(model, 0.25, budget, choices=6, seed=seed)
    found = buffet.verify(model, region)
    small = policy.Policy(words_at_once=30 * Sentences.of(model.program64.margins(0), region).work)
    monkeypatch.setattr(word_search, "POLICY", small)
    cut = buffet.verify(model, region, falsify=False)
    assert cut.verdict == found.verdict


@pytest.mark.parametrize("budget", [1, 2])
def test_parts_that_are_cut_to_the_end_hold_no_more_changes_than_are_allowed(budget, monkeypatch):
    from buffet.search import policy
    from buffet.verification import word_search

    model = encoder(0)
    region = region_of(model, 0.2, budget, choices=6)
    assert buffet.verify(model, region).verdict == "certified"
    monkeypatch.setattr(word_search, "POLICY", policy.Policy(words_at_once=0, words_each=0))
    monkeypatch.setattr(word_search.WordSearch, "_bound", lambda *_: torch.full((1,), -math.inf))
    assert buffet.verify(model, region, method="interval", falsify=False).verdict == "unknown"
    assert buffet.verify(model, region, falsify=False).verdict == "certified"


def test_attacks_rank_many_candidates_by_the_gradient():
    model = encoder(1)
    region = region_of(model, 0.5, choices=300, seed=1)
    label = int(model.program64.evaluate(region.center.double()).argmax())
    hunt = Hunt(Sentences.of(model.program64.margins(label), region), 100, None)
    changes = hunt.changes(hunt.start, 50)
    assert len(changes) == 50
    assert bool(((changes > 0).sum(-1) == 1).all())


def test_several_tasks_are_decided_each():
    model = encoder(2)
    x = torch.randn(5, model.program64.input_width, generator=torch.Generator().manual_seed(2))
    near, far = x[1] + 1e-3, x[2] + 1e-3
    region = CandidateSet(x, [[1], [2]], [[near[None]], [far[None]]])
    assert buffet.verify(model, region).verdicts == ("certified", "certified")


@pytest.mark.parametrize("seed", range(3))
def test_processes_that_share_the_sentences_find_the_same(seed, monkeypatch):
    model = encoder(seed)
    region = region_of(model, 0.3, choices=12, seed=seed)
    label = int(model.program64.evaluate(region.center.double()).argmax())
    sentences = Sentences.of(model.program64.margins(label), region)
    alone = enumerate_all(sentences)
    monkeypatch.setattr(enumeration, "WORTH_SPLITTING", 0)
    monkeypatch.setattr(enumeration, "BLOCK", 1)
    with threads(2):
        shared = enumerate_all(sentences)
    assert (shared.proven, shared.complete) == (alone.proven, alone.complete)
    assert (shared.flip is None) == (alone.flip is None)
    if alone.complete:
        assert shared.run == alone.run == sentences.count
        assert shared.least == pytest.approx(alone.least, abs=1e-12)
