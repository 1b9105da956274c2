"""Texts read piece by piece, where the tokenizer does so."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import models, normalizers, pre_tokenizers

import buffet
from buffet.errors import BuffetError
from buffet.loading.tokenizer import Tokenizer, framed
from buffet.words.reading import Reading
from word_pieces import PIECES

LETTERS = [*"abΣσ'.,!?-()n’é́ß中İ ", "n't", "...", "film", "good", "[UNK]", "[SEP]", "\t", "\u00a0", "ﬁ"]


@pytest.mark.parametrize("normalizer", [normalizers.BertNormalizer(), None])
def test_a_piece_between_spaces_is_read_as_in_its_sentence(
    normalizer: normalizers.Normalizer | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = buffet.load()
    assert model.tokenizer is not None
    if normalizer is not None:
        inner = RawTokenizer(models.WordPiece({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]"))
        inner.normalizer, inner.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
        model = replace(model, tokenizer=Tokenizer.of(framed(inner, PIECES[:4])))
    assert model.tokenizer is not None
    assert model.tokenizer.by_pieces
    rng = random.Random(0)
    compared = 0
    for _ in range(150):
        text = " ".join("".join(rng.choices(LETTERS, k=rng.randint(1, 5))) for _ in range(rng.randint(1, 5)))
        texts = ["".join(rng.choices(LETTERS, k=rng.randint(1, 4))) for _ in range(6)]
        try:
            reading = Reading.of(model, text, None)
        except BuffetError:
            continue
        for word in reading.words():
            quick = reading.tokens_of(word, texts)
            with monkeypatch.context() as patch:
                patch.setattr(Reading, "_piece", lambda self, word: None)
                assert reading.tokens_of(word, texts) == quick
            compared += 1
    assert compared > 100


def test_tokenizers_that_look_across_spaces_read_whole_sentences() -> None:
    inner = RawTokenizer(models.WordLevel({p: i for i, p in enumerate(PIECES)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    assert Tokenizer.of(framed(inner, PIECES[:4])).by_pieces
    inner.normalizer = normalizers.Replace(" ", "_")
    assert not Tokenizer.of(framed(inner, PIECES[:4])).by_pieces
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    assert not Tokenizer.of(framed(inner, PIECES[:4])).by_pieces
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    assert not Tokenizer.of(framed(inner, PIECES[:4])).by_pieces
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.add_tokens(["two words"])
    assert not Tokenizer.of(framed(inner, PIECES[:4])).by_pieces
