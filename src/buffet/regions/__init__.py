"""What may move: Lp balls, boxes and candidate sets around the rows of a sentence."""

from buffet.regions.candidates import CandidateSet
from buffet.regions.regions import Box, LpBall, Region

__all__ = ["Box", "CandidateSet", "LpBall", "Region"]
