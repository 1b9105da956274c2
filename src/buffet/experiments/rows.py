"""The rows of a sweep: what is known about every task (`store` has the file they are in)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from buffet.experiments.store import RowFile, StoredRow, open_store, read_store
from buffet.report import Versions


def _norm(text: str) -> str:
    try:
        if float(text) >= 1:
            return text
    except ValueError:
        pass
    raise ValueError(f"norm is {text!r:.60}: expected a number of at least 1, or inf")


class Row(StoredRow):
    """What is known about one task. Numbers are exact; infinity (no attack found) is None."""

    work: ClassVar[str] = "sweep"

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
    what: Literal["radius"] = "radius"  # rows of earlier versions may be about other things
    certified: float | None  # proven up to here
    attacked: float | None  # a move of this size was seen to change the answer
    margin: float | None  # proven at `certified`
    evaluations: int | None
    seconds: float | None  # of the batch: of the processor, or of the wall where a device computes
    task_seconds: float | None  # this task's share of it
    attack_seconds: float | None  # of the batch, once for all methods
    batch: int  # tasks in the batch
    seed: int
    threads: int
    config: str  # digest of the configuration
    finished: str  # UTC
    versions: Versions


def read_rows(path: Path) -> list[Row]:
    """The rows of a file, one per task; see `read_store`."""
    return read_store(path, Row)


def open_rows(path: Path) -> AbstractContextManager[RowFile[Row]]:
    """The file of rows, to be added to; see `open_store`."""
    return open_store(path, Row)
