"""What may move: balls (whole or cut into cells), boxes and candidate sets around the rows of a sentence."""

from buffet.regions.candidates import CandidateSet
from buffet.regions.cells import Cell, Cuts
from buffet.regions.regions import Box, LpBall, Region

__all__ = ["Box", "CandidateSet", "Cell", "Cuts", "LpBall", "Region"]
