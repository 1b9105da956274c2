"""What a case costs that is too large to measure: counted on smaller networks, and extrapolated.

Counts of operations, bytes and kernels are polynomials of degree 2 in the number of layers, as the rows of
every layer pass those below it, and nearly powers of tokens and width. So a large case is replaced by small
ones that differ in one size at a time; what they compute is counted as it runs. Where the small ones are a
quarter to a twelfth as large, operations come out within a third, bytes within a factor of 2. Kernels come
out too few: the count of chunks is not seen, but where chunks are many, kernels take next to no time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch

from buffet.engine import Engine
from buffet.footprint import need
from buffet.lab.bench.cases import BenchCase
from buffet.lab.bench.counting import Count, count
from buffet.lab.bench.measuring import M_FLOPS, Unit, bench_config, clocked, prepare
from buffet.loading.network import build_program
from buffet.system.allocator import keep_freed_memory
from buffet.system.devices import device_named
from buffet.system.products import quick_products

LAYERS, TOKENS, WIDTH = (4, 5, 6), 8, 64
"""What is counted for a larger case: these layers, this many tokens and twice as many, the same of width."""
Number = int | float
NUMBER = 4  # bytes: forms are float32
PYTHON = 6
"""What a kernel on a tiny tensor costs with the Python around it, in bare kernels."""


@dataclass(frozen=True)
class Estimate:
    """What is computed, whatever the machine."""

    flops: Number  # of matrix products
    moved_bytes: Number
    kernels: Number
    peak_bytes: Number


def estimate(case: BenchCase) -> Estimate:
    """What a case computes, and the memory it takes."""
    return Estimate(
        _extrapolated(case, lambda c: c.flops),
        _extrapolated(case, lambda c: c.moved_bytes),
        _extrapolated(case, lambda c: c.kernels),
        _memory(case),
    )


def _extrapolated(case: BenchCase, quantity: Callable[[Count], int]) -> Number:
    tokens, width = max(TOKENS, case.words), case.heads * math.ceil(WIDTH / case.heads)
    few, narrow = case.tokens <= 2 * tokens, case.width <= 2 * width
    middle = case.layers if case.layers <= LAYERS[-1] else LAYERS[1]

    def smaller(layers: int, more: int = 1, wider: int = 1) -> int:
        size = case.width if narrow else wider * width
        small = replace(case, layers=layers, tokens=case.tokens if few else more * tokens)
        return quantity(counted(replace(small, width=size, inner=case.inner * size // case.width)))

    found: Number = smaller(middle)
    growth = 1.0
    if not few:
        growth *= (case.tokens / tokens) ** math.log2(smaller(middle, more=2) / found)
    if not narrow:
        growth *= (case.width / width) ** math.log2(smaller(middle, wider=2) / found)
    if case.layers > LAYERS[-1]:
        before, at, after = map(smaller, LAYERS)
        steps = case.layers - LAYERS[1]
        found = at + steps * (after - before) / 2 + steps**2 * (after - 2 * at + before) / 2
    return found * growth


@cache
def counted(case: BenchCase) -> Count:
    """What one pass over a case computes: a second one in double precision, where bounds are lost, is not
    what cost grows by."""
    torch.set_num_threads(1)
    setup = prepare(case, torch.device("cpu"))
    return count(lambda: setup.run(Engine(widen=False)))


def _memory(case: BenchCase) -> int:
    """By the engine's own estimate, which is rather above what is taken."""
    weights = {
        name: torch.empty(shape, device="meta", dtype=torch.float64)
        for name, shape in bench_config(case).shapes().items()
    }
    rows = torch.empty(case.tokens, case.width, device="meta", dtype=torch.float64)
    clean_run = case.chosen.clean_run(build_program(bench_config(case), weights), rows, 0)
    bytes_ = need(clean_run, case.chosen, 1, size=NUMBER, chunk=Engine().rows)
    return bytes_.fixed + case.words * bytes_.each


@dataclass(frozen=True)
class Machine:
    """How fast something computes, moves bytes and starts kernels."""

    flop_rate: float
    byte_rate: float
    kernel_seconds: float
    unit_seconds: float  # M

    @classmethod
    def here(cls, device: str = "cpu") -> Machine:
        """This machine, measured in about a second, on one thread."""
        place = device_named(device)
        torch.set_num_threads(1)
        keep_freed_memory()
        quick_products()
        unit = min(Unit(place).seconds() for _ in range(3))
        values, small = torch.randn(2 << 20, device=place), torch.randn(8, device=place)

        def best(run: Callable[[], object]) -> float:
            run()
            return min(clocked(run, place)[0] for _ in range(5))

        moved = best(lambda: [values + values for _ in range(4)]) / (4 * 2 * values.numel() * NUMBER)
        kernel = PYTHON * best(lambda: [small + small for _ in range(500)]) / 500
        return cls(M_FLOPS / unit, 1 / moved, kernel, unit)

    def seconds(self, work: Estimate) -> float:
        """The time of work whose parts wait for each other."""
        return (
            work.flops / self.flop_rate
            + work.moved_bytes / self.byte_rate
            + work.kernels * self.kernel_seconds
        )
