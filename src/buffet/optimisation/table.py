"""Optimisers by name."""

from __future__ import annotations

from collections.abc import Mapping

from buffet.optimisation.boxes import TunedBoxes
from buffet.optimisation.end_to_end import EndToEnd
from buffet.optimisation.margin import FinalMargin
from buffet.optimisation.optimiser import NotLearned, Optimiser, RuleKept

OPTIMISERS: Mapping[str, Optimiser] = {
    "none": NotLearned(),
    "final": FinalMargin(),
    "all": EndToEnd(),
    "tuned": TunedBoxes(),
}
"""What is learned: nothing; the margin's own relaxation, boxes fixed; every α, end to end; or the margin's
relaxation and those behind the boxes."""
RULE_KEPT = RuleKept()
