"""Tokenizers put wrong."""

from __future__ import annotations

import json
import random

from fuzz.mutate import hostile_json, hostile_text
from fuzz.place import Place, use


def tokenizer(rng: random.Random, place: Place) -> None:
    use(place.checkpoint({"tokenizer.json": hostile_json(rng, json.loads(place.files["tokenizer.json"]))}))


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "film", ",", "bad", "plot", "##s"]
SETTINGS = {
    "do_lower_case": True,
    "cls_token": "[CLS]",
    "unk_token": {"content": "[UNK]"},
    "strip_accents": None,
}
EXTRA = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def vocabulary(rng: random.Random, place: Place) -> None:
    text = "\n".join(VOCABULARY)
    files: dict[str, bytes | None] = {"tokenizer.json": None}
    files["vocab.txt"] = text.encode() if rng.random() < 0.5 else hostile_text(rng, text)
    for name in rng.sample(EXTRA, rng.randrange(3)):
        files[name] = hostile_json(rng, {"[CLS]": 2} if name.startswith("added") else SETTINGS)
    use(place.checkpoint(files))


def byte_pairs(rng: random.Random, place: Place) -> None:
    words = {
        token: i for i, token in enumerate(("<pad>", "<s>", "</s>", "<unk>", "g", "o", "d", "Ġ", "go", "od"))
    }
    merges = "#version: 0.2\ng o\no d\n"
    files: dict[str, bytes | None] = {"tokenizer.json": None}
    files["vocab.json"] = hostile_json(rng, words) if rng.random() < 0.6 else json.dumps(words).encode()
    files["merges.txt"] = hostile_text(rng, merges) if rng.random() < 0.6 else merges.encode()
    use(place.checkpoint(files))
