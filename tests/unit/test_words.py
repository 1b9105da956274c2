"""Substitutions: which sentences they make, and whether one of them changes the answer."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import buffet
from buffet.errors import BuffetError
from buffet.report.words import WordsReport
from buffet.words import Flip, read_synonyms
from buffet.words.answer import answered_each
from buffet.words.nearest import nearest_words
from buffet.words.typos import NEIGHBOURS, all_typos, typos
from command_line import Run, one_line
from tiny_checkpoint import write_model
from word_pieces import pieces

TEXT = "good film , bad plot"
SWAP = {"good": ["great", "warm", "dull"], "film": ["story", "cast"], "plot": ["heart", "acting", "mess"]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def undecided(directory: Path, seed: int) -> Path:
    """A checkpoint that is hardly sure of its answer, so that some words change it."""
    write_model(directory, seed)
    model = buffet.load(directory)
    logits = model.program64.evaluate(model.embed(TEXT).double())
    label = int(logits.argmax())
    tensors = load_file(directory / "model.safetensors")
    tensors["classifier.bias"][label] -= 0.97 * float(logits[label] - logits[1 - label])
    save_file(tensors, directory / "model.safetensors")
    return directory


def all_sentences(text: str, swap: dict[str, list[str]], at_most: int | None) -> list[str]:
    """Every sentence, made of the words themselves."""
    words = text.split()
    lists = [[word, *swap.get(word, [])] for word in words]
    return [
        " ".join(chosen)
        for chosen in itertools.product(*lists)
        if at_most is None or sum(a != b for a, b in zip(chosen, words, strict=True)) <= at_most
    ]


def margin(model: buffet.Model, text: str, label: int) -> float:
    return float(model.program64.margins(label).evaluate(model.embed(text).double()).min())


@pytest.mark.parametrize("at_most", [None, 1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_all_sentences_are_decided_as_one_by_one(tmp_path: Path, seed: int, at_most: int | None) -> None:
    model = buffet.load((undecided if seed % 2 else write_model)(tmp_path / "m", seed))
    found = buffet.substitutions(model, TEXT, swap=SWAP, at_most=at_most)
    sentences = all_sentences(TEXT, SWAP, at_most)
    answer = found.verify()
    least = min(margin(model, text, answer.label) for text in sentences)
    assert answer.count == found.count == len(sentences)
    assert answer.verdict == ("certified" if least > 0 else "falsified")
    if answer.flip is None:
        assert answer.margin is not None
        assert 0 < answer.margin <= least
    else:
        assert answer.flip.sentence in sentences
        assert answer.flip.margin == pytest.approx(
            margin(model, answer.flip.sentence, answer.label), abs=1e-9
        )
        assert answer.flip.margin < 0
        assert " ".join(dict(answer.flip.changes).get(w, w) for w in TEXT.split()) == answer.flip.sentence


@pytest.mark.parametrize("at_most", [None, 1, 2])
@pytest.mark.parametrize("seed", range(6))
def test_sentences_of_other_shapes_are_gone_through(seed: int, at_most: int | None) -> None:
    model = pieces(seed)
    text, swap = (
        "a gripping film",
        {"gripping": ["good", "dull"], "film": ["movie", "films", "movies"], "a": ["good"]},
    )
    found = buffet.substitutions(model, text, swap=swap, at_most=at_most)
    sentences = all_sentences(text, swap, at_most)
    answer = found.verify()
    least = min(margin(model, some, answer.label) for some in sentences)
    assert len(found.shapes) > 1
    assert answer.count == len(sentences)
    assert answer.verdict == ("certified" if least > 0 else "falsified")
    if answer.flip:
        assert answer.flip.sentence in sentences
    with pytest.raises(BuffetError, match="shapes"):
        _ = found.region


def test_too_many_shapes_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("buffet.words.sets.MOST_SHAPES", 3)
    found = buffet.substitutions(
        pieces(), "a gripping film", swap={"film": ["films", "movies"], "gripping": ["a", "good"]}
    )
    with pytest.raises(BuffetError, match="film → films"):
        _ = found.shapes


def test_the_region_is_what_verify_takes(tiny: Path) -> None:
    model = buffet.load(tiny)
    found = buffet.substitutions(model, TEXT, swap=SWAP, at_most=2)
    region = found.region
    assert region.budget == 2
    assert torch.equal(region.center, model.embed(TEXT))
    assert torch.equal(region.candidates[0][1][0], model.embed("good story , bad plot")[2])
    assert buffet.verify(model, region).verdict == found.verify().verdict


def test_the_same_tokens_are_counted_once_and_unknown_words_told(tiny: Path) -> None:
    model = buffet.load(tiny)
    swap = {"good": ["Great", "great", "GOOD", "zzz", "qqq"]}
    found = buffet.substitutions(model, TEXT, swap=swap)
    word = next(w for w in found.words if w.text == "good")
    assert [(s.text, s.unknown) for s in word.substitutes] == [("Great", False), ("zzz", True)]
    assert [left.text for left in found.left_out] == ["great", "GOOD", "qqq"]
    assert found.count == 3
    known = buffet.substitutions(model, TEXT, swap=swap, skip_unknown=True)
    assert known.count == 2
    assert [left.reason for left in known.left_out if left.text == "zzz"] == ["not in the vocabulary"]


def test_words_of_both_texts_of_a_pair_may_be_exchanged() -> None:
    model = pieces()
    found = buffet.substitutions(
        model, "a film", pair="a good movie", swap={"movie": ["film"], "a": ["dull"]}
    )
    assert [w.span.text for w in found.words if w.substitutes] == [0, 1, 1]
    assert found.count == 8
    assert torch.equal(found.region.center, model.embed("a film", "a good movie"))
    answer = found.verify()
    assert answer.verdict in ("certified", "falsified")
    first, second = model.embed("dull film", pair="a good movie"), found.region.candidates[0][0][0]
    assert torch.equal(first[1], second)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"swap": {"story": ["film"]}}, "no word 'story'"),
        ({"swap": {"good": ["GOOD"]}}, "no word of the text has a substitute"),
        ({"swap": {"good": "great"}}, "a list of words"),
        ({"swap": {"good": ["[SEP]"]}}, "no word of the text has a substitute"),
        ({"synonyms": {"heart": ["cast"]}}, "no word of the text has a substitute"),
        ({"typos": -1}, "typos is -1"),
        ({"swap": SWAP, "at_most": 0}, "at_most is 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tiny: Path, given: dict[str, object], complaint: str) -> None:
    with pytest.raises(BuffetError, match=complaint):
        buffet.substitutions(buffet.load(tiny), TEXT, **given)


def test_files_of_synonyms(tmp_path: Path) -> None:
    path = tmp_path / "synonyms.json"
    path.write_text(json.dumps({"Good": ["fine"], "good": ["great"]}))
    assert read_synonyms(path) == {"good": ["fine", "great"]}
    for content, complaint in (
        ("[1]", "one object"),
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ('{"a": [1]}', "a list of words"),
    ):
        path.write_text(content)
        with pytest.raises(BuffetError, match=complaint):
            read_synonyms(path)
    with pytest.raises(BuffetError, match="cannot be read"):
        read_synonyms(tmp_path / "none.json")


def test_typos_are_one_slip_away_and_repeatable() -> None:
    assert typos("film", 5, 0) == typos("film", 5, 0)
    assert len(typos("film", 5, 0)) == len(set(typos("film", 5, 0))) == 5
    assert {"iflm", "flm", "fillm"} - set(all_typos("film")) == {"fillm"}
    assert "film" not in all_typos("film")
    assert all(abs(len(typo) - 4) <= 1 for typo in all_typos("film"))
    assert all_typos("a") == all_typos("...") == []
    assert set(NEIGHBOURS["g"]) == set("fhtyvb")


def test_the_nearest_words_are_those_of_a_loop(tiny: Path) -> None:
    model = buffet.load(tiny)
    encoding, x = model.encode(TEXT), model.embed(TEXT)
    found, held = nearest_words(model, encoding, [1], 2.0, 3.0, 4)
    vocabulary = model.tokenizer.inner.get_vocab()
    others = [w for w in vocabulary if not w.startswith("[") and w != "good"]
    expected = sorted(
        (float((model.embed(f"{word} film , bad plot")[1].double() - x[1].double()).norm()), word)
        for word in others
    )
    assert [(w.distance, w.token) for w in found] == [(pytest.approx(d), w) for d, w in expected[:4]]
    assert held == sum(d <= 3.0 for d, _ in expected)
    assert [w.inside for w in found] == [d <= 3.0 for d, _ in expected[:4]]


# --- the command line ---------------------------------------------------------------------------------------


def certify(run: Run, tiny: Path, *options: str):
    return run("certify", TEXT, "--model", str(tiny), "--method", "buffet", *options)


def test_certify_names_what_is_proven_or_the_sentence_that_flips(run: Run, tmp_path: Path) -> None:
    codes = set()
    for seed in range(6):
        directory = (undecided if seed % 2 else write_model)(tmp_path / str(seed), seed)
        found = certify(run, directory, "--swap", "good=great,warm", "--swap", "film=story,cast,zzz")
        report = WordsReport.model_validate_json(
            certify(
                run, directory, "--swap", "good=great,warm", "--swap", "film=story,cast,zzz", "--json"
            ).out
        )
        codes.add(found.code)
        assert report.sentences == 12
        assert found.code == (0 if report.verdict == "certified" else 1)
        assert "1 not in the vocabulary" in found.out
        if report.verdict == "certified":
            assert "proven for all 12 sentences" in found.out
        else:
            assert report.flip is not None
            assert f"falsified: {report.flip.sentence}" in found.out
    assert codes == {0, 1}


def test_certify_with_a_file_and_typos(run: Run, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "synonyms.json"
    path.write_text(json.dumps({"plot": ["story", "heart"]}))
    page = tmp_path / "page.html"
    options = ("--typos", "2", "--at-most", "1", "--html", str(page))
    outcome = certify(run, tiny, "--synonyms", str(path), *options)
    assert f"report: {page}" in outcome.out
    assert "Can exchanging words change" in page.read_text()
    assert "story, heart" in outcome.out
    assert "at most 1 of" in outcome.out
    outcome = certify(run, tiny, "--synonyms", str(path), "--most-synonyms", "1", "--json")
    report = WordsReport.model_validate_json(outcome.out)
    assert [[s.text for s in word.substitutes] for word in report.words if word.substitutes] == [["story"]]
    assert "--most-synonyms 1" in report.command


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--swap", "good"), "gripping=dull,boring"),
        (("--swap", "story=film"), "no word 'story'"),
        (("--swap", "good=great", "--eps", "1"), "--eps"),
        (("--swap", "good=great", "--norm", "inf"), "--norm"),
        (("--swap", "good=great", "--at-most", "0"), "at_most is 0"),
        (("--at-most", "1"), "--at-most"),
        (("--most-synonyms", "1"), "is about --synonyms"),
        (("--pair", "a film"), "token types"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    run: Run, tiny: Path, options: tuple[str, ...], complaint: str
) -> None:
    one_line(certify(run, tiny, *options), complaint)


@pytest.mark.parametrize("seed", range(4))
def test_several_budgets_are_answered_as_one_by_one(tmp_path: Path, seed: int) -> None:
    model = buffet.load((undecided if seed % 2 else write_model)(tmp_path, seed))
    found = buffet.substitutions(model, TEXT, swap=SWAP)
    budgets = [3, 1, 2]
    together = found.verify_each(budgets)
    for at_most, answer in zip(budgets, together, strict=True):
        alone = buffet.substitutions(model, TEXT, swap=SWAP, at_most=at_most).verify()
        same = (alone.verdict, alone.count, alone.shapes, alone.at_most)
        assert (answer.verdict, answer.count, answer.shapes, answer.at_most) == same
        assert answer.flip is None or len(answer.flip.changes) <= at_most
        assert answer.margin is None or answer.margin <= alone.margin + 1e-6


def test_a_proof_or_a_flip_settles_other_budgets(tiny: Path) -> None:
    found = buffet.substitutions(buffet.load(tiny), TEXT, swap=SWAP)
    verdict, asked = "unknown", []

    def answer(some, seconds):
        asked.append(some.at_most)
        told = some.verify(budget=seconds)
        flip = Flip("", (("good", "great"),) * 2, 0, -1.0) if verdict == "falsified" else None
        proven = verdict if some.at_most > 1 else "unknown"
        return replace(told, verdict=proven, flip=flip if some.at_most > 1 else None)

    def verdicts() -> list[str]:
        asked.clear()
        return [one.verdict for one in answered_each(found, [1, 2, 3], answer, None)]

    assert (verdicts(), asked) == (["unknown"] * 3, [1, 3, 2])
    verdict = "certified"
    assert (verdicts(), asked) == (["certified"] * 3, [1, 3])
    verdict = "falsified"
    assert (verdicts(), asked) == (["unknown", "falsified", "falsified"], [1, 3])


def test_budgets_that_were_not_made_are_refused(tiny: Path) -> None:
    found = buffet.substitutions(buffet.load(tiny), TEXT, swap=SWAP, at_most=1)
    with pytest.raises(BuffetError, match="at_most is 2"):
        found.verify_each([2])
    with pytest.raises(BuffetError, match="at_most is 0"):
        found.verify_each([0])


def test_certify_answers_every_budget(run: Run, tiny: Path) -> None:
    swap = ("--swap", "good=great,warm", "--swap", "film=story,cast")
    report = WordsReport.model_validate_json(certify(run, tiny, *swap, "--at-most", "2,1", "--json").out)
    assert (report.at_most, report.sentences) == (2, 9)
    (one,) = report.fewer
    assert (one.at_most, one.sentences) == (1, 5)
    assert f"at most 1: {one.verdict}" in certify(run, tiny, *swap, "--at-most", "1,2").out
    assert certify(run, tiny, *swap, "--at-most", "one").code == 2
