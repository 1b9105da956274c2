"""Records margins, radii and certificates over many networks, to see what a change of the code moves.

    python tests/recorder.py record before.json     # on the old commit
    python tests/recorder.py compare before.json    # on the new one: every number that differs, worst first

Margins cover every method, all operations, norms and kinds of region, depths of 1 to 6, batches, cells and
windows. Numbers are kept to the last bit; on another processor they differ in the last digits. What methods
cost is compared by ``buffet bench --against``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import buffet
from buffet.certificates.certificate import Question, certify
from buffet.lab.random_models import random_model
from buffet.lab.soundness.cases import Case, random_case, random_config
from buffet.lab.soundness.dice import Dice
from buffet.methods import method_named
from buffet.system.allocator import keep_freed_memory
from buffet.system.precision import full_precision

SEEDS = range(36)
DEEP = range(900, 906)
TEXTS = ("a gripping , moving film", "dull and far too long")
METHODS = {
    **{name: method for name, method in buffet.METHODS.items() if method.optimise == "none"},
    "o-buffet": method_named("o-buffet", steps=3),
    "lse+o-buffet": method_named("lse+o-buffet", steps=3),
    "o-backward": method_named("o-backward", steps=2),
    "baseline final": method_named("baseline", optimise="final", steps=4),
    "lse final": method_named("lse", optimise="final", steps=4),
    "backward rule": method_named("backward", product="rule"),
    "backward window": method_named("backward", window=1),
    "baf+backward": method_named("baseline", propagation="baf+backward"),
    "buffet": method_named("buffet", steps=5, optimise="tuned"),
}
RADII = {
    name: method
    for name, method in METHODS.items()
    if name in ("baseline", "r-buffet", "lse", "o-buffet", "lse final", "backward", "buffet")
}


def deep_case(seed: int) -> Case:
    """A network of four to six layers and a small ball."""
    dice = Dice(seed)
    config = random_config(dice, num_hidden_layers=4 + seed % 3, hidden_size=8, num_attention_heads=2)
    model = random_model(config, dice.generator)
    x = dice.normal(5, config.row_width)
    label = int(model.program64.evaluate(x.double()).argmax())
    region = buffet.LpBall(x, [[1], [3]], (1, 2, math.inf)[seed % 3], [0.001, 0.01])
    return Case(
        seed, f"{config.num_hidden_layers} layers", model, region, torch.ones(5, dtype=torch.bool), label
    )


def margins() -> Iterator[tuple[str, list[float]]]:
    """The margins of every method, network by network."""
    for case in (*map(random_case, SEEDS), *map(deep_case, DEEP)):
        for name, method in METHODS.items():
            found = buffet.verify(
                case.model, case.region, method=method, label=case.label, mask=case.mask, falsify=False
            )
            yield f"margin {case.seed} {name}", found.margins.flatten().tolist()


def radii() -> Iterator[tuple[str, list[float]]]:
    """Radii, margins of cells, and of certificates their hash, of the embedded model."""
    model = buffet.load()
    for text, p in zip(TEXTS, (2, 1), strict=True):
        x = model.embed(text)
        region = buffet.LpBall(x, [[1], [2]], p)
        for name, method in RADII.items():
            found = buffet.radius(model, region, method, attack=False)
            yield f"radius {text} L{p} {name}", [task.certified for task in found.tasks]
        largest = buffet.radius(model, region, "lse", attack=False).certified
        for name, cut in (("lse cells", method_named("lse", cells=4)), ("buffet cells", _cut())):
            found = buffet.verify(model, region, 1.1 * largest, cut, falsify=False)
            yield f"margin {text} L{p} {name}", found.margins.flatten().tolist()
        for name, method in METHODS.items():
            if name not in ("interval", "forward", "o-backward"):
                one = region.select([0]).with_eps(0.3 * largest)
                _, content, _ = certify(model, [Question.of(model, one)], method, text=text)
                yield f"certificate {text} L{p} {name}", [_fingerprint(content)]


def _cut() -> buffet.Method:
    return method_named("buffet", steps=5, optimise="tuned", cells=3)


def _fingerprint(content: bytes) -> float:
    """A number that other bytes do not share."""
    return float(int(hashlib.sha256(content).hexdigest()[:12], 16))


def record(tell: Callable[[str], None]) -> dict[str, list[float]]:
    """Everything there is to record, by name; ``tell`` hears how far it is."""
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {}
    begin = time.perf_counter()
    for part in (margins(), radii()):
        for name, numbers in part:
            found[name] = numbers
            if len(found) % 50 == 0:
                tell(f"{len(found)} recorded, {time.perf_counter() - begin:.0f} s")
    return found


def changes(before: dict[str, list[float]], after: dict[str, list[float]]) -> list[tuple[float, str]]:
    """By how much, relatively, every entry moved that is not the same to the last bit, the largest first."""
    moved = []
    for name in sorted({*before, *after}):
        old, new = before.get(name), after.get(name)
        if old is None or new is None or len(old) != len(new):
            moved.append((math.inf, f"{name}: {old} → {new}"))
        elif worst := max((_moved(a, b) for a, b in zip(old, new, strict=True)), default=0.0):
            moved.append((worst, f"{name}: {old} → {new}"))
    return sorted(moved, reverse=True)


def _moved(old: float, new: float) -> float:
    if old == new or (math.isnan(old) and math.isnan(new)):
        return 0.0
    change = abs(new - old) / max(1.0, abs(old))
    return change if math.isfinite(change) else math.inf


@full_precision()
def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative; changes up to it are counted only"
    )
    asked = parser.parse_args()
    keep_freed_memory()
    before = json.loads(asked.file.read_text()) if asked.command == "compare" else {}
    found = record(lambda line: print(line, file=sys.stderr, flush=True))
    if asked.command == "record":
        asked.file.write_text(json.dumps(found, indent=0) + "\n")
        print(f"{len(found)} entries in {asked.file}")
        return 0
    moved = changes(before, found)
    beyond = [line for change, line in moved if change > asked.tolerance]
    print("\n".join(beyond[:40]))
    print(
        f"{len(found)} entries, {len(moved)} not the same to the last bit, {len(beyond)} beyond the tolerance"
    )
    return 1 if beyond else 0


if __name__ == "__main__":
    sys.exit(main())
