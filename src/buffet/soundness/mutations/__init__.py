"""What the engine is broken into, one mistake per entry of `MUTANTS`."""

from buffet.soundness.mutants import Mutant
from buffet.soundness.mutations import engine, relaxations, staged

MUTANTS: tuple[Mutant, ...] = (*relaxations.MUTANTS, *engine.MUTANTS, *staged.MUTANTS)
