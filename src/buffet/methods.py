"""Methods by name: propagation × relaxation of products × relaxation of softmax × optimiser, composed.

Every method returns lower bounds of the margins and nothing else; `verify` alone turns bounds into verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.network import Program
from buffet.optimisation.boxes import Tuning
from buffet.optimisation.context import Control
from buffet.optimisation.dual import Lagrangian
from buffet.optimisation.flat import Gradient, Sheet
from buffet.optimisation.margin import follow, learn, started
from buffet.optimisation.starts import STARTS
from buffet.optimisation.steps import MODES, PLANS, RULED, Learning
from buffet.optimisation.warm_starts import Memory
from buffet.propagation.clean_run import Scene
from buffet.propagation.substitution import Bounds, OutOfTime
from buffet.propagation.walk import PROPAGATIONS, Propagation, bound_nodes, margins
from buffet.regions import Region
from buffet.relaxations.parameters import PRODUCTS, Relaxer, Shares
from buffet.relaxations.softmax import SOFTMAXES, decompose, with_differences

LARGEST_RATE = 1e6
"""Of Adam: what is learned lies between 0 and 1."""


@dataclass(frozen=True)
class Method:
    """How margins are bounded; every part is a name in the table of its kind."""

    propagation: str = "baf"  # PROPAGATIONS
    product: str = "zero"  # PRODUCTS
    softmax: str = "decomposed"  # SOFTMAXES
    optimise: str = "none"  # MODES: "final" the margin's own relaxation, boxes fixed; "all" end to end
    window: int | None = None  # with `backward`: attention layers to substitute through
    cells: int = 1  # parts that a region may be cut into, each proven on its own (`branching`)
    steps: int = 100  # of the optimiser
    rate: float = 0.05  # of Adam
    start: str = "zero"  # α the optimiser starts from (STARTS)
    rivals: tuple[str, ...] = ()  # methods that are asked too; the best answer counts
    summary: str = ""

    def __post_init__(self) -> None:
        tables = {
            "propagation": PROPAGATIONS,
            "product": PRODUCTS,
            "softmax": SOFTMAXES,
            "optimise": MODES,
            "start": STARTS,
        }
        for name, table in tables.items():
            if getattr(self, name) not in table:
                raise BuffetError(
                    f"unknown {name} '{getattr(self, name)}'; choose one of: {', '.join(table)}"
                )
        if self.window is not None and (self.propagation != "backward" or self.window < 1):
            raise BuffetError(
                f"window {self.window} with propagation '{self.propagation}': a window is a number of layers"
                " ≥ 1 and goes with propagation 'backward'"
            )
        if self.cells < 1:
            raise BuffetError(f"cells {self.cells}: a ball is cut into 1 cell or more")
        if self.steps < 0:
            raise BuffetError(f"steps {self.steps}: an optimiser takes 0 steps or more")
        if not 0 < self.rate <= LARGEST_RATE:
            raise BuffetError(f"rate {self.rate} must be a number > 0, and at most {LARGEST_RATE:g}")

    @property
    def ruled(self) -> bool:
        """Whether α are what the rule chooses, and nothing is learned instead."""
        return self.optimise == "none" and PRODUCTS[self.product] is None

    @property
    def learns(self) -> bool:
        """Whether an optimiser takes steps: over boxes alone there is nothing to learn."""
        return self.optimise != "none" and self.steps > 0 and self.describe().keeps != "boxes"

    def describe(self) -> Propagation:
        """The propagation with its window."""
        return replace(PROPAGATIONS[self.propagation], window=self.window)

    def scene(self, program: Program, x: Float[Tensor, "tokens width"], label: int) -> Scene:
        """The program (float64) as this method sees it near the rows `x`; reusable for any region there."""
        ending = program.margins(label)
        if self.softmax == "decomposed" and self.describe().keeps != "boxes":
            return Scene(*decompose(ending, x.double()))
        if self.softmax == "differences":
            return Scene(*with_differences(ending, x.double()))
        return Scene(ending, ending.values(x.double()))

    def bound(
        self,
        scene: Scene,
        region: Region,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
        control: Control | None = None,
    ) -> Float[Tensor, "tasks others"]:
        """Lower bounds of the margins over the region; NaN where there is none.

        What an optimiser learns is kept in the control's memory, and taken up again by later calls for the
        same words. With a trace, it takes all its steps whether or not the tasks are proven.
        """
        propagation = self.describe()
        control = control or Control()
        root = len(scene.program.nodes) - 1

        def walk(
            relaxer: Relaxer, region: Region = region, deadline: float | None = control.deadline
        ) -> Bounds:
            return bound_nodes(
                scene,
                region,
                relaxer,
                propagation,
                dtype=dtype,
                chunk_bytes=chunk_bytes,
                sharpen=Tuning(self.steps, control=control) if self.optimise == "tuned" else Bounds.boxes_of,
                deadline=deadline,
            )

        def end_to_end(shares: Mapping[int, Shares], deadline: float | None = control.deadline) -> Tensor:
            return margins(walk(Relaxer(learned=shares), deadline=deadline), propagation)

        def evaluate(sheet: Sheet, deadline: float | None) -> tuple[Tensor, Gradient]:
            with torch.enable_grad():
                found = end_to_end(sheet.shares, deadline)
            return found.detach(), lambda weights: sheet.gradient(found, weights)

        begin = time.perf_counter()
        plain = self.optimise == "none" or propagation.keeps == "boxes"
        try:
            # Gradients are only ever taken from tensors made outside inference mode.
            with torch.no_grad() if self.optimise == "tuned" else torch.inference_mode():
                if control.memory and self.ruled:
                    return self._ruled(walk, region, control.memory, root)
                if control.memory and self.optimise == "all":
                    known = control.memory.shares_of(region, root, within=PLANS["all"].reach)
                    if known:
                        return end_to_end(known)
                bounds = walk(Relaxer(self.product))
                found = margins(bounds, propagation)
        except OutOfTime:
            return scene.clean[root].new_full((region.tasks, scene.clean[root].shape[-1]), torch.nan)
        settled = ((found > 0).all(-1) & (control.memory is None)) | found.isnan().any(-1)
        lost = root not in bounds.pieces  # the walk has ended early: there is nothing to learn from
        if plain or control.expired or lost or (bool(settled.all()) and not control.trace):
            return found
        learning = Learning(self.steps, self.rate, self.start, self.optimise, control.trace is None)
        try:
            with torch.no_grad():
                if self.optimise == "all":
                    # What is learned counts once it was evaluated without gradients: leave time for that.
                    early = control.ahead(1.5 * (time.perf_counter() - begin))
                    learner = partial(evaluate, deadline=early.deadline)
                    shares = learn(bounds, learner, learning, products_only=True, control=early)
                    better = end_to_end(shares)
                else:
                    better = _final(bounds, learning, control)
        except OutOfTime:
            return found
        return torch.where((better.amin(-1) > found.amin(-1))[:, None], better, found)

    def _ruled(
        self, walk: Callable[[Relaxer, Region], Bounds], region: Region, memory: Memory, root: int
    ) -> Float[Tensor, "tasks others"]:
        """Margins with the α that the rule chose for these words before, if it was asked already.

        In a radius search margins are smooth then, instead of jumping wherever the rule changes its mind.
        What it chooses a little below the radius proves more than what it chooses there.
        """
        asked = memory.lacking(region, root, RULED)
        known = sorted({*range(region.tasks)} - {*asked})
        parts: list[Tensor] = []
        if asked:
            some, chosen = region.select(asked), dict[int, Shares]()
            parts.append(margins(walk(Relaxer(self.product, chosen=chosen), some), self.describe()))
            memory.keep(some, root, chosen)
        if known:
            some = region.select(known)
            shares = memory.shares_of(some, root)
            parts.append(margins(walk(Relaxer(learned=shares or {}), some), self.describe()))
        return torch.cat(parts)[torch.tensor([*asked, *known]).argsort()]

    def follow(
        self,
        scene: Scene,
        region: Region,
        eps: Float[Tensor, "tasks"],
        control: Control,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
    ) -> Float[Tensor, "tasks"]:
        """Learn every α end to end at the edge of what can be proven, and keep them in the control's memory.

        Returns about the largest ε they prove, from a start at `eps`.
        """
        assert control.memory is not None
        root, propagation = len(scene.program.nodes) - 1, self.describe()

        def walk(relaxer: Relaxer, eps: Tensor) -> Bounds:
            ball = region.with_eps(eps)
            return bound_nodes(
                scene,
                ball,
                relaxer,
                propagation,
                dtype=dtype,
                chunk_bytes=chunk_bytes,
                deadline=control.deadline,
            )

        def evaluate(relaxer: Relaxer, eps: Tensor) -> Tensor:
            return margins(walk(relaxer, eps), propagation)

        with torch.no_grad():
            learning = Learning(self.steps, self.rate).shared(PLANS["all"], known=False, moved=torch.inf)
            try:
                start = walk(Relaxer(self.product), eps)
                if root not in start.pieces:
                    return eps
                sheet = started(
                    start,
                    self.start,
                    lambda sheet: evaluate(Relaxer(learned=sheet.shares), eps),
                    products_only=True,
                )
                clean = float(scene.clean[root].min())
                shares, eps = follow(evaluate, sheet, eps, clean, learning, control)
            except OutOfTime:
                return eps
            control.memory.keep(region.with_eps(eps), root, shares)
        return eps

    def challengers(self, program: Program) -> tuple[Method, ...]:
        """Methods that may do better on some task of a network.

        Gradients through the backward passes of all boxes cost little in one layer, and gain the most there.
        """
        deep = program.layers > 1
        rivals = (METHODS[name] for name in self.rivals)
        return tuple(r for r in rivals if not (deep and r.optimise == "all" and r.describe().keeps == "none"))

    def plain(self) -> Method:
        """The same without an optimiser."""
        return replace(self, optimise="none", rivals=())


def _final(bounds: Bounds, learning: Learning, control: Control) -> Tensor:
    """Margins with everything learned that is free in their own backward pass, the boxes as they are."""
    bounds = replace(bounds, deadline=None)
    lagrangian = cache(lambda: Lagrangian.of_margins(bounds))  # not needed where everything is known already
    shares = learn(
        bounds,
        lambda sheet: lagrangian().bound(sheet),
        learning,
        products_only=False,
        control=control,
        dtype=torch.float32,
    )
    with torch.inference_mode():
        exact = bounds.relaxed(Relaxer(learned=shares), torch.float64)
        return bounds.clean[-1] + exact.margin(exact.locals)


METHODS: Mapping[str, Method] = {
    "interval": Method("interval", summary="interval arithmetic: instant, very loose"),
    "forward": Method("forward", summary="linear forms pushed forward through every operation"),
    "baseline": Method(summary="CROWN-BaF: backward per token, forward through attention, α = 0"),
    "dual": Method(product="dual", summary="baseline with the other plane of every product, α = 1"),
    "middle": Method(product="middle", summary="baseline with the mean of the two planes, α = ½"),
    "r-buffet": Method(product="rule", summary="baseline with α by the rule on the fused ReLU's range"),
    "o-buffet": Method(optimise="all", summary="baseline with every α learned, end to end"),
    "lse": Method(softmax="lse", summary="baseline with log-sum-exp bounds of softmax"),
    "lse+r-buffet": Method(softmax="lse", product="rule", summary="both: lse and r-buffet"),
    "lse+o-buffet": Method(softmax="lse", optimise="all", summary="both: lse and o-buffet"),
    "backward": Method("backward", summary="full backward substitution of every intermediate: tight, slower"),
    "o-backward": Method(
        "backward",
        optimise="all",
        summary="backward with every α learned, end to end: like alpha-CROWN, slow",
    ),
    "buffet": Method(
        "backward",
        softmax="differences",
        optimise="tuned",
        steps=30,
        rate=0.1,
        start="best",
        rivals=(
            "lse",
            "baseline",
            "interval",
            "dual",
            "middle",
            "r-buffet",
            "lse+r-buffet",
            "forward",
            "backward",
            "o-buffet",
            "lse+o-buffet",
            "o-backward",
        ),
        summary="the tightest: backward, lse with score differences, everything free learned everywhere",
    ),
}


def method_named(name: str | Method, **changes: object) -> Method:
    """The method called `name`, with the given fields changed (``None`` changes nothing)."""
    if isinstance(name, str):
        if name not in METHODS:
            raise BuffetError(f"unknown method '{name}'; choose one of: {', '.join(METHODS)}")
        name = METHODS[name]
    known = {f.name for f in fields(Method)}
    assert known.issuperset(changes)
    given = {k: v for k, v in changes.items() if v is not None}
    if not given.keys() <= {"steps", "rate", "start", "cells"}:
        given["rivals"] = ()  # a composition of one's own is taken by its word
    return replace(name, **given)  # type: ignore[arg-type]
