"""What a certificate is about, in words: the sentence is checked against the model, and printed safely."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import buffet
from buffet.certificates.certificate import Question, certify, certify_to
from buffet.cli import main
from buffet_checker import BadInputError, Result
from buffet_checker.__main__ import main as check_alone
from buffet_checker.check import judge
from buffet_checker.network import Checkpoint, read_checkpoint
from buffet_checker.report import as_json, as_lines
from buffet_checker.sentence import read_vocabulary
from buffet_checker.wording import printable, quoted, statement
from certificate_campaign import outcome, write_variant
from corruptions import Opened

TEXT, OTHER = "a gripping film", "a moving film"
SMALL: dict[str, object] = {"layer_norm": "no_var", "num_hidden_layers": 1}
METHOD = buffet.METHODS["lse"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> buffet.Model:
    return buffet.load(write_variant(tmp_path_factory.mktemp("naming") / "model", SMALL, 1))


@pytest.fixture(scope="module")
def proof(model: buffet.Model) -> tuple[bytes, Checkpoint]:
    region = buffet.LpBall(model.embed(TEXT), [2], 2, 0.01)
    _, content, checkpoint = certify(model, [Question.of(model, region)], METHOD, text=TEXT)
    return content, checkpoint


@pytest.fixture
def elsewhere(model: buffet.Model, tmp_path: Path) -> Path:
    """The same checkpoint somewhere else, to be put wrong."""
    assert model.directory is not None
    place = tmp_path / "elsewhere"
    place.mkdir()
    for file in model.directory.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    return place


def accepted(model: buffet.Model, region: buffet.Region, text: str | None = TEXT) -> Result:
    _, content, checkpoint = certify(model, [Question.of(model, region)], METHOD, text=text)
    result = judge(content, "certificate", checkpoint)
    assert result.accepted, result.reason
    return result


def said(model: buffet.Model, region: buffet.Region, text: str | None = TEXT) -> str:
    result = accepted(model, region, text)
    assert result.subject is not None
    found = statement(result.subject, result.proofs[0])
    assert found in as_lines(result)
    return found


# --- what is said -------------------------------------------------------------------------------------------


def test_a_ball_is_stated_in_full(model: buffet.Model) -> None:
    region = buffet.LpBall(model.embed(TEXT), [2], 2, 0.01)
    result = accepted(model, region)
    assert result.subject is not None
    found = said(model, region)
    start = (
        'Proven: in "a gripping film", moving the embedding of "gripping" (row 2) by any vector of L2 norm '
        f'up to 0.01 never changes the answer "no" (class 0) of model sha256:{result.subject.model[:12]}…; '
        "the margin stays at least "
    )
    assert found.startswith(start)
    assert float(found.removeprefix(start).split(". ")[0]) <= min(result.proofs[0].margins)
    assert "Holds in exact arithmetic, and as deployed in float32, where the margin stays at least" in found
    deployed = min(m - s for m, s in zip(result.proofs[0].margins, result.proofs[0].slacks, strict=True))
    assert float(found.split()[-1].removesuffix(".")) <= deployed


def test_several_words_and_other_norms(model: buffet.Model) -> None:
    found = said(model, buffet.LpBall(model.embed(TEXT), [3, 1], np.inf, 5e-4))
    assert (
        'embeddings of "film" (row 3) and "a" (row 1), each by any vector of L∞ norm up to 0.0005,' in found
    )
    assert "L1.5 norm up to" in said(model, buffet.LpBall(model.embed(TEXT), [2], 1.5, 1e-3))


def test_boxes_name_the_file_that_has_them(model: buffet.Model) -> None:
    x = model.embed(TEXT)
    found = said(model, buffet.Box(x, x - 5e-4, x + 3e-4, words=[2]))
    assert (
        'moving the embedding of "gripping" (row 2) anywhere within the box of certificate sha256:' in found
    )
    assert "no entry by more than 0.000500" in found
    assert "never changes the answer" in found
    away = said(model, buffet.Box(x, x + 1e-4, x + 3e-4, words=[2]))
    assert "always gives the answer" in away, "the unmoved row is not in it"
    assert "never changes" not in away


def substitutes(model: buffet.Model, *words: str) -> Tensor:
    return torch.stack([model.embed(TEXT.replace("gripping", word))[2] for word in words])


def test_substitutes_are_named_where_they_are_tokens(model: buffet.Model) -> None:
    x = model.embed(TEXT)
    near = 1e-3 * torch.randn(2, 3, x.shape[1], generator=torch.Generator().manual_seed(0))
    found = said(model, buffet.CandidateSet(x, [2, 3], [x[2] + near[0], x[3] + near[1, :1]], budget=1))
    assert '"gripping" (row 2) by any of 3 vectors of certificate sha256:' in found
    assert 'and "film" (row 3) by a vector of' in found
    assert "at most 1 of these 2 at once," in found


@pytest.fixture(scope="module")
def similar(model: buffet.Model, tmp_path_factory: pytest.TempPathFactory) -> buffet.Model:
    """A model whose words are nearly the same, so that one may stand for the other."""
    from safetensors.torch import load_file, save_file

    place = write_variant(tmp_path_factory.mktemp("similar") / "model", SMALL, 1)
    tensors = load_file(place / "model.safetensors")
    words = tensors["bert.embeddings.word_embeddings.weight"]
    words[4:] = words[4] + 1e-3 * words[4:]
    save_file(tensors, place / "model.safetensors")
    return buffet.load(place)


def test_substitutes_that_are_tokens_are_named_and_checked(similar: buffet.Model) -> None:
    x = similar.embed(TEXT)
    film = similar.embed("a gripping .")[3:4]
    region = buffet.CandidateSet(x, [3, 2], [film, substitutes(similar, "moving", "bad", "gripping")])
    found = said(similar, region)
    assert (
        'replacing "film" (row 3) by ".", and "gripping" (row 2) by "moving" or "bad", alone or together,'
        in found
    )
    _, content, checkpoint = certify(similar, [Question.of(similar, region)], METHOD, text=TEXT)
    document = json.loads(as_json(judge(content, "certificate", checkpoint)))
    assert [s["tokens"] for s in document["claims"][0]["substitutes"]] == [["."], ["moving", "bad"]]
    opened = Opened.of(content)
    ids = opened.claim["region"]["ids"]
    for wrong in ([ids[1], ids[0]], ids[:1], [ids[0], [*ids[1][:2], 10**6]], [ids[0], [True] * 3], 5, [3, 4]):
        opened.claim["region"]["ids"] = wrong
        assert outcome(opened.close(), checkpoint).startswith("rejected: claims[0].region.ids")
    opened.claim["region"]["ids"], opened.head["sentence"] = ids, None
    del opened.head["model"]["tokenizer.json"]
    assert "names no sentence" in outcome(opened.close(), checkpoint)
    del opened.claim["region"]["ids"]
    assert outcome(opened.close(), checkpoint) == "accepted"


def test_a_substitute_that_no_token_has_is_a_vector(similar: buffet.Model) -> None:
    """The table has more rows than the vocabulary has words."""
    x, tables = similar.embed(TEXT), similar.embeddings
    assert similar.spelling(len(tables.words) - 1) is None
    row = (tables.words[-1] + tables.types[0]) + tables.positions[2]
    found = said(similar, buffet.CandidateSet(x, [2], [row[None]]))
    assert 'replacing "gripping" (row 2) by a vector of certificate sha256:' in found


def test_rows_without_a_text_are_no_sentence(model: buffet.Model) -> None:
    region = buffet.LpBall(model.embed(TEXT), [2], 2, 0.01)
    result = accepted(model, region, None)
    assert "(no sentence is named), moving row 2 by any vector of" in said(model, region, None)
    assert "no sentence is named · rows sha256:" in as_lines(result)[2]
    assert json.loads(as_json(result))["sentence"] is None
    with pytest.raises(buffet.BuffetError, match="not those of the text"):
        certify(model, [Question.of(model, region)], METHOD, text=OTHER)


@pytest.mark.parametrize("alone", [True, False])
def test_the_command_lines_carry_everything(
    alone: bool, model: buffet.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "proof.safetensors"
    certify_to(path, model, buffet.LpBall(model.embed(TEXT), [2], 2), 0.01, "lse", text=TEXT)
    given = [str(path), "--model", str(model.directory), "--json"]
    assert (check_alone(given) if alone else main(["check", *given])) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["answer"] == "no"
    assert found["sentence"] == {
        "text": TEXT,
        "tokens": model.tokens(TEXT),
        "ids": list(model.encode(TEXT).ids),
        "types": [0] * 5,
    }
    assert found["model"]["files"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert found["claims"][0]["words"] == ["gripping"]
    assert found["claims"][0]["statement"].startswith('Proven: in "a gripping film", moving the embedding of')


# --- what is checked ----------------------------------------------------------------------------------------


def test_the_rows_are_those_of_the_tokens_to_the_last_bit(proof: tuple[bytes, Checkpoint]) -> None:
    content, checkpoint = proof
    opened = Opened.of(content)
    good = opened.head["sentence"]["ids"][2]
    for wrong in (good + 1, 10**6):
        opened.head["sentence"]["ids"][2] = wrong
        assert outcome(opened.close(), checkpoint).startswith("rejected: sentence: ")
    opened.head["sentence"]["ids"][2] = good
    opened.head["sentence"]["types"][2] = 1
    assert "row 2 of center is not that of its token id" in outcome(opened.close(), checkpoint)
    opened.head["sentence"]["types"] = [0, 0]
    assert "one each for the 5 rows" in outcome(opened.close(), checkpoint)
    opened = Opened.of(content)
    row = opened.tensors["center"][2]
    row[0] = np.nextafter(row[0], np.float32(np.inf))
    opened.head["input"] = hashlib.sha256(opened.tensors["center"].tobytes()).hexdigest()
    assert "row 2 of center is not that of its token id" in outcome(opened.close(), checkpoint)
    opened.head["sentence"] = None
    del opened.head["model"]["tokenizer.json"]
    assert outcome(opened.close(), checkpoint) == "accepted", "without the sentence it is still a proof"


def test_another_vocabulary_is_another_sentence(proof: tuple[bytes, Checkpoint], elsewhere: Path) -> None:
    """The weights are the same, but "gripping" would be printed as something else."""
    vocabulary = elsewhere / "tokenizer.json"
    vocabulary.write_text(vocabulary.read_text().replace("gripping", "terrible"))
    assert "tokenizer.json has another hash" in outcome(proof[0], read_checkpoint(elsewhere))
    vocabulary.unlink()
    assert "tokenizer.json: cannot be read" in outcome(proof[0], read_checkpoint(elsewhere))


def test_what_no_vocabulary_spells_is_named_by_its_id(model: buffet.Model, elsewhere: Path) -> None:
    """A tokenizer from somewhere else, and none in the directory, or one that spells otherwise."""
    vocabulary = elsewhere / "tokenizer.json"
    for content in (vocabulary.read_text().replace("gripping", "terrible"), None):
        vocabulary.write_text(content) if content else vocabulary.unlink()
        copy = buffet.load(elsewhere, tokenizer=model.directory)
        found = said(copy, buffet.LpBall(copy.embed(TEXT), [2], 2, 0.01))
        ids = copy.encode(TEXT).ids
        assert f"in the sentence of token ids {' '.join(map(str, ids))} (no vocabulary is named), " in found
        assert f"the embedding of token {ids[2]} (row 2)" in found


def test_a_vocabulary_of_word_pieces(model: buffet.Model, elsewhere: Path) -> None:
    vocabulary = json.loads((elsewhere / "tokenizer.json").read_text())["model"]["vocab"]
    words = sorted(vocabulary, key=lambda word: vocabulary[word])
    (elsewhere / "vocab.txt").write_text("\n".join(words) + "\n")
    (elsewhere / "tokenizer.json").unlink()
    copy = buffet.load(elsewhere)
    result = accepted(copy, buffet.LpBall(copy.embed(TEXT), [2], 2, 0.01))
    assert result.subject is not None
    assert result.subject.files.keys() == {"config.json", "model.safetensors", "vocab.txt"}
    assert result.subject.sentence is not None
    assert result.subject.sentence.text == TEXT


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", b"[]"),
        ("tokenizer.json", b'{"model": {"vocab": 3}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1, "b": 1}}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": true}}}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1}}, "added_tokens": [{"id": 1, "content": "b"}]}'),
        ("tokenizer.json", b'{"model": {"vocab": {"a": 1}}, "added_tokens": [7]}'),
        ("tokenizer.json", b'{"model": {"vocab": [["a", 0.0], []]}}'),
        ("vocab.txt", b"\xff"),
    ],
)
def test_unclear_vocabularies_are_refused(name: str, content: bytes) -> None:
    with pytest.raises(BadInputError, match="vocabulary"):
        read_vocabulary(name, content, "vocabulary")


def test_unigrams_are_numbered_by_their_places() -> None:
    content = b'{"model": {"vocab": [["a", 0.0], ["b", -1.5]]}, "added_tokens": [{"id": 2, "content": "c"}]}'
    assert read_vocabulary("tokenizer.json", content, "").tokens == {0: "a", 1: "b", 2: "c"}


def test_certificates_of_the_first_schema_are_read(proof: tuple[bytes, Checkpoint]) -> None:
    content, checkpoint = proof
    opened = Opened.of(content)
    opened.head["schema"] = 1
    assert "unknown key 'sentence'" in outcome(opened.close(), checkpoint)
    del opened.head["sentence"], opened.head["model"]["tokenizer.json"]
    result = judge(opened.close(), "certificate", checkpoint)
    assert result.accepted
    assert "no sentence is named" in as_lines(result)[2]


# --- how it is printed --------------------------------------------------------------------------------------


def test_nothing_that_is_printed_speaks_to_the_terminal(elsewhere: Path) -> None:
    """Escape sequences, line breaks and letters that turn the writing round, in tokens and class names."""
    wild = 'x\x1b[2J\x07"\n\u202e\u2028\\'
    vocabulary = json.loads((elsewhere / "tokenizer.json").read_text())
    words = vocabulary["model"]["vocab"]
    words[wild] = words.pop("gripping")
    (elsewhere / "tokenizer.json").write_text(json.dumps(vocabulary))
    config = json.loads((elsewhere / "config.json").read_text())
    config["id2label"] = {"0": wild, "1": "b", "2": "c"}
    (elsewhere / "config.json").write_text(json.dumps(config))
    copy = buffet.load(elsewhere)
    ids = torch.tensor(copy.encode("a film film").ids)
    ids[2] = words[wild]
    region = buffet.LpBall(copy.embeddings.rows(ids), [2], 2, 0.01)
    _, content, checkpoint = certify(copy, [Question.of(copy, region)], METHOD)
    opened = Opened.of(content)
    opened.head["sentence"] = {"ids": ids.tolist(), "types": [0] * len(ids)}
    name = "tokenizer.json"
    opened.head["model"][name] = hashlib.sha256((elsewhere / name).read_bytes()).hexdigest()
    result = judge(opened.close(), "certificate", checkpoint)
    assert result.accepted, result.reason
    for line in as_lines(result):
        assert line.isprintable()
    assert as_json(result).isascii()
    assert quoted(wild) in as_lines(result)[-1]


def test_text_is_printed_as_it_is_or_escaped() -> None:
    assert printable("naïve — 好") == "naïve — 好"
    assert printable("a\x1b[31m\tb\x85\ud800") == "a\\x1b[31m\\tb\\x85\\ud800"
    assert quoted('a" and "b\\') == '"a\\" and \\"b\\\\"'
