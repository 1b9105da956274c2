"""What the engine is broken into, one mistake per entry of `MUTANTS`."""

from buffet.lab.soundness.mutants import Mutant
from buffet.lab.soundness.mutations import engine, relaxations, staged

MUTANTS: tuple[Mutant, ...] = (*relaxations.MUTANTS, *engine.MUTANTS, *staged.MUTANTS)
