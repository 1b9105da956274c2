"""Other people's tokenizers: `tokenizer.json`, the vocabularies from before it, or objects in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from buffet.errors import BuffetError, show
from buffet.loading.families import read_json
from buffet.loading.tokenizer import Tokenizer, framed, guarded

TokenizerSettings = dict[str, Any]
# The part every special token plays, by its key in tokenizer_config.json, where the file does not say.
ROLES = ("cls_token", "sep_token", "unk_token", "pad_token", "mask_token")
WORDPIECE = dict(zip(ROLES, ("[CLS]", "[SEP]", "[UNK]", "[PAD]", "[MASK]"), strict=True))
BYTE_PAIRS = dict(zip(ROLES, ("<s>", "</s>", "<unk>", "<pad>", "<mask>"), strict=True))


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint directory, whose ids all have an embedding."""
    kind = next((kind for kind in KINDS if (directory / kind).is_file()), None)
    if kind is None:
        raise BuffetError(
            f"{directory / 'tokenizer.json'}: no such file; a tokenizer is in tokenizer.json, "
            "vocab.txt, or vocab.json and merges.txt"
        )
    path = directory / kind
    tokenizer = guarded(lambda: Tokenizer.of(KINDS[kind](path)), f"{path}: not a tokenizer file")
    return _fitting(tokenizer, vocab_size, str(path))


def tokenizer_of(source: object, vocab_size: int) -> Tokenizer:
    """The tokenizer in `source`: a directory, one of this package, of `tokenizers` or of `transformers`."""
    if isinstance(source, str | Path):
        return read_tokenizer(Path(source), vocab_size)
    inner = getattr(source, "backend_tokenizer", source)
    if isinstance(inner, tokenizers.Tokenizer):
        source = Tokenizer.of(inner)
    if not isinstance(source, Tokenizer):
        raise BuffetError(
            f"the tokenizer is a {type(source).__name__}; supported: a directory, tokenizers.Tokenizer, "
            "or a fast tokenizer of transformers"
        )
    return _fitting(source, vocab_size, "the tokenizer")


def _fitting(tokenizer: Tokenizer, vocab_size: int, where: str) -> Tokenizer:
    if (size := tokenizer.size) > vocab_size:
        raise BuffetError(
            f"{where}: has token ids up to {size - 1}, the configuration says vocab_size {vocab_size}"
        )
    return tokenizer


def _word_pieces(path: Path) -> tokenizers.Tokenizer:
    """BERT's own: a word per line of vocab.txt, lower case unless tokenizer_config.json says otherwise."""
    settings = _settings(path.parent, WORDPIECE)
    lower = settings.get("do_lower_case", True)
    model = models.WordPiece(models.WordPiece.read_file(str(path)), unk_token=settings["unk_token"])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lower,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _with_special(tokenizer, settings, WORDPIECE, path)


def _byte_pairs(path: Path) -> tokenizers.Tokenizer:
    """RoBERTa's own: byte-level pairs, vocab.json and the merges.txt beside it."""
    merges = path.parent / "merges.txt"
    if not merges.is_file():
        raise BuffetError(f"{merges}: no such file; vocab.json needs the merges beside it")
    settings = _settings(path.parent, BYTE_PAIRS)
    tokenizer = tokenizers.Tokenizer(models.BPE(*models.BPE.read_file(str(path), str(merges))))
    spaced = settings.get("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    return _with_special(tokenizer, settings, BYTE_PAIRS, path)


def _settings(directory: Path, special: dict[str, str]) -> TokenizerSettings:
    """tokenizer_config.json over special_tokens_map.json over the defaults; special tokens as plain text."""
    settings: TokenizerSettings = dict(special)
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path := directory / name).is_file():
            content = read_json(path)
            if not isinstance(content, dict):
                raise BuffetError(f"{path}: expected an object with the settings of a tokenizer")
            settings |= {key: value for key, value in content.items() if value is not None}
    for key in special:
        if isinstance(settings[key], dict):
            settings[key] = settings[key].get("content")
    return settings


def _with_special(
    tokenizer: tokenizers.Tokenizer, settings: TokenizerSettings, special: dict[str, str], path: Path
) -> tokenizers.Tokenizer:
    """The tokenizer with the special tokens of its settings, as far as it has them."""
    first, last = settings["cls_token"], settings["sep_token"]
    for token in (first, last):
        if tokenizer.token_to_id(token) is None:
            raise BuffetError(f"{path}: has no entry {show(token)}, the token around every sentence")
    extra = path.parent / "added_tokens.json"
    if extra.is_file() and (new := [t for t in read_json(extra) if tokenizer.token_to_id(t) is None]):
        raise BuffetError(f"{extra}: adds {new[0]!r}; save the tokenizer as tokenizer.json to have it read")
    present = (settings[key] for key in special if tokenizer.token_to_id(settings[key]) is not None)
    return framed(tokenizer, sorted(set(present)), first, last, pairs=special is WORDPIECE)


# The file that says which kind of tokenizer a directory has -> how it is read; the first that is there.
KINDS: dict[str, Callable[[Path], tokenizers.Tokenizer]] = {
    "tokenizer.json": lambda path: tokenizers.Tokenizer.from_file(str(path)),
    "vocab.txt": _word_pieces,
    "vocab.json": _byte_pairs,
}
