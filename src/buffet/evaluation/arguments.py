"""Questions from what users pass: every failure is one `BuffetError` that says how to fix it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from buffet.errors import BuffetError
from buffet.evaluation.questions import EACH, MOST_LEVELS, TOGETHER, Balls, Exchanges, Question
from buffet.regions.arguments import checked_norm
from buffet.synonyms import Synonyms, checked_synonyms, read_synonyms


def question(
    eps: float | int | Sequence[float | int] | None = None,
    norm: float | int | str = 2,
    words: str = EACH[0],
    synonyms: Synonyms | str | Path | None = None,
    most_synonyms: int | None = None,
    typos: int = 0,
    at_most: int | Sequence[int | None] | None = None,
    skip_unknown: bool = False,
) -> Question:
    """Balls or exchanges, whichever is asked for; what does not go together is refused."""
    exchanged = synonyms is not None or typos != 0
    if (eps is not None) == exchanged:
        raise BuffetError(
            "give either eps, for words that move in balls, or synonyms or typos, for words that are"
            " exchanged"
        )
    if most_synonyms is not None and synonyms is None:
        raise BuffetError("most synonyms: is about synonyms; give a file of them")
    if eps is None:
        if (checked_norm(norm), words) != (2.0, EACH[0]):
            raise BuffetError("norm and words go with eps, for words that move in balls")
        return exchanges(synonyms, typos, at_most, skip_unknown, most_synonyms)
    if at_most is not None or skip_unknown:
        raise BuffetError("at most and skip unknown go with synonyms and typos")
    return balls(eps, norm, words)


def balls(
    eps: float | int | Sequence[float | int], norm: float | int | str = 2, words: str = "each"
) -> Balls:
    """Balls of some sizes, checked."""
    sizes = [eps] if isinstance(eps, int | float) else list(eps)
    if not all(isinstance(size, int | float) and 0 <= size < math.inf for size in sizes):
        raise BuffetError(f"eps: got {', '.join(map(str, sizes))}; give finite numbers ≥ 0")
    if words not in (*EACH, *TOGETHER):
        raise BuffetError(f"words: got {words!r}; give each (every word on its own) or all (all at once)")
    return Balls(_rising("eps", [abs(float(size)) for size in sizes]), checked_norm(norm), words in TOGETHER)


def exchanges(
    synonyms: Synonyms | str | Path | None = None,
    typos: int = 0,
    at_most: int | Sequence[int | None] | None = None,
    skip_unknown: bool = False,
    most_synonyms: int | None = None,
) -> Exchanges:
    """Exchanges of some numbers of words, checked; None: all words at once."""
    numbers = list(at_most) if isinstance(at_most, Sequence) else [at_most]
    for number in numbers:
        if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 1):
            raise BuffetError(f"at_most: got {number!r}; give numbers of words from 1, or None for all")
    if typos < 0:
        raise BuffetError(f"typos: got {typos}; give a number of misspellings per word, 0 or more")
    table: Mapping[str, Sequence[str]] | None = None
    if isinstance(synonyms, str | Path):
        table = read_synonyms(synonyms, most_synonyms)
    elif synonyms is not None:
        table = checked_synonyms(synonyms, "synonyms", most_synonyms)
    if table is None and not typos:
        raise BuffetError("nothing may be exchanged: give synonyms, or a number of typos")
    levels = _rising("at_most", [math.inf if number is None else float(number) for number in numbers])
    return Exchanges(levels, table, typos, skip_unknown)


def _rising(name: str, levels: list[float]) -> tuple[float, ...]:
    found = tuple(sorted(set(levels)))
    if not 1 <= len(found) <= MOST_LEVELS:
        raise BuffetError(f"{name}: got {len(found)} of them; give 1 to {MOST_LEVELS}")
    return found
