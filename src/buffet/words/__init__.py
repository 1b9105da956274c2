"""Words exchanged for others: synonyms, given swaps and typos, and whether they can change the answer.

`reading` reads a text as the model's tokenizer does, `typos` misspells, `sets` makes regions of what may be
exchanged, and `answer` proves them, or finds the sentence that flips the answer.
"""

from buffet.synonyms import read_synonyms
from buffet.words.answer import Answer, Flip
from buffet.words.reading import LeftOut, Substitute, Word
from buffet.words.sets import NoSubstitutesError, Shape, Substitutions, substitutions

__all__ = [
    "Answer",
    "Flip",
    "LeftOut",
    "NoSubstitutesError",
    "Shape",
    "Substitute",
    "Substitutions",
    "Word",
    "read_synonyms",
    "substitutions",
]
