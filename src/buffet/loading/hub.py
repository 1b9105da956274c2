"""Checkpoints of the Hugging Face Hub: fetched into its cache, then read like any directory."""

from __future__ import annotations

from pathlib import Path

from buffet.errors import BuffetError, one_line
from buffet.loading.families import read_architecture
from buffet.loading.vocabulary import KINDS

SAFETENSORS = ("model*.safetensors", "model.safetensors.index.json")
PYTORCH = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
TOKENIZER = (*KINDS, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def fetch(name: str) -> Path:
    """The directory with the files of a model of the Hub; only what is read is fetched, weights last.

    An unsupported architecture is refused before its weights are fetched. Out of reach of the Hub, its cache
    answers.
    """
    try:
        from huggingface_hub import hf_hub_download, snapshot_download
    except ImportError:
        raise BuffetError(
            f"{name!r}: no such directory; to load it from the Hugging Face Hub: pip install 'buffet[hf]'"
        ) from None
    cached = False
    try:
        cached = not _reachable(name)
        read_architecture(Path(hf_hub_download(name, "config.json", local_files_only=cached)))
        patterns = ["config.json", *SAFETENSORS, *TOKENIZER]
        directory = Path(snapshot_download(name, allow_patterns=patterns, local_files_only=cached))
        if not any(directory.glob("*.safetensors")):
            snapshot_download(name, allow_patterns=list(PYTORCH), local_files_only=cached)
    except BuffetError:
        raise
    except Exception as error:  # unknown, private, not cached, disk full: the library has an error for each
        reason = one_line(error).split(". ")[0][:200]
        if cached:
            reason = "it cannot be reached, and its cache does not have the model"
        raise BuffetError(
            f"{name!r}: no such directory, and not given by the Hugging Face Hub: {reason}"
        ) from None
    return directory


def _reachable(name: str) -> bool:
    """Whether the Hub answers; asked once, as downloads try again for half a minute before they give up."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        HfApi().model_info(name, timeout=10)
    except HfHubHTTPError:  # an answer: unknown, private, …
        raise
    except Exception:  # whatever the HTTP library in use raises when nobody answers
        return False
    return True
