"""Other verifiers, run on the same networks in the same process. None of them is a dependency; one of them,
zonotopes, is written here from its paper.

A peer is a small adapter: how a method of ours is called there, and how it bounds the margins of a plain
PyTorch module (`plain.PlainNetwork`), which is checked to compute what our program computes.
"""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from buffet.errors import BuffetError
from buffet.lab.bench.cases import BenchCase
from buffet.lab.bench.measuring import (
    PATIENCE,
    REPETITIONS,
    BenchSetup,
    Unit,
    peak_megabytes,
    prepare,
    timed,
)
from buffet.lab.bench.running import BenchLimits, in_process, run_cases
from buffet.lab.peers.plain import PlainNetwork
from buffet.system.devices import device_named

PEERS: Mapping[str, str] = {
    "auto_LiRPA": "buffet.lab.peers.auto_lirpa",
    "zonotope": "buffet.lab.peers.zonotope",
}
"""The name of every peer, and the module of its adapter, which has a `peer` function."""


@runtime_checkable
class Peer(Protocol):
    """Another verifier."""

    def method_for(self, case: BenchCase) -> str | None:
        """What comes closest to the method of a case there; None: nothing."""

    def prepare(self, case: BenchCase, network: PlainNetwork) -> Callable[[], Tensor]:
        """A verification to be timed: lower bounds of the margins, ``[others]``."""


def peer_named(name: str) -> Peer:
    """The adapter of a peer that is installed."""
    if name not in PEERS:
        raise BuffetError(f"--peer: unknown peer '{name}'; choose one of: {', '.join(PEERS)}")
    peer = importlib.import_module(PEERS[name]).peer()
    assert isinstance(peer, Peer)
    return peer


@dataclass(frozen=True)
class Meeting:
    """Both verifiers on one network in one process; units are CPU time in M, medians."""

    method: str  # of the peer
    units: float
    peer_units: float
    peer_megabytes: float  # growth of the process, which the peer uses first
    margin: float | None
    peer_margin: float | None


@dataclass(frozen=True)
class Rivalry:
    """A case, what both need, or the reason why that is not known."""

    case: BenchCase
    meeting: Meeting | None = None
    megabytes: float | None = None  # of ours, in a process of its own
    reason: str | None = None


def rival(case: BenchCase, peer: Peer, device: str) -> Meeting:
    """Both verifiers on the network of a case, by turns, with M measured around every run."""
    torch.set_num_threads(1)
    place = device_named(device)
    setup = prepare(case, place)
    method = peer.method_for(case)
    assert method is not None
    network = plain_network(setup)
    theirs, unit = peer.prepare(case, network), Unit(place)
    before = peak_megabytes(place)
    first, bound = timed(theirs, place, unit)
    grown = peak_megabytes(place) - before
    own, margins = timed(setup.run, place, unit)
    rounds = REPETITIONS if first.cpu + own.cpu < PATIENCE / 2 else 0
    times = [(timed(setup.run, place, unit)[0], timed(theirs, place, unit)[0]) for _ in range(rounds)]
    times = times or [(own, first)]
    ours, others = (statistics.median(t.units for t in side) for side in zip(*times, strict=True))
    return Meeting(method, ours, others, grown, _finite(margins), _finite(bound))


def plain_network(setup: BenchSetup) -> PlainNetwork:
    """The margins of a setup's first task as a plain module of δ, checked against the program."""
    program = setup.model.program.margins(setup.label)
    network = PlainNetwork(program, setup.region.center.float(), int(setup.region.moved[0, 0])).eval()
    generator = torch.Generator().manual_seed(0)
    deltas = (0.1 * torch.randn(8, 1, setup.region.width, generator=generator)).to(setup.region.center.device)
    one = setup.region.select([0])
    with torch.no_grad():
        for delta in deltas:
            expected = program.evaluate(one.points(delta[None]))[0]
            found = network(delta)[0]
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
                worst = float((found - expected).abs().max())
                raise BuffetError(f"the plain module differs from the program by {worst:.2g}: not compared")
    return network


def _finite(bound: Tensor) -> float | None:
    least = float(bound.min())
    return least if math.isfinite(least) else None


def run_rivals(cases: Sequence[BenchCase], name: str, limits: BenchLimits, device: str) -> Iterator[Rivalry]:
    """Measure case by case, each in a process of its own; our memory in another one, where it is alone."""
    for case in cases:
        found = in_process(case, limits, device, name)
        if isinstance(found, str):
            yield Rivalry(case, reason=found)
            continue
        (alone,) = run_cases([case], limits, device)
        memory = alone.measurement.peak_megabytes if alone.measurement else None
        yield Rivalry(case, Meeting(**found), memory)
