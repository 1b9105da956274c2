"""The outcome of a check as people and programs read it; margins are rounded down, slacks up."""

from __future__ import annotations

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

from buffet_checker.check import Proof, Result


def as_lines(result: Result) -> list[str]:
    if not result.accepted:
        return [f"rejected: {result.reason}"]
    count = f"{len(result.proofs)} claim{'s' if len(result.proofs) != 1 else ''}"
    lines = [f"accepted · label {result.label} · {count} · {result.seconds:.2f} s"]
    for proof in result.proofs:
        rows = "+".join(str(row) for row in proof.moved)
        least = min(zip(proof.margins, proof.slacks, strict=True), key=lambda pair: pair[0] - pair[1])
        holds = "holds in float32 too" if proof.deployed else "float32 is not covered: the slack is larger"
        margin, slack = _rounded(min(proof.margins), ROUND_FLOOR), _rounded(least[1], ROUND_CEILING)
        parts = f" · {proof.cells} cells" if proof.cells > 1 else ""
        lines.append(f"row {rows} · {_region(proof)}{parts} · margin {margin} · slack {slack} · {holds}")
    return lines


def as_json(result: Result) -> str:
    """One JSON document; a slack without a bound is null."""
    claims = [
        {
            "moved": list(proof.moved),
            "region": proof.region.facts(),
            "cells": proof.cells,
            "margins": list(proof.margins),
            "slacks": [slack if math.isfinite(slack) else None for slack in proof.slacks],
            "float32": proof.deployed,
        }
        for proof in result.proofs
    ]
    document = {
        "accepted": result.accepted,
        "reason": result.reason or None,
        "label": result.label,
        "claims": claims,
        "seconds": result.seconds,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _region(proof: Proof) -> str:
    facts = proof.region.facts()
    if facts["kind"] == "ball":
        return f"L{str(facts['p']).removesuffix('.0')} ball of {facts['eps']!r}"
    if facts["kind"] == "box":
        return f"box of up to {_rounded(proof.region.reach.max(), ROUND_CEILING)}"
    return f"{facts['choices']} candidates each, at most {facts['budget']} changed"


def _rounded(value: float, rounding: str) -> str:
    if not math.isfinite(value):
        return "unbounded"
    short = Context(prec=4, rounding=rounding).plus(Decimal(value))
    return f"{short:f}" if -5 <= short.adjusted() < 6 else f"{short:.3e}"
