"""Every case in a fresh single-threaded process, within limits: what does not fit says so in its row."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from buffet.errors import BuffetError
from buffet.lab.bench.cases import BenchCase, case_from
from buffet.lab.bench.measuring import Measurement
from buffet.report import Versions

FORMAT = "buffet bench 1"
WAITING = 10
"""How many times its limit of CPU time a case may take on a busy machine."""
TOO_LONG = "more than {:g} s"
MEASUREMENT = TypeAdapter(Measurement)
NO_MEMORY = (
    *("can't allocate memory", "MemoryError", "out of memory", "Cannot allocate memory", "bad_alloc"),
    "error return without exception set",  # there was no memory for the exception
)


@dataclass(frozen=True)
class BenchLimits:
    """What one case may take."""

    seconds: float = 60.0  # of CPU time, all repetitions together
    memory: int = 8 << 30  # bytes

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise BuffetError(f"--limit: got {self.seconds:g}; give a number of seconds above 0")


@dataclass(frozen=True)
class BenchRow:
    """A case and its measurement, or the reason why there is none."""

    case: BenchCase
    measurement: Measurement | None = None
    reason: str | None = None


def run_cases(
    cases: Sequence[BenchCase], limits: BenchLimits | None = None, device: str = "cpu"
) -> Iterator[BenchRow]:
    """Measure case by case; a row is there as soon as its case is done."""
    for case in cases:
        found = _in_process(case, limits or BenchLimits(), device)
        if isinstance(found, str):
            yield BenchRow(case, reason=found)
        else:
            yield BenchRow(case, Measurement(**{**found, "samples": tuple(found["samples"])}))


def _in_process(case: BenchCase, limits: BenchLimits, device: str) -> dict[str, Any] | str:
    """What a process of its own measured, or in a few words why it could not."""
    asked = {"case": asdict(case), **asdict(limits), "device": device}
    command = [sys.executable, "-m", "buffet.lab.bench.measuring", json.dumps(asked)]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env={**os.environ, **threads},
            timeout=WAITING * limits.seconds + 60,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TOO_LONG.format(limits.seconds)
    if done.returncode == -signal.SIGXCPU:
        return TOO_LONG.format(limits.seconds)
    if done.returncode:
        if done.returncode == -signal.SIGKILL or any(words in done.stderr for words in NO_MEMORY):
            return f"more than {limits.memory / (1 << 30):.3g} GB"
        return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return dict(json.loads(done.stdout))


def document(rows: Sequence[BenchRow], device: str) -> dict[str, Any]:
    """Measurements as JSON, with what they were made on."""
    return {
        "format": FORMAT,
        "versions": Versions.current().model_dump(),
        "machine": {"processor": _processor(), "system": platform.platform(), "device": device},
        "rows": [asdict(row) for row in rows],
    }


def read_document(text: str, where: str) -> list[BenchRow]:
    """The rows of a document that `document` has made."""
    try:
        content = json.loads(text)
        if content["format"] != FORMAT:
            raise BuffetError(
                f"{where}: its format is {content['format']!r:.60}, not {FORMAT!r}: measure again"
            )
        return [
            BenchRow(
                case_from(row["case"]),
                MEASUREMENT.validate_python(m) if (m := row["measurement"]) else None,
                None if row["reason"] is None else str(row["reason"]),
            )
            for row in content["rows"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BuffetError(f"{where}: no measurements; give a file that 'buffet bench --json' wrote") from None


def _processor() -> str:
    """The name of the processor, as the system gives it."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
