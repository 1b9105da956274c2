"""o-BuFFeT: the free numbers of the relaxations, learned by gradient on the margin.

Whatever is learned is sound at every step, so the best iterate of every task is kept, and what counts is its
margin computed once more without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.choices import PRODUCTS, Relaxer, Shares, initial_shares
from buffet.bounds.intervals import Box
from buffet.bounds.substitution import Bounds, Stop

MODES = ("none", "final", "all", "tuned")
STARTS = (*PRODUCTS, "random", "best")

Evaluate = Callable[[Relaxer], Float[Tensor, "tasks others"]]
"""The margins under a relaxation, differentiable in its learned shares."""


class Memory:
    """Shares that were learned for a task at one ε, to start from at the next.

    What is learned is sound at every ε, and hardly moves between neighbouring ones.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], int], dict[int, Shares]] = {}

    def keep(self, bounds: Bounds, root: int, shares: Mapping[int, Shares]) -> None:
        """Remember the shares of every task for the bounds of node `root`."""
        for task, words in enumerate(bounds.region.moved.tolist()):
            one = {i: {k: v[task].detach().clone() for k, v in s.items()} for i, s in shares.items()}
            self._known[tuple(words), root] = one

    def recall(self, bounds: Bounds, root: int, like: Mapping[int, Shares]) -> dict[int, Shares] | None:
        """What was learned for these tasks, if all of it is known and fits `like`."""
        known = [self._known.get((tuple(words), root)) for words in bounds.region.moved.tolist()]
        found: dict[int, Shares] = {}
        for index, node in like.items():
            found[index] = {}
            for name in node:
                parts = [k[index][name] for k in known if k is not None and name in k.get(index, {})]
                if len(parts) < len(known):
                    return None
                found[index][name] = torch.stack(parts)
        return found


@dataclass(frozen=True)
class Learning:
    """How to learn. The defaults are the paper's."""

    steps: int = 100
    rate: float = 0.05  # of Adam
    start: str = "zero"  # the first α: a key of `PRODUCTS`, ``random``, or ``best`` of the fixed ones
    stop: bool = True  # as soon as every task is proven
    trace: Callable[[int, Tensor], None] | None = None  # is told the step and the margins of the tasks


def learn(
    bounds: Bounds,
    evaluate: Evaluate,
    learning: Learning,
    *,
    products_only: bool,
    memory: Memory | None = None,
) -> tuple[dict[int, Shares], Float[Tensor, "tasks"]]:
    """Maximise the smallest margin of every task by Adam on ``softplus(−margin)``, shares clamped to [0, 1].

    Returns the best shares found for every task and the margin they had (with gradients on, so to be
    evaluated again).
    """
    root = len(bounds.nodes) - 1
    starts = ("zero", "rule", "middle") if learning.start == "best" else (learning.start,)
    with torch.no_grad():
        candidates = [initial_shares(bounds, starts[0], products_only=products_only)]
        known = memory.recall(bounds, root, candidates[0]) if memory else None
        if known:
            candidates.append(known)
        else:
            candidates += [initial_shares(bounds, s, products_only=products_only) for s in starts[1:]]
        best, best_margin = None, None
        for shares in candidates:
            margin = _smallest(evaluate(Relaxer(learned=shares)))
            best, best_margin = _better(best, best_margin, shares, margin)
    assert best is not None
    assert best_margin is not None
    leaves = {i: {k: v.clone() for k, v in s.items()} for i, s in best.items()}
    if not leaves:
        return best, best_margin
    adam = Adam(leaves, learning.rate)
    for number in range(learning.steps):
        with torch.enable_grad():
            margin = _smallest(evaluate(Relaxer(learned=leaves)))
            loss = torch.nn.functional.softplus(-margin).sum()
        if learning.trace:
            learning.trace(number, margin.detach())
        best, best_margin = _better(best, best_margin, leaves, margin.detach())
        if learning.stop and bool((best_margin > 0).all()):
            break
        adam.descend(loss)
    if memory:
        memory.keep(bounds, root, best)
    return best, best_margin


def _smallest(margins: Tensor) -> Tensor:
    return margins.amin(-1)


def _better(
    best: dict[int, Shares] | None,
    best_margin: Tensor | None,
    shares: Mapping[int, Shares],
    margin: Tensor,
) -> tuple[dict[int, Shares], Tensor]:
    """Keep, task by task, the shares with the larger margin."""
    margin = margin.nan_to_num(nan=-torch.inf)
    if best is None or best_margin is None:
        return {i: {k: v.detach().clone() for k, v in s.items()} for i, s in shares.items()}, margin
    better = margin > best_margin

    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(better.reshape(-1, *[1] * (new.ndim - 1)), new.detach(), old)

    kept = {i: {k: pick(v, best[i][k]) for k, v in s.items()} for i, s in shares.items()}
    return kept, torch.where(better, margin, best_margin)


@dataclass(frozen=True)
class Tuning:
    """Boxes from relaxations tuned to them: every group of nodes gets its own shares, learned on a few rows.

    All rows of the group use the same shares, so a random sample of them stands for all. The box is the
    intersection with the one of the untuned relaxation, so it is never larger.
    """

    rows: int = 48  # sampled, over all tokens
    steps: int = 12  # most of what can be gained is gained by then
    again: int = 3  # steps from shares learned at another ε
    rate: float = 0.15  # of Adam
    memory: Memory | None = None

    def __call__(self, bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        plain = bounds.boxes_of(nodes, stops)
        root, _ = next(iter(bounds.unit_rows(nodes, stops)))
        shares = initial_shares(bounds, "zero", products_only=False, upto=root)
        if not shares or root in stops:
            return plain
        features = sum(bounds.clean[n].shape[-1] for n in nodes)
        count = max(2, self.rows // bounds.clean[root].shape[0])
        generator = torch.Generator().manual_seed(root)
        sample = torch.randperm(features, generator=generator)[:count]
        known = self.memory.recall(bounds, root, shares) if self.memory else None
        shares = known or shares
        adam = Adam(shares, self.rate)
        for _ in range(self.again if known else self.steps):
            with torch.enable_grad():
                tuned = bounds.relaxed(Relaxer(learned=shares), bounds.dtype, upto=root)
                lower = [
                    tuned.concretise(*tuned.substitute(start, rows, tuned.locals))
                    for start, rows in tuned.unit_rows(nodes, tuned.locals, sample)
                ]
                loss = -torch.cat(lower, -1).mean((1, 2)).sum()
            adam.descend(loss)
        learned = {i: {k: v.detach() for k, v in s.items()} for i, s in shares.items()}
        if self.memory:
            self.memory.keep(bounds, root, learned)
        tuned = bounds.relaxed(Relaxer(learned=learned), bounds.dtype, upto=root)
        boxes = tuned.boxes_of(nodes, tuned.locals)
        return {n: plain[n] & boxes[n] for n in nodes}


class Adam:
    """Adam (Kingma & Ba 2015) on shares: every step is followed by the projection to [0, 1].

    PyTorch's own costs seconds of imports at its first use, which is more than most bounds take.
    """

    def __init__(self, shares: Mapping[int, Shares], rate: float) -> None:
        self.leaves = [share.requires_grad_() for node in shares.values() for share in node.values()]
        self.rate = rate
        self._moments = [(torch.zeros_like(leaf), torch.zeros_like(leaf)) for leaf in self.leaves]
        self._steps = 0

    def descend(self, loss: Tensor) -> None:
        """One step down the gradient of `loss`; an entry that is not a number does not move."""
        grads = torch.autograd.grad(loss, self.leaves, allow_unused=True)
        self._steps += 1
        with torch.no_grad():
            for leaf, grad, (first, second) in zip(self.leaves, grads, self._moments, strict=True):
                if grad is None:
                    continue
                grad = grad.nan_to_num(0.0, 0.0, 0.0)
                first.lerp_(grad, 0.1)
                second.lerp_(grad * grad, 0.001)
                size = (second / (1 - 0.999**self._steps)).sqrt_().add_(1e-8)
                leaf.addcdiv_(first, size, value=-self.rate / (1 - 0.9**self._steps)).clamp_(0, 1)
