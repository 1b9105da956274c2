"""The outcome of a check as people and programs read it; margins are rounded down, slacks up."""

from __future__ import annotations

import json
import math
from decimal import ROUND_CEILING, ROUND_FLOOR

from buffet_checker.check import Proof, Result, Subject
from buffet_checker.wording import LISTED, printable, quoted, rounded, statement


def as_lines(result: Result) -> list[str]:
    if not result.accepted or result.subject is None:
        return [f"rejected: {printable(result.reason)}"]
    subject = result.subject
    count = f"{len(result.proofs)} claim{'s' if len(result.proofs) != 1 else ''}"
    about = "properties" if subject.label is None else f"label {subject.label} {quoted(str(subject.answer))}"
    lines = [
        f"accepted · {about} · {count} · {result.seconds:.2f} s",
        _model(subject),
        _sentence(subject),
    ]
    for proof in result.proofs:
        rows = "+".join(str(row) for row in proof.moved)
        least = min(zip(proof.margins, proof.slacks, strict=True), key=lambda pair: pair[0] - pair[1])
        holds = "holds in float32 too" if proof.deployed else "float32 is not covered: the slack is larger"
        margin, slack = rounded(min(proof.margins), ROUND_FLOOR), rounded(least[1], ROUND_CEILING)
        if subject.program is not None:
            slack, holds = "not derived", "float32 is not covered"
        parts = f" · {proof.cells} cells" if proof.cells > 1 else ""
        parts += f" · {proof.leaves} leaves" if proof.leaves else ""
        if len(proof.moved) > LISTED:
            rows = f"{proof.moved[0]}+…+{proof.moved[-1]}, {len(proof.moved)} of them"
        lines.append(f"row {rows} · {_region(proof)}{parts} · margin {margin} · slack {slack} · {holds}")
        lines.append(statement(subject, proof))
    return lines


def _model(subject: Subject) -> str:
    program = subject.program
    if program is None:
        return f"model sha256:{subject.model} · {', '.join(sorted(subject.files))}"
    many = f"stored here: {len(program.steps)} operations, {program.inputs} inputs, {program.outputs} outputs"
    found = subject.agreement
    near = (
        "agreement not measured"
        if found is None
        else f"outputs of the file differ by at most {rounded(found.difference, ROUND_CEILING)} at "
        f"{found.points} points"
    )
    return f"onnx sha256:{subject.files['onnx']} · {many} · {near}"


def as_json(result: Result) -> str:
    """One JSON document; a slack without a bound is null, and so is what is not named."""
    subject = result.subject
    document = {
        "accepted": result.accepted,
        "reason": result.reason or None,
        "label": result.label,
        "answer": subject and subject.answer,
        "model": subject and {"sha256": subject.model, "files": dict(subject.files)},
        "network": subject and _network(subject),
        "certificate": subject and subject.certificate,
        "rows": subject and subject.rows,
        "sentence": subject and _named(subject),
        "claims": [] if subject is None else [_claim(subject, proof) for proof in result.proofs],
        "seconds": result.seconds,
    }
    return json.dumps(document, indent=2, allow_nan=False)


def _network(subject: Subject) -> dict[str, object] | None:
    """What is stored instead of read from the model's files."""
    program, found = subject.program, subject.agreement
    if program is None:
        return None
    measured = found and {"difference": found.difference, "points": found.points}
    sizes = {"operations": len(program.steps), "inputs": program.inputs, "outputs": program.outputs}
    return {**sizes, "agreement": measured}


def _claim(subject: Subject, proof: Proof) -> dict[str, object]:
    return {
        "statement": statement(subject, proof),
        "moved": list(proof.moved),
        "words": _spelled(
            subject, [subject.sentence.ids[i] for i in proof.moved] if subject.sentence else None
        ),
        "region": proof.region.facts(),
        "substitutes": proof.substitutes
        and [{"ids": list(ids), "tokens": _spelled(subject, list(ids))} for ids in proof.substitutes],
        "property": proof.asked and list(proof.asked.texts),
        "cells": proof.cells,
        "leaves": proof.leaves,
        "margins": list(proof.margins),
        "slacks": [slack if math.isfinite(slack) else None for slack in proof.slacks],
        "float32": proof.deployed,
    }


def _named(subject: Subject) -> dict[str, object] | None:
    sentence = subject.sentence
    if sentence is None:
        return None
    tokens = _spelled(subject, list(sentence.ids))
    return {"text": sentence.text, "tokens": tokens, "ids": list(sentence.ids), "types": list(sentence.types)}


def _spelled(subject: Subject, ids: list[int] | None) -> list[str] | None:
    if ids is None or subject.sentence is None or subject.sentence.vocabulary is None:
        return None
    return [subject.sentence.vocabulary.tokens[i] for i in ids]


def _sentence(subject: Subject) -> str:
    """Every row with its token."""
    sentence = subject.sentence
    if sentence is None:
        return f"no sentence is named · rows sha256:{subject.rows}"
    if sentence.tokens is None:
        return f"token ids {' '.join(map(str, sentence.ids))} · no vocabulary is named"
    return "rows " + " · ".join(f"{row} {printable(token)}" for row, token in enumerate(sentence.tokens))


def _region(proof: Proof) -> str:
    facts = proof.region.facts()
    if facts["kind"] == "ball":
        return f"L{str(facts['p']).removesuffix('.0')} ball of {facts['eps']!r}"
    if facts["kind"] == "box":
        return f"box of up to {rounded(proof.region.reach.max(), ROUND_CEILING)}"
    return f"{facts['choices']} candidates each, at most {facts['budget']} changed"
