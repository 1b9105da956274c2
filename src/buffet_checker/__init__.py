"""Checks buffet's certificates without trusting, or importing, anything of buffet: numpy and the standard
library.

>>> import buffet_checker
>>> buffet_checker.check("proof.safetensors", "path/to/checkpoint").accepted  # doctest: +SKIP
True
"""

from buffet_checker.check import Proof, Result, Subject, check
from buffet_checker.errors import BadInputError

__all__ = ["BadInputError", "Proof", "Result", "Subject", "check"]
