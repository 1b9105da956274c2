"""Boxes and candidate sets cut into parts: parts cover the whole, prove more, and nothing that is wrong."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import buffet
from buffet.certificates.certificate import Question, certify
from buffet.methods import method_named
from buffet.regions import Region
from buffet.search.branching import Tree
from buffet_checker.cells import _choices_cover
from buffet_checker.check import judge
from certificate_campaign import write_variant
from corruptions import Opened
from random_encoders import encoder

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(105)).double()


def box(size: float) -> buffet.Box:
    return buffet.Box(X, X - size, X + 1.3 * size, words=[1, 2])


def candidates(size: float, budget: int | None = None) -> buffet.CandidateSet:
    noise = size * torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1)).double()
    return buffet.CandidateSet(X, [1, 2], [X[1] + noise[0], X[2] + noise[1, :3]], budget)


REGIONS: dict[str, Callable[[float], Region]] = {
    "box": box,
    "candidates": candidates,
    "candidates, one at a time": lambda size: candidates(size, 1),
}


def grown(region: Region, most: int) -> Tree:
    """A tree of parts that are never proven; the parts that come first are the worst."""
    count = iter(range(10**6))
    tree = Tree(
        encoder(3).program64, region, lambda part: torch.tensor([-1.0 / (2 + next(count))]), most, False
    )
    assert not tree.grow(0.0)
    return tree


@pytest.mark.parametrize("name", REGIONS)
def test_every_point_is_in_a_part(name: str) -> None:
    region = REGIONS[name](0.3)
    parts = [leaf.part for leaf in grown(region, 7).leaves]
    assert len(parts) == 7
    delta = region.sample(300, torch.Generator().manual_seed(0))
    inside = torch.stack([part.contains(delta, slack=1e-15) for part in parts])
    assert bool(inside.any(0).all())
    assert not bool(inside.all(1).any()), "and none is everything"
    for part in parts:
        assert bool(region.contains(part.sample(50, torch.Generator().manual_seed(1)), slack=1e-15).all())


def test_what_cannot_be_cut_any_further_stays_whole() -> None:
    single = buffet.CandidateSet(X, [1], [X[1:2] + 0.1])
    assert len(grown(single, 5).leaves) == 1
    assert len(grown(buffet.CandidateSet(X, [1], [X[1] + 0.1 * torch.eye(8)]), 50).leaves) == 8
    assert len(grown(buffet.Box(X, X, X, words=[1]), 5).leaves) == 1
    assert len(grown(buffet.CandidateSet(X, [1], [X[:0]]), 5).leaves) == 1


@pytest.mark.parametrize(("name", "method"), [*((name, "lse") for name in REGIONS), ("box", "final")])
def test_parts_prove_more_and_nothing_wrong(name: str, method: str) -> None:
    model, low, high = encoder(5), 0.0, 4.0
    chosen = method_named("lse") if method == "lse" else method_named("lse", optimise="final", steps=4)

    def proves(size: float, cells: int) -> buffet.Verification:
        return buffet.verify(
            model, REGIONS[name](size), method=method_named(chosen, cells=cells), falsify=False
        )

    for _ in range(7):
        middle = (low + high) / 2
        low, high = (middle, high) if proves(middle, 1).verdict == "certified" else (low, middle)
    assert low > 0
    size = 1.005 * high
    assert proves(size, 1).verdict == "unknown"
    found = proves(size, 8)
    assert found.verdict == "certified"
    region = REGIONS[name](size)
    logits = model.program64.evaluate(region.points(region.sample(400, torch.Generator().manual_seed(2))))
    margins = logits[..., found.label] - logits[..., 1 - found.label]
    assert bool((margins >= found.margins.min()).all())


# --- the rule, learning and products as a whole -------------------------------------------------------------


@pytest.mark.parametrize("method", ["r-buffet", "lse", "backward", "buffet"])
def test_a_box_proves_what_the_same_ball_does(method: str) -> None:
    model, size = encoder(5), 0.08
    chosen = method_named(method, optimise="tuned", steps=5) if method == "buffet" else method_named(method)
    ball = buffet.LpBall(X, [1, 2], math.inf, size)
    same = buffet.Box(X, torch.nextafter(X - size, X - 9), torch.nextafter(X + size, X + 9), words=[1, 2])
    assert ball.symmetric
    assert same.symmetric
    a, b = (buffet.verify(model, region, method=chosen, falsify=False).margins for region in (ball, same))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", REGIONS)
def test_learning_helps_every_region(name: str) -> None:
    model, region = encoder(5), REGIONS[name](0.1)
    plain, learned = (
        buffet.verify(model, region, method=method, falsify=False).margins.min()
        for method in (method_named("backward", softmax="lse"), method_named("buffet", optimise="tuned"))
    )
    assert learned > plain


# --- certificates -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["box", "candidates"])
def proven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, object]:
    """A certificate of a region that is proven in parts only."""
    path = tmp_path_factory.mktemp("parts") / "model"
    model = buffet.load(write_variant(path, {"layer_norm": "no_var", "num_hidden_layers": 2}, 1))
    x = model.embed("a gripping film").double()
    noise = torch.randn(6, x.shape[1], generator=torch.Generator().manual_seed(1)).double()

    def region(size: float) -> Region:
        if request.param == "box":
            wide = size * noise[0].abs()
            return buffet.Box(x, x - wide, x + 1.5 * wide, words=[2])
        return buffet.CandidateSet(x, [2, 3], [x[2] + size * noise, x[3] + size * noise[:2]], budget=1)

    cut = method_named("lse", cells=12)
    low, high = 0.0, 4.0
    for _ in range(10):
        middle = (low + high) / 2
        found = buffet.verify(model, region(middle), method="lse", falsify=False)
        low, high = (middle, high) if found.verdict == "certified" else (low, middle)
    _, content, checkpoint = certify(model, [Question.of(model, region(1.02 * high))], cut)
    assert len(Opened.of(content).head["claims"]) > 1
    return content, checkpoint


def test_a_certificate_of_parts_is_accepted(proven: tuple[bytes, object]) -> None:
    result = judge(proven[0], "certificate", proven[1])
    assert result.accepted, result.reason
    (proof,) = result.proofs
    assert proof.cells == len(Opened.of(proven[0]).head["claims"])


def _drop(opened: Opened) -> None:
    opened.head["claims"].pop()
    number = len(opened.head["claims"])
    opened.tensors = {k: v for k, v in opened.tensors.items() if not k.startswith(f"{number}.")}


def _shrink(opened: Opened) -> None:
    region = opened.claim["region"]
    if region["kind"] == "box":
        upper = opened.tensors["0.region.upper"]
        upper[:] = upper - 1e-6 * abs(upper)
    else:
        region["choices"] = [some[1:] for some in region["choices"]]


def _wider(opened: Opened) -> None:
    """The whole is more than what was cut."""
    for name, value in list(opened.tensors.items()):
        if name == "whole.0.upper":
            opened.tensors[name] = value + 1e-6
        if name == "whole.0.rows":
            opened.tensors[name] = np.concatenate([value, value[:, :1] + 1.0], 1)


def _apart(opened: Opened) -> None:
    opened.claim["region"]["whole"] = 77
    opened.tensors |= {
        k.replace(".0.", ".77."): v for k, v in opened.tensors.items() if k.startswith("whole.0.")
    }


def _other_words(opened: Opened) -> None:
    opened.claim["region"]["moved"] = [1, *opened.claim["region"]["moved"][1:]]


def _no_number(opened: Opened) -> None:
    opened.claim["region"]["whole"] = "x"


def _nonsense(opened: Opened) -> None:
    for claim in opened.head["claims"]:
        claim["region"]["choices"] = 5
        claim["region"]["moved"] = 7


@pytest.mark.parametrize(
    ("corrupt", "reason"),
    [
        (_drop, "do not add up"),
        (_shrink, "do not add up"),
        (_wider, "do not add up|nothing refers"),
        (_apart, "do not add up"),
        (_other_words, "another moved"),
        (_no_number, "whole"),
        (_nonsense, "choices|moved"),
    ],
)
def test_parts_that_prove_nothing_are_rejected(
    proven: tuple[bytes, object], corrupt: Callable[[Opened], None], reason: str
) -> None:
    opened = Opened.of(proven[0])
    corrupt(opened)
    result = judge(opened.close(), "certificate", proven[1])
    assert not result.accepted
    assert re.search(reason, result.reason), result.reason


@given(st.integers(0, 2**31), st.integers(1, 3))
@settings(max_examples=100, deadline=None)
def test_choices_that_are_covered_have_a_part_each(seed: int, words: int) -> None:
    """Against all combinations, for parts that come from cutting and for some of them only."""
    generator = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=generator))

    whole = tuple(frozenset(range(1 + draw(3))) for _ in range(words))
    parts = [whole]
    for _ in range(4):
        part, word = parts.pop(draw(len(parts))), draw(words)
        first = frozenset(i for i in part[word] if draw(2))
        sides = [side for side in (first, part[word] - first) if side]
        parts += [(*part[:word], side, *part[word + 1 :]) for side in sides]
    assert _choices_cover(whole, parts)
    fewer = [part for part in parts if draw(3)]
    combinations = torch.cartesian_prod(*(torch.tensor([-1, *w]) for w in whole)).reshape(-1, words).tolist()
    covered = all(
        any(all(i < 0 or i in w for i, w in zip(one, part, strict=True)) for part in fewer)
        for one in combinations
    )
    if _choices_cover(whole, fewer):
        assert covered
