"""Tensors from where they are stored: safetensors, PyTorch files, their shards, or a module in memory.

Nothing is ever executed. What a source holds is first looked at (names, types, shapes), then compared with
what the architecture calls for, and only then read.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from buffet.errors import BuffetError, one_line
from buffet.loading.families import Architecture, read_json

# Where the weights of a directory are; the first of these that exists is read.
FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Stored types that become float32; everything else is refused, and so is a value that float32 would round.
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# The first release whose weights_only reader has no known way to run code or to corrupt memory.
SAFE_TORCH = "2.10"


@dataclass(frozen=True)
class Stored:
    """A tensor that can be read: what is known of it beforehand, and how to read it."""

    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def open_weights(directory: Path) -> dict[str, Stored]:
    """Every tensor of a checkpoint directory, under its stored name."""
    path = next((directory / name for name in FILES if (directory / name).is_file()), None)
    if path is None:
        wanted = directory / FILES[0]
        others = sorted(
            other.name for end in ("bin", "pt", "h5", "msgpack") for other in directory.glob(f"*.{end}")
        )
        if others:
            raise BuffetError(f"{wanted}: no such file; found {others[0]}, but read are: {', '.join(FILES)}")
        raise BuffetError(f"{wanted}: no such file; the weights of a checkpoint are in {FILES[0]}")
    stored: dict[str, Stored] = {}
    for file in _shards(path) if path.suffix == ".json" else [path]:
        stored |= _open_safetensors(file) if file.suffix == ".safetensors" else _open_torch(file)
    return stored


def _shards(index: Path) -> list[Path]:
    """The files an index names; only files beside it are opened."""
    content = read_json(index)
    parts = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(parts, dict) or not parts:
        raise BuffetError(f"{index}: not an index of weights: weight_map is missing")
    names = sorted({str(name) for name in parts.values()})
    for name in names:
        if Path(name).name != name or not name.endswith((".safetensors", ".bin")):
            raise BuffetError(f"{index}: names {name!r}; only .safetensors and .bin files beside it are read")
        if not (index.parent / name).is_file():
            raise BuffetError(f"{index.parent / name}: no such file, but {index.name} names it")
    return [index.parent / name for name in names]


def _open_safetensors(path: Path) -> dict[str, Stored]:
    try:
        with path.open("rb") as raw:
            start = raw.read(8)
        if start.startswith((b"PK\x03\x04", b"\x80")) and not _is_header_length(path, start):
            raise BuffetError(
                f"{path}: a pickle or zip file, not safetensors; it was not opened: convert it first"
            )
        file = safe_open(str(path), framework="pt")
        headers = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise BuffetError(
            f"{path}: not a complete safetensors file (truncated or damaged): {one_line(error)}"
        ) from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror or error}") from None
    return {
        name: Stored(header.get_dtype(), tuple(header.get_shape()), partial(file.get_tensor, name))
        for name, header in headers.items()
    }


def _is_header_length(path: Path, start: bytes) -> bool:
    """Whether the first eight bytes can be what safetensors starts with: the length of its header."""
    return int.from_bytes(start, "little") <= path.stat().st_size - 8


def _open_torch(path: Path) -> dict[str, Stored]:
    """A PyTorch file, read as tensors and nothing else: any other object in it is refused, never built."""
    if torch.__version__ < SAFE_TORCH:
        raise BuffetError(
            f"{path}: PyTorch files are read with torch {SAFE_TORCH} or later, this is {torch.__version__}: "
            f"upgrade torch, or convert the file to {FILES[0]}"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        what = f"{found[1]} in it" if found else "it holds more than tensors, or is damaged"
        raise BuffetError(
            f"{path}: refused, nothing was executed: {what}; convert it to {FILES[0]}"
        ) from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise BuffetError(
            f"{path}: not a PyTorch file of tensors: {one_line(error).split('. ')[0][:200]}"
        ) from None
    if not isinstance(content, Mapping):
        raise BuffetError(f"{path}: holds a {type(content).__name__}, expected tensors by name")
    return in_memory(content)


def in_memory(tensors: Mapping[str, object]) -> dict[str, Stored]:
    """Tensors that are there already; other objects, such as packed quantised weights, by their type only."""
    return {
        name: Stored(_type(value), tuple(value.shape), value.detach)
        if isinstance(value, Tensor)
        else Stored(type(value).__name__, (), torch.Tensor)
        for name, value in tensors.items()
    }


def _type(tensor: Tensor) -> str:
    """The name of a stored type; sparse tensors, and those without data, have types of their own."""
    if tensor.is_meta or tensor.layout != torch.strided:
        return "meta (no data)" if tensor.is_meta else str(tensor.layout)
    return next((name for name, dtype in FLOATS.items() if dtype == tensor.dtype), str(tensor.dtype))


def read_tensors(stored: Mapping[str, Stored], architecture: Architecture, where: str) -> dict[str, Tensor]:
    """The float32 tensors of an architecture, by BERT's names: all of them, no other, every value finite.

    Every value is the one that is stored: a model proven with rounded weights would not be the one deployed.
    """
    found: dict[str, str] = {}
    for key in stored:
        if (name := architecture.name(key)) is None:
            continue
        if name in found:
            raise BuffetError(f"{where}: tensors {found[name]} and {key} are the same part of the network")
        found[name] = key
    shapes = architecture.stored_shapes()
    for key in found.values():
        if (dtype := stored[key].dtype) not in FLOATS:
            raise BuffetError(
                f"{where}: tensor {key} has type {dtype}: sparse or quantised weights are not supported; "
                f"supported: {', '.join(FLOATS)}"
            )
    _check_names(set(found), set(shapes), found, where)
    tensors = {}
    for name, expected in shapes.items():
        key = found[name]
        if (shape := stored[key].shape) != expected:
            raise BuffetError(
                f"{where}: tensor {key} has shape {list(shape)}, the configuration says {list(expected)}"
            )
        tensors[name] = _in_float32(stored[key].read().detach().cpu(), f"{where}: tensor {key}")
    return architecture.complete(tensors)


def _in_float32(original: Tensor, where: str) -> Tensor:
    """A copy with exactly the values of `original`, all of them finite; F16 and BF16 always fit."""
    tensor = original.to(torch.float32, copy=True)
    if bad := int((~torch.isfinite(tensor)).sum()):
        raise BuffetError(f"{where} has {bad} non-finite values (NaN or inf in float32)")
    if lost := int((tensor.to(original.dtype) != original).sum()):
        raise BuffetError(
            f"{where} is float64, and float32 would round {lost} of its values, but proofs are about weights "
            "as stored: convert the model to float32, save it again and deploy that"
        )
    return tensor


def _check_names(found: set[str], wanted: set[str], keys: Mapping[str, str], where: str) -> None:
    missing, unexpected = wanted - found, found - wanted
    if missing and not any(name.startswith("classifier.") for name in found):
        raise BuffetError(
            f"{where}: no classifier among the tensors: an encoder without its classification head, "
            "fine-tune it first"
        )
    if missing:
        raise BuffetError(
            f"{where}: missing tensors that the configuration calls for: {_names(missing)} (BERT's names)"
        )
    if unexpected:
        raise BuffetError(
            f"{where}: tensors that the configuration has no place for: {_names(keys[n] for n in unexpected)}"
        )


def _names(names: Iterable[str], shown: int = 3) -> str:
    ordered = sorted(one_line(name) for name in names)
    more = f" and {len(ordered) - shown} more" if len(ordered) > shown else ""
    return ", ".join(ordered[:shown]) + more
