"""o-BuFFeT: the free numbers of the relaxations, learned by gradient on the margin.

Whatever is learned is sound at every step, so the best iterate of every task is kept, and what counts is its
margin computed once more without gradients.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.choices import PRODUCTS, Relaxer, initial_shares
from buffet.bounds.intervals import Box
from buffet.bounds.sheet import Gradient, Shares, Sheet
from buffet.bounds.substitution import Bounds, OutOfTime, Stop
from buffet.program import Scores, Softmax
from buffet.regions import LpBall, Region

MODES = ("none", "final", "all", "tuned")
STARTS = (*PRODUCTS, "random", "best")

Evaluate = Callable[[Sheet], tuple[Float[Tensor, "tasks others"], Gradient]]
"""The margins under the relaxation with these shares, and how to get their gradient."""


Lessons = dict[tuple[tuple[int, ...], int], tuple[float, dict[int, Shares]]]
"""The shares learned for some words to bound some node, and the ε they were learned at."""


class Memory:
    """Shares that were learned for a task at one ε, to start from at the next, and for other words.

    What is learned is sound at every ε and for every word, and hardly moves between neighbouring ε. Tasks may
    be worked on at the same time: nothing a task gets depends on which of the others came first.
    """

    def __init__(self) -> None:
        self._known: Lessons = {}
        self._first: dict[int, dict[int, Shares]] = {}

    def copy(self) -> Memory:
        """Another memory that begins with the same lessons."""
        other = Memory()
        other._known, other._first = dict(self._known), dict(self._first)
        return other

    def keep(self, region: Region, root: int, shares: Mapping[int, Shares]) -> None:
        """Remember what every task has learned to bound the node `root`, and the ε it was learned at."""
        for task, (words, size) in enumerate(_tasks(region)):
            one = {i: {k: v[task].detach().clone() for k, v in s.items()} for i, s in shares.items()}
            self.add({(words, root): (size, one)})

    def lessons(self, region: Region, root: int | None = None) -> Lessons:
        """What was learned for the tasks of a region, to bound the node `root` or any."""
        tasks = {words for words, _ in _tasks(region)}
        return {
            (words, node): lesson
            for (words, node), lesson in self._known.items()
            if words in tasks and root in (None, node)
        }

    def add(self, lessons: Lessons) -> None:
        """Take over what was learned elsewhere."""
        self._known |= lessons
        for (_, root), (_, shares) in lessons.items():
            self._first.setdefault(root, shares)

    def shares_of(
        self, region: Region, root: int, within: float = math.inf, *, others: bool = False
    ) -> dict[int, Shares] | None:
        """What was learned for these tasks, no further than `within` (relatively) from their present ε.

        With `others`, tasks nothing was learned for get what was learned for the first one.
        """
        first = 0.0, self._first.get(root) if others else None
        known = [(*self._known.get((words, root), first), size) for words, size in _tasks(region)]
        fit = [k for at, k, size in known if k and (math.isinf(within) or abs(size / at - 1) < within)]
        if not fit or len(fit) < len(known):
            return None
        # Which sides of a line are free depends on ε: what not all tasks have learned is left to its default.
        return {
            i: {k: torch.stack([one[i][k] for one in fit]) for k in s if all(k in one[i] for one in fit)}
            for i, s in fit[0].items()
        }

    def moved(self, bounds: Bounds, root: int) -> float:
        """How far ε is from where the shares of the tasks were learned, relatively; inf: for another task."""
        known = [(self._known.get((words, root)), size) for words, size in _tasks(bounds.region)]
        return max(abs(size / k[0] - 1) if k is not None and k[0] > 0 else math.inf for k, size in known)


def _tasks(region: Region) -> list[tuple[tuple[int, ...], float]]:
    """The words of every task, and its size if it has one."""
    sizes = [0.0] * region.tasks
    if isinstance(region, LpBall) and region.eps is not None:
        sizes = region.eps.tolist()
    return list(zip((tuple(words) for words in region.moved.tolist()), sizes, strict=True))


@dataclass(frozen=True)
class Control:
    """What a computation remembers, when it has to end, and who is told how it goes."""

    memory: Memory | None = None
    deadline: float | None = None  # on the clock of `time.perf_counter`
    trace: Callable[[int, Tensor], None] | None = None  # is told the step and the margins of the tasks
    learned: dict[int, dict[int, Shares]] | None = None  # takes the shares learned for every node

    @property
    def expired(self) -> bool:
        return self.deadline is not None and time.perf_counter() > self.deadline

    def ahead(self, seconds: float) -> Control:
        """The same, ending so many seconds earlier."""
        return self if self.deadline is None else replace(self, deadline=self.deadline - seconds)


@dataclass(frozen=True)
class Learning:
    """How to learn. The defaults are the paper's."""

    steps: int = 100
    rate: float = 0.05  # of Adam
    start: str = "zero"  # the first α: a key of `PRODUCTS`, ``random``, or ``best`` of the fixed ones
    mode: str = "all"  # of `MODES`; says how steps are shared between tasks
    stop: bool = True  # as soon as every task is proven
    decay: bool = False  # let the rate fall to 0 over the steps

    def shared(self, plan: Plan, known: bool, moved: float) -> Learning:
        """The same for one of many neighbouring tasks, where what was learned for one serves the next.

        Whether a margin is positive must not matter then, so that margins are comparable between ε.
        """
        share = plan.near if moved < NEAR else plan.other if known else plan.first
        steps = math.ceil(self.steps * share)
        return replace(self, steps=steps, rate=self.rate * plan.faster, stop=False, decay=True)


@dataclass(frozen=True)
class Plan:
    """The share of all steps that a radius search takes for one task, with larger steps."""

    first: float  # for its first word
    other: float  # where shares are known from another word or ε
    near: float  # where they are known from an ε that is near
    faster: float  # by how much larger the steps are


NEAR = 0.4
"""Shares learned within this relative distance of an ε may be used as they are: the margin is a smooth
function of ε then."""
PLANS: Mapping[str, Plan] = {
    "final": Plan(0.2, 0.1, 0.0, 6.0),
    "all": Plan(0.12, 0.08, 0.0, 6.0),
    "tuned": Plan(0.6, 0.3, 0.1, 1.0),
}


def learn(
    bounds: Bounds,
    evaluate: Evaluate,
    learning: Learning,
    *,
    products_only: bool,
    control: Control,
    dtype: torch.dtype = torch.float64,
) -> dict[int, Shares]:
    """Maximise the smallest margin of every task by Adam on ``softplus(−margin)``, shares clamped to [0, 1].

    Returns the best shares found for every task. Their margin has to be evaluated again, without gradients.
    """
    root, memory = len(bounds.nodes) - 1, control.memory
    starts = ("zero", "rule", "middle") if learning.start == "best" else (learning.start,)
    known = memory.shares_of(bounds.region, root, others=True) if memory else None
    if memory:
        learning = learning.shared(PLANS[learning.mode], known is not None, memory.moved(bounds, root))
    with torch.no_grad():
        candidates = (
            [known] if known else [initial_shares(bounds, s, products_only=products_only) for s in starts]
        )
        sheets = [Sheet(shares, dtype) for shares in candidates]
        best = _Best(sheets[0].values)
        if len(sheets) > 1:
            for sheet in sheets:
                best.offer(sheet.values, evaluate(sheet)[0].amin(-1))
        sheet = sheets[0]
        sheet.values.copy_(best.values)
    adam = Adam(sheet, learning.rate)
    for number in range(learning.steps if sheet.values.numel() else 0):
        if control.expired:
            break
        try:
            margins, gradient = evaluate(sheet)
        except OutOfTime:
            break
        margin, other = margins.min(-1, keepdim=True)
        if control.trace:
            control.trace(number, margin.squeeze(-1))
        best.offer(sheet.values.detach(), margin.squeeze(-1))
        if number == learning.steps - 1 or (learning.stop and best.proven):
            break
        # the derivative of softplus(−margin)
        weights = torch.zeros_like(margins).scatter_(-1, other, -torch.sigmoid(-margin))
        adam.descend(gradient(weights), 1 - number / learning.steps if learning.decay else 1.0)
    found = sheet.reading(best.values.double())
    if memory and (learning.steps or not known):
        memory.keep(bounds.region, root, found)
    if control.learned is not None:
        control.learned[root] = found
    return found


def follow(
    evaluate: Callable[[Relaxer, Tensor], Tensor],
    shares: Mapping[int, Shares],
    eps: Float[Tensor, "tasks"],
    clean: float,
    learning: Learning,
    control: Control,
) -> tuple[dict[int, Shares], Float[Tensor, "tasks"]]:
    """Learn shares where it matters, at the ε where the margin is about 0, which moves as they are learned.

    Every step takes the gradient of the margins at the present ε and then moves ε towards the root.

    Args:
        evaluate: margins under a relaxation at given sizes, differentiable in the shares.
        eps: where to start, about the largest ε proven so far.
        clean: the margin at ε = 0.
    """
    sheet = Sheet(shares)
    adam = Adam(sheet, learning.rate)
    for number in range(learning.steps):
        try:
            with torch.enable_grad():
                margin = evaluate(Relaxer(learned=sheet.shares), eps).amin(-1)
                loss = torch.nn.functional.softplus(-margin).sum()
        except OutOfTime:
            break
        adam.descend(sheet.gradient(loss), 1 - number / learning.steps)
        step = (margin.detach() / (STEEPNESS * clean)).clamp(-LARGEST_FALL, LARGEST_RISE)
        eps = eps * (1 + step.nan_to_num(nan=-LARGEST_FALL))
    return sheet.reading(sheet.values.detach()), eps


STEEPNESS, LARGEST_RISE, LARGEST_FALL = 10.0, 0.08, 0.05
"""By how much ε moves, relatively, when the margin is as large as the clean one; and the most it may."""


class _Best:
    """For every task the values that had the largest margin so far."""

    def __init__(self, values: Tensor) -> None:
        self.values = values.detach().clone()
        self._margin = values.new_full((len(values),), -torch.inf, dtype=torch.float64)

    @property
    def proven(self) -> bool:
        return bool((self._margin > 0).all())

    def offer(self, values: Tensor, margin: Tensor) -> None:
        better = margin > self._margin  # not for NaN
        torch.where(better[:, None], values, self.values, out=self.values)
        torch.where(better, margin, self._margin, out=self._margin)


@dataclass(frozen=True)
class Tuning:
    """Boxes from relaxations tuned to them: groups of nodes get their own shares, learned on a few rows.

    All rows of a group use the same shares, so a random sample of them stands for all. A group starts from
    what the groups before it have learned; shares of another word would be a much worse start.
    """

    rows: int = 24  # sampled, over all tokens
    steps: int = 4  # for every group: half of what they all can gain together
    near: float = 0.15  # within this relative distance of the ε they were learned at, shares are kept
    rate: float = 0.15  # of Adam
    control: Control = Control()
    carried: dict[int, Shares] = field(default_factory=dict)  # what groups have learned, for the next one

    def sample(self, tokens: int) -> int:
        """How many features of a node with so many tokens are learned on."""
        return max(2, self.rows // tokens)

    def __call__(self, bounds: Bounds, nodes: Sequence[int], stops: Mapping[int, Stop]) -> dict[int, Box]:
        root, _ = next(iter(bounds.unit_rows(nodes, stops)))
        memory, target = self.control.memory, nodes[0]
        # Scores, their differences and weights take what queries and keys have learned.
        follows = any(isinstance(bounds.nodes[n].op, Scores | Softmax) for n in (target, root))
        known = memory.shares_of(bounds.region, target, self.near) if memory and not follows else None
        shares = known or initial_shares(bounds, "zero", products_only=False, upto=root, known=self.carried)
        if not shares or root in stops:
            return bounds.boxes_of(nodes, stops)
        features = sum(bounds.clean[n].shape[-1] for n in nodes)
        generator = torch.Generator().manual_seed(root)
        sample = torch.randperm(features, generator=generator)[: self.sample(len(bounds.clean[root]))]
        steps = 0 if follows or known else self.steps
        sheet = Sheet(shares)
        adam = Adam(sheet, self.rate)
        for _ in range(steps):
            if self.control.expired:
                break
            with torch.enable_grad():
                tuned = bounds.relaxed(Relaxer(learned=sheet.shares), bounds.dtype, upto=root)
                lower = [
                    tuned.concretise(*tuned.substitute(start, rows, tuned.locals))
                    for start, rows in tuned.unit_rows(nodes, tuned.locals, sample)
                ]
                loss = -torch.cat(lower, -1).mean((1, 2)).sum()
            adam.descend(sheet.gradient(loss))
        learned = sheet.reading(sheet.values.detach())
        self.carried.update(learned)
        if memory and steps:
            memory.keep(bounds.region, target, learned)
        if self.control.learned is not None:
            self.control.learned[target] = learned
        tuned = bounds.relaxed(Relaxer(learned=learned), bounds.dtype, upto=root)
        return tuned.boxes_of(nodes, tuned.locals)


class Adam:
    """Adam (Kingma & Ba 2015) on shares: every step is followed by the projection to [0, 1].

    PyTorch's own costs seconds of imports at its first use, which is more than most bounds take.
    """

    def __init__(self, sheet: Sheet, rate: float) -> None:
        self.sheet, self.rate = sheet, rate
        self._first, self._second = (torch.zeros_like(sheet.values, requires_grad=False) for _ in range(2))
        self._steps = 0

    def descend(self, gradient: Float[Tensor, "tasks numbers"], share: float = 1.0) -> None:
        """One step (or a `share` of it) down a gradient; where it is NaN, nothing moves."""
        self._steps += 1
        with torch.no_grad():
            gradient = gradient.nan_to_num(0.0, 0.0, 0.0)
            self._first.lerp_(gradient, 0.1)
            self._second.lerp_(gradient.square_(), 0.001)
            size = (self._second / (1 - 0.999**self._steps)).sqrt_().add_(1e-8)
            reach = -self.rate * share / (1 - 0.9**self._steps)
            self.sheet.values.addcdiv_(self._first, size, value=reach).clamp_(0, 1)
