"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from buffet.errors import BuffetError


def check_writable(path: Path) -> None:
    """Refuse, before any work is done, a path that `write_atomically` could not write."""
    if path.exists() and not path.is_file():
        raise BuffetError(f"{path}: exists and is not a file; choose another name")
    if not path.parent.is_dir():
        raise BuffetError(f"{path}: there is no directory {path.parent}; create it first")
    probe = _partial(path)
    try:
        probe.open("x").close()
        probe.unlink()
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write the whole file or nothing: a temporary file beside it is renamed at the end."""
    partial = _partial(path)
    try:
        with partial.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # A link is followed, so that it stays a link.
        os.replace(partial, path.resolve())
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def _partial(path: Path) -> Path:
    target = path.resolve()
    return target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
