"""What verification costs: CPU time, wall time and peak memory of every method on fixed random encoders.

Machines differ and are shared, so CPU time is also given in units of M, the CPU time of one 1024³ float32
matrix product measured around the case in the same process. Every case runs in a process of its own, so that
its peak memory is its own too.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import torch

from buffet.errors import BuffetError
from buffet.loading.config import ModelConfig
from buffet.methods import method_named
from buffet.random_models import random_model
from buffet.regions import LpBall
from buffet.verify import Engine, bound_margins

M_FLOPS = 2 * 1024**3


@dataclass(frozen=True)
class BenchCase:
    """One verification to time: an encoder, a method and a batch of words."""

    method: str
    layers: int
    tokens: int = 8
    width: int = 64
    inner: int = 128
    heads: int = 4
    pooling: str = "cls"
    words: int = 1
    eps: float = 0.005


@dataclass(frozen=True)
class Measurement:
    """Medians over the repetitions, spread as (largest − smallest) / median."""

    case: BenchCase
    cpu_seconds: float
    wall_seconds: float
    units: float  # cpu_seconds / M
    spread: float
    unit_seconds: float  # M
    peak_megabytes: float  # growth of the process over what it held before
    margin: float


CASES: tuple[BenchCase, ...] = (
    BenchCase("interval", 3),
    BenchCase("forward", 3),
    BenchCase("baseline", 1),
    BenchCase("baseline", 3),
    BenchCase("baseline", 3, words=8),
    BenchCase("backward", 1),
    BenchCase("backward", 3),
    BenchCase("backward", 6),
    BenchCase("backward", 6, pooling="mean"),
    BenchCase("backward", 1, tokens=16, width=256, inner=512),
    BenchCase("backward", 1, tokens=16, width=256, inner=512, pooling="mean"),
)


def measure(case: BenchCase, repetitions: int = 5) -> Measurement:
    """Time one case in this process, single-threaded and warm."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    config = ModelConfig(
        vocab_size=2,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=case.inner,
        hidden_act="relu",
        layer_norm="no_var",
        pooling=case.pooling,  # type: ignore[arg-type]
    )
    model = random_model(config, generator)
    x = 0.5 * torch.randn(case.tokens, case.width, generator=generator)
    label = int(model.program64.evaluate(x.double()).argmax())
    region = LpBall(x, [[w] for w in range(case.words)], 2, case.eps)
    method = method_named(case.method)
    matrix = torch.randn(1024, 1024, generator=generator)

    before = _peak()
    margin = float(bound_margins(model, region, method, label, Engine()).min())
    grown = _peak() - before
    unit = _cpu(lambda: matrix @ matrix, 5)
    start = time.perf_counter()
    times = [_once(lambda: bound_margins(model, region, method, label, Engine())) for _ in range(repetitions)]
    wall = (time.perf_counter() - start) / repetitions
    unit = min(unit, _cpu(lambda: matrix @ matrix, 5))
    cpu = statistics.median(times)
    return Measurement(case, cpu, wall, cpu / unit, (max(times) - min(times)) / cpu, unit, grown, margin)


def _once(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def _cpu(run: Callable[[], object], repetitions: int) -> float:
    run()
    return statistics.median(_once(run) for _ in range(repetitions))


def _peak() -> float:
    """Peak resident memory of this process so far, in megabytes."""
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def run_cases(cases: Sequence[BenchCase]) -> Iterator[Measurement]:
    """Measure every case in a fresh single-threaded process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    for case in cases:
        command = [sys.executable, "-m", "buffet.bench", json.dumps(asdict(case))]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise BuffetError(f"the measurement of {case} failed: {reason}")
        result = json.loads(done.stdout)
        yield Measurement(case=BenchCase(**result.pop("case")), **result)


if __name__ == "__main__":
    print(json.dumps(asdict(measure(BenchCase(**json.loads(sys.argv[1]))))))
