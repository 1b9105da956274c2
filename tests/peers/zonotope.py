"""Multi-norm zonotopes in the manner of DeepT-Fast (Bonaert et al., PLDI 2021), written from the maths.

It is here to be compared with, and shares nothing with our own bounds: values are pushed forward through the
program as zonotopes (`multinorm`), and at the input of every block all but the largest noise symbols are
folded into one symbol per entry. To see a radius:

    PYTHONPATH=tests python -c "
    import buffet; from peers import zonotope
    model = buffet.load(); x = model.embed('a gripping , moving film')
    print(zonotope.radius(model, buffet.LpBall(x, words=[[1], [2]], p=2)))"
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.attack import AttackSettings, attacked_radius
from buffet.engine import Classifier
from buffet.errors import BuffetError
from buffet.network import Add, Affine, Apply, Bilinear, Linear, Op, Program, Scores, Softmax
from buffet.query import clean_answer
from buffet.regions import LpBall
from buffet.search.root_finding import RootFinder, hopeless, secant
from peers.multinorm import LINES, Zonotope, product, softmax

SYMBOLS = 6000
"""Noise symbols kept at the input of a block, beside one for every entry; DeepT keeps 14000, on a GPU.

A block of 16 tokens × 128 features adds up to 8000, of 16 kB each in every value, about four at a time: 1 GB.
"""
GUESS, GUESS_ATTACK = 0.3, AttackSettings(steps=10, restarts=1)
"""Radii are looked for first at this share of what a short attack breaks."""


def margins(
    program: Program, region: LpBall, label: int, *, symbols: int = SYMBOLS
) -> Float[Tensor, "tasks others"]:
    """Lower bounds of ``logit[label] − logit[other]`` over the region, sound up to float64's rounding.

    Args:
        program: from embedding rows to logits, without padding rows; it is run in float64.
        region: an `LpBall` with a size, of any norm and any number of words.
        symbols: how many noise symbols are kept at the input of every block.

    NaN, or minus infinity, where there is no bound.
    """
    if region.eps is None:
        raise BuffetError("zonotope: got an LpBall without a size; give one with a size (eps=...)")
    if symbols < 1:
        raise BuffetError(f"zonotope: got symbols={symbols}; give at least 1")
    walk = _Walk.of(program.to(torch.float64).margins(label), symbols)
    with torch.inference_mode():
        return torch.stack([walk.run(_start(region.select([task]))) for task in range(region.tasks)])


def radius(
    model: Classifier,
    region: LpBall,
    *,
    label: int | None = None,
    symbols: int = SYMBOLS,
    tolerance: float = 1e-3,
    largest: float = 1e4,
    guesses: Sequence[float] | None = None,
) -> list[float]:
    """The largest ε that `margins` proves, for every task, by the search that our own methods use.

    Args:
        label: the class to defend; by default the one the model gives the unmoved rows.
        tolerance: relative, of the search.
        guesses: where to look first, one number per task; otherwise a short attack suggests it.
    """
    label, clean = clean_answer(model, region, label)
    if guesses is None:
        broken = attacked_radius(model.program64, region, label, GUESS_ATTACK)
        guesses = (GUESS * broken).tolist()

    def search(task: int, guess: float) -> float:
        steps: RootFinder = secant(clean, guess, tolerance, largest) if clean > 0 else hopeless()
        try:
            eps = next(steps)
            while True:
                ball = region.select([task]).with_eps(eps)
                found = margins(model.program64, ball, label, symbols=symbols)
                eps = steps.send(float(found.min()) if bool(found.isfinite().all()) else math.nan)
        except StopIteration as stop:
            return float(stop.value.certified)

    return [search(task, guess) for task, guess in enumerate(guesses)]


def _start(region: LpBall) -> Zonotope:
    """The rows of the only task of a region; where the norm is the largest entry, φ is made of ε symbols."""
    assert region.eps is not None
    center = region.center.double()
    tokens, width = center.shape
    (rows,) = region.moved
    moves = center.new_zeros(len(rows), width, tokens, width)
    entry = torch.arange(width, device=center.device)
    for word, row in enumerate(rows):
        moves[word, entry, row, entry] = region.eps[0]
    if math.isinf(region.p):
        return Zonotope(center, moves[:0], moves.flatten(0, 1), region.q)
    return Zonotope(center, moves, moves.new_zeros(0, tokens, width), region.q)


@dataclass(frozen=True, eq=False)
class _Walk:
    """A program that ends in margins, and where in it symbols are folded."""

    program: Program
    last_use: tuple[int, ...]  # of every node, the node that reads it last
    inputs: frozenset[int]  # of blocks: what comes later reads nothing from before
    symbols: int

    @classmethod
    def of(cls, program: Program, symbols: int) -> _Walk:
        count = len(program.nodes)
        last_use = list(range(count))
        for index, node in enumerate(program.nodes):
            for read in node.inputs:
                last_use[read] = index
        necks = [n for n in range(count) if all(use <= n for use in last_use[:n])]
        scores = [index for index, node in enumerate(program.nodes) if isinstance(node.op, Scores)]
        inputs = frozenset(max(n for n in necks if n < s) for s in scores)
        return cls(program, tuple(last_use), inputs, symbols)

    def run(self, start: Zonotope) -> Float[Tensor, "others"]:
        """The smallest margins."""
        live = {0: start}
        for index, node in enumerate(self.program.nodes[1:], start=1):
            used = max(value.symbols for value in live.values())
            value = _apply(node.op, [live[i] for i in node.inputs], used)
            live = {i: kept for i, kept in live.items() if self.last_use[i] > index}
            live[index] = value.reduced(self.symbols) if index in self.inputs else value
        return live[index].box()[0].squeeze(0)


def _apply(op: Op, inputs: Sequence[Zonotope], used: int) -> Zonotope:
    """What an operation makes of values; new symbols come after the `used` ones."""
    x = inputs[0]
    match op:
        case Affine():
            return replace(x.map(lambda v: _affine(v, op.weight), op.bias), least=op.least)
        case Linear():
            coefs, constant = op.coefficients(x.center), op.evaluate(torch.zeros_like(x.center))
            return x.map(lambda v: op.forth(coefs, v.unsqueeze(-1)).squeeze(-1), constant)
        case Add():
            return x.plus(inputs[1])
        case Apply() if op.function in LINES:
            return LINES[op.function](*x.box()).of(x, used)
        case Bilinear():
            return product(op, x, inputs[1], used)
        case Softmax():
            return softmax(x, op.heads, used)
    what = op.function if isinstance(op, Apply) else type(op).__name__
    raise BuffetError(f"zonotope: {what} is not supported; choose a network of: {', '.join(LINES)}")


def _affine(value: Tensor, weight: Tensor) -> Tensor:
    """Rows times weights; most symbols reach a single row, and rows of zeros stay what they are."""
    rows = value.flatten(0, -2)
    reached = torch.linalg.vector_norm(rows, math.inf, dim=-1) != 0
    out = rows.new_zeros(len(rows), len(weight))
    out[reached] = rows[reached] @ weight.mT
    return out.unflatten(0, value.shape[:-1])
