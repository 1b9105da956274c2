"""What may move: Lp balls, boxes and candidate sets around the rows of a sentence."""

from buffet.regions.regions import Box, CandidateSet, LpBall, Region

__all__ = ["Box", "CandidateSet", "LpBall", "Region"]
