"""Files that are written whole or not at all, whatever interrupts the writer, a power cut included.

A rename alone does not give that: a file system may bring the new name to the disk before the content, and a
power cut then leaves an empty file where a good one was. So content goes to the disk first, then the name,
then the directory that holds the name.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from buffet.errors import BuffetError

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES)
"""What a system answers that has no such thing as bringing a directory to the disk, or does not let us."""


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        _refuse_devices(path)
        return path.read_bytes()
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The text of a file in UTF-8."""
    try:
        _refuse_devices(path)
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise BuffetError(f"{path}: not UTF-8 (byte {error.start})") from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None


def _refuse_devices(path: Path) -> None:
    """Reading one may never end; pipes do."""
    if path.is_char_device() or path.is_block_device():
        raise BuffetError(f"{path}: cannot be read: is a device, not a file")


def check_writable(path: Path) -> None:
    """Refuse, before any work is done, a path that `write_atomically` could not write."""
    if path.exists() and not path.is_file():
        raise BuffetError(f"{path}: exists and is not a file; choose another name")
    if not path.parent.is_dir():
        raise BuffetError(f"{path}: there is no directory {path.parent}; create it first")
    probe = _partial(path)
    try:
        write_synced(probe, "")
        probe.unlink()
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write the whole file or nothing: a temporary file beside it is renamed once it is on the disk."""
    partial = _partial(path)
    try:
        write_synced(partial, content)
        # A link is followed, so that it stays a link.
        rename_synced(partial, path.resolve())
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()


def write_synced(path: Path, content: str | bytes) -> None:
    """Write a new file in place of what a killed run may have left there, and bring its content to the disk.

    An interruption may leave a part of it: it gets its real name afterwards, by `rename_synced`.
    """
    path.unlink(missing_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk names none
        raise


def rename_synced(source: Path, target: Path) -> None:
    """Give a file or directory, whose content is on the disk, its name; when this returns it keeps it."""
    os.replace(source, target)
    sync_directory(target.parent)


def sync_directory(directory: Path) -> None:
    """Bring the names in a directory to the disk, where the system can do that."""
    try:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise


def _partial(path: Path) -> Path:
    target = path.resolve()
    return target.with_name(f".{target.name[:200]}.{os.getpid()}.part")
