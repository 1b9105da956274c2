"""Certificates of networks at the edges of floating point, forged and honest, held against exact margins.

A certificate need not come from the engine: whoever forges one leaves boxes out, which the checker then
derives itself, and writes whatever choices and derivations may carry a loss of its arithmetic to the margin.
What is accepted is a claim that no point of the region has a smaller margin than the one the checker has
derived; the exact judge of the soundness campaign decides whether that is true.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save
from safetensors.torch import save_file
from torch import Tensor

import buffet
from buffet.certificates.certificate import Question, certify, described_in, kinds
from buffet.lab.random_models import model_of
from buffet.lab.soundness.campaign import known_methods
from buffet.lab.soundness.cases import Case
from buffet.lab.soundness.dice import Dice
from buffet.lab.soundness.exact_points import ExactPoints, exact_points
from buffet.lab.soundness.extremes import extreme_case, extreme_network
from buffet.loading import Model
from buffet.network import Affine, Apply, Bilinear, Center, Diagonal, Offset, Program, Softmax
from buffet.network.functions import FUNCTIONS
from buffet_checker.certificate import KEY, SCHEMA
from buffet_checker.check import judge
from buffet_checker.network import Checkpoint, read_checkpoint

POINTS = 120
GRAPHS = ("plain", "decomposed", "differences")
PLANS = ("intervals", "margin", "everything", "everything")
"""What is derived backwards: nothing, the margin alone, all that nonlinearities read."""
SMALLEST = 5e-324
LOCAL = Affine | Diagonal | Center | Offset
HONEST = ("interval", "baseline", "forward", "backward", "lse", "baf+backward")


@dataclass
class ExtremeTally:
    """What became of the certificates."""

    networks: int = 0
    made: int = 0
    accepted: int = 0
    points: int = 0  # held against an accepted certificate
    undecided: int = 0
    wrong: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{self.networks} networks, {self.made} certificates, {self.accepted} accepted, held against"
            f" {self.points} points, {self.undecided} undecided, {len(self.wrong)} WRONG"
        )


@dataclass(frozen=True)
class Situation:
    """A network on disk, with points whose margins are known."""

    points: ExactPoints
    model: Model
    checkpoint: Checkpoint

    @property
    def case(self) -> Case:
        return self.points.case


def situation(seed: int, folder: Path) -> Situation:
    """The extreme case of a seed, often with a bias that puts the smallest known margin near 0."""
    case = extreme_case(seed)
    case = replace(case, region=case.inner, mask=torch.ones(len(case.inner.center), dtype=torch.bool))
    points, dice = exact_points(case, POINTS), Dice(seed)
    tensors = extreme_network(Dice(seed))[2]
    if shift := _shift(points, dice):
        bias = tensors["classifier.bias"].clone()
        bias[case.label] += shift
        tensors["classifier.bias"] = bias
        case = replace(case, model=model_of(case.model.config, tensors))
        points = exact_points(case, POINTS)
    directory = folder / str(seed)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(case.model.config.model_dump_json(exclude_none=True))
    model = Model(str(seed), case.model.config, case.model.program, None, tensors, directory)
    return Situation(points, model, read_checkpoint(directory))


def _shift(points: ExactPoints, dice: Dice) -> float:
    """What to add to the label's bias so that the smallest known margin is near 0, on either side; or 0."""
    margins, scale = points.margins, points.margins.scale
    least, most = (Fraction(int(v), scale) for v in (margins.upper.min(), margins.upper.max()))
    size = max(most - least, abs(least))
    share = dice.pick((0.0, 1.0, 2.0**-4, 2.0 ** dice.power(-50, -1), -(2.0 ** dice.power(-50, -4))))
    if share == 0 or size > Fraction(2.0**120):
        return 0.0
    return float(np.float32(float(size * Fraction(share) - least)))


# --- forged ones --------------------------------------------------------------------------------------------


def forge(at: Situation, dice: Dice) -> bytes:
    """A certificate without boxes, with choices that are as good as any."""
    case, graph, plan = at.case, dice.pick(GRAPHS), dice.pick(PLANS)
    method = buffet.Method(softmax=graph if graph != "plain" else "lse")
    clean_run = method.clean_run(case.model.program64, case.region.center, case.label)
    center = case.region.center.contiguous()
    described, extra = described_in(case.region.describe(), 0, {})
    tensors: dict[str, Tensor] = {"center": center, **extra}
    derivations: list[dict[str, object]] = []
    if plan != "intervals":
        tensors |= _choices(clean_run.program, clean_run.clean, dice)
        derivations = _derivations(clean_run.program, everything=plan == "everything")
    claim = {
        "method": "forged",
        "graph": graph,
        "nodes": kinds(clean_run.program),
        "region": described,
        "margins": [SMALLEST] * (case.model.config.num_labels - 1),
        "derivations": derivations,
    }
    head = {
        "schema": SCHEMA,
        "made": "forged",
        "model": dict(at.checkpoint.hashes),
        "input": hashlib.sha256(center.numpy().tobytes()).hexdigest(),
        "label": case.label,
        "claims": [claim],
    }
    return save({n: v.contiguous().numpy() for n, v in tensors.items()}, {KEY: json.dumps(head)})


def _choices(program: Program, clean: list[Tensor], dice: Dice) -> dict[str, Tensor]:
    """For every nonlinearity: tangents at the clean value, products on one plane or the other."""
    found: dict[str, Tensor] = {}
    for index, node in enumerate(program.nodes):
        prefix = f"0.0.{index}"
        if isinstance(node.op, Apply):
            slope = FUNCTIONS[node.op.function].derivative(clean[node.inputs[0]])
            slope = slope.nan_to_num(0.0, 0.0, 0.0)
            found |= {f"{prefix}.lower": slope, f"{prefix}.upper": slope.clone()}
        elif isinstance(node.op, Softmax):
            shape = (len(clean[index]), node.op.heads, clean[index].shape[1] // node.op.heads)
            found[f"{prefix}.point"] = torch.tensor(0.5)
            found[f"{prefix}.mixture"] = torch.full(shape, dice.pick((0.0, 0.5, 1.0)))
        elif isinstance(node.op, Bilinear):
            for side in ("lower", "upper"):
                found[f"{prefix}.{side}"] = torch.tensor(dice.pick((0.0, 0.5, 1.0)))
    return found


def _derivations(program: Program, everything: bool) -> list[dict[str, object]]:
    """The margin from the input; with `everything`, all that nonlinearities read too."""
    last = len(program.nodes) - 1
    needed = {last}
    if everything:
        for node in program.nodes:
            if isinstance(node.op, Apply | Softmax | Bilinear):
                needed |= set(node.inputs[:1] if isinstance(node.op, Softmax) else node.inputs)
    local = {0}
    found: list[dict[str, object]] = []
    for index, node in enumerate(program.nodes):
        if isinstance(node.op, LOCAL) and node.inputs[0] in local:
            local.add(index)
        if index and index in needed:
            push = {"nodes": [index], "push": True, "keep": False}
            back = {"nodes": [index], "choices": 0, "stops": [], "keep": False}
            found.append(push if index in local else back)
    return found


def honest(at: Situation, dice: Dice) -> bytes | None:
    """What the engine writes, if it proves anything."""
    method = known_methods()[dice.pick(HONEST)]
    try:
        return certify(at.model, [Question.of(at.model, at.case.region, at.case.label)], method)[1]
    except buffet.BuffetError:
        return None


# --- the campaign -------------------------------------------------------------------------------------------


def hold(at: Situation, content: bytes, kind: str, tally: ExtremeTally) -> None:
    """Check one certificate, and what it proves if it is accepted."""
    tally.made += 1
    result = judge(content, "certificate", at.checkpoint)
    if not result.accepted:
        tally.reasons[result.reason.split(":")[-1][:40]] += 1
        return
    tally.accepted += 1
    tally.points += at.points.count()
    bounds = torch.tensor(result.proofs[0].margins, dtype=torch.float64)
    wrong, undecided = at.points.violated(bounds)
    tally.undecided += undecided
    if wrong.any():
        other = int(np.argwhere(wrong)[0][1])
        exact = min(at.points.margin(int(i), other) for i in np.flatnonzero(wrong[:, other]))
        tally.wrong.append(
            f"seed {at.case.seed}, {kind}: accepted with margin {float(bounds[other])!r}, exact is {exact!r}"
            f" ({at.case.name}, label {at.case.label})"
        )


def extreme(count: int, folder: Path, seed: int = 0, per_network: int = 6) -> Iterator[ExtremeTally]:
    """Certificates of extreme networks until so many were accepted; tells after every network."""
    tally = ExtremeTally()
    while tally.accepted < count:
        number = seed + tally.networks
        at, dice = situation(number, folder), Dice(number)
        for _ in range(per_network):
            hold(at, forge(at, dice), "forged", tally)
        if content := honest(at, dice):
            hold(at, content, "honest", tally)
        tally.networks += 1
        yield tally
