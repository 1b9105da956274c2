"""Tokenizers that are made from a bare vocabulary, as those of transformers do it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from buffet.errors import BuffetError
from buffet.loading import load
from family_models import WORDS, classifier, saved

transformers = pytest.importorskip("transformers")


PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "a",
    "film",
    "grip",
    "##ping",
    "Film",
    ",",
    "caf",
    "##e",
]
TEXTS = ["A gripping, gripping film", "Film zzz ,film", "a café [mask film", "  a\tfilm\n"]


@pytest.mark.parametrize("lower", [True, False])
def test_word_pieces_of_a_bare_vocabulary(tmp_path: Path, lower: bool) -> None:
    directory = saved(classifier("bert"), tmp_path / "m")
    reference = transformers.BertTokenizer(
        vocab={piece: index for index, piece in enumerate(PIECES)}, do_lower_case=lower
    )
    reference.save_pretrained(directory)
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    model, given = load(directory), load(directory, tokenizer=reference)
    for text in TEXTS:
        assert list(model.encode(text).ids) == reference(text)["input_ids"]
        assert model.encode(text) == given.encode(text)
    assert model.tokens("a film")[0] == "[CLS]"
    assert model.encode("a film").special == (True, False, False, True)
    pair = reference("a film", "gripping")
    assert list(model.encode("a film", "gripping").ids) == pair["input_ids"]
    assert list(model.encode("a film", "gripping").types) == pair["token_type_ids"]
    rows = model.embed("a film", "gripping")
    assert torch.equal(
        rows[-1],
        model.embeddings.rows(torch.tensor(pair["input_ids"]), torch.tensor(pair["token_type_ids"]))[-1],
    )


def byte_pairs() -> RawTokenizer:
    tokenizer = RawTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([WORDS] * 3, trainer)
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    return tokenizer


@pytest.mark.parametrize("spaced", [True, False])
def test_byte_pairs_of_a_bare_vocabulary(tmp_path: Path, spaced: bool) -> None:
    directory = saved(classifier("roberta", vocab_size=300), tmp_path / "m")
    byte_pairs().save(str(directory / "tokenizer.json"))
    reference = transformers.RobertaTokenizer.from_pretrained(directory, add_prefix_space=spaced)
    reference.save_pretrained(directory)
    (directory / "tokenizer.json").unlink()
    byte_pairs().model.save(str(directory))
    model = load(directory)
    for text in ("a gripping film", " it's not bad", "café <mask film"):
        assert list(model.encode(text).ids) == reference(text)["input_ids"]
    first, *words, last = model.encode("a film").special
    assert (first, any(words), last) == (True, False, True)
    assert model.tokens("a")[0] == "<s>"
    for typed in ("a <pad> film", "a <mask> film"):
        with pytest.raises(BuffetError, match="special token"):
            model.encode(typed)


def test_bad_vocabularies_are_refused(tmp_path: Path) -> None:
    directory = saved(classifier("bert"), tmp_path / "m")
    (directory / "tokenizer.json").unlink()
    vocabulary = directory / "vocab.txt"
    for content, complaint in (("a\nfilm\n", "no entry '[CLS]'"), ("\n".join(map(str, range(99))), "[CLS]")):
        vocabulary.write_text(content)
        with pytest.raises(BuffetError) as caught:
            load(directory)
        assert complaint in str(caught.value)
    vocabulary.write_text("\n".join(PIECES))
    (directory / "added_tokens.json").write_text('{"[NEW]": 13, "a": 5}')
    with pytest.raises(BuffetError, match=r"adds '\[NEW\]'"):
        load(directory)
    (directory / "added_tokens.json").unlink()
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(BuffetError, match=r"tokenizer_config\.json: expected an object"):
        load(directory)
    vocabulary.rename(directory / "vocab.json")
    with pytest.raises(BuffetError, match=r"merges\.txt: no such file"):
        load(directory)


def test_tokenizers_that_do_not_fit_are_refused() -> None:
    module = classifier("bert")
    with pytest.raises(BuffetError, match=r"the tokenizer: has token ids up to 287"):
        load(module, tokenizer=byte_pairs())
    with pytest.raises(BuffetError, match=r"the tokenizer is a dict; supported: a directory"):
        load(module, tokenizer={"a": 1})
    with pytest.raises(BuffetError, match=r"loaded without a tokenizer"):
        load(module).embed("a film")
