"""Methods as data: the parts that each is composed of, by their names.

Nothing here computes, so that listing the methods and their parts takes no PyTorch. `methods` says what the
names mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from buffet.errors import BuffetError

PARTS: Mapping[str, tuple[str, ...]] = {
    "propagation": ("interval", "forward", "baf", "baf-published", "baf+backward", "backward"),
    "product": ("zero", "dual", "middle", "rule"),
    "softmax": ("decomposed", "lse", "differences"),
    "optimise": ("none", "final", "all", "tuned"),
    "start": ("zero", "dual", "middle", "rule", "random", "best"),
}
"""The names that each part of a method is chosen from; a test holds them to the tables of the engine."""
LARGEST_RATE = 1e6
"""Of Adam: what is learned lies between 0 and 1."""


@dataclass(frozen=True)
class Composition:
    """How margins are bounded: names of `PARTS`, and numbers."""

    propagation: str = "baf"
    product: str = "zero"
    softmax: str = "decomposed"
    optimise: str = "none"  # "final" the margin's own relaxation, boxes fixed; "all" end to end
    window: int | None = None  # with `backward`: attention layers to substitute through
    cells: int = 1  # parts that a ball may be cut into, each proven on its own (`branching`)
    steps: int = 100  # of the optimiser
    rate: float = 0.05  # of Adam
    start: str = "zero"  # α the optimiser starts from
    rivals: tuple[str, ...] = ()  # methods that are asked too; the best answer counts
    summary: str = ""

    def __post_init__(self) -> None:
        for name, known in PARTS.items():
            if getattr(self, name) not in known:
                raise BuffetError(
                    f"unknown {name} '{getattr(self, name)}'; choose one of: {', '.join(known)}"
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


COMPOSITIONS: Mapping[str, Composition] = {
    "interval": Composition("interval", summary="interval arithmetic: instant, very loose"),
    "forward": Composition("forward", summary="linear forms pushed forward through every operation"),
    "baseline": Composition(summary="CROWN-BaF: backward per token, forward through attention, α = 0"),
    "dual": Composition(product="dual", summary="baseline with the other plane of every product, α = 1"),
    "middle": Composition(product="middle", summary="baseline with the mean of the two planes, α = ½"),
    "r-buffet": Composition(product="rule", summary="baseline with α by the rule on the fused ReLU's range"),
    "o-buffet": Composition(optimise="all", summary="baseline with every α learned, end to end"),
    "lse": Composition(softmax="lse", summary="baseline with log-sum-exp bounds of softmax"),
    "lse+r-buffet": Composition(softmax="lse", product="rule", summary="both: lse and r-buffet"),
    "lse+o-buffet": Composition(softmax="lse", optimise="all", summary="both: lse and o-buffet"),
    "crown-baf": Composition(
        "baf-published",
        summary="CROWN-BaF as published: attention and residual become numbers apart; a reference",
    ),
    "crown-baf+r": Composition(
        "baf-published",
        product="rule",
        summary="crown-baf with α by r-BuFFeT's rule; to compare with the paper",
    ),
    "crown-baf+o": Composition(
        "baf-published", optimise="all", summary="crown-baf with every α learned, as o-BuFFeT in the paper"
    ),
    "backward": Composition(
        "backward", summary="full backward substitution of every intermediate: tight, slower"
    ),
    "o-backward": Composition(
        "backward",
        optimise="all",
        summary="backward with every α learned, end to end: like alpha-CROWN, slow",
    ),
    "buffet": Composition(
        "backward",
        softmax="differences",
        optimise="tuned",
        steps=30,
        rate=0.1,
        start="best",
        rivals=("lse", "interval", "o-backward"),  # those that ever win (docs/methods.md)
        summary="the tightest: backward, lse with score differences, everything free learned everywhere",
    ),
}


def title(method: Composition) -> str:
    """The name of a method; of one that has none, the nearest that has, and what differs from it."""
    names = [field.name for field in fields(Composition) if field.name != "summary"]

    def differences(named: Composition) -> dict[str, object]:
        return {name: value for name in names if (value := getattr(method, name)) != getattr(named, name)}

    nearest = min(COMPOSITIONS, key=lambda name: len(differences(COMPOSITIONS[name])))
    changes = differences(COMPOSITIONS[nearest])
    rivals = changes.pop("rivals", None)
    named = [f"{name} {value}" for name, value in changes.items()]
    if rivals is not None and not named:
        named = [f"rivals {', '.join(method.rivals)}" if rivals else "alone"]
    return f"{nearest} ({', '.join(named)})" if named else nearest
