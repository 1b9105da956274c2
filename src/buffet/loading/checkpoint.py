"""Checkpoint directories of our own: written whole or not at all."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from buffet.errors import BuffetError
from buffet.system.files import rename_synced, sync_directory, write_synced

WEIGHTS = "model.safetensors"
# What a checkpoint directory holds; nothing else in such a directory is ever replaced or removed.
FILES = ("config.json", WEIGHTS, "tokenizer.json", "README.md")


def check_target(directory: Path, *, overwrite: bool) -> None:
    """Refuse, before any work is done, a directory that `write_checkpoint` would not write."""
    if directory.is_symlink() or (directory.exists() and not directory.is_dir()):
        raise BuffetError(f"{directory}: exists and is not a directory; choose another output")
    if not directory.exists():
        return
    inside = {entry.name for entry in directory.iterdir()}
    if inside and not overwrite:
        raise BuffetError(f"{directory}: is not empty; choose another output or allow overwriting")
    if foreign := inside - set(FILES):
        named = ", ".join(sorted(foreign)[:3])
        raise BuffetError(f"{directory}: holds other files than a checkpoint ({named}): not replaced")


def write_checkpoint(
    directory: Path, texts: Mapping[str, str], tensors: Mapping[str, Tensor], *, overwrite: bool = False
) -> None:
    """Write a whole checkpoint or nothing: a directory beside the target is renamed once on the disk."""
    check_target(directory, overwrite=overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        new, old = partial / "new", partial / "old"
        new.mkdir()
        write_synced(new / WEIGHTS, serialise(tensors))
        for name, text in texts.items():
            write_synced(new / name, text)
        sync_directory(new)
        if directory.exists():
            directory.rename(old)
        try:
            rename_synced(new, directory)
        except OSError:
            if old.exists() and not directory.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def serialise(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of the safetensors file these tensors make."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
