"""The numbers that the BuFFeT paper prints, next to which ours are put. Ranges have both ends."""

from __future__ import annotations

from collections.abc import Mapping

ACCURACY: Mapping[str, tuple[float, float]] = {"sst": (0.809, 0.832), "yelp": (0.912, 0.915)}
"""Of its models on test sentences, by data."""
RULE_GAIN = 1.8
"""The most that r-BuFFeT multiplies CROWN-BaF's radius by, at six layers."""
LEARNED_GAIN = 3.6
"""The same of o-BuFFeT."""
TINYBERT_GAIN = 2.7
"""The most that o-BuFFeT gains on TinyBERT."""
RULE_TIME = 1.1, 1.7
"""The time of r-BuFFeT, as a multiple of CROWN-BaF's."""
LEARNED_TIME = 33.0, 97.0
"""The same of o-BuFFeT."""

YELP = (
    "The paper's Yelp is Yelp Polarity, whole reviews; ours is a set of sentences (Shen et al. 2017), "
    "which are easier to classify."
)
GAINS = (
    f"The paper: r-BuFFeT up to {RULE_GAIN:g} and o-BuFFeT up to {LEARNED_GAIN:g} at six layers, o-BuFFeT"
    f" {TINYBERT_GAIN:g} on TinyBERT."
)
TIMES = (
    f"The paper: r-BuFFeT {RULE_TIME[0]:g} to {RULE_TIME[1]:g}, o-BuFFeT {LEARNED_TIME[0]:g} to"
    f" {LEARNED_TIME[1]:g}."
)


def accuracy_range(data: str) -> str:
    """The paper's range of accuracies on some data."""
    if data not in ACCURACY:
        return ""
    low, high = ACCURACY[data]
    return f"{low:.1%} to {high:.1%}"
