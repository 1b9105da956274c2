"""Experiments at scale: models × methods × norms × sentences × words, one row per task in a file.

`config` is what a user writes, `plan` the tasks it means, `work` answers them, `workers` are the processes
that do so (`cluster`: on many machines), `rows` the file, `sweep` the driver, `summary` what came out.
"""

from buffet.experiments.config import SweepConfig, read_sweep
from buffet.experiments.rows import Row, read_rows
from buffet.experiments.summary import MethodSummary, summarise
from buffet.experiments.sweep import Outcome, SweepProgress, sweep

__all__ = [
    "MethodSummary",
    "Outcome",
    "Row",
    "SweepConfig",
    "SweepProgress",
    "read_rows",
    "read_sweep",
    "summarise",
    "sweep",
]
