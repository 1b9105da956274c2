"""Regions that are proven part by part: whether the parts that are claimed are all there are.

Parts are what is left of a whole when it is cut in two again and again. So there is a cut with every part on
one side of it, then one through each of the sides, and so on, until a single part is left of each.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from buffet_checker.arrays import Tensors
from buffet_checker.balls import Array
from buffet_checker.certificate import Claim, cell_ends, picked, region_of
from buffet_checker.errors import RejectedError
from buffet_checker.regions import Candidates

Ends = tuple[tuple[float, float], ...]
"""Of a cell the two along every cut, of a box those of every entry."""
Choices = tuple[frozenset[int], ...]
"""Of candidates, for every word those that it has."""
SAME = {
    "cell": ("kind", "moved", "p", "eps", "rows"),
    "box": ("kind", "moved"),
    "candidates": ("kind", "moved", "budget", "ids"),
}
"""What parts of a whole have in common."""


def groups(claims: Sequence[Claim], rows: Array, tensors: Tensors) -> list[list[Claim]]:
    """Claims about parts of the same whole together, all others alone, in the order of the file.

    Raises where the parts of a whole do not cover it.
    """
    found: dict[object, list[Claim]] = {}
    for claim in claims:
        found.setdefault(_whole(claim) or claim.number, []).append(claim)
    for members in found.values():
        if _whole(members[0]):
            _check_cover(members, rows, tensors)
    return list(found.values())


def _whole(claim: Claim) -> tuple[str, int] | None:
    """What a claim is a part of, if it is one."""
    key = {"cell": "cuts", "box": "whole", "candidates": "whole"}.get(claim.region["kind"])
    return (key, claim.region[key]) if key in claim.region else None


def _check_cover(claims: Sequence[Claim], rows: Array, tensors: Tensors) -> None:
    first = claims[0]
    where = " ".join(map(str, ("parts of", *(_whole(first) or ()))))
    for claim in claims:
        for key in SAME[first.region["kind"]]:
            if claim.region.get(key) != first.region.get(key):
                raise RejectedError(f"{where}: claims[{claim.number}] has another {key} than the others")
    if first.region["kind"] == "candidates":
        region = region_of(first, rows, tensors, whole=True)
        assert isinstance(region, Candidates)
        # Rows that are the original are nothing to choose: every part has it.
        whole = tuple(frozenset(np.flatnonzero(word.any(1)).tolist()) for word in region.offsets)
        given = (picked(claim, region.offsets.shape[1]) for claim in claims)
        covered = _choices_cover(whole, [_meet(whole, part) for part in given])
    elif first.region["kind"] == "box":
        covered = _ends_cover(*_box_ends(claims, tensors))
    else:
        ends = [cell_ends(claim) for claim in claims]
        covered = _ends_cover(((-math.inf, math.inf),) * len(ends[0]), ends)
    if not covered:
        raise RejectedError(f"{where}: the claims do not add up to the whole")


def _box_ends(claims: Sequence[Claim], tensors: Tensors) -> tuple[Ends, list[Ends]]:
    """The ends of the whole and of the parts, along entries where they are not all the same."""
    names = [f"whole.{claims[0].region['whole']}", *(f"{claim.number}.region" for claim in claims)]
    found = tensors.stored.tensors.get(f"{names[0]}.lower")
    shape = () if found is None else found.shape
    both = [
        np.stack([tensors.need(f"{name}.{side}", [shape]).reshape(-1) for side in ("lower", "upper")], 1)
        for name in names
    ]
    cut = np.any([part != both[0] for part in both], (0, 2))
    whole, *parts = (tuple((low, high) for low, high in part[cut].tolist()) for part in both)
    return whole, parts


def _ends_cover(everything: Ends, ends: list[Ends]) -> bool:
    parts = [(everything, ends)]
    while parts:
        whole, cells = parts.pop()
        if cells == [whole]:
            continue
        found = next((plane for plane in _inner_ends(cells, whole) if _separates(*plane, cells)), None)
        if found is None:
            return False
        cut, place = found
        low, high = whole[cut]
        below = [cell for cell in cells if cell[cut][1] <= place]
        above = [cell for cell in cells if cell[cut][0] >= place]
        parts.append(((*whole[:cut], (low, place), *whole[cut + 1 :]), below))
        parts.append(((*whole[:cut], (place, high), *whole[cut + 1 :]), above))
    return True


def _meet(a: Choices, b: Choices) -> Choices:
    return tuple(x & y for x, y in zip(a, b, strict=True))


def _choices_cover(everything: Choices, sets: list[Choices]) -> bool:
    """Whether every choice of a candidate (or the original) for each word is one of a part.

    A word's candidates that some part has are set against the others, where no part has both.
    """
    parts = [(everything, sets)]
    while parts:
        whole, left = parts.pop()
        if any(all(a <= b for a, b in zip(whole, one, strict=True)) for one in left):
            continue
        found = next(_choice_cuts(whole, left), None)
        if found is None:
            return False
        word, some = found
        for side in (whole[word] & some, whole[word] - some):
            inside = [one for one in left if one[word] & side]
            parts.append(((*whole[:word], side, *whole[word + 1 :]), inside))
    return True


def _choice_cuts(whole: Choices, parts: Sequence[Choices]) -> Iterator[tuple[int, frozenset[int]]]:
    """A word, and some of its candidates: every part has some of these only, or of the others only."""
    for part in parts:
        for word, some in enumerate(part):
            others = whole[word] - some
            if others and whole[word] & some and not any(p[word] & some and p[word] & others for p in parts):
                yield word, some


def _inner_ends(cells: Sequence[Ends], whole: Ends) -> Iterator[tuple[int, float]]:
    """Ends of cells that lie within the whole: the cut, and the place along it."""
    for cell in cells:
        for cut, (ends, (low, high)) in enumerate(zip(cell, whole, strict=True)):
            yield from ((cut, end) for end in ends if low < end < high)


def _separates(cut: int, place: float, cells: Sequence[Ends]) -> bool:
    """Whether every cell lies on one side of a plane."""
    return all(cell[cut][1] <= place or cell[cut][0] >= place for cell in cells)
