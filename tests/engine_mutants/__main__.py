"""`python -m engine_mutants`: every mutant, and what notices it; exit code 1 if nothing notices one."""

from __future__ import annotations

import sys

import torch

from engine_mutants.hunting import hunt
from engine_mutants.table import MUTANTS


def run() -> int:
    torch.set_num_threads(1)
    missed = 0
    for mutant in MUTANTS:
        found = hunt(mutant)
        seen = found.violation
        missed += seen is None
        noticed = f"{seen.claim} by {seen.method}" if seen else "NOT NOTICED"
        print(f"{found.mutant} ({found.what}): {noticed}, {found.seconds:.1f} s", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} mutants noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(run())
