"""Certificates that the checker must reject, as one number of them is beyond what it derives.

A *base* is a true certificate of a tiny network; together they use every operation, region and choice. What
the checker derives for every node of a base is recorded. A *pushed* certificate claims more than that for one
entry of one node, by one unit in the last place, so that only a checker that has lost some error term accepts
it. `forged_certificates` has those that claim what no proof could show.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import buffet
from buffet.branching import stems
from buffet.certificates import certificate
from buffet.certificates.certificate import Question, certify
from buffet.loading import OnnxModel
from buffet.methods import method_named
from buffet_checker.balls import Array
from buffet_checker.check import Result, judge
from buffet_checker.errors import BadInputError
from buffet_checker.graph import Node
from buffet_checker.network import Checkpoint
from buffet_checker.substitution import Claimed
from certificate_campaign import write_variant
from corruptions import Opened

SMALL = {"num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 3, "layer_norm": "no_var"}
ROOM = 1e-6
"""By which claimed boxes exceed derived ones, relative to 1 + their size: room for what follows from them."""
Key = tuple[int, int]
"""Number of a claim, and of a node."""


@dataclass(frozen=True)
class Derived:
    """What follows for a node: a box, and how far a deployed run may be outside of it."""

    low: Array
    high: Array
    escape: Array


@dataclass(frozen=True)
class Base:
    """A true certificate, what it is about, and what is derived from it."""

    content: bytes
    checkpoint: Checkpoint
    found: Mapping[Key, Derived]
    result: Result


@dataclass
class _Unclaimed:
    """The arrays of a certificate without its boxes."""

    tensors: Any

    def get(self, name: str, *args: Any, **kwargs: Any) -> Array | None:
        return None if ".box." in name else self.tensors.get(name, *args, **kwargs)


@dataclass
class Recorder:
    """Takes down what is derived for every node; `claims` also makes it the claim, with some room."""

    found: dict[Key, Derived] = field(default_factory=dict)
    claims: dict[str, Array] | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        right = Claimed._settle

        def settle(claimed: Claimed, index: int, node: Node) -> None:
            if type(claimed) is not Claimed:  # a part of the region, with boxes of its own
                right(claimed, index, node)
                return
            tensors, derived = claimed.tensors, dict(claimed.derived)
            before = claimed.boxes[index], claimed.escapes[index]
            claimed.tensors = _Unclaimed(tensors)  # type: ignore[assignment]
            try:
                right(claimed, index, node)
            finally:
                claimed.tensors = tensors
            low, high = claimed.boxes[index]
            self.found[claimed.claim.number, index] = Derived(low, high, claimed.escapes[index])
            if self.claims is not None and index < len(claimed.nodes) - 1:
                name = f"{claimed.claim.number}.box.{index}"
                box = np.stack([low - ROOM * (1 + np.abs(low)), high + ROOM * (1 + np.abs(high))])
                self.claims[name] = tensors.stored.tensors[name] = box
            claimed.boxes[index], claimed.escapes[index] = before
            claimed.derived.update(derived)
            right(claimed, index, node)

        Claimed._settle = settle  # type: ignore[method-assign]
        try:
            yield
        finally:
            Claimed._settle = right  # type: ignore[method-assign]


def judged(content: bytes, checkpoint: Checkpoint) -> Result | None:
    """The checker's answer; None where it refuses to read the file."""
    try:
        return judge(content, "certificate", checkpoint)
    except BadInputError:
        return None


def accepted(content: bytes, checkpoint: Checkpoint) -> bool:
    result = judged(content, checkpoint)
    return result is not None and result.accepted


# --- bases --------------------------------------------------------------------------------------------------

Change = Callable[[Opened, np.random.Generator], None]


def _plain(opened: Opened, rng: np.random.Generator) -> None:
    pass


def _every_choice(opened: Opened, rng: np.random.Generator) -> None:
    """Whatever is free is chosen at random, and what is optional is there: every choice is valid."""
    kinds = opened.claim["nodes"]
    tokens, heads = len(opened.tensors["center"]), 2
    for name, value in sorted(opened.tensors.items()):
        if name.count(".") != 3:
            continue
        prefix, kind = name.rpartition(".")[0], kinds[int(name.split(".")[2])]
        if kind == "apply":
            opened.tensors[name] = (value + 0.02 * rng.normal(size=value.shape)).astype(np.float32)
        else:
            opened.tensors[name] = rng.uniform(0.1, 0.9, size=value.shape).astype(np.float32)
        if kind == "softmax":
            queries = opened.tensors[f"{prefix}.mixture"].shape[0]
            opened.tensors[f"{prefix}.shift"] = rng.uniform(0.2, 0.8, (queries, heads)).astype(np.float32)
        linear = "rescale" not in kinds  # no norm makes values anything but linear
        if kind == "mix" and linear:
            rows = 1 if "first" in kinds else tokens
            opened.tensors[f"{prefix}.whole"] = rng.uniform(0.2, 0.8, (rows, heads)).astype(np.float32)


def _intervals_only(opened: Opened, rng: np.random.Generator) -> None:
    """Nothing is derived but by interval arithmetic, so nothing is chosen."""
    opened.claim["derivations"] = []
    opened.tensors = {name: value for name, value in opened.tensors.items() if name.count(".") != 3}


@dataclass(frozen=True)
class Recipe:
    """How a base is made: a network, what moves, a method, and what is changed by hand."""

    network: Mapping[str, object]
    region: Callable[[torch.Tensor], buffet.Region]
    method: buffet.Method
    change: Change = _plain
    seed: int = 1
    lead: float = 0.0  # added to the logit of the label
    stored: bool = False  # whether the network is one that the certificate stores


def _ball(p: float, eps: float, *words: int) -> Callable[[torch.Tensor], buffet.Region]:
    return lambda x: buffet.LpBall(x, list(words or (1,)), p, eps)


def _candidates(x: torch.Tensor) -> buffet.Region:
    noise = 1e-3 * torch.randn(2, 2, x.shape[1], generator=torch.Generator().manual_seed(1))
    return buffet.CandidateSet(x, [1, 2], [x[1] + noise[0], x[2] + noise[1]], budget=1)


WHOLE = method_named("backward", softmax="differences")
RECIPES: Mapping[str, Recipe] = {
    "baseline": Recipe({}, _ball(2, 0.01), buffet.METHODS["baseline"], _every_choice),
    "standard": Recipe(
        {"layer_norm": "standard", "hidden_act": "gelu_new"},
        _ball(math.inf, 1e-3, 1, 2),
        buffet.METHODS["lse"],
        _every_choice,
        2,
    ),
    "mean": Recipe(
        {"pooling": "mean", "norm_position": "pre", "hidden_act": "tanh"},
        _ball(1.5, 1e-3),
        WHOLE,
        _every_choice,
        3,
    ),
    "box": Recipe(
        {"embedding_size": 3, "head_act": "relu", "hidden_act": "gelu"},
        lambda x: buffet.Box(x, x - 5e-4, x + 3e-4, words=[1, 2]),
        buffet.METHODS["backward"],
        seed=4,
    ),
    "candidates": Recipe({}, _candidates, buffet.METHODS["forward"], seed=5),
    "whole": Recipe({}, _ball(1, 1e-3), WHOLE, _every_choice, 6),
    "whole of a box": Recipe(
        {}, lambda x: buffet.Box(x, x - 5e-4, x + 1e-3, words=[1, 2]), WHOLE, _every_choice, 6
    ),
    "whole of candidates": Recipe({}, _candidates, WHOLE, _every_choice, 6),
    "parts of a box": Recipe(
        {}, lambda x: buffet.Box(x, x - 5e-4, x + 1e-3, words=[1]), buffet.METHODS["lse"], seed=1
    ),
    "parts of candidates": Recipe({}, _candidates, buffet.METHODS["lse"], seed=5),
    "interval": Recipe({}, _ball(2, 1e-6), buffet.METHODS["interval"]),
    "intervals only": Recipe({}, _ball(2, 1e-6), buffet.METHODS["baseline"], _intervals_only),
    "at a point": Recipe({}, _ball(2, 0.0), buffet.METHODS["backward"]),
    "standard at a point": Recipe(
        {"layer_norm": "standard", "hidden_act": "gelu"}, _ball(2, 0.0), WHOLE, seed=2
    ),
    "wide": Recipe({}, _ball(2, 0.7), WHOLE, _every_choice, lead=1e3),
    "wide gelu": Recipe(
        {"hidden_act": "gelu", "embedding_norm": False},
        _ball(2, 0.7),
        WHOLE,
        lead=1e3,
    ),
    "wide square": Recipe(
        {"layer_norm": "standard", "layer_norm_eps": 0.1, "head_act": "relu"},
        _ball(2, 0.2),
        buffet.METHODS["interval"],
        lead=1e6,
    ),
    "two layers": Recipe({"num_hidden_layers": 2}, _ball(3, 1e-4), buffet.METHODS["forward"], seed=5),
    "cells": Recipe({}, _ball(2, 0.01), buffet.METHODS["lse"], seed=1),
    "cells of L1": Recipe({}, _ball(1, 0.01), buffet.METHODS["lse"], seed=1),
    "tree": Recipe({"hidden_act": "relu"}, _ball(2, 1.4), buffet.METHODS["buffet"], seed=5),
    "stored": Recipe(
        {"layer_norm": "standard", "layer_norm_eps": 0.1, "norm_position": "pre"},
        lambda x: buffet.Box(x, x - 5e-5, x + 3e-5, words=[1, 2]),
        buffet.METHODS["backward"],
        seed=4,
        stored=True,
    ),
}
FURTHER: Mapping[str, Recipe] = {
    "stems": Recipe({"hidden_act": "relu"}, _ball(2, 1.4), method_named("buffet", rivals=()), seed=5),
}
"""Bases of forged certificates only."""


@cache
def base(name: str) -> Base:
    """The certificate of a recipe: its boxes are claimed with some room, its margins barely."""
    recipe = {**RECIPES, **FURTHER}[name]
    with TemporaryDirectory() as folder, _stems_of_their_own(name == "stems"):
        directory = write_variant(Path(folder) / "model", {**SMALL, **recipe.network}, recipe.seed)
        model = buffet.load(directory, check=False)
        if recipe.lead:
            model = _leading(directory, model, recipe.lead)
        asked = Question.of(model, recipe.region(model.embed("a film")))
        if recipe.stored:
            model, asked = _in_onnx(directory, model)  # type: ignore[assignment]
        _, content, checkpoint = certify(model, [asked], recipe.method)
        if isinstance(model, OnnxModel):
            checkpoint = replace(
                checkpoint, run=lambda path, x: model.outputs_of(torch.from_numpy(x)).numpy()
            )
    opened = Opened.of(content)
    recipe.change(opened, np.random.default_rng(0))
    if name.startswith("cells"):
        _in_cells(opened)
    if name.startswith("parts"):
        _in_parts(opened)
    for claim in opened.head["claims"]:
        claim["margins"] = [m and 1e-9 for m in claim["margins"]]
    opened.tensors = {k: v for k, v in opened.tensors.items() if ".box." not in k}
    claims: dict[str, Array] = {}
    with Recorder(claims=claims).listening():
        result = judge(opened.close(), name, checkpoint)
    assert result.accepted, f"{name}: {result.reason}"
    opened.tensors |= claims
    return settled(opened.close(), checkpoint)


def _in_onnx(directory: Path, model: buffet.Model) -> tuple[OnnxModel, Question]:
    """The same network as one that is not a checkpoint's, with a row more.

    The margins of its answer are to be positive, or else the first of them negative: a case of two rows.
    """
    path = directory / "model.onnx"
    path.write_bytes(b"a network")
    x = model.embed("a film").double()
    rows = torch.cat([x, torch.zeros_like(x[:1])])
    layout = torch.arange(rows.numel()).view_as(rows)
    layout[-1] = -1
    found = OnnxModel("model", path, model.program64, (x.numel(),), layout)
    margins = buffet.Property.margins(int(found.program64.evaluate(rows).argmax()), found.outputs).rows
    last = len(margins)
    cases = ((0, last), *((r,) for r in range(1, last)))
    asked = buffet.Property(torch.cat([margins, -margins[:1]]), torch.zeros(last + 1).double(), cases)
    return found, Question(RECIPES["stored"].region(rows), asked)


@contextmanager
def _stems_of_their_own(wanted: bool) -> Iterator[None]:
    """Trees grow from parts of the region that have boxes of their own, and few leaves."""
    before = stems.Trunk._pays, certificate.POLICY
    if wanted:
        stems.Trunk._pays = lambda *args: True  # type: ignore[method-assign]
        certificate.POLICY = replace(before[1], leaves=2)
    try:
        yield
    finally:
        stems.Trunk._pays, certificate.POLICY = before  # type: ignore[method-assign]


def _leading(directory: Path, model: buffet.Model, lead: float) -> buffet.Model:
    """The same network, its answer so certain that wide regions are proven too."""
    tensors = load_file(directory / "model.safetensors")
    answer = int(model.logits(model.embed("a film")[None])[0].argmax())
    tensors["classifier.bias"][answer] += lead
    save_file(tensors, directory / "model.safetensors")
    return buffet.load(directory, check=False)


def settled(content: bytes, checkpoint: Checkpoint) -> Base:
    recorder = Recorder()
    with recorder.listening():
        result = judge(content, "base", checkpoint)
    assert result.accepted, result.reason
    return Base(content, checkpoint, recorder.found, result)


def _in_cells(opened: Opened) -> None:
    """The same claim twice, of both sides of a plane through the ball."""
    first, width = opened.claim, opened.tensors["center"].shape[1]
    ball = first["region"]
    direction = np.linspace(-1, 1.5, width)[None]
    opened.tensors["cuts.0"] = direction / np.linalg.norm(direction)
    place = 0.3 * ball["eps"]
    for number, ends in enumerate([([None], [place]), ([place], [None])]):
        region = {**ball, "kind": "cell", "cuts": 0, "rows": [0], "lower": ends[0], "upper": ends[1]}
        opened.head["claims"][number : number + 1] = [{**first, "region": region}]
    for name, value in list(opened.tensors.items()):
        if name.startswith("0."):
            opened.tensors["1" + name[1:]] = value


def _in_parts(opened: Opened) -> None:
    """The same claim twice, of both halves of an entry of a box or of a word's candidates."""
    first = opened.claim
    tensors = {n: v for n, v in opened.tensors.items() if not n.startswith("0.region")}
    own = {n.removeprefix("0.region."): v for n, v in opened.tensors.items() if n.startswith("0.region")}
    tensors |= {f"whole.0.{name}": value for name, value in own.items()}
    tensors |= {f"1{name[1:]}": value for name, value in tensors.items() if name.startswith("0.")}
    claims = []
    for number in range(2):
        region = {**first["region"], "whole": 0}
        if region["kind"] == "box":
            ends = {side: own[side].copy() for side in ("lower", "upper")}
            ends[("upper", "lower")[number]][0, 0] = 0.3 * own["lower"][0, 0] + 0.7 * own["upper"][0, 0]
            tensors |= {f"{number}.region.{side}": value for side, value in ends.items()}
        else:
            region["choices"] = [[number], [0, 1]]
        claims.append({**first, "region": region})
    opened.head["claims"], opened.tensors = claims, tensors


# --- pushed -------------------------------------------------------------------------------------------------


def weaker(known: Base, found: Mapping[Key, Derived]) -> Iterator[bytes]:
    """Certificates that claim one unit more than is derived, where what else was `found` allows it."""
    for key, right in known.found.items():
        wrong = found.get(key)
        if wrong is None:
            continue
        for side in range(2):
            inside = wrong.low > right.low if side == 0 else wrong.high < right.high
            for place in np.argwhere(inside)[:1]:
                yield _pushed(known, key, right, wrong, side, tuple(place))


def _pushed(
    known: Base, key: Key, right: Derived, wrong: Derived, side: int, place: tuple[int, ...]
) -> bytes:
    opened = Opened.of(known.content)
    low, high = np.minimum(right.low, wrong.low), np.maximum(right.high, wrong.high)
    box = np.stack([low - ROOM * (1 + np.abs(low)), high + ROOM * (1 + np.abs(high))])
    limit = (right.low if side == 0 else right.high)[place]
    box[(side, *place)] = np.nextafter(limit, math.inf if side == 0 else -math.inf)
    opened.tensors[f"{key[0]}.box.{key[1]}"] = box
    return opened.close()


def less_slack(known: Base, found: Mapping[Key, Derived], result: Result) -> bool:
    """Whether a deployed run is said to be nearer than is derived: at a node, or in the margin."""
    margins = (
        m - s > n - t
        for ours, theirs in zip(result.proofs, known.result.proofs, strict=True)
        for m, s, n, t in zip(ours.margins, ours.slacks, theirs.margins, theirs.slacks, strict=True)
    )
    nodes = (bool((found[k].escape < d.escape).any()) for k, d in known.found.items() if k in found)
    return any(margins) or any(nodes)
