"""Balls that are proven part by part: whether the parts that are claimed are all there are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from buffet_checker.certificate import Claim, cell_ends
from buffet_checker.errors import RejectedError

Ends = tuple[tuple[float, float], ...]
"""Of a cell, the two along every cut."""


def groups(claims: Sequence[Claim]) -> list[list[Claim]]:
    """Claims about cells of the same ball together, all others alone, in the order of the file.

    Raises where cells of a ball do not cover it.
    """
    found: dict[object, list[Claim]] = {}
    for claim in claims:
        cell = claim.region["kind"] == "cell"
        found.setdefault(("cuts", claim.region["cuts"]) if cell else claim.number, []).append(claim)
    for members in found.values():
        if members[0].region["kind"] == "cell":
            _check_cover(members)
    return list(found.values())


def _check_cover(claims: Sequence[Claim]) -> None:
    """The cells are what is left of everything when it is cut in two again and again."""
    first = claims[0]
    where = f"cells of cuts {first.region['cuts']}"
    for claim in claims:
        for key in ("moved", "p", "eps", "rows"):
            if claim.region[key] != first.region[key]:
                raise RejectedError(f"{where}: claims[{claim.number}] has another {key} than the others")
    ends = [cell_ends(claim) for claim in claims]
    everything = ((-math.inf, math.inf),) * len(ends[0])
    parts = [(everything, ends)]
    while parts:
        whole, cells = parts.pop()
        if cells == [whole]:
            continue
        found = next((plane for plane in _inner_ends(cells, whole) if _separates(*plane, cells)), None)
        if found is None:
            raise RejectedError(f"{where}: the claims do not add up to the part {list(whole)}")
        cut, place = found
        low, high = whole[cut]
        below = [cell for cell in cells if cell[cut][1] <= place]
        above = [cell for cell in cells if cell[cut][0] >= place]
        parts.append(((*whole[:cut], (low, place), *whole[cut + 1 :]), below))
        parts.append(((*whole[:cut], (place, high), *whole[cut + 1 :]), above))


def _inner_ends(cells: Sequence[Ends], whole: Ends) -> Iterator[tuple[int, float]]:
    """Ends of cells that lie within the whole: the cut, and the place along it."""
    for cell in cells:
        for cut, (ends, (low, high)) in enumerate(zip(cell, whole, strict=True)):
            yield from ((cut, end) for end in ends if low < end < high)


def _separates(cut: int, place: float, cells: Sequence[Ends]) -> bool:
    """Whether every cell lies on one side of a plane."""
    return all(cell[cut][1] <= place or cell[cut][0] >= place for cell in cells)
