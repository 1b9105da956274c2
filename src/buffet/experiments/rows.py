"""The file of rows: one line of JSON per task, only ever appended to.

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
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from buffet.errors import BuffetError, explain, show
from buffet.report import Versions
from buffet.system.files import read_bytes, sync_directory

if TYPE_CHECKING:
    import polars

START = b'{"key":"'
"""How every line begins."""
FIRST = re.compile(rb'\{"key":"[^"\\]+","status":"[a-z]+","reason":')
"""How an unfinished line begins that is all there is of a file: nobody else's file does by accident."""
CHECKED = re.compile(rb'(\{.*),"check":"([0-9a-f]{16})"\}')
"""A whole line, in two groups: what is checked, and its check."""
FIX = "left as it is: correct the line or remove it (its task is then done again), or give another file"


def _norm(text: str) -> str:
    try:
        if float(text) >= 1:
            return text
    except ValueError:
        pass
    raise ValueError(f"norm is {text!r:.60}: expected a number of at least 1, or inf")


class Row(BaseModel):
    """What is known about one task. Numbers are exact; infinity (no attack found) is None."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=(), allow_inf_nan=False)

    key: str
    status: Literal["ok", "failed", "timeout"]
    reason: str | None  # of a failure, or why an answer lacks its attack
    model: str
    model_digest: str
    sentence: str
    sentence_tokens: tuple[str, ...]
    gold: int | None
    label: int
    label_name: str
    clean_margin: float
    words: tuple[int, ...]
    tokens: tuple[str, ...]
    norm: Annotated[str, AfterValidator(_norm)]
    method: str
    parts: dict[str, str | int | float | None]
    what: Literal["radius", "verify"]
    eps: float | None  # verified at
    share: float | None  # of the reference's radius
    reference: float | None  # the reference's radius
    certified: float | None  # proven up to here (with verify: eps or 0)
    attacked: float | None  # a move of this size was seen to change the answer
    verdict: Literal["certified", "falsified", "unknown"] | None
    margin: float | None  # proven at `certified`; with verify: at eps
    evaluations: int | None
    seconds: float | None  # of the batch
    task_seconds: float | None  # this task's share of it
    attack_seconds: float | None  # of the batch, once for all methods
    batch: int  # tasks in the batch
    seed: int
    threads: int
    config: str  # digest of the configuration
    finished: str  # UTC
    versions: Versions

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    def line(self) -> str:
        """The row as it is written: JSON on one line, the check at its end."""
        text = json.dumps(self.model_dump(mode="json"), allow_nan=False, separators=(",", ":"))
        return seal(text.encode()).decode() + "\n"


def seal(text: bytes) -> bytes:
    """A JSON object with a check of all that it holds as its last value."""
    body = text.removesuffix(b"}")
    return body + b',"check":"' + _check(body) + b'"}'


def _check(body: bytes) -> bytes:
    """A hash that is short: it is there for accidents, not for forgers, who could compute it again."""
    return hashlib.sha256(body).hexdigest()[:16].encode()


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, one per task; a torn end is skipped, and nothing is written.

    Of several rows of one task the first success counts, or else the first of all.
    """
    return distinct(Content.of(path, read_bytes(path)).rows)


def distinct(rows: Iterable[Row]) -> list[Row]:
    """One row per key: the first that succeeded, or else the first."""
    best: dict[str, Row] = {}
    for row in rows:
        if row.key not in best or (row.ok and not best[row.key].ok):
            best[row.key] = row
    return list(best.values())


def load_rows(path: Path) -> polars.DataFrame:
    """The rows of a file as a table; needs the extra ``tables``."""
    try:
        import polars
    except ImportError:
        raise BuffetError("tables need polars: pip install 'buffet[tables]'") from None
    floats = ("eps", "share", "reference", "certified", "attacked", "margin", "seconds", "task_seconds")
    types: dict[str, type[polars.DataType]] = {
        **dict.fromkeys((*floats, "attack_seconds", "clean_margin"), polars.Float64),
        **dict.fromkeys(("gold", "label", "evaluations", "batch"), polars.Int64),
        **dict.fromkeys(("reason", "verdict"), polars.String),
    }
    records = [row.model_dump(mode="json") for row in read_rows(path)]
    if not records:
        raise BuffetError(f"{path}: has no rows yet")
    return polars.DataFrame(records, schema_overrides=types, infer_schema_length=None)


@dataclass(frozen=True)
class Content:
    """What a file of rows holds: its rows in order, and how many bytes they take; a torn end follows."""

    rows: tuple[Row, ...]
    size: int
    ended: bool = True  # False: the newline of the last row is missing

    @classmethod
    def of(cls, path: Path, content: bytes) -> Content:
        """The rows in `content`: every line as it was written, but for a torn end. Anything else is refused.

        A last line that lacks nothing but its newline is a row like the others.
        """
        *lines, end = content.split(b"\n")
        rows = tuple(_row(path, number, line) for number, line in enumerate(lines, 1))
        size = len(content) - len(end)
        if _is_torn(end, bool(rows)):
            return cls(rows, size)
        last = end.rstrip(b"\0") or end
        return cls((*rows, _row(path, len(lines) + 1, last)), size + len(last), ended=False)


def _row(path: Path, number: int, line: bytes) -> Row:
    """The row on a line, as it was written, or else one line that says what is wrong with it."""
    where = f"{path}: line {number}"
    parts = CHECKED.fullmatch(line)
    if not parts and (not line.startswith(START) or b'"check":' in line):
        part = "ends" if line.startswith(START) else "begins"
        found = show((line[-40:] if part == "ends" else line[:40]).decode(errors="replace"))
        raise BuffetError(f"{where} is not a row of a sweep: it {part} with {found}; {FIX}")
    if parts and parts[2] != _check(parts[1]):
        raise BuffetError(f"{where} is not what was written there: its check does not fit; {FIX}")
    try:
        row = Row.model_validate_json(line)
    except ValidationError as error:
        raise BuffetError(f"{where} is not a row of a sweep: {explain(error)}; {FIX}") from None
    if not parts:
        raise BuffetError(
            f"{where} has no check, as in files of earlier versions: nothing shows that its numbers are those"
            " that were written; read it with the version that wrote it, or run the sweep into another file"
        )
    return row


def _is_torn(end: bytes, after_rows: bool) -> bool:
    """Whether `end`, behind the last newline, is what an interrupted append leaves: nothing, or a torn end.

    That is the beginning of one line of JSON, never a whole object, and then nothing or NUL bytes. Where no
    row goes before it, it has to be long enough to be told from a file of something else.
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


class RowFile:
    """A file of rows that this process alone writes; made by `open_rows`."""

    def __init__(self, path: Path, descriptor: int, content: Content) -> None:
        self.path, self.rows = path, tuple(distinct(content.rows))
        self._descriptor, self._size, self._ended = descriptor, content.size, content.ended

    def append(self, rows: Sequence[Row]) -> None:
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
def open_rows(path: Path) -> Iterator[RowFile]:
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
                f"{path}: another sweep is writing it; wait for that, or use another out"
            ) from None
        except OSError as error:
            raise BuffetError(f"{path}: cannot be locked: {error.strerror}; use a local disk") from None
        yield RowFile(path, descriptor, _repaired(path, descriptor))
    finally:
        os.close(descriptor)


def _repaired(path: Path, descriptor: int) -> Content:
    """What an open file holds; its torn end is cut off, once all the rest has turned out to be rows."""
    try:
        with open(descriptor, "rb", closefd=False) as file:
            found = file.read()
        content = Content.of(path, found)
        if len(found) > content.size:
            os.ftruncate(descriptor, content.size)
        sync_directory(path.parent)
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    return content
