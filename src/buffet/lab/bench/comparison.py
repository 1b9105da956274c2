"""Two documents of measurements, case by case: what became slower or faster, beyond noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from buffet.lab.bench.cases import BenchCase
from buffet.lab.bench.measuring import Measurement
from buffet.lab.bench.running import BenchRow

LEAST_NOISE = 0.05
"""Smaller changes of time always count as noise."""


@dataclass(frozen=True)
class Change:
    """What became of a case; ratios are new / old, of CPU time in units of M."""

    case: BenchCase
    old: Measurement
    new: Measurement

    @property
    def ratio(self) -> float:
        return self.new.units / self.old.units

    @property
    def noise(self) -> float:
        """How far the ratio of two runs of the same code may be from 1, from both spreads."""
        return max(LEAST_NOISE, math.hypot(self.old.spread, self.new.spread))

    @property
    def real(self) -> bool:
        """Beyond noise: by the medians, and by the best repetitions too."""
        best = self.new.best / self.old.best
        same_way = (best > 1) == (self.ratio > 1)
        return same_way and min(abs(math.log(self.ratio)), abs(math.log(best))) > math.log1p(self.noise)

    @property
    def memory(self) -> float:
        return self.new.peak_megabytes / max(self.old.peak_megabytes, 1.0)


def compare(old: Sequence[BenchRow], new: Sequence[BenchRow]) -> tuple[list[Change], list[str]]:
    """The changes of all cases that both have measured, and a note for every other case of `new`."""
    before = {row.case: row for row in old}
    changes, notes = [], []
    for row in new:
        past = before.get(row.case)
        if past and past.measurement and row.measurement:
            changes.append(Change(row.case, past.measurement, row.measurement))
        elif past and past.measurement:
            notes.append(f"{row.case.name} {row.case.shape}: was measured, now {row.reason}")
        elif past and row.measurement:
            notes.append(f"{row.case.name} {row.case.shape}: now measured, was {past.reason}")
    return changes, notes
