"""The soundness campaign: random networks and regions, and points that try to break every method's bounds.

A method claims that no point of a region has a smaller margin than its bound. The campaign draws small
networks over all operations (and a share with extreme weights), bounds their margins with every method,
evaluates sampled, corner and attacked points in float64, and counts the claims that fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.loading import ModelConfig
from buffet.methods import METHODS, Method, method_named
from buffet.random_models import RandomModel, random_model
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.verify import Engine, bound_margins

LEARNING_STEPS, LEARNING_EVERY = 4, 5
"""Methods that learn are checked with this many steps, on every so manieth network: they are slow."""
TOLERANCE = 1e-9
"""How far, relative to the size of the logits, evaluating a point in float64 may itself be off."""


@dataclass(frozen=True)
class Case:
    """One random network with a region around one random input."""

    name: str
    model: RandomModel
    region: Region
    mask: Bool[Tensor, "tokens"]
    label: int


@dataclass(frozen=True)
class Violation:
    """A point that a bound says cannot exist."""

    case: str
    method: str
    bound: float
    margin: float


@dataclass(frozen=True)
class Tally:
    """What the campaign has seen of one method."""

    method: str
    networks: int = 0
    points: int = 0  # margins of points held against a finite bound
    no_bound: int = 0  # networks for which the method gave no finite bound
    violations: tuple[Violation, ...] = ()


def random_case(seed: int) -> Case:
    """A network of 1 to 4 layers over a random choice of everything a program can express."""
    g = torch.Generator().manual_seed(seed)

    def pick(choices: Sequence[Any]) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=g))]

    heads = pick((1, 2, 3))
    classes = pick((2, 2, 3))
    config = ModelConfig(
        vocab_size=4,
        hidden_size=heads * pick((2, 3, 4)),
        num_hidden_layers=pick((1, 2, 3, 4)),
        num_attention_heads=heads,
        intermediate_size=pick((3, 8)),
        hidden_act=pick(("relu", "gelu", "gelu_new", "tanh")),
        max_position_embeddings=8,
        type_vocab_size=1,
        layer_norm=pick(("standard", "no_var")),
        layer_norm_eps=pick((1e-12, 1e-5)),
        norm_position=pick(("post", "pre")),
        pooling=pick(("cls", "mean")),
        num_labels=classes,
    )
    scale = pick((0.3, 1.0, 1.0, 2.0, 10.0))
    model = random_model(config, g, scale)
    tokens = pick((2, 3, 5))
    padding = pick((0, 0, 1, 2))
    mask = torch.arange(tokens + padding) < tokens
    x = pick((0.1, 1.0, 5.0)) * torch.randn(tokens + padding, config.hidden_size, generator=g)
    label = int(model.program64.evaluate(x.double(), mask).argmax())
    kind = f"{config.num_hidden_layers}×{config.hidden_size} {config.hidden_act} {config.layer_norm}"
    name = f"{seed}: {kind} {config.norm_position} {config.pooling} scale {scale}"
    return Case(name, model, _random_region(x, tokens, g, pick), mask, label)


def _random_region(
    x: Tensor, tokens: int, g: torch.Generator, pick: Callable[[Sequence[Any]], Any]
) -> Region:
    """A region around one or two words, tasks of very different sizes."""
    count = pick((1, 1, 2))
    words = [torch.randperm(tokens, generator=g)[:count].tolist() for _ in range(2)]
    size = 10 ** (-4 + 4 * torch.rand(2, generator=g, dtype=torch.float64))
    kind = pick(("ball", "ball", "ball", "box", "candidates"))
    if kind == "ball":
        return LpBall(x, words, p=pick((1, 1.5, 2, 3, math.inf)), eps=size)
    if kind == "box":
        reach = size[0] * torch.rand(2, *x.shape, generator=g)
        return Box(x, x - reach[0], x + reach[1], words)
    rows = [
        [x[w] + size[t] * torch.randn(3, x.shape[1], generator=g) for w in ws] for t, ws in enumerate(words)
    ]
    return CandidateSet(x, words, rows, budget=pick((None, 1)))


def points_of(case: Case, count: int) -> Float[Tensor, "points tasks others"]:
    """Margins at sampled, corner and attacked points of the region (float64)."""
    generator = torch.Generator().manual_seed(0)
    deltas = [case.region.sample(count, generator)]
    found = attack(
        case.model.program64, case.region, case.label, AttackSettings(steps=20, restarts=2), mask=case.mask
    )
    deltas.append(found.deltas[None])
    # Corners in the direction of the gradient at the sampled points, which a linear bound leans on.
    margins = case.model.program64.margins(case.label)
    start = case.region.sample(max(2, count // 10), generator).requires_grad_()
    mask = case.mask.expand(*start.shape[:2], -1)
    values = margins.evaluate(case.region.points(start), mask)
    for other in range(values.shape[-1]):
        (slope,) = torch.autograd.grad(values[..., other].sum(), start, retain_graph=True)
        deltas.append(case.region.extreme(slope.nan_to_num(0.0, 0.0, 0.0)))
    with torch.no_grad():
        everything = torch.cat(deltas)
        mask = case.mask.expand(*everything.shape[:2], -1)
        return margins.evaluate(case.region.points(everything), mask)


def check_case(case: Case, method: Method, name: str, margins: Tensor, engine: Engine) -> Tally:
    """Hold the points' margins against one method's bounds."""
    bounds = bound_margins(case.model, case.region.without_padding(case.mask), method, case.label, engine)
    finite = bounds.isfinite().all()
    slack = TOLERANCE * (1 + margins.abs())
    broken = (margins < bounds - slack) & bounds.isfinite()
    worst = [
        Violation(case.name, name, float(bounds[t, o]), float(margins[i, t, o]))
        for i, t, o in broken.nonzero()[:1].tolist()
    ]
    points = margins.shape[0] * int(bounds.isfinite().all(-1).sum())
    return Tally(name, 1, points, int(not finite), tuple(worst))


def campaign(
    networks: int, points: int, seed: int = 0, methods: Sequence[str] | None = None
) -> Iterator[dict[str, Tally]]:
    """Run the campaign; yields the tallies so far after every network."""
    # Any share is sound, so a few steps of an optimiser say as much as a hundred.
    named = {name: method_named(name, steps=LEARNING_STEPS) for name in methods or METHODS}
    if methods is None:
        named |= {
            "baf+backward": method_named("baseline", propagation="baf+backward"),
            "backward, window 1": method_named("backward", window=1),
            "backward, differences": method_named("backward", softmax="differences"),
            "backward, float64": method_named("backward"),
        }
    tallies = {name: Tally(name) for name in named}
    for index in range(networks):
        case = random_case(seed + index)
        margins = points_of(case, points)
        for name, method in named.items():
            if method.optimise != "none" and index % LEARNING_EVERY:
                continue
            engine = Engine(dtype=torch.float64 if name.endswith("float64") else torch.float32)
            new, old = check_case(case, method, name, margins, engine), tallies[name]
            tallies[name] = Tally(
                name,
                old.networks + 1,
                old.points + new.points,
                old.no_bound + new.no_bound,
                old.violations + new.violations,
            )
        yield dict(tallies)
