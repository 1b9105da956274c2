"""Random rows of every kind and random forms, and their coefficients spelt out."""

from __future__ import annotations

import torch
from torch import Tensor

from buffet.bounds.forms import Form, Rows

TASKS, TOKENS, WIDTH, ROWS = 3, 4, 6, 7
KINDS = {
    "diagonal": {"groups": TOKENS, "diagonal": True},
    "diagonal, fewer groups": {"groups": 2, "diagonal": True},
    "diagonal, shared by tasks and tokens": {"groups": TOKENS, "diagonal": True, "tasks": 1, "shared": True},
    "diagonal, fewer groups, shared": {"groups": 2, "diagonal": True, "shared": True},
    "dense": {"groups": TOKENS, "diagonal": False},
    "dense, fewer groups": {"groups": 2, "diagonal": False},
    "dense, shared by tasks": {"groups": 2, "diagonal": False, "tasks": 1},
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_rows(
    tokens: int, features: int, *, groups: int, diagonal: bool, tasks: int = TASKS, shared: bool = False
) -> Rows:
    """Rows of a node; with `shared`, diagonal rows whose coefficients are the same for every token."""
    if diagonal:
        return Rows(random(tasks, 1 if shared else groups, features, ROWS), groups, diagonal=True)
    return Rows(random(tasks, tokens, features, groups * ROWS), groups, diagonal=False)


def spelt_out(rows: Rows, tokens: int) -> Tensor:
    """Every coefficient of every row: ``[tasks, groups, rows, tokens, features]``."""
    if not rows.diagonal:
        return rows.coefs.unflatten(3, (rows.groups, -1)).permute(0, 3, 4, 1, 2)
    tasks, _, features, count = rows.coefs.shape
    full = rows.coefs.new_zeros(tasks, rows.groups, count, tokens, features)
    for group in range(rows.groups):
        full[:, group, :, group] = rows.coefs[:, group % rows.coefs.shape[1]].mT
    return full


def random_form(seed: int = 0) -> Form:
    """A form with a lower and an upper side, in eight inputs."""
    return Form.between(
        random(TASKS, TOKENS, WIDTH, 9, seed=seed), random(TASKS, TOKENS, WIDTH, 9, seed=seed + 50)
    )
