"""Files of rows: one line of JSON each, only ever appended to.

One process writes, whole batches at a time, each safely on the disk before the next begins. Every line ends
with a check, a hash of all that comes before it, so a line that was changed later is noticed.

Whatever interrupts an append leaves a beginning of its batch: whole lines, then at most one unfinished line,
behind which some file systems leave NUL bytes after a power cut. That unfinished last line, and nothing else,
is a *torn end*: readers skip it, and the next writer cuts it off. Any other line that is not a row as it
was written is refused, before anything is touched, by readers and writers alike.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from buffet.errors import BuffetError, explain, show
from buffet.system.files import read_bytes, sync_directory

START = b'{"key":"'
"""How every line begins."""
FIRST = re.compile(rb'\{"key":"[^"\\]+","status":"[a-z]+","reason":')
"""How an unfinished first line begins: no other file begins like that by accident."""
CHECKED = re.compile(rb'(\{.*),"check":"([0-9a-f]{16})"\}')
"""A whole line, in two groups: what is checked, and its check."""
FIX = "left as it is: correct the line or remove it (its task is then done again), or give another file"


class StoredRow(BaseModel):
    """What is known about one task, under a key that means it wherever it is asked. Numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False)

    work: ClassVar[str]  # what writes such rows: sweep, evaluation

    key: str
    status: Literal["ok", "failed", "timeout"]
    reason: str | None  # of a failure, or what an answer lacks

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def line(self) -> str:
        """The row as it is written: JSON on one line, the check at its end."""
        text = json.dumps(self.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
        return seal(text.encode()).decode() + "\n"


R = TypeVar("R", bound=StoredRow)
"""The kind of rows in a file."""


def seal(text: bytes) -> bytes:
    """A JSON object with a check of all that it holds as its last value."""
    body = text.removesuffix(b"}")
    return body + b',"check":"' + _check(body) + b'"}'


def _check(body: bytes) -> bytes:
    """A hash that is short: it is there for accidents, not for forgers, who could compute it again."""
    return hashlib.sha256(body).hexdigest()[:16].encode()


def read_store(path: Path, kind: type[R]) -> list[R]:
    """The rows of a file, one per task; a torn end is skipped, and nothing is written.

    Of several rows of one task the first success counts, or else the first of all.
    """
    return distinct(Content.of(path, read_bytes(path), kind).rows)


def distinct(rows: Iterable[R]) -> list[R]:
    """One row per key: the first that succeeded, or else the first."""
    best: dict[str, R] = {}
    for row in rows:
        if row.key not in best or (row.ok and not best[row.key].ok):
            best[row.key] = row
    return list(best.values())


@dataclass(frozen=True)
class Content(Generic[R]):
    """What a file of rows holds: its rows in order, and how many bytes they take; a torn end follows."""

    rows: tuple[R, ...]
    size: int
    ended: bool = True  # False: the newline of the last row is missing

    @classmethod
    def of(cls, path: Path, content: bytes, kind: type[R]) -> Content[R]:
        """The rows in `content`: every line as it was written, but for a torn end. Anything else is refused.

        A last line that lacks nothing but its newline is a row like the others.
        """
        *lines, end = content.split(b"\n")
        rows = tuple(_row(path, number, line, kind) for number, line in enumerate(lines, 1))
        size = len(content) - len(end)
        if _is_torn(end, bool(rows)):
            return cls(rows, size)
        last = end.rstrip(b"\0") or end
        return cls((*rows, _row(path, len(lines) + 1, last, kind)), size + len(last), ended=False)


def _row(path: Path, number: int, line: bytes, kind: type[R]) -> R:
    """The row on a line, as it was written, or else one line that says what is wrong with it."""
    where = f"{path}: line {number}"
    parts = CHECKED.fullmatch(line)
    if not parts and (not line.startswith(START) or b'"check":' in line):
        part = "ends" if line.startswith(START) else "begins"
        found = show((line[-40:] if part == "ends" else line[:40]).decode(errors="replace"))
        raise BuffetError(f"{where} is not a row of {_a(kind.work)}: it {part} with {found}; {FIX}")
    if parts and parts[2] != _check(parts[1]):
        raise BuffetError(f"{where} is not what was written there: its check does not fit; {FIX}")
    try:
        row = kind.model_validate_json(line)
    except ValidationError as error:
        raise BuffetError(f"{where} is not a row of {_a(kind.work)}: {explain(error)}; {FIX}") from None
    if not parts:
        raise BuffetError(
            f"{where} has no check, as in files of earlier versions: nothing shows that its numbers are those"
            f" that were written; read it with the version that wrote it, or run the {kind.work} into another"
            " file"
        )
    return row


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _is_torn(end: bytes, after_rows: bool) -> bool:
    """Whether `end`, behind the last newline, is what an interrupted append leaves: nothing, or a torn end.

    That is the beginning of one line of JSON, never a whole object, and then nothing or NUL bytes. Where no
    row goes before it, it has to be long enough to be recognised as one of ours.
    """
    if not end:
        return True
    text = end.rstrip(b"\0")
    begins = START.startswith(text[: len(START)]) if after_rows else FIRST.match(text)
    if not begins or not re.fullmatch(rb"[ -~]*", text) or CHECKED.match(text):
        return False
    try:
        json.JSONDecoder().raw_decode(text.decode())
    except json.JSONDecodeError:
        return True
    except (ValueError, RecursionError):  # numbers and nesting beyond what any row has
        return False
    return False


class RowFile(Generic[R]):
    """A file of rows that this process alone writes; made by `open_store`."""

    def __init__(self, path: Path, descriptor: int, content: Content[R]) -> None:
        self.path, self.rows = path, tuple(distinct(content.rows))
        self._descriptor, self._size, self._ended = descriptor, content.size, content.ended

    def append(self, rows: Sequence[R]) -> None:
        """Write the rows; when this returns they are on the disk, and if it raises none of them is."""
        lines = "".join(row.line() for row in rows)
        data = (lines if self._ended else "\n" + lines).encode()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise BuffetError(
                f"{self.path}: cannot be written: {error.strerror}; fix that and run the same command"
                " again, it continues"
            ) from None
        self._size, self._ended = self._size + len(data), True


@contextmanager
def open_store(path: Path, kind: type[R]) -> Iterator[RowFile[R]]:
    """The file of rows, made if there is none, locked against a second writer.

    All of it is checked first, and refused untouched if it is anything but rows; only then its torn end is
    cut off.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except FileNotFoundError:
        raise BuffetError(f"{path}: there is no directory {path.parent}; create it first") from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise BuffetError(f"{path}: is not a regular file; use another out")
        try:
            # The system gives the lock back however this process ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuffetError(
                f"{path}: another {kind.work} is writing it; wait for that, or use another out"
            ) from None
        except OSError as error:
            raise BuffetError(f"{path}: cannot be locked: {error.strerror}; use a local disk") from None
        yield RowFile(path, descriptor, _repaired(path, descriptor, kind))
    finally:
        os.close(descriptor)


def _repaired(path: Path, descriptor: int, kind: type[R]) -> Content[R]:
    """What an open file holds; its torn end is cut off, once all the rest has turned out to be rows."""
    try:
        with open(descriptor, "rb", closefd=False) as file:
            found = file.read()
        content = Content.of(path, found, kind)
        if len(found) > content.size:
            os.ftruncate(descriptor, content.size)
        sync_directory(path.parent)
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    return content
