"""What a certificate is about, in words: token ids, and the file that says how they are spelled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from buffet.errors import BuffetError
from buffet.loading import Encoding, Model
from buffet_checker import BadInputError
from buffet_checker.certificate import VOCABULARIES
from buffet_checker.sentence import read_vocabulary
from buffet_checker.storage import LARGEST_TEXT, read_bytes, sha256


def sentence_of(model: Model, text: str, center: Tensor) -> Encoding:
    """The tokens of a text, whose rows must be those of a region."""
    encoding = model.encode(text)
    rows = model.embed(text)
    if rows.shape != center.shape or not bool((rows.double() == center.double().to(rows.device)).all()):
        raise BuffetError(
            "certificate: the region's rows are not those of the text; make the region of model.embed(text),"
            " or leave the text out"
        )
    return encoding


def spelling(directory: Path, sentence: Encoding) -> dict[str, str]:
    """The vocabulary of a directory and its hash, if it spells the tokens as the model's tokenizer does.

    The checker names tokens by it. Without one, a certificate names ids only.
    """
    for name in VOCABULARIES:
        if not (directory / name).is_file():
            continue
        try:
            content = read_bytes(directory / name, LARGEST_TEXT)
            tokens = read_vocabulary(name, content, name).tokens
        except BadInputError:
            return {}
        same = all(tokens.get(i) == token for i, token in zip(sentence.ids, sentence.tokens, strict=True))
        return {name: sha256(content)} if same else {}
    return {}


def substitutes(
    model: Model, sentence: Encoding, moved: Sequence[int], candidates: Sequence[Tensor]
) -> dict[str, object]:
    """The token ids of the candidates of every moved row, if each of them is the row of a token with a name.

    As many for each word: words with fewer candidates repeat the original, as the rows that are stored do.
    """
    most = max(len(choices) for choices in candidates)
    named: list[list[int]] = []
    for row, choices in zip(moved, candidates, strict=True):
        tables = model.embeddings
        table = tables.words + tables.types[sentence.types[row]] + tables.positions[row]
        ids = [found for choice in choices if (found := _row_of(table, choice)) is not None]
        if len(ids) < len(choices) or any(model.spelling(i) is None for i in ids):
            return {}
        named.append([*ids, *[sentence.ids[row]] * (most - len(ids))])
    return {"ids": named}


def _row_of(table: Tensor, row: Tensor) -> int | None:
    """The first row of a float32 table that is this very one."""
    short = row.to(table)
    if not torch.equal(short.double(), row.double().to(short.device)):
        return None
    same = (table == short).all(1).nonzero()
    return int(same[0]) if len(same) else None
