"""Methods by name: a propagation, a relaxation of products and one of softmax, composed.

Every method returns lower bounds of the margins and nothing else; `verify` alone turns bounds into verdicts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.intervals import Box
from buffet.bounds.linear import LinesPiece, Piece
from buffet.bounds.products import planes
from buffet.bounds.propagation import PROPAGATIONS, Propagation, bound_nodes, margins
from buffet.bounds.relaxations import relax
from buffet.bounds.softmax import decompose
from buffet.bounds.substitution import Scene
from buffet.errors import BuffetError
from buffet.program import Apply, Bilinear, Op, Program
from buffet.regions import Region


@dataclass(frozen=True)
class Method:
    """How margins are bounded: each field is a name in one table or a number with a meaning of its own."""

    propagation: str = "baf"  # a key of `PROPAGATIONS`
    alpha: float = 0.0  # the fixed plane of every product, 0 to 1
    window: int | None = None  # with `backward`: attention layers to substitute through
    summary: str = ""

    def describe(self) -> Propagation:
        """The propagation with its window."""
        if self.propagation not in PROPAGATIONS:
            raise BuffetError(
                f"unknown propagation '{self.propagation}'; choose one of: {', '.join(PROPAGATIONS)}"
            )
        base = PROPAGATIONS[self.propagation]
        if self.window is None:
            return base
        if self.propagation != "backward" or self.window < 1:
            raise BuffetError(
                f"window {self.window} with propagation '{self.propagation}': a window is a number of layers"
                " ≥ 1 and goes with propagation 'backward'"
            )
        return replace(base, window=self.window)

    def scene(self, program: Program, x: Float[Tensor, "tokens width"], label: int) -> Scene:
        """The program (float64) as this method sees it near the rows `x`; reusable for any region there."""
        margins = program.margins(label)
        if PROPAGATIONS[self.propagation].keeps == "boxes":
            return Scene(margins, margins.values(x.double()))
        return Scene(*decompose(margins, x.double()))

    def bound(
        self,
        scene: Scene,
        region: Region,
        *,
        dtype: torch.dtype = torch.float32,
        chunk_bytes: int = 4 << 20,
    ) -> Float[Tensor, "tasks others"]:
        """Lower bounds of the margins over the region; NaN where there is none."""
        propagation = self.describe()
        bounds = bound_nodes(scene, region, self._relax, propagation, dtype=dtype, chunk_bytes=chunk_bytes)
        return margins(bounds, propagation)

    def _relax(
        self, index: int, op: Op, clean: tuple[Tensor, ...], boxes: tuple[Box, ...], dtype: torch.dtype
    ) -> Piece:
        if isinstance(op, Bilinear):
            return planes(op, clean, *boxes, alpha_lower=self.alpha, alpha_upper=self.alpha, dtype=dtype)
        assert isinstance(op, Apply)
        lines = relax(op.function, clean[0], boxes[0].lower, boxes[0].upper, dtype=dtype)
        return LinesPiece(lines.lower_slope, lines.lower_intercept, lines.upper_slope, lines.upper_intercept)


METHODS: Mapping[str, Method] = {
    "interval": Method("interval", summary="interval arithmetic: instant, very loose"),
    "forward": Method("forward", summary="linear forms pushed forward through every operation"),
    "baseline": Method("baf", summary="CROWN-BaF: backward per token, forward through attention"),
    "backward": Method("backward", summary="full backward substitution of every intermediate: tight, slower"),
}


def method_named(name: str | Method, **changes: object) -> Method:
    """The method called `name`, with the given fields changed (``None`` changes nothing)."""
    if isinstance(name, str):
        if name not in METHODS:
            raise BuffetError(f"unknown method '{name}'; choose one of: {', '.join(METHODS)}")
        name = METHODS[name]
    return replace(name, **{k: v for k, v in changes.items() if v is not None})  # type: ignore[arg-type]
