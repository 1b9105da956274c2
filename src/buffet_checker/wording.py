"""What was proven in one sentence that can be quoted, and text that is safe to print.

The statement says no more than was checked. Margins are rounded down, sizes of boxes up, an ε is written so
that it reads back as the same number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal

import numpy as np

from buffet_checker.check import Proof, Subject
from buffet_checker.regions import Ball, Box, Candidates

SHORT = 12
"""Digits of a hash that are quoted."""
LISTED = 8
"""Substitutes of a word that are quoted; the JSON has all."""


def statement(subject: Subject, proof: Proof) -> str:
    """The claim that was proven, for quoting."""
    changes, margin = _moves(subject, proof), rounded(min(proof.margins), ROUND_FLOOR)
    return (
        f"Proven: {_where(subject, proof)}, {changes} {_outcome(subject, proof)}; "
        f"the margin stays at least {margin}. {_holds(subject, proof)}"
    )


def _outcome(subject: Subject, proof: Proof) -> str:
    """What is true after whatever may happen to the input."""
    model = "" if subject.program is not None else f" of model sha256:{subject.model[:SHORT]}…"
    if proof.asked is None:
        stays = "never changes the answer" if _holds_still(proof) else "always gives the answer"
        return f"{stays} {quoted(str(subject.answer))} (class {subject.label}){model}"
    largest = proof.asked.largest
    if largest is not None:
        return f"leaves output {largest} larger than all {proof.asked.rows.shape[1] - 1} others{model}"
    cases = [case if " or " not in case else f"({case})" for case in proof.asked.texts]
    if len(cases) > LISTED:
        cases = [*cases[:LISTED], f"{len(cases) - LISTED} more conditions of {_file(subject)}"]
    return f"leaves {listed(cases)} true{model}"


def _holds(subject: Subject, proof: Proof) -> str:
    """In which arithmetic, and how a network that is stored is known to be that of the file."""
    if subject.program is not None:
        return f"Holds in exact arithmetic for the network as it is stored there. {_binding(subject)}"
    if not proof.deployed:
        return "Holds in exact arithmetic; rounding in float32 is not covered."
    least = min(np.nextafter(m - s, -np.inf) for m, s in zip(proof.margins, proof.slacks, strict=True))
    return (
        f"Holds in exact arithmetic, and as deployed in float32, where the margin stays at least "
        f"{rounded(least, ROUND_FLOOR)}."
    )


def _binding(subject: Subject) -> str:
    name = f"the ONNX file sha256:{subject.files['onnx'][:SHORT]}…, which the certificate names"
    if subject.agreement is None:
        return f"Whether it is the network of {name}, was not measured."
    return (
        f"Its outputs and those of {name}, differ by at most "
        f"{rounded(subject.agreement.difference, ROUND_CEILING)} at {subject.agreement.points} points of the "
        "region, as was measured, not proven."
    )


def _where(subject: Subject, proof: Proof) -> str:
    sentence = subject.sentence
    if subject.program is not None:
        return f"of the network that {_file(subject)} stores"
    if sentence is None:
        return f"for the rows sha256:{proof.rows[:SHORT]}… (no sentence is named)"
    if sentence.text is None:
        return f"in the sentence of token ids {' '.join(map(str, sentence.ids))} (no vocabulary is named)"
    return f"in {quoted(sentence.text)}"


def _moves(subject: Subject, proof: Proof) -> str:
    """What happens to the sentence."""
    region, several = proof.region, len(proof.moved) > 1
    if subject.program is not None and isinstance(region, Box):
        half = rounded(float(((region.upper - region.lower) / 2).max(initial=0.0)), ROUND_CEILING)
        return (
            f"any input X_0 to X_{subject.program.inputs - 1} within the ends that {_file(subject)} has for "
            f"each of them, none further apart than twice {half},"
        )
    words = listed([word(subject, row) for row in proof.moved])
    if subject.sentence is not None:
        words = f"the embedding{'s' if several else ''} of {words}"
    if isinstance(region, Ball):
        norm = "∞" if math.isinf(region.p) else repr(region.p).removesuffix(".0")
        by = f"by any vector of L{norm} norm up to {region.eps!r}"
        return f"moving {words}, each {by}," if several else f"moving {words} {by}"
    if isinstance(region, Box):
        reach = rounded(float(region.reach.max(initial=0.0)), ROUND_CEILING)
        return f"moving {words} anywhere within the box of {_file(subject)}, no entry by more than {reach},"
    assert isinstance(region, Candidates)
    choices = [
        f"{word(subject, row)} by {by}"
        for place, row in enumerate(proof.moved)
        if (by := _substitutes(subject, proof, region, place))
    ]
    if not choices:
        return "replacing nothing"
    limit = f", at most {region.budget} of these {len(choices)} at once,"
    if region.budget >= len(choices):
        limit = ", alone or together," if len(choices) > 1 else ""
    return f"replacing {', and '.join(choices)}{limit}"


def _substitutes(subject: Subject, proof: Proof, region: Candidates, place: int) -> str:
    """What a row may be replaced by; nothing if there is only the row itself."""
    if proof.substitutes is None:
        vectors = np.unique(region.offsets[place], axis=0)
        count = int((vectors != 0).any(1).sum())
        many = f"any of {count} vectors" if count > 1 else "a vector"
        return f"{many} of {_file(subject)}" if count else ""
    names = [spelled(subject, i) for i in proof.substitutes[place]]
    if len(names) > LISTED:
        names = [*names[:LISTED], f"{len(names) - LISTED} other tokens"]
    return listed(names, "or")


def _file(subject: Subject) -> str:
    return f"certificate sha256:{subject.certificate[:SHORT]}…"


def _holds_still(proof: Proof) -> bool:
    """Whether the unmoved rows are in the region: all but boxes always hold them."""
    region = proof.region
    return not isinstance(region, Box) or bool(((region.lower <= 0) & (region.upper >= 0)).all())


def word(subject: Subject, row: int) -> str:
    """A row of the sentence: what it is, and where."""
    if subject.sentence is None:
        return f"row {row}"
    return f"{spelled(subject, subject.sentence.ids[row])} (row {row})"


def spelled(subject: Subject, number: int) -> str:
    """A token id as the vocabulary spells it, in quotation marks."""
    vocabulary = subject.sentence.vocabulary if subject.sentence else None
    return f"token {number}" if vocabulary is None else quoted(vocabulary.tokens[number])


def listed(names: Sequence[str], last: str = "and") -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} {last} {names[-1]}" if names else ""


def quoted(text: str) -> str:
    """In quotation marks; those of the text itself are escaped, so that it cannot go on after its end."""
    return '"' + printable(text.replace("\\", "\\\\").replace('"', '\\"')) + '"'


def printable(text: str) -> str:
    """The text with everything escaped that does not stand for itself on a terminal: control characters,
    line breaks, invisible characters and those that turn the direction of writing."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rounded(value: float, rounding: str) -> str:
    """Four digits, rounded up or down."""
    if not math.isfinite(value):
        return "unbounded"
    short = Context(prec=4, rounding=rounding).plus(Decimal(value))
    return f"{short:f}" if -5 <= short.adjusted() < 6 else f"{short:.3e}"
