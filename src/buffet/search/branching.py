"""Branching: a ball is cut into cells, worst first, and the word is proven when every cell is.

Bounds over a cell are tighter than over the ball. It is cut across the directions in which attention scores
move most: products, and with them everything that is loose, vary with the scores, and those with few
directions of the input. Any cut is sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.methods import Method
from buffet.network import Program, Scores
from buffet.regions import Cell, Cuts, LpBall, Region
from buffet.regions.norms import lp_norm
from buffet.system.parallel import side_by_side

DIRECTIONS = 3
"""A ball is cut across so many directions at most."""
CHUNK = 1 << 28
"""Bytes that the values of the network may take at a time while directions are looked for."""
SOME = 4096
"""So many scores tell where to cut."""

Ask = Callable[[Cell], Float[Tensor, "others"]]
"""The margins of a single cell, NaN where there are none."""


def check_cuttable(method: Method, region: Region) -> None:
    """Refuse cells for a region that is not a ball."""
    if method.cells > 1 and not isinstance(region, LpBall):
        raise BuffetError(f"cells: only balls can be cut, not a {type(region).__name__}; leave cells out")


@dataclass(eq=False)
class Leaf:
    """A cell, its margins at the last ε that it was asked about, and at the largest that it was proven at."""

    cell: Cell
    eps: float
    margins: Float[Tensor, "others"]
    proven: float = -math.inf
    proof: Float[Tensor, "others"] | None = None

    @property
    def least(self) -> float:
        """The smallest margin; −inf where there is none."""
        return float(self.margins.min()) if bool(self.margins.isfinite().all()) else -math.inf

    def hear(self, eps: float, margins: Float[Tensor, "others"]) -> None:
        self.eps, self.margins = eps, margins
        if self.least > 0 and eps > self.proven:
            self.proven, self.proof = eps, margins


class Tree:
    """The ball of one task, which is not proven as a whole, cut into cells that together cover it.

    Planes stay where they are when ε changes, so what is proven of a cell holds for all smaller ε.
    """

    def __init__(self, program: Program, ball: LpBall, ask: Ask, most: int, together: bool) -> None:
        """
        Args:
            ball: of one task; the margins of the whole are of no use at this ε.
            ask: bounds the margins of a cell.
            most: so many cells may there be.
            together: whether cells may be asked about at the same time.
        """
        assert ball.eps is not None
        cuts, self._strengths = directions(program, ball)
        whole = Cell(ball, cuts, [[(-math.inf, math.inf)] * len(cuts.rows)])
        self._ask, self._most = ask, most
        self._step = torch.get_num_threads() if together else 1
        self.leaves = [Leaf(whole, float(ball.eps[0]), torch.tensor([-math.inf]))]
        self.asked = 0

    def grow(self, eps: float, go_on: Callable[[], bool] = lambda: True) -> bool:
        """Halve the worst cell until all are proven, or there are as many as may be. Whether they are."""
        while worst := self._failing(eps):
            if len(self.leaves) >= self._most or not go_on():
                return False
            self.leaves.remove(worst)
            halves = [replace(worst, cell=half, eps=0.0) for half in self._halves(worst.cell, eps)]
            self.leaves += halves
            self._hear(halves, eps)
        return True

    def limit(self, eps: float) -> float:
        """The margin of a cell that is not proven; else the smallest found at this ε, or of all proofs."""
        if failing := self._failing(eps):
            return failing.least
        return min((leaf.least for leaf in self.leaves if leaf.eps == eps), default=self.margin)

    @property
    def margins(self) -> Float[Tensor, "others"]:
        """The smallest margins of all cells, where all are proven."""
        return torch.stack([leaf.proof for leaf in self.leaves if leaf.proof is not None]).amin(0)

    @property
    def margin(self) -> float:
        """The smallest of these."""
        return float(self.margins.min())

    def _failing(self, eps: float) -> Leaf | None:
        """A cell that is not proven, the worst as far as one can tell."""
        rest = sorted((leaf for leaf in self.leaves if leaf.proven < eps), key=lambda leaf: leaf.least)
        for k in range(0, len(rest), self._step):
            some = rest[k : k + self._step]
            self._hear([leaf for leaf in some if leaf.eps != eps], eps)
            if failing := [leaf for leaf in some if leaf.proven < eps]:
                return min(failing, key=lambda leaf: leaf.least)
        return None

    def _hear(self, leaves: Sequence[Leaf], eps: float) -> None:
        cells = [leaf.cell.with_eps(eps) for leaf in leaves]
        found = side_by_side(self._ask, cells) if self._step > 1 else [self._ask(cell) for cell in cells]
        for leaf, margins in zip(leaves, found, strict=True):
            leaf.hear(eps, margins)
        self.asked += len(leaves)

    def _halves(self, cell: Cell, eps: float) -> tuple[Cell, Cell]:
        """A cell cut in the middle, across the direction in which scores move most within it."""
        reach = eps * lp_norm(cell.cuts.directions, cell.q, 1)  # no plane further out meets the ball
        lower, upper = torch.maximum(cell.lower[0], -reach), torch.minimum(cell.upper[0], reach)
        cut = int((self._strengths * (upper - lower)).argmax())
        return cell.halves(cut, float(lower[cut] + upper[cut]) / 2)


def directions(program: Program, ball: LpBall) -> tuple[Cuts, Float[Tensor, "cuts"]]:
    """Directions in which scores move most within the ball of one task, and how much they do."""
    found = [(row, *pair) for row in range(ball.moved.shape[1]) for pair in _directions(program, ball, row)]
    found = sorted(found, key=lambda one: -one[1])[:DIRECTIONS]
    cuts = Cuts(tuple(row for row, _, _ in found), torch.stack([direction for _, _, direction in found]))
    strengths = [strength for _, strength, _ in found]
    return cuts, torch.tensor(strengths, dtype=torch.float64, device=ball.center.device)


def _directions(program: Program, ball: LpBall, row: int) -> list[tuple[float, Float[Tensor, "width"]]]:
    """Orthonormal directions of a row in which all scores together move most, with how much they do."""
    assert ball.eps is not None
    center = ball.center.double()
    kept = sum(value.numel() for value in program.values(center))
    moves = ball.eps[0] * torch.eye(ball.width, dtype=torch.float64, device=center.device)
    changes = []
    for part in moves.split(max(1, CHUNK // (2 * kept * center.element_size()))):
        x = center.repeat(2, len(part), 1, 1)
        x[:, :, ball.moved[0, row]] += torch.stack([part, -part])
        up, down = _scores(program, x)
        changes.append(up - down)
    left, strengths, _ = torch.linalg.svd(torch.cat(changes).nan_to_num(0.0, 0.0, 0.0), full_matrices=False)
    return [(float(s), u) for s, u in zip(strengths[:DIRECTIONS], left.T, strict=False)]


def _scores(
    program: Program, x: Float[Tensor, "sides moves tokens width"]
) -> Float[Tensor, "sides moves some"]:
    """Attention scores of all layers; of very many, some that stand for all."""
    values = program.values(x)
    scores = [v for v, node in zip(values, program.nodes, strict=True) if isinstance(node.op, Scores)]
    found = torch.cat([v.flatten(2) for v in scores or values[-1:]], 2)
    return found[..., :: -(-found.shape[2] // SOME)].clone()
