"""Balls that are proven part by part: whether the parts that are claimed are all there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from buffet_checker.certificate import Claim, cell_ends
from buffet_checker.errors import RejectedError


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
    """Along every cut the ends form a chain from −∞ to ∞, and every combination of its links is claimed."""
    first = claims[0]
    where = f"cells of cuts {first.region['cuts']}"
    for claim in claims:
        for key in ("moved", "eps", "rows"):
            if claim.region[key] != first.region[key]:
                raise RejectedError(f"{where}: claims[{claim.number}] has another {key} than the others")
    cells = {cell_ends(claim) for claim in claims}
    chains = [sorted({cell[i] for cell in cells}) for i in range(len(first.region["rows"]))]
    for number, chain in enumerate(chains):
        ends = [float("-inf"), *(high for _, high in chain)]
        starts = [*(low for low, _ in chain), float("inf")]
        if ends != starts:
            raise RejectedError(f"{where}: along cut {number} there is a gap, or an overlap")
    for cell in itertools.product(*chains):
        if cell not in cells:
            raise RejectedError(f"{where}: the part {list(cell)} is not claimed")
