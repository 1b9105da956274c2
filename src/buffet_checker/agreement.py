"""How far a network that a certificate stores is from the file that it was read from.

If nobody can run the file, all that can be compared is its hash. Whoever can (`Run`, which is not part
of this package) lets both be evaluated at some points of the regions that were proven. That is a measurement,
not a proof; where the outputs are apart by more than rounding in float32 explains, the certificate is
rejected.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from buffet_checker.balls import Array
from buffet_checker.errors import RejectedError
from buffet_checker.programs import Program
from buffet_checker.storage import read_bytes, sha256

LARGEST = 1e-4
"""Of a difference between outputs, relative to outputs above 1."""
Run = Callable[[Path, Array], Array | None]
"""From the path of a file and some inputs, one a row, to its outputs; None where it cannot be run."""


@dataclass(frozen=True)
class NetworkFile:
    """The file of a network, which is known by its hash only, and who runs it, if anyone can."""

    path: Path
    hashes: Mapping[str, str]
    run: Run | None = None

    @property
    def where(self) -> str:
        return str(self.path)


@dataclass(frozen=True)
class Agreement:
    """The largest difference that was measured between outputs, relative to outputs above 1."""

    difference: float
    points: int


def read_network_file(path: Path, run: Run | None = None) -> NetworkFile:
    return NetworkFile(path, {"onnx": sha256(read_bytes(path))}, run)


def measured(program: Program, file: NetworkFile, points: Sequence[Array]) -> Agreement | None:
    """Both networks at some inputs of float32; None where nobody runs the file."""
    inputs = np.stack(points).astype(np.float32).astype(np.float64)
    found = None if file.run is None else file.run(file.path, inputs)
    if found is None:
        return None
    theirs = np.asarray(found, np.float64)
    ours = np.stack([program.evaluate(one) for one in inputs])
    if theirs.shape != ours.shape:
        raise RejectedError(
            f"network: the file has {theirs.shape[1:]} outputs, what is stored {ours.shape[1:]}"
        )
    difference = float((np.abs(ours - theirs) / np.maximum(1.0, np.abs(ours))).max())
    if not difference <= LARGEST:
        raise RejectedError(
            f"network: what is stored is not the network of the file: outputs differ by {difference:.3g}"
        )
    return Agreement(difference, len(points))
