"""`python -m fuzz --inputs 100000 --seed 0 [--target NAME]`: exit code 1 if there is a finding."""

from __future__ import annotations

import argparse
import logging
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from pathlib import Path

import torch

from fuzz.place import FoundError, Place
from fuzz.targets import TARGETS, attempt

MEMORY = 8 << 30
"""Bytes of address space: what would allocate more fails at once."""
SLOW = 10.0
"""Seconds of CPU time for one input that are a finding of their own."""


def run() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description="Hostile input, and no crash.")
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first input; runs are split by it")
    parser.add_argument("--target", choices=tuple(TARGETS), help="only this one; default: all in turn")
    given = parser.parse_args()
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    names = (given.target,) if given.target else tuple(TARGETS)
    counts: Counter[tuple[str, str]] = Counter()
    begin = last = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="buffet-fuzz-") as root:
        place = Place.make(Path(root))
        for number in range(given.inputs):
            name, seed = names[number % len(names)], given.seed + number // len(names)
            start = time.process_time()
            try:
                outcome = attempt(name, seed, place)
                if time.process_time() - start > SLOW:
                    raise FoundError(f"{name} {seed}: took {time.process_time() - start:.0f} s")
            except FoundError as finding:
                outcome = "FINDING"
                cause = finding.__cause__
                trace = "".join(traceback.format_exception(cause)[-4:]) if cause else ""
                print(f"FINDING {finding}\n{trace}", flush=True)
            counts[name, outcome] += 1
            if time.monotonic() - last > 60:
                last = time.monotonic()
                print(f"{number + 1:,} inputs, {last - begin:.0f} s", file=sys.stderr, flush=True)
    for name in names:
        shown = ", ".join(
            f"{counts[name, outcome]:,} {outcome}" for outcome in ("taken", "refused", "FINDING")
        )
        print(f"{name:12} {shown}")
    findings = sum(count for (_, outcome), count in counts.items() if outcome == "FINDING")
    seconds = time.monotonic() - begin
    print(f"{given.inputs:,} inputs from seed {given.seed}, {findings} findings, {seconds:.0f} s")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(run())
