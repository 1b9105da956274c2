"""Methods by name: propagation × relaxation of products × relaxation of softmax × optimiser, composed.

Every method returns lower bounds of the margins and nothing else; `verify` alone turns bounds into verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.network import Program
from buffet.optimisation.context import Control
from buffet.optimisation.end_to_end import EndToEnd
from buffet.optimisation.optimiser import Optimiser, Problem
from buffet.optimisation.starts import STARTS
from buffet.optimisation.steps import Learning
from buffet.optimisation.table import OPTIMISERS, RULE_KEPT
from buffet.propagation.clean_run import Scene
from buffet.propagation.plan import PROPAGATIONS, Propagation
from buffet.regions import LpBall, Region
from buffet.relaxations.softmax import SOFTMAXES
from buffet.relaxations.table import PRODUCTS, RULE

LARGEST_RATE = 1e6
"""Of Adam: what is learned lies between 0 and 1."""


@dataclass(frozen=True)
class Method:
    """How margins are bounded; every part is a name in the table of its kind."""

    propagation: str = "baf"  # PROPAGATIONS
    product: str = "zero"  # PRODUCTS
    softmax: str = "decomposed"  # SOFTMAXES
    optimise: str = "none"  # OPTIMISERS
    window: int | None = None  # with `backward`: attention layers to substitute through
    cells: int = 1  # parts that a ball may be cut into, each proven on its own (`branching`)
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
            "optimise": OPTIMISERS,
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
    def optimiser(self) -> Optimiser:
        """How parameters are learned; α that the rule chooses are kept from one ε to the next."""
        return RULE_KEPT if self.ruled else OPTIMISERS[self.optimise]

    @property
    def ruled(self) -> bool:
        """Whether α are what the rule chooses, and nothing is learned instead."""
        return not OPTIMISERS[self.optimise].learns and PRODUCTS[self.product] is RULE

    @property
    def learns(self) -> bool:
        """Whether an optimiser takes steps: over boxes alone there is nothing to learn."""
        return self.optimiser.learns and self.steps > 0 and self.describe().linear

    def describe(self) -> Propagation:
        """The propagation with its window."""
        return replace(PROPAGATIONS[self.propagation], window=self.window)

    @property
    def graph(self) -> str:
        """How the graph has softmax: a name in SOFTMAXES. Interval arithmetic takes it as it is."""
        return self.softmax if self.describe().linear else "lse"

    def scene(self, program: Program, x: Float[Tensor, "tokens width"], label: int) -> Scene:
        """The program (float64) as this method sees it near the rows `x`; reusable for any region there."""
        return Scene(*SOFTMAXES[self.graph](program.margins(label), x.double()))

    def problem(
        self, scene: Scene, region: Region, *, dtype: torch.dtype = torch.float32, chunk_bytes: int = 8 << 20
    ) -> Problem:
        """The margins of a region as the optimiser sees them."""
        learning = Learning(self.steps, self.rate, self.start)
        return Problem(scene, region, self.describe(), self.product, learning, dtype, chunk_bytes)

    def bound(
        self,
        scene: Scene,
        region: Region,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
        control: Control | None = None,
    ) -> Float[Tensor, "tasks others"]:
        """Lower bounds of the margins over the region; NaN where there is none."""
        problem = self.problem(scene, region, dtype=dtype, chunk_bytes=chunk_bytes)
        return self.optimiser.bound(problem, control or Control())

    def follow(
        self,
        scene: Scene,
        ball: LpBall,
        eps: Float[Tensor, "tasks"],
        control: Control,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 8 << 20,
    ) -> Float[Tensor, "tasks"]:
        """Learn end to end at the edge of what can be proven; about the largest ε proven then."""
        optimiser = self.optimiser
        assert isinstance(optimiser, EndToEnd)
        problem = self.problem(scene, ball, dtype=dtype, chunk_bytes=chunk_bytes)
        return optimiser.follow(problem, ball, eps, control)

    def challengers(self, program: Program) -> tuple[Method, ...]:
        """Methods that may do better on some task of a network.

        Gradients through the backward passes of all boxes cost little in one layer, and gain the most there.
        """
        deep = program.layers > 1
        rivals = (METHODS[name] for name in self.rivals)
        return tuple(
            r for r in rivals if not (deep and r.optimiser.end_to_end and r.describe().fully_backward)
        )

    def plain(self) -> Method:
        """The same without an optimiser."""
        return replace(self, optimise="none", rivals=())


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
