"""Typos of a word, as people make them: letters swapped, left out, added, or hit beside the right key."""

from __future__ import annotations

import random

ROWS = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def _neighbours() -> dict[str, str]:
    """The letters next to every letter on a keyboard."""
    found: dict[str, str] = {}
    for line, row in enumerate(ROWS):
        for place, letter in enumerate(row):
            near = [row[p] for p in (place - 1, place + 1) if 0 <= p < len(row)]
            for other in (line - 1, line + 1):
                if 0 <= other < len(ROWS):
                    shift = place if other > line else place + 1
                    near += [ROWS[other][p] for p in (shift - 1, shift) if 0 <= p < len(ROWS[other])]
            found[letter] = "".join(near)
    return found


NEIGHBOURS = _neighbours()


def all_typos(word: str) -> list[str]:
    """Every typo of one kind at one place, each once: a word of a single letter, or without any, has none."""
    if len(word) < 2 or not any(letter.isalpha() for letter in word):
        return []
    found: list[str] = []
    for place, letter in enumerate(word):
        before, after = word[:place], word[place + 1 :]
        if after:
            found.append(before + after[0] + letter + after[1:])  # adjacent letters swapped
        found.append(before + after)  # one left out
        near = NEIGHBOURS.get(letter.lower(), "")
        found += [before + letter + other + after for other in near]  # a key beside it hit too
        found += [before + other + after for other in near]  # or instead of it
    return [typo for typo in dict.fromkeys(found) if typo != word]


def typos(word: str, most: int, seed: int) -> list[str]:
    """Typos of a word, `most` of them at random if there are more; the same word and seed give the same."""
    every = all_typos(word)
    if len(every) <= most:
        return every
    return random.Random(f"{seed} {word}").sample(every, most)
