"""Two hundred tasks whose driver, workers and machines are killed: the same rows as if nothing happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from buffet.experiments import SweepProgress, read_rows, read_sweep, sweep
from buffet.experiments.cluster import RayFleet, RayWorker, ray_fleet
from buffet.experiments.workers import News, Ready
from tiny_checkpoint import SENTENCES, write_model

TASKS = 200
CONFIG = f"""
models = ["tiny"]
methods = ["interval", "baseline", "lse", "r-buffet"]
[sentences]
texts = {json.dumps([s for s in SENTENCES if len(s.split()) >= 5][:10])}
[words]
count = 5
[radius]
tolerance = 0.5
[run]
workers = 1
"""
COMMAND = (sys.executable, "-c", "import sys; from buffet.cli import main; sys.exit(main())", "sweep")
SECONDS = 120  # after which something hangs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("faults")
    write_model(directory / "tiny")
    (directory / "sweep.toml").write_text(CONFIG)
    return directory


@pytest.fixture(scope="module")
def expected(home: Path) -> dict[str, Any]:
    """The numbers of a run that nothing disturbs."""
    outcome = sweep(read_sweep(home / "sweep.toml"), home / "quiet.ndjson")
    assert (outcome.tasks, outcome.written, outcome.failed) == (TASKS, TASKS, 0)
    return numbers(home / "quiet.ndjson")


def numbers(path: Path) -> dict[str, Any]:
    return {r.key: (r.certified, r.attacked, r.margin, r.words) for r in read_rows(path)}


def test_a_driver_killed_five_times(home: Path, expected: dict[str, Any]) -> None:
    out = home / "killed.ndjson"
    # Random moments, each when so many bytes are on the disk; another run may end with a few bytes less.
    size = (home / "quiet.ndjson").stat().st_size * 9 // 10
    for moment in sorted(random.Random(1).sample(range(size), 5)):
        process = subprocess.Popen([*COMMAND, home / "sweep.toml", "--out", out])
        start = time.monotonic()
        while (out.stat().st_size if out.exists() else 0) < moment:
            assert process.poll() is None
            assert time.monotonic() - start < SECONDS
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finished = subprocess.run([*COMMAND, home / "sweep.toml", "--out", out, "--json"], capture_output=True)
    assert finished.returncode == 0
    outcome = json.loads(finished.stdout)
    assert outcome["already"] + outcome["written"] == TASKS
    assert outcome["already"] > 0
    lines = out.read_text().splitlines()
    assert len({json.loads(line)["key"] for line in lines}) == len(lines) == TASKS
    assert numbers(out) == expected


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two machines, one of them to be lost, as far as Ray can tell."""
    pytest.importorskip("ray", reason="the extra ray is not installed")
    from ray.cluster_utils import Cluster

    machines = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        yield machines
    finally:
        machines.shutdown()


def test_a_ray_worker_and_a_machine_are_lost(home: Path, expected: dict[str, Any], cluster: Any) -> None:
    import ray

    second = cluster.add_node(num_cpus=1)
    config, out = read_sweep(home / "sweep.toml"), home / "ray.ndjson"
    processes: list[int] = []

    class Watched(RayFleet):
        def hear(self, workers: Any, timeout: float) -> list[tuple[RayWorker, News]]:
            found = super().hear(workers, timeout)
            processes.extend(news.process for _, news in found if isinstance(news, Ready))
            return found

    def destroy(now: SweepProgress) -> None:
        if now.done == 50:
            os.kill(processes[0], signal.SIGKILL)
        if now.done == 100:
            cluster.remove_node(second, allow_graceful=False)

    with ray_fleet(cluster.address):
        outcome = sweep(config, out, Watched(ray, None, 1), progress=destroy)
    assert (outcome.written, outcome.failed) == (TASKS, 0)
    assert len(processes) >= 2
    assert len(out.read_text().splitlines()) == TASKS
    assert numbers(out) == expected
