"""What may move: balls (whole or cut into cells), boxes and candidate sets around the rows of a sentence.

base        the questions that every region answers
balls       every moved row within a distance of its clean one
cells       parts of a ball between parallel planes
boxes       every entry between two values
candidates  every word one of finitely many
arguments   checks of what users pass
norms       the arithmetic underneath
"""

from buffet.regions.balls import LpBall
from buffet.regions.base import Region
from buffet.regions.boxes import Box
from buffet.regions.candidates import CandidateSet
from buffet.regions.cells import Cell, Cuts

__all__ = ["Box", "CandidateSet", "Cell", "Cuts", "LpBall", "Region"]
