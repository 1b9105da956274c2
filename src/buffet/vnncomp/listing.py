"""A list of instances, answered side by side, and the file of results, which is only ever appended to.

The list has rows of ``onnx,vnnlib,timeout``, paths counted from its directory, as the benchmarks of the
competition have them. Results have a header (`COLUMNS`) and a row per instance as it was finished; rows that
are there already are kept, so that an interrupted run resumes.
"""

from __future__ import annotations

import csv
import heapq
import io
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from buffet.errors import BuffetError, one_line, show
from buffet.experiments.workers import Done, Failed, LocalFleet, Ticket, dispatch, execute
from buffet.system.files import read_text, sync_directory, write_atomically
from buffet.vnncomp.instance import answer

COLUMNS = ("onnx", "vnnlib", "timeout", "result", "seconds", "reason")
RESULTS = ("unsat", "sat", "unknown", "timeout", "error")
GRACE = 30.0
"""Seconds after its time limit at which an instance that does not end is given up."""


@dataclass(frozen=True)
class Instance:
    """A network, a property, and the seconds to spend, as the list has them."""

    onnx: str
    vnnlib: str
    timeout: float


@dataclass(frozen=True)
class Row:
    """The answer to an instance."""

    instance: Instance
    result: str
    seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """An instance to answer, in any process."""

    instance: Instance
    directory: Path
    method: str
    certificate: Path | None = None  # where the proof of ``unsat`` is written

    def run(self) -> tuple[str, float, str]:
        given, directory = self.instance, self.directory
        files = directory / given.onnx, directory / given.vnnlib
        found = answer(*files, given.timeout, self.method, certificate=self.certificate)
        if found.interrupted:
            raise KeyboardInterrupt  # it is not answered, and is asked again by whoever continues the list
        return found.result, found.seconds, found.reason or found.note or ""


Progress = Callable[[int, int, Counter[str]], None]
"""Is told how many instances are done, of how many, and the answers so far."""


def read_instances(path: Path, timeout: float | None = None) -> list[Instance]:
    """The instances of a list; `timeout` is for rows that have none."""
    found = []
    for line, cells in _table(path):
        if len(cells) not in (2, 3) or not cells[0] or not cells[1]:
            raise BuffetError(f"{path}: line {line}: expected onnx,vnnlib,timeout; found {show(cells)}")
        if line == 1 and cells[0] == "onnx":
            continue
        seconds = _seconds(cells[2]) if len(cells) == 3 else timeout
        if seconds is None or not 0 < seconds < math.inf:
            raise BuffetError(f"{path}: line {line}: no time limit; add one in seconds, or give --timeout")
        found.append(Instance(cells[0], cells[1], seconds))
    if not found:
        raise BuffetError(f"{path}: no instances; expected rows of onnx,vnnlib,timeout")
    return list(dict.fromkeys(found))


def read_results(path: Path) -> list[Row]:
    """The rows of a file of results; an unfinished last line, left by an interruption, is not one."""
    text = read_text(path)
    whole, _, _ = text.rpartition("\n")
    try:
        table = list(csv.reader(io.StringIO(whole)))
    except csv.Error as error:
        raise BuffetError(f"{path}: not a file of results: {one_line(error)}") from None
    if not table or tuple(table[0]) != COLUMNS:
        raise BuffetError(f"{path}: not a file of results: it has to begin with {','.join(COLUMNS)}")
    rows = []
    for line, cells in enumerate(table[1:], 2):
        numbers = [_seconds(cells[i]) for i in (2, 4)] if len(cells) == len(COLUMNS) else []
        if len(numbers) < 2 or None in numbers or cells[3] not in RESULTS:
            raise BuffetError(f"{path}: line {line} is not a result; correct it or remove it")
        limit, seconds = (number or 0.0 for number in numbers)
        rows.append(Row(Instance(cells[0], cells[1], limit), cells[3], seconds, cells[5]))
    return rows


def run_list(
    instances: Sequence[Instance],
    directory: Path,
    out: Path,
    *,
    method: str,
    workers: int,
    threads: int,
    certificates: Path | None = None,
    progress: Progress = lambda done, total, counts: None,
) -> list[Row]:
    """The rows of all instances, in their order; those that `out` lacks are answered and appended to it.

    The proof of each that is ``unsat`` becomes a file in the directory `certificates`, if it is given.

    One worker is this process, so that an instance has all its cores; several are processes of their own.
    """
    known = {row.instance: row for row in read_results(out)} if out.exists() else {}
    _check_unchanged([i for i in instances if i in known], directory, out)
    _open(out, list(known.values()))
    missing = [instance for instance in instances if instance not in known]
    counts = Counter(known[i].result for i in instances if i in known)

    def settle(instance: Instance, news: Done | Failed) -> None:
        if isinstance(news, Done):
            result, seconds, reason = news.answer  # type: ignore[misc]
        else:
            late = news.status == "timeout"
            result, seconds = ("timeout", instance.timeout) if late else ("error", 0.0)
            reason = one_line(news.reason)
        row = known[instance] = Row(instance, result, round(seconds, 3), reason)
        counts[result] += 1
        _append(out, row)
        progress(sum(counts.values()), len(instances), counts)

    progress(sum(counts.values()), len(instances), counts)
    files = proof_files(instances, certificates)
    jobs = [Job(instance, directory, method, files.get(instance)) for instance in missing]
    if workers == 1:
        for job in jobs:
            settle(job.instance, execute(job))
    elif jobs:
        queue = [Ticket(number, job) for number, job in enumerate(jobs)]
        heapq.heapify(queue)
        longest = max(job.instance.timeout for job in jobs)
        dispatch(
            LocalFleet(workers, threads),
            queue,
            lambda ticket, news: settle(jobs[ticket.number].instance, news),
            limit=longest + GRACE,
        )
    return [known[instance] for instance in instances]


def _check_unchanged(answered: Sequence[Instance], directory: Path, out: Path) -> None:
    """Refuse to go on with answers about files that were written after them."""
    for name in dict.fromkeys(name for i in answered for name in (i.onnx, i.vnnlib)):
        path = directory / name
        if path.exists() and path.stat().st_mtime_ns > out.stat().st_mtime_ns:
            raise BuffetError(
                f"{out}: {path} was written after it, so its answers may be about another file; remove the"
                " rows about it, or give another --out"
            )


def proof_files(instances: Sequence[Instance], directory: Path | None) -> dict[Instance, Path]:
    """Where the proof of every instance is written: a file named after network and property."""
    if directory is None:
        return {}
    stems = {i: [Path(f).name.split(".")[0] for f in (i.onnx, i.vnnlib)] for i in instances}
    names = {
        i: vnnlib if vnnlib.startswith(onnx) else f"{onnx}-{vnnlib}" for i, (onnx, vnnlib) in stems.items()
    }
    if twice := [name for name, count in Counter(names.values()).items() if count > 1]:
        raise BuffetError(f"{directory}: two instances would be proven in {show(twice[0])}.safetensors")
    directory.mkdir(parents=True, exist_ok=True)
    return {instance: directory / f"{name}.safetensors" for instance, name in names.items()}


def _table(path: Path) -> list[tuple[int, list[str]]]:
    """The lines of a file with commas that are not empty, without blanks around the cells."""
    try:
        lines = list(csv.reader(io.StringIO(read_text(path)), strict=True))
    except csv.Error as error:
        raise BuffetError(f"{path}: not a list of instances: {one_line(error)}") from None
    return [(n, [cell.strip() for cell in cells]) for n, cells in enumerate(lines, 1) if any(cells)]


def _seconds(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _open(path: Path, rows: Iterable[Row]) -> None:
    """A file that begins with these rows: an unfinished line behind them is cut off."""
    text = ",".join(COLUMNS) + "\n" + "".join(map(_line, rows))
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        write_atomically(path, text)


def _append(path: Path, row: Row) -> None:
    """A row more, on the disk before the next instance begins."""
    with path.open("a", encoding="utf-8", newline="") as file:
        file.write(_line(row))
        file.flush()
        os.fsync(file.fileno())
    sync_directory(path.parent)


def _line(row: Row) -> str:
    given = row.instance
    cells = (given.onnx, given.vnnlib, f"{given.timeout:g}", row.result, f"{row.seconds:.3f}", row.reason)
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerow(cells)
    return written.getvalue()
