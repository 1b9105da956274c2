"""The checker broken on purpose, one mistake at a time, by names of its functions and attributes.

Every mutant must accept a certificate that the checker as it is rejects (`false_certificates`), or claim less
slack for a deployed run than what is derived.
"""

from checker_mutants import arithmetic, claims, relaxations
from checker_mutants.wrong import Mutant, only

MUTANTS: tuple[Mutant, ...] = (*arithmetic.MUTANTS, *relaxations.MUTANTS, *claims.MUTANTS)

__all__ = ["MUTANTS", "Mutant", "only"]
