"""What an interrupted run leaves behind: one safetensors file beside the output, numbers and no code.

A run that resumes from it ends with the same weights as one that was never interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from buffet.errors import BuffetError, explain, one_line
from buffet.system.files import rename_synced, write_synced


def resume_file(out: Path) -> Path:
    """Where the run that writes `out` keeps its last snapshot."""
    return out.with_name(f"{out.name}.resume.safetensors")


Tally = Annotated[int, Field(ge=0, lt=1 << 40)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
BROKEN = (SafetensorError, OSError, ValueError, KeyError, TypeError, RuntimeError)
"""What is raised by a file that is not what was written, `RecursionError` included."""


@dataclass(frozen=True)
class Position:
    """How far a run has come."""

    epoch: Tally = 1  # the running one, from 1
    batch: Tally = 0  # batches of this epoch that are done
    step: Tally = 0  # optimiser steps that are done
    total: Finite = 0.0  # sum of this epoch's losses so far
    losses: tuple[Finite, ...] = ()  # of the epochs that are done, as are the next
    accuracies: tuple[Finite, ...] = ()
    seconds: Finite = 0.0

    @property
    def best_epoch(self) -> int:
        """The first epoch with the best dev accuracy; 0 before the end of the first."""
        return self.accuracies.index(max(self.accuracies)) + 1 if self.accuracies else 0


POSITION = TypeAdapter(Position)


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run in the middle: where it is, and every number it goes on from."""

    at: Position
    tensors: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Store:
    """Where the snapshots of one run are kept; `identity` says which run it is."""

    path: Path
    identity: Mapping[str, Any]

    @classmethod
    def beside(cls, out: Path, identity: Mapping[str, Any]) -> Store:
        """The store of the run that writes `out`."""
        return cls(resume_file(out), identity)

    def save(self, snapshot: Snapshot) -> None:
        """Replace the last snapshot by this one; a crash at any moment leaves one of the two, complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_name(f".{self.path.name}.partial")
        metadata = {"at": json.dumps(asdict(snapshot.at)), "identity": json.dumps(dict(self.identity))}
        # Always under one name: a run that is killed here leaves a single such file behind, not many.
        write_synced(partial, save(dict(snapshot.tensors), metadata))
        rename_synced(partial, self.path)

    def load(self) -> Snapshot | None:
        """The last snapshot, None if there is none; that of another run is refused."""
        if not self.path.exists():
            return None
        try:
            with safe_open(str(self.path), framework="pt") as file:
                metadata = file.metadata()
                raw, identity = json.loads(metadata["at"]), json.loads(metadata["identity"])
                self._check(dict(identity))
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            at = POSITION.validate_python(raw)
            if not len(at.losses) == len(at.accuracies) == at.epoch - 1:
                raise ValueError(f"epoch {at.epoch} with {len(at.losses)} losses")
        except BROKEN as error:
            raise self.broken(error) from None
        return Snapshot(at, tensors)

    def broken(self, reason: object) -> BuffetError:
        """What is said of a snapshot that nothing can go on from."""
        why = explain(reason) if isinstance(reason, ValidationError) else one_line(reason)
        return BuffetError(f"{self.path}: cannot be continued ({why}): add --restart to begin again")

    def discard(self) -> None:
        """Forget the run."""
        self.path.unlink(missing_ok=True)

    def _check(self, other: Mapping[str, Any]) -> None:
        different = sorted(
            k for k in self.identity.keys() | other.keys() if self.identity.get(k) != other.get(k)
        )
        if different:
            changes = ", ".join(
                f"{k} {other.get(k)!r:.80}, now {self.identity.get(k)!r}" for k in different[:3]
            )
            raise BuffetError(
                f"{self.path}: an unfinished run of other settings ({changes}):"
                " repeat its command, choose another --out, or add --restart"
            )
