"""Results that can be read on their own: in a prompt, as plain types, as a table, in a notebook."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch

import buffet
from buffet.errors import BuffetError
from buffet.methods import METHODS, method_named
from buffet.network import Builder
from buffet.regions import Box, LpBall
from buffet.results import Radius, Subject, TaskRadius, Verification
from buffet.search.radius import radius
from buffet.verification.verify import verify
from random_encoders import ball, encoder

TEXT = "a gripping , moving film"
NAN, INF = math.nan, math.inf
Tokens = tuple[tuple[str | None, ...], ...]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model() -> buffet.Model:
    return buffet.load()


def about(
    tokens: tuple[tuple[str | None, ...], ...] = (("gripping",), (None,)), **changes: object
) -> Subject:
    words = tuple(tuple(range(2, 2 + len(task))) for task in tokens)
    given = Subject("small", ("no", "yes"), "lse", "LpBall", 2.0, tuple(0.3 for _ in tokens), words, tokens)
    return replace(given, **changes)  # type: ignore[arg-type]


def verification(margins: list[list[float]], *verdicts: str, **changes: object) -> Verification:
    points = tuple(torch.eye(4) if v == "falsified" else None for v in verdicts)
    found = torch.tensor(margins, dtype=torch.float64)
    return Verification(1, verdicts, found, 1.23456, points, 0.5, about(**changes))  # type: ignore[arg-type]


def radii(*brackets: tuple[float, float], clean: float = 1.23456, **changes: object) -> Radius:
    tasks = tuple(TaskRadius((2 + i,), low, high, 0.01, 3) for i, (low, high) in enumerate(brackets))
    return Radius(1, clean, tasks, 7, 0.5, 0.25, about(**{"sizes": None, **changes}))  # type: ignore[arg-type]


class Cells(HTMLParser):
    """The texts of a piece of markup, and its tags."""

    def __init__(self, markup: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.feed(markup)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_models_and_programs_are_told_in_one_line(model) -> None:
    assert repr(model) == (
        "Model('sst2-small', bert, 3 layers, width 96, 4 heads, classes negative, positive,"
        " 1,163,234 parameters)"
    )
    assert repr(model.program) == "Program(55 nodes, 3 layers, input width 96)"
    assert repr(Builder().build()) == "Program(1 node, 0 layers)"


def test_results_are_told_in_a_few_words() -> None:
    one = about((("gripping",),))
    proven = verification([[0.14999]], "certified", tokens=one.tokens, words=one.words, sizes=(0.3,))
    assert repr(proven) == "Verification(certified, margin 0.149, L2 ball of 0.3 around 'gripping', lse)"
    broken = verification([[NAN], [0.2]], "falsified", "certified", sizes=(0.1, 0.3), norm=INF)
    assert (
        repr(broken)
        == "Verification(falsified, no bound, L∞ ball of 0.1 to 0.3 around 'gripping', row 2, lse)"
    )
    assert repr(radii((0.14999, 0.20001), (0.2, INF))) == (
        "Radius(certified 0.149, attacked 0.201, L2 ball around 'gripping', row 2, lse)"
    )
    assert "certified 0, no attack found" in repr(radii((0.0, INF), (0.2, INF)))
    many = about((tuple("abcdefghijklmnopqrstuvwxyz"),) * 2)
    assert "'a' + 'b' + 'c' + … + 'z', 'a'" in repr(
        radii((0.1, 0.2), (0.1, 0.2), tokens=many.tokens, words=many.words)
    )
    boxes = verification([[0.2]], "certified", region="Box", norm=None, sizes=None)
    assert "Box around" in repr(boxes)
    # A part of a ball is not called a ball.
    assert "ball" not in repr(verification([[0.2]], "certified", region="Cell"))


def test_results_become_plain_types() -> None:
    found = verification([[0.1, INF], [NAN, 0.2]], "certified", "falsified", labels=("a", "b", "c")).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found == {
        "model": "small",
        "labels": ["a", "b", "c"],
        "method": "lse",
        "region": "LpBall",
        "norm": 2.0,
        "label": 1,
        "clean_margin": 1.23456,
        "verdict": "falsified",
        "margin": None,
        "seconds": 0.5,
        "tasks": [
            {
                "words": [2],
                "tokens": ["gripping"],
                "eps": 0.3,
                "verdict": "certified",
                "certified": 0.3,
                "attacked": None,
                "margin": 0.1,
                "margins": {"a": 0.1, "c": None},
                "counterexample": None,
            },
            {
                "words": [2],
                "tokens": [None],
                "eps": 0.3,
                "verdict": "falsified",
                "certified": 0.0,
                "attacked": 0.3,
                "margin": None,  # no bound against one class: none at all
                "margins": {"a": None, "c": 0.2},
                "counterexample": [[0.0, 0.0, 1.0, 0.0]],
            },
        ],
    }
    found = radii((0.125, INF), (0.0, 0.5), norm=INF).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["norm"], found["certified"], found["attacked"], found["verdict"]) == (
        "inf",
        0.0,
        0.5,
        "unknown",
    )
    assert [task["attacked"] for task in found["tasks"]] == [None, 0.5]
    assert [task["verdict"] for task in found["tasks"]] == ["certified", "unknown"]
    assert radii((0.0, 0.0), clean=-1.0).verdict == "falsified"
    unnamed = verification([[0.1]], "certified", labels=None).to_dict()
    assert unnamed["tasks"][0]["margins"] == {"0": 0.1}
    assert verification([[0.1]], "certified", sizes=None).to_dict()["tasks"][0]["certified"] is None


def test_results_become_a_table(monkeypatch) -> None:
    polars = pytest.importorskip("polars")
    table = radii((0.125, INF), (0.0, 0.5), norm=INF).to_frame()
    assert table.shape == (2, 12)
    assert table["norm"].to_list() == ["inf", "inf"]
    assert table["attacked"].to_list() == [None, 0.5]
    assert table["tokens"].to_list() == [["gripping"], [None]]
    other = verification([[0.1], [0.2]], "certified", "unknown", norm=None, labels=None).to_frame()
    assert polars.concat([table, other]).shape == (4, 12)
    monkeypatch.setitem(sys.modules, "polars", None)
    with pytest.raises(BuffetError, match=r"pip install 'buffet\[tables\]'"):
        radii((0.125, INF), (0.0, 0.5)).to_frame()


def test_notebooks_show_a_table_rounded_to_the_safe_side() -> None:
    page = Cells(radii((0.123456, 0.234512), (0.0, INF))._repr_html_())
    assert page.tags == {"p", "table", "tr", "th", "td"}
    assert page.texts[0] == (
        "certified 0, attacked 0.2346 · L2 ball around 'gripping', row 2 · lse"
        " · small: yes (clean margin 1.234)"
    )
    assert page.texts[6:] == [
        *("gripping", "0.1234", "0.2346", "0.01000", "certified"),
        *("row 2", "0", "—", "0.01000", "unknown"),
    ]
    # A size that was given is not rounded.
    given = verification([[0.199999]], "certified", sizes=(0.123456,), tokens=(("good",),), words=((1,),))
    assert Cells(given._repr_html_()).texts[6:] == ["good", "0.123456", "—", "0.1999", "certified"]


def test_what_is_not_markup_does_not_become_markup() -> None:
    evil = "<script>alert('&')</script>"
    changes = {"tokens": ((evil,),), "words": ((2,),), "model": evil, "labels": (evil, evil), "method": evil}
    for result in (radii((0.1, 0.2), **changes), verification([[0.1]], "certified", **changes)):
        page = Cells(result._repr_html_())
        assert page.tags == {"p", "table", "tr", "th", "td"}
        assert evil in page.texts


def test_a_model_reads_the_words_of_rows_it_has_made_itself(model) -> None:
    x = model.embed(TEXT)
    everything = range(len(x))
    assert model.read(x, everything) == model.tokens(TEXT)
    assert model.read(x.double(), [2, 4]) == ["gripping", "moving"]
    moved = x.clone()
    moved[2] = torch.nextafter(x[2], x[2] + 1)
    assert model.read(moved, [1, 2]) == ["a", None]
    assert model.read(x.double() + 1e-12, [2]) == [None]
    assert model.read(x.flip(0), [1]) == [None]  # the row of another position
    assert model.read(x.new_zeros(100, 96), [99]) == [None]
    twins = {**model.tensors, "bert.embeddings.word_embeddings.weight": model.embeddings.words.clone()}
    words = twins["bert.embeddings.word_embeddings.weight"]
    (gripping,) = (i for i in range(len(words)) if model.spelling(i) == "gripping")
    words[7] = words[gripping]
    assert replace(model, tensors=twins).read(x, [1, 2]) == ["a", None]  # one of two, who knows which
    assert replace(model, tokenizer=None).read(x, [1]) == [None]


def test_results_know_what_they_are_about(model) -> None:
    x = model.embed(TEXT)
    found = verify(model, LpBall(x, [[2], [5]], p=2), 0.01, "baseline")
    assert found.about == Subject(
        model="sst2-small",
        labels=("negative", "positive"),
        method="baseline",
        region="LpBall",
        norm=2.0,
        sizes=(0.01, 0.01),
        words=((2,), (5,)),
        tokens=(("gripping",), ("film",)),
    )
    box = verify(model, Box(x, x - 0.01, x + 0.01, [2, 4]), method=method_named("interval"), falsify=False)
    assert (box.about.region, box.about.norm, box.about.sizes) == ("Box", None, None)
    assert box.about.tokens == (("gripping", "moving"),)


def test_padding_changes_no_number_of_a_row() -> None:
    network, region = encoder(0), ball(0, 5.0)
    x, mask = region.center, torch.tensor([True, False] + [True] * (len(region.center) - 1))
    padded = torch.cat([x[:1], 0 * x[:1], x[1:]])
    words = (region.moved + (region.moved > 0)).tolist()
    found = verify(network, LpBall(padded, words, 2, 50.0), method="interval", mask=mask)
    assert found.about.model == "RandomModel"
    assert found.about.labels is None
    assert [list(task) for task in found.about.words] == words
    assert "falsified" in found.verdicts
    for task, point in zip(found.records(), found.counterexamples, strict=True):
        if point is not None:
            assert point.shape == padded.shape
            assert not point[1].any()
            answer = network.program64.evaluate(point.double(), mask)
            assert int(answer.argmax()) != found.label
            assert task["counterexample"] == point[task["words"]].tolist()
    searched = radius(network, LpBall(padded, words, 2, 1.0), "interval", mask=mask, attack=False)
    assert [list(task) for task in searched.about.words] == [list(t.words) for t in searched.tasks] == words
    assert searched.about.sizes is None


def test_methods_are_named_as_they_were_used(model) -> None:
    x = model.embed("good")
    found = verify(model, LpBall(x, [1]), 0.01, replace(METHODS["o-buffet"], steps=1), falsify=False)
    assert found.about.method == "o-buffet (steps 1)"
