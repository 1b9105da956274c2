"""Many certificates and many corrupted ones against the checker: ``python tests/certificate_campaign.py``.

Certificates of verified tasks whose margin exceeds 1e-4 have to be accepted, corrupted ones rejected. Most
tasks are of small random checkpoints of every kind; with ``--real N``, N are of the embedded model. Prints
how much checking costs against one verification, and the size of a certificate against that of o-BuFFeT's α.

With ``--extreme N`` instead: networks at the edges of floating point, with forged certificates and those of
the engine, until N are accepted. What is accepted is held against exact margins, with no tolerance; exit code
1 if one of them proves too much (`extreme_certificates`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import buffet
from buffet.certificates.certificate import Question, certify
from buffet.lab.random_models import _tensor
from buffet.loading.tokenizer import word_level
from buffet.optimisation.starts import initial_parameters
from buffet.propagation.walk import bound_nodes
from buffet.relaxations.table import Relaxer
from buffet_checker import BadInputError
from buffet_checker.check import judge
from buffet_checker.network import Checkpoint
from checkpoints import CONFIG, WORDS, config_of
from corruptions import CORRUPTIONS, corrupted, damaged
from extreme_certificates import ExtremeTally, extreme

VARIANTS: tuple[dict[str, object], ...] = (
    {"layer_norm": "no_var"},
    {},
    {"layer_norm": "no_var", "hidden_act": "gelu"},
    {"hidden_act": "gelu_new"},
    {"layer_norm": "no_var", "pooling": "mean", "hidden_act": "tanh"},
    {"layer_norm": "no_var", "norm_position": "pre"},
    {"layer_norm": "no_var", "embedding_size": 6, "head_act": "relu"},
)
METHODS = ("baseline", "lse", "dual", "middle", "r-buffet", "lse+r-buffet", "backward", "baseline")
FLAGSHIP = replace(buffet.METHODS["buffet"], rivals=(), steps=4)
TEXTS = ("a gripping film", "moving , not bad", "it 's a film .", "not a bad film")


@dataclass(frozen=True)
class Task:
    model: buffet.Model
    text: str
    region: buffet.LpBall
    method: buffet.Method
    margin: float  # as verified
    seconds: float


def write_variant(directory: Path, changes: dict[str, object], seed: int) -> Path:
    """A small random checkpoint, its weights scaled as they are in networks."""
    directory.mkdir()
    config = config_of(**changes)
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: _tensor(name, shape, 1.0, generator) for name, shape in config.shapes().items()}
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    word_level([WORDS], size=20, min_count=1).save(str(directory / "tokenizer.json"))
    return directory


def small_tasks(folder: Path, seed: int = 0) -> Iterator[Task]:
    """Verified tasks of small checkpoints, without end."""
    rng = np.random.default_rng(seed)
    number = 0
    while True:
        changes = VARIANTS[number % len(VARIANTS)]
        model = buffet.load(write_variant(folder / f"{seed}-{number}", changes, 1000 * seed + number))
        for text in TEXTS:
            x = model.embed(text)
            for word in rng.permutation(np.arange(1, len(x)))[:3].tolist():
                p = float(rng.choice([1, 2, 3, np.inf]))
                size = float(10 ** rng.uniform(-3, -1.3)) * (0.3 if np.isinf(p) else 1)
                name = METHODS[rng.integers(len(METHODS))]
                method = FLAGSHIP if rng.integers(200) == 0 else buffet.METHODS[name]
                yield from verified(model, text, buffet.LpBall(x, [word], p, size), method)
        number += 1


def real_tasks() -> Iterator[Task]:
    """Verified tasks of the embedded model, without end."""
    model, rng = buffet.load(), np.random.default_rng(0)
    texts = (
        "a gripping , moving film",
        "dull and far too long",
        "one of the best films of the year",
        "a mess",
    )
    while True:
        text = texts[rng.integers(len(texts))]
        x = model.embed(text)
        method = buffet.METHODS[METHODS[rng.integers(len(METHODS))]]
        ball = buffet.LpBall(
            x, [int(rng.integers(1, len(x)))], float(rng.choice([1, 2])), rng.uniform(0.05, 0.3)
        )
        yield from verified(model, text, ball, method)


def verified(model: buffet.Model, text: str, region: buffet.LpBall, method: buffet.Method) -> Iterator[Task]:
    found = buffet.verify(model, region, method=method, falsify=False)
    if found.verdict == "certified" and found.margin > 1e-4:
        yield Task(model, text, region, method, found.margin, found.seconds)


def alpha_bytes(task: Task) -> int:
    """The size of α in float32, as o-BuFFeT has them: one per term and side of every product."""
    plain = buffet.METHODS["baseline"]
    clean_run = plain.clean_run(task.model.program64, task.region.center, 0)
    bounds = bound_nodes(clean_run, task.region, Relaxer(), plain.describe())
    parameters = initial_parameters(bounds, "zero", only_alphas=True)
    return sum(4 * v.numel() for s in parameters.values() for v in s.values())


@dataclass
class Tally:
    tasks: int = 0
    accepted: int = 0
    covered: int = 0  # also in float32
    altered: int = 0
    rejected: int = 0
    cost: list[float] = field(default_factory=list)
    size: list[float] = field(default_factory=list)
    misses: list[str] = field(default_factory=list)


def outcome(content: bytes, checkpoint: Checkpoint) -> str:
    """accepted, rejected or bad input, with the reason; anything else would be a crash."""
    try:
        result = judge(content, "certificate", checkpoint)
    except BadInputError as error:
        return f"bad input: {error}"
    return "accepted" if result.accepted else f"rejected: {result.reason}"


def run(task: Task, tally: Tally, per_task: int, rng: np.random.Generator, measure: bool = False) -> None:
    """Certify a task, check that, and check corrupted copies."""
    tally.tasks += 1
    try:
        certificate, content, checkpoint = certify(
            task.model, [Question.of(task.model, task.region)], task.method, text=task.text
        )
    except buffet.BuffetError as error:
        tally.misses.append(f"not written: {error}")
        return
    begin = time.perf_counter()
    result = judge(content, "certificate", checkpoint)
    seconds = time.perf_counter() - begin
    tally.accepted += result.accepted
    if not result.accepted:
        tally.misses.append(f"{result.reason} (margin {task.margin:.3g})")
        return
    tally.covered += all(proof.deployed for proof in result.proofs)
    if measure:
        tally.cost.append(seconds / task.seconds)
        tally.size.append(certificate.size / alpha_bytes(task))
    names = [*CORRUPTIONS, "damaged"]
    for _ in range(per_task):
        name = names[tally.altered % len(names)]
        bad = damaged(content, rng) if name == "damaged" else corrupted(content, name, rng)
        found = outcome(bad, checkpoint)
        tally.altered += 1
        tally.rejected += found != "accepted"
        if found == "accepted":
            tally.misses.append(f"accepted after {name}")


def run_extreme(count: int, seed: int, networks: int | None) -> int:
    """Print how certificates of extreme networks fare."""
    tally, told, begin = ExtremeTally(), 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for tally in extreme(count, Path(folder), seed):
            for wrong in tally.wrong[told:]:
                print(f"WRONG {wrong}", flush=True)
            told = len(tally.wrong)
            if tally.networks % 100 == 0:
                print(f"{tally}; the next seed is {seed + tally.networks}", flush=True)
            if tally.networks == networks:
                break
    print(f"{tally}, in {time.monotonic() - begin:.0f} seconds")
    for reason, times in tally.reasons.most_common(10):
        print(f"{times} × rejected: {reason}")
    return 1 if tally.wrong else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="tasks of small checkpoints")
    parser.add_argument("--real", type=int, default=20, help="tasks of the embedded model")
    parser.add_argument("--per-task", type=int, default=2, help="corrupted copies of every certificate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--extreme", type=int, metavar="N", help="extreme networks until N are accepted")
    parser.add_argument("--networks", type=int, help="with --extreme: no more networks than this")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.extreme:
        sys.exit(run_extreme(given.extreme, given.seed, given.networks))
    tally, rng = Tally(), np.random.default_rng(given.seed)
    with tempfile.TemporaryDirectory() as folder:
        for tasks, count, measure in (
            (small_tasks(Path(folder), given.seed), given.count, False),
            (real_tasks(), given.real, True),
        ):
            for _, task in zip(range(count), tasks, strict=False):
                run(task, tally, given.per_task, rng, measure)
                if tally.tasks % 50 == 0:
                    print(
                        f"{tally.tasks} tasks, {tally.accepted} accepted, {tally.rejected}/{tally.altered}",
                        flush=True,
                    )
    print(f"accepted {tally.accepted} of {tally.tasks}, {tally.covered} of them in float32 too")
    print(f"rejected {tally.rejected} of {tally.altered} corrupted")
    if tally.cost and tally.size:
        print(
            f"checking costs {np.median(tally.cost):.2f} (median), {max(tally.cost):.2f} (most) verifications"
        )
        print(
            f"a certificate has {np.median(tally.size):.2f} (median), {max(tally.size):.2f} (most) sizes of α"
        )
    for miss, times in Counter(tally.misses).most_common(20):
        print(f"{times} × {miss}")


if __name__ == "__main__":
    main()
