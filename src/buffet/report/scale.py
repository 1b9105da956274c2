"""The colours of words: from a certified radius to a step of one ramp, in a terminal and on a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

RAMP = ("#fde725", "#a5db36", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e")
"""From fragile to robust: viridis, whose lightness falls steadily, so it also reads without hue."""
DARK_INK_STEPS = 4
"""How many steps of the ramp, from its light end, carry dark letters (contrast above 5.5 everywhere)."""
DARK_INK, LIGHT_INK = "#10131a", "#ffffff"


def ink(step: int) -> str:
    """The colour of letters on a step of the ramp."""
    return DARK_INK if step < DARK_INK_STEPS else LIGHT_INK


@dataclass(frozen=True)
class ColourScale:
    """Which step of `RAMP` a strength takes: equal factors are equal steps, from `low` to `high`."""

    low: float
    high: float

    @classmethod
    def over(cls, values: Iterable[float]) -> ColourScale | None:
        """The scale of some strengths, at least a factor of two wide: what hardly differs looks alike.

        One value in fifty at either end may lie beyond it. None if nothing is above 0.
        """
        logs = sorted(math.log(value) for value in values if value > 0)
        if not logs:
            return None
        first, last = logs[len(logs) // 50], logs[-1 - len(logs) // 50]
        middle, half = (first + last) / 2, max(last - first, math.log(2)) / 2
        return cls(math.exp(middle - half), math.exp(middle + half))

    def step(self, value: float) -> int:
        """The step of a strength; nothing proven is the fragile end."""
        if value <= 0:
            return 0
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return min(max(int(share * len(RAMP)), 0), len(RAMP) - 1)

    def edges(self) -> tuple[float, ...]:
        """Where one step ends and the next begins."""
        factor = self.high / self.low
        return tuple(self.low * factor ** (k / len(RAMP)) for k in range(1, len(RAMP)))


def steps(strengths: Mapping[int, float]) -> dict[int, int]:
    """The step of every word, relative to the others."""
    scale = ColourScale.over(strengths.values())
    return {word: scale.step(value) if scale else 0 for word, value in strengths.items()}
