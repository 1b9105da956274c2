"""What a training run reports while it goes on and when it is done."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class TrainProgress:
    """How far training has come; `dev_accuracy` is given at the end of an epoch only.

    In training for substitutions it is the certified one, as `measure` says.
    """

    epoch: int  # from 1
    epochs: int
    step: int  # of all epochs, from 1
    steps: int
    loss: float  # mean of this epoch so far
    rate: float
    seconds: float  # of training so far, interruptions not counted
    dev_accuracy: float | None = None
    measure: str = "dev accuracy"


@dataclass(frozen=True)
class TrainSummary:
    """What came out; accuracies are fractions."""

    out: Path
    preset: str
    dev_accuracy: float
    test_accuracy: float | None  # None when the data has no labelled test part
    losses: tuple[float, ...]  # mean training loss of every epoch
    dev_accuracies: tuple[float, ...]  # of every epoch; certified ones, where epochs are compared by these
    best_epoch: int
    parameters: int
    rows: int
    seconds: float
    sha256: str
    dev_certified: float | None = None  # right whatever is exchanged, by the bound of training
    test_certified: float | None = None
