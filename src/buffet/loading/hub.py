"""Checkpoints of the Hugging Face Hub: fetched into its cache, then read like any directory."""

from __future__ import annotations

import re
from pathlib import Path

from buffet.errors import BuffetError
from buffet.loading.config import one_line
from buffet.loading.families import read_architecture
from buffet.loading.vocabulary import KINDS

SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
PYTORCH = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
TOKENIZER = (*KINDS, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def is_hub_id(name: str) -> bool:
    """Whether `name` reads like ``owner/model``."""
    return re.fullmatch(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", name, re.ASCII) is not None


def fetch(name: str) -> Path:
    """The directory with the files of a model of the Hub; only what is read is fetched, weights last.

    An unsupported architecture is refused before its weights are fetched.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise BuffetError(
            f"{name!r}: no such directory; to load it from the Hugging Face Hub: pip install 'buffet[hf]'"
        ) from None
    try:
        read_architecture(Path(hf_hub_download(name, "config.json")))
        directory = Path(snapshot_download(name, allow_patterns=["config.json", *SAFETENSORS, *TOKENIZER]))
        if not any(directory.glob("*.safetensors")):
            directory = Path(snapshot_download(name, allow_patterns=list(PYTORCH)))
    except BuffetError:
        raise
    except Exception as error:  # offline, unknown, private, disk full: the library has an error for each
        reason = one_line(error).split(". ")[0][:200]
        raise BuffetError(
            f"{name!r}: no such directory, and the Hugging Face Hub did not give it: {reason}"
        ) from None
    return directory
