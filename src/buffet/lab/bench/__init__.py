"""What verification costs: measured, counted, and compared between commits.

cases       what is measured: fixed cases, and methods at given sizes
counting    floating point operations and bytes of a computation, counted as it runs
measuring   one case in this process; run as a module, the process of one case
running     every case in a process of its own, within limits of time and memory
comparison  two documents of measurements, case by case
"""

from buffet.lab.bench.cases import BenchCase, selection
from buffet.lab.bench.measuring import Measurement, measure
from buffet.lab.bench.running import BenchLimits, BenchRow, run_cases

__all__ = ["BenchCase", "BenchLimits", "BenchRow", "Measurement", "measure", "run_cases", "selection"]
