"""The weights of a checkpoint: `model.safetensors`, read with every check and written atomically."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from buffet.errors import BuffetError

WEIGHTS = "model.safetensors"
# What a checkpoint directory holds; nothing else in such a directory is ever replaced or removed.
FILES = ("config.json", WEIGHTS, "tokenizer.json", "README.md")
# Stored types that become float32 (float64 is rounded); everything else is refused.
FLOATS = ("F64", "F32", "F16", "BF16")
# A buffer that older exports carry: 0, 1, 2, … and no part of the network.
IGNORED = ("bert.embeddings.position_ids",)


def read_tensors(directory: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The float32 tensors of a checkpoint: exactly the names and shapes asked for, every value finite.

    Only the safetensors format is opened: it holds numbers and no code. Names, types and shapes are
    compared with the header before anything is allocated.
    """
    path = _weights_file(directory)
    try:
        with safe_open(str(path), framework="pt") as file:
            _check_header(path, file, shapes)
            tensors = {name: file.get_tensor(name).to(torch.float32) for name in shapes}
    except SafetensorError as error:
        reason = " ".join(str(error).split())
        raise BuffetError(
            f"{path}: not a complete safetensors file (truncated or damaged): {reason}"
        ) from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error}") from None
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise BuffetError(f"{path}: tensor {name} has {bad} non-finite values (NaN or inf in float32)")
    return tensors


def _weights_file(directory: Path) -> Path:
    path = directory / WEIGHTS
    if not path.is_file():
        others = [
            *directory.glob("*.bin"),
            *directory.glob("*.pt"),
            *directory.glob("*.safetensors.index.json"),
        ]
        if not others:
            raise BuffetError(f"{path}: no such file; the weights of a checkpoint are in {WEIGHTS}")
        found = min(other.name for other in others)
        raise BuffetError(f"{path}: no such file; found {found}, but one {WEIGHTS} file is expected")
    try:
        with path.open("rb") as file:
            start = file.read(8)
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None
    if start.startswith((b"PK\x03\x04", b"\x80")) and not _is_header_length(path, start):
        raise BuffetError(
            f"{path}: a pickle or zip file, not safetensors; it was not opened: convert it first"
        )
    return path


def _is_header_length(path: Path, start: bytes) -> bool:
    """Whether the first eight bytes can be what safetensors starts with: the length of its header."""
    return int.from_bytes(start, "little") <= path.stat().st_size - 8


def _check_header(path: Path, file: safe_open, shapes: Mapping[str, tuple[int, ...]]) -> None:
    present = set(file.keys())
    if missing := shapes.keys() - present:
        raise BuffetError(f"{path}: missing tensors that config.json calls for: {_names(missing)}")
    if unexpected := present - shapes.keys() - set(IGNORED):
        raise BuffetError(f"{path}: tensors that config.json has no place for: {_names(unexpected)}")
    for name, expected in shapes.items():
        header = file.get_slice(name)
        if (dtype := header.get_dtype()) not in FLOATS:
            raise BuffetError(f"{path}: tensor {name} has type {dtype}; supported: {', '.join(FLOATS)}")
        if (shape := tuple(header.get_shape())) != expected:
            raise BuffetError(
                f"{path}: tensor {name} has shape {list(shape)}, config.json says {list(expected)}"
            )


def _names(names: Iterable[str], shown: int = 3) -> str:
    ordered = sorted(" ".join(name.split()) for name in names)
    more = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + more


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
        raise BuffetError(
            f"{directory}: holds other files than a checkpoint ({_names(foreign)}): not replaced"
        )


def write_checkpoint(
    directory: Path, texts: Mapping[str, str], tensors: Mapping[str, Tensor], *, overwrite: bool = False
) -> None:
    """Write a whole checkpoint or nothing: a temporary directory beside the target is renamed at the end."""
    check_target(directory, overwrite=overwrite)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        new, old = partial / "new", partial / "old"
        new.mkdir()
        (new / WEIGHTS).write_bytes(serialise(tensors))
        for name, text in texts.items():
            (new / name).write_text(text, encoding="utf-8")
        if directory.exists():
            directory.rename(old)
        try:
            new.rename(directory)
        except OSError:
            if old.exists():
                old.rename(directory)
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def serialise(tensors: Mapping[str, Tensor]) -> bytes:
    """The content of the safetensors file these tensors make."""
    return save({name: tensor.detach().contiguous() for name, tensor in tensors.items()})
