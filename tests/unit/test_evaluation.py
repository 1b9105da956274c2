"""Evaluations of data sets on a tiny model: what is counted, reused, resumed, refused and named."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import buffet
from buffet.data import Example, read_tsv
from buffet.errors import BuffetError
from buffet.evaluation import Evaluation, SentenceRow, Share, evaluate, questions
from buffet.evaluation.accuracy import clopper_pearson
from buffet.evaluation.arguments import balls
from buffet.evaluation.examples import read_examples
from buffet.evaluation.questions import Counterexample, Level, settled
from buffet.experiments import read_rows
from buffet.experiments.store import read_store
from buffet.loading import Model, load_checkpoint
from buffet.words import answer
from reports import row as sweep_row
from tiny_checkpoint import SENTENCES, write_model, write_sentences

SYNONYMS = {
    "good": ["great", "warm"],
    "bad": ["dull", "slow"],
    "funny": ["cold", "warm"],
    "plot": ["story", "cast", "film"],
    "heart": ["acting"],
    "film": ["mess"],
    "slow": ["long", "funny"],
}
SIZES = (0.02, 0.1, 1.0)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("evaluation")
    write_model(directory / "tiny", seed=1, scale=0.8)
    lines = write_sentences(directory / "data.tsv").read_text().splitlines(keepends=True)
    (directory / "data.tsv").write_text("".join(lines[place] for place in (0, 1, 2, 4, 6)))
    return directory


@pytest.fixture(scope="module")
def model(home: Path) -> Model:
    return load_checkpoint(home / "tiny")


@pytest.fixture(scope="module")
def moved(model: Model, home: Path) -> Evaluation:
    return evaluate(model, home / "data.tsv", eps=SIZES, norm=2, method="baseline")


def clean_margin(model: Model, example: Example) -> float:
    logits = model.program64.evaluate(model.embed(example.sentence).double()).tolist()
    return logits[example.label] - max(x for c, x in enumerate(logits) if c != example.label)


# ---------------------------------------------------------------------------------------------- agreement


def test_balls_are_what_a_loop_over_verify_says(model: Model, home: Path, moved: Evaluation) -> None:
    counts = dict.fromkeys(SIZES, 0)
    right = 0
    for example, found in zip(read_tsv(home / "data.tsv"), moved.sentences, strict=True):
        margin = clean_margin(model, example)
        assert found.clean_margin == pytest.approx(margin)
        if margin <= 0:
            assert (found.right, found.levels, found.counterexample) == (False, (), None)
            continue
        right += 1
        x = model.embed(example.sentence)
        rows = range(1, len(x) - 1)
        for eps in SIZES:
            region = buffet.LpBall(x, [[row] for row in rows], 2, eps)
            alone = buffet.verify(model, region, method="baseline", label=example.label)
            counts[eps] += alone.verdict == "certified"
            assert (found.verdict_at(eps) == "certified") == (alone.verdict == "certified")
            if alone.verdict == "falsified":
                assert found.verdict_at(eps) == "falsified"
    assert [at.certified.count for at in moved.curve] == list(counts.values())
    assert moved.clean == right / 4
    assert len({*counts.values()}) > 1  # some of it is decided by the size


def test_counterexamples_are_points_with_another_answer(model: Model, moved: Evaluation) -> None:
    broken = [row for row in moved.sentences if row.counterexample]
    assert broken
    for row in broken:
        assert row.counterexample is not None
        assert row.counterexample.margin < 0
        assert row.counterexample.answer != row.gold
        assert row.counterexample.change.endswith(f"moved by {row.counterexample.level!r}")
        sizes = [answer.size for answer in row.levels if answer.verdict == "falsified"]
        assert min(sizes) == row.counterexample.level


def test_all_words_at_once_are_one_ball(model: Model, home: Path) -> None:
    asked = {"norm": "inf", "method": "baseline", "words": "all"}
    found = evaluate(model, home / "data.tsv", eps=0.005, **asked)
    assert balls(0.1, words="together") == balls(0.1, words="all")
    for example, row in zip(read_tsv(home / "data.tsv"), found.sentences, strict=True):
        if row.right:
            x = model.embed(example.sentence)
            region = buffet.LpBall(x, [[*range(1, len(x) - 1)]], math.inf, 0.005)
            proven = buffet.verify(model, region, method="baseline", label=example.label).verdict
            assert (row.verdict_at(0.005) == "certified") == (proven == "certified")


def test_exchanges_are_what_a_loop_over_substitutions_says(model: Model, home: Path) -> None:
    found = evaluate(model, home / "data.tsv", synonyms=SYNONYMS, at_most=[2, 1, None])
    assert [at.level for at in found.curve] == [1, 2, math.inf]
    verdicts = set()
    for row in found.sentences:
        if not row.right:
            continue
        for at_most, level in ((1, 1.0), (2, 2.0), (None, math.inf)):
            some = buffet.substitutions(model, row.sentence, synonyms=SYNONYMS, at_most=at_most)
            expected = some.verify(label=row.gold)
            assert row.verdict_at(level) == expected.verdict
            verdicts.add(expected.verdict)
            assert row.sentences == some.count or level != math.inf
        if row.counterexample is not None:
            assert row.counterexample.sentence is not None
            other = Example(row.counterexample.sentence, row.gold)
            assert clean_margin(model, other) == pytest.approx(row.counterexample.margin)
            assert len(row.counterexample.words) == row.counterexample.level
    assert verdicts == {"certified", "falsified"}
    assert found.certified <= found.attacked <= found.clean


# ------------------------------------------------------------------------------------------------- levels


def test_what_one_level_tells_about_others_is_not_asked() -> None:
    asked: list[tuple[float, float | None]] = []
    flip = Counterexample(level=2, words=("a", "b"), into=("c", "d"), sentence="c d", answer=0, margin=-1.0)
    answers = {
        math.inf: Level("unknown", reason="too many"),
        3: Level("falsified", counterexample=flip),
        1: Level("certified", 0.5),
    }

    def ask(level: float, seconds: float | None) -> Level:
        asked.append((level, seconds))
        return answers[level]

    found = settled((1.0, 2.0, 3.0, math.inf), ask, None)
    assert asked == [(math.inf, None), (3, None), (1, None)]
    assert [answer.verdict for answer in found.levels] == ["certified", *["falsified"] * 3]
    assert found.counterexample is flip
    assert [answer.margin for answer in found.levels] == [0.5, None, None, None]

    asked.clear()
    found = settled((1.0, 2.0), lambda k, left: (asked.append((k, left)), Level("certified", 2.0))[1], 10.0)
    assert [answer.verdict for answer in found.levels] == ["certified"] * 2
    ((level, left),) = asked
    assert level == 2
    assert left == pytest.approx(5, abs=0.5)


def test_a_spent_budget_leaves_sentences_open_and_proves_nothing_false(model: Model, home: Path) -> None:
    found = evaluate(model, home / "data.tsv", eps=[0.3, 1.0], budget=1e-6)
    assert found.certified == 0
    assert found.open + found.certified + (found.clean - found.attacked) == pytest.approx(found.clean)


# ------------------------------------------------------------------------------------- sentences and data


def test_no_sentence_is_dropped(model: Model) -> None:
    text = SENTENCES[0]
    gold = int(model.logits(model.embed(text)).argmax())
    data = [(text, gold), (text, 1 - gold), (text, gold), ("", 0), ("film " * 50, 0), ("zzz", 1)]
    found = evaluate(model, data, synonyms={"zebra": ["film"]})
    assert len(found.sentences) == 6
    assert (found.clean, found.certified, found.attacked, found.open) == (2 / 6, 2 / 6, 2 / 6, 0)
    assert [row.refused is not None for row in found.sentences] == [False] * 3 + [True] * 3
    assert found.sentences[0].sentences == 1  # nothing to exchange: itself is all there is
    assert [note.split(" ")[0] for note in found.notes] == ["1", "1", "1"]
    assert "takes at most 12" in "\n".join(found.notes)


def test_too_many_shapes_are_named_and_count_as_not_certified(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("buffet.words.sets.MOST_SHAPES", 2)
    text = SENTENCES[2]
    gold = int(model.logits(model.embed(text)).argmax())
    synonyms = {"dull": ["not good"], "cold": ["not warm"]}
    found = evaluate(model, [(text, gold)], synonyms=synonyms)
    assert (found.clean, found.certified, found.attacked, found.open) == (1, 0, 1, 1)
    ((note,),) = (found.notes,)
    assert "2 substitutes are of several tokens" in note
    assert found.unasked == found.sentences


def test_sizes_of_zero_are_proven_and_huge_ones_are_not(model: Model, home: Path) -> None:
    found = evaluate(model, home / "data.tsv", eps=[0, 1e30], method="baseline")
    assert found.curve[0].certified == found.curve[0].clean
    assert found.certified == 0


def test_data_comes_from_many_places(tmp_path: Path) -> None:
    class Rows:
        """As a `datasets` data set: rows with columns."""

        def __iter__(self) -> Iterator[Mapping[str, object]]:
            yield {"idx": 3, "text": "a", "label": 1}
            yield {"idx": 4, "text": "", "label": 0}

    expected = (Example("a", 1), Example("", 0))
    (tmp_path / "test.tsv").write_text("sentence\tlabel\na\t1\n\t0\n")
    for data in (Rows(), [("a", 1), ("", 0)], [["a", 1], Example("", 0)], tmp_path, tmp_path / "test.tsv"):
        assert read_examples(data).examples == expected


@pytest.mark.parametrize(
    ("data", "needle"),
    [
        ([], "has no sentences"),
        ([("a", "positive")], "entry 0 of the data: the label is 'positive'"),
        ([("a", 0), {"sentence": "b", "label": -1}], "entry 1 of the data: the label is -1"),
        ([("a", 0, 1)], "expected .sentence, label."),
        (["ab"], "expected .sentence, label."),
        ([(b"a", 0)], "the sentence is b'a'"),
        ([{"title": "a", "label": 0}], "columns title, label"),
        ({"train": []}, "has the parts train"),
        (7, "the data is a int"),
        ([("a", 2)], "has the label 2, and tiny has 2 classes"),
    ],
)
def test_odd_data_is_refused(model: Model, data: Any, needle: str) -> None:
    with pytest.raises(BuffetError, match=needle):
        evaluate(model, data, eps=0.1)


@pytest.mark.parametrize(
    ("asked", "needle"),
    [
        ({}, "give either eps"),
        ({"eps": 0.1, "typos": 2}, "give either eps"),
        ({"eps": 0.1, "at_most": 2}, "at most and skip unknown go with"),
        ({"eps": -1.0}, "eps: got -1.0"),
        ({"eps": [0.1, math.nan]}, "eps: got 0.1, nan"),
        ({"eps": []}, "eps: got 0 of them"),
        ({"eps": 0.1, "words": "some"}, "words: got 'some'"),
        ({"eps": 0.1, "norm": 0.5}, "p is 0.5"),
        ({"eps": 0.1, "count": 0}, "count: got 0"),
        ({"eps": 0.1, "workers": 2}, "a model in memory"),
        ({"eps": 0.1, "part": "train"}, "part: got 'train'"),
        ({"typos": -1}, "typos: got -1"),
        ({"typos": 1, "at_most": [1, 0]}, "at_most: got 0"),
        ({"synonyms": {"a": "b"}}, "expected a list of words"),
        ({"eps": 0.1, "budget": -1.0}, "budget -1.0"),
    ],
)
def test_odd_questions_are_refused(model: Model, asked: Any, needle: str) -> None:
    with pytest.raises(BuffetError, match=needle):
        evaluate(model, [("film", 0)], **asked)


def test_a_pipeline_is_its_model_and_its_tokenizer(home: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
    tokenizer = load_checkpoint(home / "tiny").tokenizer
    assert tokenizer is not None
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = transformers.BertConfig(vocab_size=60, max_position_embeddings=12, **sizes)
    module = transformers.BertForSequenceClassification(config).eval()
    data = [("good film", 0), ("good film", 1)]
    pipeline = SimpleNamespace(model=module, tokenizer=tokenizer.inner)
    one = evaluate(pipeline, data, eps=1e-6)
    assert one.clean == one.certified == 0.5
    assert evaluate(module, data, tokenizer=tokenizer.inner, eps=1e-6).certified == 0.5
    with pytest.raises(BuffetError, match="has no tokenizer"):
        evaluate(module, data, eps=1e-6)
    with pytest.raises(BuffetError, match="the model is a int"):
        evaluate(3, data, eps=1e-6)


# ----------------------------------------------------------------------------------- samples, intervals


def test_a_larger_sample_holds_the_smaller() -> None:
    examples = read_examples([(f"sentence {place % 7}", 0) for place in range(50)])
    some, more = examples.sample(5, 3), examples.sample(20, 3)
    assert (some.sampled, len(some.examples), some.total) == (True, 5, 50)
    assert set(some.examples) <= set(more.examples)
    assert some == examples.sample(5, 3)
    assert examples.sample(60, 3) == examples.sample(None, 3) == examples
    assert not examples.sampled


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    # of published tables; with none or all, one end is in closed form
    [(5, 10, 0.1871, 0.8129), (0, 20, 0.0, 1 - 0.025 ** (1 / 20)), (81, 263, 0.2527, 0.3676)],
)
def test_intervals_are_those_of_clopper_and_pearson(count: int, of: int, low: float, high: float) -> None:
    assert clopper_pearson(count, of) == pytest.approx((low, high), abs=1e-4)
    assert clopper_pearson(of - count, of) == pytest.approx((1 - high, 1 - low), abs=1e-4)


def test_shares_are_rounded_to_the_safe_side() -> None:
    third = Share(1, 3, False)
    assert (third.text(up=False), third.text(up=True), third.interval) == ("0.3333", "0.3334", None)
    assert (Share(33, 40, False).text(up=False), Share(33, 40, False).text(up=True)) == ("0.8250", "0.8250")
    assert Share(1, 3, True).text(up=False) == "0.3333 [0.00, 0.91]"


# ------------------------------------------------------------------------------------------ rows, results


def numbers(rows: Any) -> list[tuple[object, ...]]:
    """What must not depend on how the work was done."""
    return sorted((r.key, r.clean_margin, r.levels, r.counterexample) for r in rows)


def test_an_interrupted_evaluation_goes_on(home: Path, tmp_path: Path, moved: Evaluation) -> None:
    out = tmp_path / "rows.ndjson"

    def interrupt(now: Any) -> None:
        if now.done == 2:
            raise KeyboardInterrupt

    asked = {"eps": SIZES, "method": "baseline", "out": out}
    with pytest.raises(KeyboardInterrupt):
        evaluate(home / "tiny", home / "data.tsv", **asked, progress=interrupt)
    assert len(read_store(out, SentenceRow)) == 2
    with out.open("ab") as file:
        file.write(b'{"key":"torn')
    seen = []
    found = evaluate(str(home / "tiny"), home / "data.tsv", **asked, progress=seen.append)
    assert (seen[0].before, seen[-1].done, seen[-1].total) == (2, 2, 4)
    assert numbers(found.sentences) == numbers(moved.sentences) == numbers(read_store(out, SentenceRow))
    again = evaluate(str(home / "tiny"), home / "data.tsv", **asked, count=3, progress=seen.append)
    assert seen[-1].before == 3  # a sample of what is known
    assert again.sampled


@pytest.mark.parametrize("asked", [{"eps": 0.02}, {"synonyms": SYNONYMS}])
def test_an_interrupted_sentence_has_no_row(
    home: Path, tmp_path: Path, asked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a budget `verify` tells what is known by then, which is not what the whole budget would tell."""
    for module in (questions, answer):
        right = module.verify
        stopped = partial(
            lambda right, *args, **kwargs: replace(right(*args, **kwargs), interrupted=True), right
        )
        monkeypatch.setattr(module, "verify", stopped)
    out = tmp_path / "rows.ndjson"
    with pytest.raises(KeyboardInterrupt):
        evaluate(home / "tiny", home / "data.tsv", **asked, budget=20.0, method="baseline", out=out)
    assert all(not row.right for row in read_store(out, SentenceRow))


def test_substitutes_that_nothing_is_asked_of_are_told(model: Model) -> None:
    data = [("good film", int(clean_margin(model, Example("good film", 0)) < 0))]
    for some, count in ({"film": ["[SEP]", "mess"]}, 1), ({"film": ["[SEP]", "[CLS]"]}, 2):
        found = evaluate(model, data, synonyms=some, method="baseline")
        assert found.sentences[0].left_out == count
        assert f"{count} substitute" in found.notes[0]
        assert "left out" in found.notes[0]


def test_rows_of_something_else_are_refused(home: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.ndjson"
    path.write_text(sweep_row("a").line())
    with pytest.raises(BuffetError, match="line 1 is not a row of an evaluation"):
        evaluate(home / "tiny", home / "data.tsv", eps=0.1, out=path)
    other = tmp_path / "other.ndjson"
    evaluate(home / "tiny", [("good film", 0)], eps=0.1, out=other, method="interval")
    with pytest.raises(BuffetError, match="line 1 is not a row of a sweep"):
        read_rows(other)


def test_a_result_reads_in_every_form(moved: Evaluation) -> None:
    assert repr(moved).startswith(f"Evaluation(clean {moved.worst.clean.text(up=True)}, eps=1.0: certified")
    assert "each word on its own moved within L2 balls · baseline · 4 sentences of data.tsv" in repr(moved)
    assert moved._repr_html_().count("<tr>") == 4
    plain = json.loads(json.dumps(moved.to_dict(), allow_nan=False))
    assert plain["certified"] == moved.certified
    assert [point["eps"] for point in plain["curve"]] == list(SIZES)
    assert len(plain["sentences"]) == 4
    lines = moved.to_csv().splitlines()
    assert len(lines) == 1 + 4 * 3
    assert lines[0].startswith("place,sentence,label,answer,clean_margin,eps,verdict")
    assert moved.to_frame().height == 12
