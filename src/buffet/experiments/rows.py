"""The file of rows: one line of JSON per task, only ever appended to.

One process writes, whole batches at a time, each safely on the disk before the next begins. Whatever
interrupts it, the file then holds complete lines and at most one torn end, which the next start cuts off.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from buffet.errors import BuffetError
from buffet.loading.config import explain
from buffet.report import Versions

if TYPE_CHECKING:
    import polars

START = b'{"key":"'
"""How every line begins, by which a file of rows is recognised."""


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
        return json.dumps(self.model_dump(mode="json"), allow_nan=False, separators=(",", ":")) + "\n"


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, one per task; a torn end is passed over.

    Of several rows of one task the first success counts, or else the first of all.
    """
    return distinct(_parsed(path, _read(path)))


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


def _read(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror}") from None
    start = content[: len(START)].rstrip(b"\0")
    if not START.startswith(start):
        raise BuffetError(f"{path}: line 1 is not a row of a sweep; give another file")
    return content[: _whole(content)]


def _whole(content: bytes) -> int:
    """The length of the complete lines: without what follows the last newline, or lines never written."""
    end = content.rfind(b"\n") + 1
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        with suppress(ValueError, RecursionError):
            json.loads(content[start:end])
            break
        end = start
    return end


def _parsed(path: Path, content: bytes) -> Iterator[Row]:
    for number, line in enumerate(content.splitlines(), 1):
        try:
            yield Row.model_validate_json(line)
        except ValidationError as error:
            raise BuffetError(f"{path}: line {number} is not a row of a sweep: {explain(error)}") from None


class RowFile:
    """A file of rows that this process alone writes; made by `open_rows`."""

    def __init__(self, path: Path, descriptor: int, rows: Sequence[Row], size: int) -> None:
        self.path, self.rows = path, tuple(rows)
        self._descriptor, self._size = descriptor, size

    def append(self, rows: Sequence[Row]) -> None:
        """Write the rows; when this returns they are on the disk, and if it raises none of them is."""
        data = "".join(row.line() for row in rows).encode()
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise BuffetError(
                f"{self.path}: cannot be written: {error.strerror}; mend that and run the same command"
                " again, it continues"
            ) from None
        self._size += len(data)


@contextmanager
def open_rows(path: Path) -> Iterator[RowFile]:
    """The file of rows, made if there is none, its torn end cut off, locked against a second writer."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except FileNotFoundError:
        raise BuffetError(f"{path}: there is no directory {path.parent}; create it first") from None
    except OSError as error:
        raise BuffetError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        try:
            # The system gives the lock back however this process ends.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuffetError(
                f"{path}: another sweep is writing it; wait for that, or use another out"
            ) from None
        except OSError as error:
            raise BuffetError(f"{path}: cannot be locked: {error.strerror}; use a local disk") from None
        content = _read(path)
        os.ftruncate(descriptor, len(content))
        _sync_directory(path.parent)
        yield RowFile(path, descriptor, distinct(_parsed(path, content)), len(content))
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    """Make sure that a new file is still there after a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
