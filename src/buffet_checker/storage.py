"""Reads regular files of bounded size, and safetensors in them: a header and arrays, nothing else.

The reader is strict, as a certificate may be hostile: names are unique, arrays lie one after the other and
fill the file, types are known, sizes are what the shapes say. Nothing is allocated before that is checked.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from buffet_checker.errors import BadInputError

TYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}
LARGEST_FILE, LARGEST_TEXT = 16 << 30, 64 << 20
"""Bytes of a file that is read at all: of weights or a certificate, and of JSON or a vocabulary."""
LARGEST_HEADER = 64 << 20
LARGEST_AXES = 8


@dataclass(frozen=True)
class Stored:
    """The arrays of a file, by name, and the texts in its header."""

    tensors: dict[str, npt.NDArray[Any]]
    metadata: dict[str, str]


def read_bytes(path: Path, limit: int = LARGEST_FILE) -> bytes:
    """The content of a regular file, or of one that a link leads to.

    Devices, pipes and directories are refused unopened, as reading them may never end.
    """
    try:
        _check_regular(path, os.stat(path), limit)
        # should it become a pipe in the meantime, opening it does not wait for a writer
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(handle, "rb") as file:
            found = os.fstat(handle)
            _check_regular(path, found, limit)
            content = file.read(found.st_size + 1) or b""
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # no name of a file
        raise BadInputError(f"{str(path)!r:.80}: cannot be read: {error}") from None
    if len(content) != found.st_size:
        raise BadInputError(f"{path}: cannot be read: its size changes while it is read")
    return content


def _check_regular(path: Path, found: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise BadInputError(f"{path}: cannot be read: not a regular file")
    if found.st_size > limit:
        raise BadInputError(f"{path}: has {found.st_size} bytes, larger than the {limit} that are read")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def parse_json(text: str | bytes, where: str) -> Any:
    """A JSON value in which no object names a key twice and every number is finite."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a key is there twice")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no number")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise BadInputError(f"{where}: not valid JSON: {' '.join(str(error).split())[:120]}") from None


def parse(content: bytes, where: str) -> Stored:
    """The arrays of a safetensors file (views, not copies)."""

    def bad(reason: str) -> BadInputError:
        return BadInputError(f"{where}: not a complete safetensors file: {reason}")

    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or not 2 <= size <= min(len(content) - 8, LARGEST_HEADER):
        raise bad("its header is longer than the file")
    header = parse_json(content[8 : 8 + size], where)
    if not isinstance(header, dict):
        raise bad("its header is no object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise bad("its metadata are not texts")
    entries: list[tuple[int, int, str, Any, tuple[int, ...]]] = []
    for name, entry in header.items():
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            raise bad(f"entry {name[:80]!r}")
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not _counts(shape) or 0 in shape or len(shape) > LARGEST_AXES:
            raise bad(f"shape of {name[:80]!r}")
        if not _counts(offsets) or len(offsets) != 2:
            raise bad(f"offsets of {name[:80]!r}")
        if not isinstance(dtype, str) or dtype not in TYPES:
            raise BadInputError(
                f"{where}: {name[:80]!r} has type {str(dtype)[:20]}; read are: {', '.join(TYPES)}"
            )
        if offsets[1] - offsets[0] != math.prod(shape) * np.dtype(TYPES[dtype]).itemsize:
            raise bad(f"size of {name[:80]!r}")
        entries.append((offsets[0], offsets[1], name, TYPES[dtype], tuple(shape)))
    place = 0
    tensors: dict[str, npt.NDArray[Any]] = {}
    for start, end, name, kind, shape in sorted(entries, key=lambda e: e[:2]):
        if start != place or 8 + size + end > len(content):
            raise bad(f"{name[:80]!r} is not where the one before it ends")
        place = end
        tensors[name] = np.frombuffer(content, kind, math.prod(shape), 8 + size + start).reshape(shape)
    if 8 + size + place != len(content):
        raise bad("it goes on after the last array")
    return Stored(tensors, metadata)


def _counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 48 for v in values)
