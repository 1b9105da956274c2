"""Branching: a ball is cut into cells, and the word is proven when every cell is.

Bounds over a cell are tighter than over the ball. It is cut across the directions in which attention scores
move most: products, and with them everything that is loose, vary with the scores, and those with few
directions of the input. Any cut is sound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.errors import BuffetError
from buffet.methods import Method
from buffet.program import Program, Scores
from buffet.regions import Cell, Cuts, LpBall, Region

DIRECTIONS = 3
"""So many at most of one row are cut across."""
CHUNK = 1 << 28
"""Bytes that the values of the network may take at a time while directions are looked for."""
SOME = 4096
"""So many scores tell where to cut."""


def check_cuttable(method: Method, region: Region) -> None:
    """Refuse cells for a region that is not an L2 ball."""
    if method.cells > 1 and not (isinstance(region, LpBall) and region.p == 2):
        kind = f"L{region.p:g} ball" if isinstance(region, LpBall) else type(region).__name__
        raise BuffetError(f"cells: only L2 balls can be cut, not a {kind}; leave cells out")


def cut(program: Program, ball: LpBall, cells: int) -> Cell:
    """The cells of one task's ball, `cells` at most, the most difficult first as far as one can tell."""
    assert ball.eps is not None
    size = float(ball.eps[0])
    found = [(row, *pair) for row in range(ball.moved.shape[1]) for pair in _directions(program, ball, row)]
    found = sorted(found, key=lambda one: -one[1])[:DIRECTIONS]
    counts = _counts([strength for _, strength, _ in found], cells)
    used = [(*one, count) for one, count in zip(found, counts, strict=True) if count > 1]
    cuts = Cuts(
        tuple(row for row, _, _, _ in used),
        torch.stack([direction for _, _, direction, _ in used]),
        tuple(tuple(size * (2 * k / count - 1) for k in range(1, count)) for _, _, _, count in used),
    )

    def outside(cell: Sequence[tuple[float, float]]) -> float:
        return sum(min(abs(low), abs(high)) if low * high > 0 else 0.0 for low, high in cell)

    return Cell(ball, cuts, sorted(cuts.cells, key=outside))


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


def _counts(strengths: Sequence[float], cells: int) -> list[int]:
    """Into how many parts each direction is cut: where most is left, as long as there are cells."""
    counts = [1] * len(strengths)
    while True:
        total = math.prod(counts)
        fit = [i for i, count in enumerate(counts) if total // count * (count + 1) <= cells]
        if not fit:
            return counts
        counts[max(fit, key=lambda i: strengths[i] / counts[i])] += 1
