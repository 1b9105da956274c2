"""One case in this process: CPU time, wall time, peak memory, and what was computed.

Machines differ and are shared, so CPU time is also given in units of M, the CPU time of one 1024³ float32
matrix product, measured before and after every repetition. The share of the machine's own matmul rate is
then ``operations / (units · 2·1024³)``. On other devices than the CPU, all times are wall times.
"""

from __future__ import annotations

import json
import math
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from buffet.engine import Engine, bound_margins
from buffet.lab.bench.cases import BenchCase, case_from
from buffet.lab.bench.counting import count
from buffet.lab.random_models import RandomModel, random_model
from buffet.loading.config import ModelConfig
from buffet.regions import LpBall
from buffet.system.allocator import keep_freed_memory
from buffet.system.devices import device_named, synchronise
from buffet.system.precision import full_precision

M_FLOPS = 2 * 1024**3
REPETITIONS = 5
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PATIENCE = 15.0
"""CPU seconds after which a case is no longer repeated."""


@dataclass(frozen=True)
class Measurement:
    """Medians over the repetitions; all of them in `samples`, so that noise can be told from change."""

    cpu_seconds: Positive
    wall_seconds: Positive
    units: Positive  # cpu_seconds / M, the median of the samples
    samples: Annotated[tuple[Positive, ...], Field(min_length=1)]  # units of every repetition
    unit_seconds: Positive  # M
    peak_megabytes: NonNegative  # growth of the process over what it held before
    flops: int  # of matrix products
    moved_bytes: int  # read and written by kernels
    margin: float | None  # None: no bound

    @property
    def best(self) -> float:
        """The least units of any repetition: what noise can only make larger."""
        return min(self.samples)

    @property
    def spread(self) -> float:
        """The distance of the quartiles, relative to the median; 0 for a single repetition."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return (high - low) / self.units

    @property
    def fraction(self) -> float:
        """The achieved share of the machine's matmul rate."""
        return self.flops / (self.units * M_FLOPS)


@dataclass(frozen=True)
class BenchSetup:
    """A network, a region around its sentence, and the verification to be measured."""

    case: BenchCase
    model: RandomModel
    region: LpBall
    label: int

    def run(self) -> Tensor:
        """One verification; learning methods take all their steps, proven or not."""
        method = self.case.chosen
        trace = (lambda tasks, step, margins: None) if method.optimiser.learns else None
        return bound_margins(self.model, self.region, method, self.label, Engine(), trace=trace)


def bench_config(case: BenchCase) -> ModelConfig:
    """The encoder of a case."""
    return ModelConfig(
        vocab_size=2,
        hidden_size=case.width,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=case.inner,
        hidden_act="relu",
        layer_norm="no_var",
        pooling=case.pooling,  # type: ignore[arg-type]
    )


def prepare(case: BenchCase, device: torch.device) -> BenchSetup:
    """The network of a case, the same in every process."""
    generator = torch.Generator().manual_seed(0)
    model = random_model(bench_config(case), generator, case.scale).to(device)
    x = (0.5 * torch.randn(case.tokens, case.width, generator=generator)).to(device)
    label = int(model.program64.evaluate(x.double()).argmax())
    return BenchSetup(case, model, LpBall(x, [[w] for w in range(case.words)], 2, case.eps), label)


def measure(case: BenchCase, device: str = "cpu") -> Measurement:
    """Measure a case, single-threaded and warm. The matrix products are counted in a run of their own."""
    torch.set_num_threads(1)
    place = device_named(device)
    setup = prepare(case, place)
    unit = Unit(place)
    before = peak_megabytes(place)
    first, margins = timed(setup.run, place, unit)
    grown = peak_megabytes(place) - before
    counts = count(setup.run)
    # What takes long is warm enough the first time, and not worth repeating.
    times = repeat(setup.run, place, unit) if first.cpu < PATIENCE else [first]
    margin = float(margins.min())
    return Measurement(
        cpu_seconds=statistics.median(t.cpu for t in times),
        wall_seconds=statistics.median(t.wall for t in times),
        units=statistics.median(t.units for t in times),
        samples=tuple(t.units for t in times),
        unit_seconds=statistics.median(t.cpu / t.units for t in times),
        peak_megabytes=grown,
        flops=counts.flops,
        moved_bytes=counts.moved_bytes,
        margin=margin if math.isfinite(margin) else None,
    )


@dataclass(frozen=True)
class Times:
    """One run: seconds by both clocks, and the CPU time in units of M."""

    cpu: float
    wall: float
    units: float


class Unit:
    """M, measured when asked for: the mean of two products, after one to warm up."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._matrix = torch.randn(1024, 1024, device=device)

    def seconds(self) -> float:
        self._matrix @ self._matrix
        cpu, _, _ = clocked(lambda: [self._matrix @ self._matrix for _ in range(2)], self.device)
        return cpu / 2


def clocked(run: Callable[[], object], device: torch.device) -> tuple[float, float, object]:
    """CPU and wall time of a run, and what it returned. What another device does counts as wall time."""
    synchronise(device)
    cpu, wall = time.process_time(), time.perf_counter()
    result = run()
    synchronise(device)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return cpu if device.type == "cpu" else wall, wall, result


def timed(run: Callable[[], Tensor], device: torch.device, unit: Unit) -> tuple[Times, Tensor]:
    """One run with M measured before and after it."""
    before = unit.seconds()
    cpu, wall, result = clocked(run, device)
    assert isinstance(result, Tensor)
    return Times(cpu, wall, 2 * cpu / (before + unit.seconds())), result


def repeat(run: Callable[[], Tensor], device: torch.device, unit: Unit) -> list[Times]:
    """As many repetitions as there is patience for, at least one."""
    times: list[Times] = []
    while not times or (len(times) < REPETITIONS and sum(t.cpu for t in times) < PATIENCE):
        times.append(timed(run, device, unit)[0])
    return times


def peak_megabytes(device: torch.device) -> float:
    """The most memory held so far: by this process, or by its tensors on the device."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e6
    scale = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def limit_memory(growth: int) -> None:
    """Let this process take `growth` bytes more than it holds now, where the system can see to that.

    Beyond them an allocation fails with a message, before the machine starts to swap.
    """
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            data = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (data + growth, hard))


def limit_time(seconds: float) -> None:
    """End this process after so much CPU time: on a shared machine, the clock on the wall is no measure."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time() + seconds), hard))


@full_precision()
def main(request: str) -> None:
    """The process of one case: a request on the command line, a measurement on stdout (both JSON)."""
    asked = json.loads(request)
    case = case_from(asked["case"])
    keep_freed_memory()
    limit_time(asked["seconds"])
    limit_memory(asked["memory"])
    print(json.dumps(asdict(measure(case, asked["device"]))))


if __name__ == "__main__":
    main(sys.argv[1])
