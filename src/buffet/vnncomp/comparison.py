"""Answers held against those of another verifier."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from buffet.errors import BuffetError, one_line
from buffet.system.files import read_text
from buffet.vnncomp.listing import Row

SAME = {"holds": "unsat", "verified": "unsat", "safe": "unsat", "violated": "sat", "falsified": "sat"}
"""Older names of answers."""
DECIDED = ("unsat", "sat")


@dataclass(frozen=True)
class Peer:
    """Another verifier's answers, by (network, property) or, where no network is named, by property."""

    name: str
    answers: dict[tuple[str | None, str], str]

    def answer(self, row: Row) -> str | None:
        """Its answer to the same instance; None where it has none."""
        onnx, vnnlib = _stem(row.instance.onnx), _stem(row.instance.vnnlib)
        return self.answers.get((onnx, vnnlib), self.answers.get((None, vnnlib)))


@dataclass(frozen=True)
class Comparison:
    """Who decides what: properties, by the names of their files."""

    peer: str
    common: int  # instances that the peer has an answer to
    both: int  # decided by both, alike
    only_ours: tuple[str, ...]
    only_theirs: tuple[str, ...]
    contradictions: tuple[str, ...]  # one says sat, the other unsat


def read_peer(path: Path) -> Peer:
    """Answers from a table with a header: a column ``vnnlib``, perhaps ``onnx``, and one with the answers.

    That is the column ``result``, or else the first other one, whose name is taken for the verifier's.
    """
    try:
        lines = list(csv.reader(io.StringIO(read_text(path))))
    except csv.Error as error:
        raise BuffetError(f"{path}: not a table: {one_line(error)}") from None
    table = [[cell.strip() for cell in cells] for cells in lines if cells]
    header = table[0] if table else []
    others = [name for name in header if name not in ("onnx", "vnnlib", "timeout", "seconds", "reason")]
    if "vnnlib" not in header or not others:
        raise BuffetError(f"{path}: expected a table whose header has vnnlib and result")
    column = "result" if "result" in others else others[0]
    answers: dict[tuple[str | None, str], str] = {}
    for line, cells in enumerate(table[1:], 2):
        if len(cells) != len(header):
            raise BuffetError(f"{path}: line {line} has {len(cells)} columns, the header {len(header)}")
        row = dict(zip(header, cells, strict=True))
        onnx = _stem(row["onnx"]) if "onnx" in row else None
        said = row[column].lower()
        answers[onnx, _stem(row["vnnlib"])] = SAME.get(said, said)
    return Peer(path.stem if column == "result" else column, answers)


def compare(rows: Sequence[Row], peer: Peer) -> Comparison:
    """What each of the two decides of the instances that both were asked about."""
    pairs = [(_stem(row.instance.vnnlib), row.result, peer.answer(row)) for row in rows]
    asked = [(name, ours, theirs) for name, ours, theirs in pairs if theirs is not None]
    decided = [(name, ours, theirs) for name, ours, theirs in asked if ours in DECIDED and theirs in DECIDED]
    return Comparison(
        peer=peer.name,
        common=len(asked),
        both=sum(ours == theirs for _, ours, theirs in decided),
        only_ours=tuple(name for name, ours, theirs in asked if ours in DECIDED and theirs not in DECIDED),
        only_theirs=tuple(name for name, ours, theirs in asked if theirs in DECIDED and ours not in DECIDED),
        contradictions=tuple(name for name, ours, theirs in decided if ours != theirs),
    )


def _stem(path: str) -> str:
    """The name of a file without its directory and endings."""
    return PurePath(path).name.removesuffix(".gz").removesuffix(".vnnlib").removesuffix(".onnx")
