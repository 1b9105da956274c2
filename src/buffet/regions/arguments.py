"""Checks of what a user passes to a region; every failure is one `BuffetError` that says how to fix it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from buffet.errors import BuffetError

Words = Sequence[int] | Sequence[Sequence[int]] | Tensor


def checked_rows(x: Tensor) -> Tensor:
    """The clean rows, kept in their own precision."""
    if not isinstance(x, Tensor):
        raise BuffetError(f"region: x must be a tensor of tokens × width; got a {type(x).__name__}")
    if x.ndim != 2 or 0 in x.shape or not x.is_floating_point():
        found = f"a {x.dtype} tensor of shape {tuple(x.shape)}".replace("torch.", "")
        raise BuffetError(f"region: x must be a float matrix of tokens × width; got {found}")
    if not bool(torch.isfinite(x).all()):
        row = int((~torch.isfinite(x)).nonzero()[0, 0])
        raise BuffetError(f"region: x holds NaN or infinity in row {row}; every embedding must be finite")
    return x.detach()


def checked_words(words: Words, tokens: int) -> Tensor:
    """The moved rows, tasks × moved; a flat list is one task."""
    given: Any = words.tolist() if isinstance(words, Tensor) else words
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise BuffetError(f"region: words must be [2], [2, 5] or [[1], [2]]; got {given!r}")
    listed: list[Any] = list(given)
    nested = bool(listed) and all(isinstance(w, Sequence) for w in listed)
    tasks: list[list[Any]] = [list(w) for w in listed] if nested else [listed]
    if not all(tasks):
        raise BuffetError("region: words is empty; give at least one row, such as words=[2]")
    for t, task in enumerate(tasks):
        wrong = [w for w in task if not isinstance(w, Integral) or isinstance(w, bool)]
        if wrong:
            raise BuffetError(
                f"region: words must be [2], [2, 5] or [[1], [2]]; got {wrong[0]!r} in task {t}"
            )
        outside = [w for w in task if not 0 <= w < tokens]
        if outside:
            raise BuffetError(f"region: word {outside[0]} in task {t} is not a row of x (0 to {tokens - 1})")
        if len(set(task)) < len(task):
            raise BuffetError(f"region: task {t} names a word twice: {task}; name every word once")
        if len(task) != len(tasks[0]):
            raise BuffetError(
                f"region: task 0 moves {len(tasks[0])} words and task {t} moves {len(task)}; the tasks of one"
                " region must move equally many, so make one region per number of words"
            )
    return torch.tensor(tasks)


def checked_norm(p: float | int | str) -> float:
    """The exponent of the norm."""
    try:
        value = float(p)
    except (TypeError, ValueError):
        value = math.nan
    if not value >= 1:
        raise BuffetError(f"LpBall: p is {p}; give a number ≥ 1, or inf")
    return value


def checked_eps(eps: float | int | Sequence[float] | Tensor, tasks: int) -> Tensor:
    """One float64 size per task."""
    try:
        sizes = torch.as_tensor(eps, dtype=torch.float64).detach()
    except (TypeError, ValueError) as error:
        raise BuffetError(f"LpBall: eps is {eps!r}; give one number or one per task ({tasks})") from error
    if sizes.ndim > 1 or (sizes.ndim == 1 and len(sizes) != tasks):
        raise BuffetError(
            f"LpBall: eps has shape {tuple(sizes.shape)}; give one number or one per task ({tasks})"
        )
    good = torch.isfinite(sizes) & (sizes >= 0)
    if not bool(good.all()):
        raise BuffetError(f"LpBall: eps is {float(sizes[~good].flatten()[0])}; give a finite number ≥ 0")
    return sizes.expand(tasks).clone()


def checked_bound(name: str, bound: Tensor, rows: Tensor, x: Tensor) -> Tensor:
    """A bound of the values of the moved `rows` of `x`, tasks × moved × width in float64."""
    (tokens, width), (tasks, moved) = x.shape, rows.shape
    shape, wide = tuple(bound.shape), bound.detach().double().to(x.device)
    if not bool(torch.isfinite(wide).all()):
        raise BuffetError(f"Box: {name} holds NaN or infinity; every bound must be finite")
    if shape == (tokens, width):
        if moved == tokens and not torch.equal(wide[rows], wide.expand(tasks, -1, -1)):
            raise BuffetError(
                f"Box: all {tokens} rows move, in another order than that of x, so {name} may have a row for"
                f" each of x or of words; give {(tasks, moved, width)}, in the order of words"
            )
        return wide[rows]
    if shape == (moved, width):
        return wide.expand(tasks, -1, -1)
    if shape == (tasks, moved, width):
        return wide
    raise BuffetError(
        f"Box: {name} has shape {shape}; expected {(tokens, width)} (all rows), {(moved, width)} (moved rows)"
        f" or {(tasks, moved, width)} (per task)"
    )


def checked_candidates(
    candidates: Sequence[Tensor] | Sequence[Sequence[Tensor]], tasks: int, moved: int, width: int
) -> tuple[tuple[Tensor, ...], ...]:
    """The candidates per task and word; a flat list of tensors is one task."""
    listed: list[Any] = list(candidates)
    flat = all(isinstance(c, Tensor) and c.ndim <= 2 for c in listed)
    nested: list[tuple[Tensor, ...]] = [tuple(listed)] if flat else [tuple(task) for task in listed]
    if len(nested) != tasks:
        raise BuffetError(
            f"CandidateSet: words make {tasks} tasks, candidates {len(nested)}; give one list per task"
        )
    for t, task in enumerate(nested):
        if len(task) != moved:
            raise BuffetError(
                f"CandidateSet: task {t} has candidates for {len(task)} words and moves {moved}"
            )
        for d, rows in enumerate(task):
            where = f"CandidateSet: candidates of word {d} in task {t}"
            if rows.ndim != 2 or rows.shape[1] != width:
                raise BuffetError(f"{where} have shape {tuple(rows.shape)}; expected (choices, {width})")
            if not bool(torch.isfinite(rows).all()):
                raise BuffetError(f"{where} hold NaN or infinity")
    return tuple(tuple(rows.detach() for rows in task) for task in nested)
