"""The checker broken on purpose: every mistake accepts a certificate that is rejected without it."""

from __future__ import annotations

import numpy as np
import pytest

from buffet_checker import known, substitution
from buffet_checker.balls import Array
from buffet_checker.check import Proof, judge
from buffet_checker.graph import evaluate
from buffet_checker.network import build
from checker_mutants import MUTANTS, Mutant, only
from corruptions import Opened
from false_certificates import RECIPES, Base, Recorder, accepted, base, judged, less_slack, weaker
from forged_certificates import FORGED, forged

TRIES = 8
"""Pushed certificates that are tried with every base."""


@pytest.mark.parametrize("name", RECIPES)
def test_bases_are_true_and_cannot_be_pushed(name: str) -> None:
    known = base(name)
    assert accepted(known.content, known.checkpoint)
    assert list(weaker(known, known.found)) == []


@pytest.mark.parametrize("name", FORGED)
def test_forged_certificates_are_rejected(name: str) -> None:
    assert not accepted(*forged(name))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_mutant_accepts_something_false(mutant: Mutant) -> None:
    if mutant.shows == "forgery":
        assert any(_fooled(mutant, *forged(name)) for name in FORGED)
    else:
        show = _claims_less_slack if mutant.shows == "slack" else _accepts_a_pushed_one
        assert any(show(mutant, base(name)) for name in RECIPES)


def test_a_harmless_mutant_accepts_nothing_false() -> None:
    harmless = Mutant("none", known, "planes", lambda right: right)
    for name in ("baseline", "whole"):
        assert not _accepts_a_pushed_one(harmless, base(name))
        assert not _claims_less_slack(harmless, base(name))
    assert not any(_fooled(harmless, *forged(name)) for name in FORGED)


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) > 150


def _fooled(mutant: Mutant, content: bytes, checkpoint: object) -> bool:
    with mutant.loose():
        return accepted(content, checkpoint)  # type: ignore[arg-type]


def _accepts_a_pushed_one(mutant: Mutant, known: Base) -> bool:
    """A number one unit beyond what is derived is accepted, and rejected without the mutant."""
    recorder = Recorder()
    with mutant.loose(), recorder.listening():
        judged(known.content, known.checkpoint)
    for _, false in zip(range(TRIES), weaker(known, recorder.found), strict=False):
        if _fooled(mutant, false, known.checkpoint):
            assert not accepted(false, known.checkpoint)
            return True
    return False


def _claims_less_slack(mutant: Mutant, known: Base) -> bool:
    recorder = Recorder()
    with mutant.loose(), recorder.listening():
        result = judged(known.content, known.checkpoint)
    return result is not None and result.accepted and less_slack(known, recorder.found, result)


# --- a deployed run -----------------------------------------------------------------------------------------

COARSE = 1e4
"""How much less precise one kind of operation is, so that its rounding is most of what there is."""
DEPLOYED = [
    ("at a point", kind) for kind in ("affine", "diagonal", "center", "add", "scores", "normalise", "mix")
] + [("standard at a point", kind) for kind in ("rescale", "softmax", "apply")]


def _coarse(kind: str) -> Mutant:
    """Deployed arithmetic in which operations of one kind err more."""
    when = lambda nodes, index, *rest: nodes[index].kind == kind  # noqa: E731
    return Mutant(kind, substitution, "local_rounding", only(when, lambda found: COARSE * found))


def _worst_run(known: Base, kind: str) -> Array:
    """The margins of a run on the unmoved rows in which operations of a kind round as unluckily as they may.

    Every entry errs by all that its rounding allows, towards a smaller first margin.
    """
    opened = Opened.of(known.content)
    rows = opened.tensors["center"].astype(np.float64)
    nodes, values = build(known.checkpoint, rows, opened.head["label"], opened.claim["graph"])
    still = [(np.zeros_like(v), np.zeros_like(v)) for v in values]
    calm = [np.zeros_like(v) for v in values]
    errors = {
        i: COARSE * substitution.local_rounding(nodes, i, values, still, calm)
        for i, node in enumerate(nodes)
        if node.kind == kind
    }

    def run(added: dict[int, Array]) -> Array:
        found = [rows]
        for index, node in enumerate(nodes[1:], 1):
            found.append(evaluate(node, [found[i] for i in node.inputs]) + added.get(index, 0.0))
        return found[-1][0]

    start, chosen = run({})[0], {}
    for index, error in errors.items():
        chosen[index] = error.copy()
        for place in np.ndindex(error.shape):
            alone = np.zeros_like(error)
            alone[place] = error[place]
            if run({index: alone})[0] > start:
                chosen[index][place] *= -1
    return run(chosen)


@pytest.mark.parametrize(("name", "kind"), DEPLOYED)
def test_the_slack_covers_an_unlucky_run_and_no_less_would(name: str, kind: str) -> None:
    known = base(name)
    worst = _worst_run(known, kind)[0]
    with _coarse(kind).loose():
        (proof,) = judge(known.content, name, known.checkpoint).proofs
        assert _least(proof) <= worst
        lost = proof.margins[0] - worst
        assert lost > 0.2 * proof.slacks[0]
    mutant = next(m for m in MUTANTS if m.name == f"rounding of {kind}")
    with mutant.loose():
        (proof,) = judge(known.content, name, known.checkpoint).proofs
        assert _least(proof) > worst


def _least(proof: Proof) -> float:
    return proof.margins[0] - proof.slacks[0]
