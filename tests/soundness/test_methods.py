"""The soundness campaign in small: no method is ever wrong, and one that is would be caught."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from torch import Tensor

from buffet.bounds import choices
from buffet.bounds.linear import PlanesPiece, SoftmaxPiece
from buffet.bounds.relaxations import Lines
from buffet.methods import METHODS, method_named
from buffet.regions import LpBall
from buffet.soundness import Case, Tally, campaign, check_case, points_of, random_case
from buffet.verify import Engine

PLAIN = [name for name, method in METHODS.items() if method.optimise == "none"]
LEARNED = [name for name, method in METHODS.items() if method.optimise != "none"]


@cache
def evidence(seed: int) -> tuple[Case, Tensor]:
    case = random_case(seed)
    return case, points_of(case, 60)


def final(networks: int, methods: list[str], seed: int = 0) -> dict[str, Tally]:
    *_, tallies = campaign(networks, 60, seed, methods)
    return tallies


@pytest.mark.parametrize("seed", [0, 1, 4, 23, 26, 30])
def test_no_method_is_ever_wrong(seed):
    """Networks on which every method has a bound; `make soundness` has hundreds of all kinds."""
    tallies = final(1, PLAIN, seed)
    assert list(tallies) == PLAIN
    for tally in tallies.values():
        assert tally.violations == ()
        assert (tally.networks, tally.no_bound) == (1, 0)
        assert tally.points > 100


@pytest.mark.parametrize("method", LEARNED)
def test_learning_is_never_wrong_either(method):
    """A few steps are enough: every iterate must be sound."""
    case, margins = evidence(0)
    tally = check_case(case, method_named(method, steps=3), method, margins, Engine())
    assert tally.violations == ()
    assert tally.points > 0


def test_a_campaign_can_be_repeated():
    assert final(1, ["interval"], seed=3) == final(1, ["interval"], seed=3)


# --- planted mistakes ---------------------------------------------------------------------------------------


def caught(method: str) -> bool:
    """Whether some network shows the method to be wrong; on the first few its bounds are nearly exact."""
    chosen = method_named(method)
    for seed in (30, 11, 22, 0, 1, 2):
        case, margins = evidence(seed)
        if check_case(case, chosen, method, margins, Engine()).violations:
            return True
    return False


def raised_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower line of every activation 0.05 too high."""
    right = choices.relax

    def wrong(*args: object, **kwargs: object) -> Lines:
        lines = right(*args, **kwargs)
        return replace(lines, lower_intercept=lines.lower_intercept + 0.05)

    monkeypatch.setattr(choices, "relax", wrong)


def flipped_planes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower and upper plane of every product exchanged."""
    right = choices.planes

    def wrong(*args: object, **kwargs: object) -> PlanesPiece:
        piece = right(*args, **kwargs)
        return replace(
            piece,
            x_lower=piece.x_upper,
            x_upper=piece.x_lower,
            y_lower=piece.y_upper,
            y_upper=piece.y_lower,
            lower=piece.upper,
            upper=piece.lower,
        )

    monkeypatch.setattr(choices, "planes", wrong)


def raised_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lower bound of every attention weight 0.05 too high."""
    right = choices.softmax_piece

    def wrong(*args: object, **kwargs: object) -> SoftmaxPiece:
        piece = right(*args, **kwargs)
        return replace(piece, lower=piece.lower + 0.05)

    monkeypatch.setattr(choices, "softmax_piece", wrong)


def small_ball(monkeypatch: pytest.MonkeyPatch) -> None:
    """Balls five percent too small."""
    right = LpBall.minimise
    monkeypatch.setattr(LpBall, "minimise", lambda self, form: 0.95 * right(self, form))


def lost_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constants of the planes forgotten when rows are pulled."""
    right = PlanesPiece.pull
    monkeypatch.setattr(PlanesPiece, "pull", lambda self, rows: (right(self, rows)[0], None))


MISTAKES = {
    raised_line: ["baseline", "backward"],
    flipped_planes: ["baseline", "backward"],
    raised_softmax: ["lse"],
    small_ball: ["forward", "baseline", "backward"],
    lost_constant: ["backward"],
}


@pytest.mark.parametrize(
    ("mistake", "method"), [(mistake, method) for mistake, names in MISTAKES.items() for method in names]
)
def test_a_planted_mistake_is_caught(mistake, method, monkeypatch):
    mistake(monkeypatch)
    assert caught(method)
