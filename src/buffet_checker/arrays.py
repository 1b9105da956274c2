"""The arrays of a certificate, asked for one by one."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from buffet_checker.balls import Array
from buffet_checker.errors import RejectedError
from buffet_checker.fields import LARGEST
from buffet_checker.storage import Stored


@dataclass
class Tensors:
    """The arrays of one file; every one has to be asked for exactly as it is, and none may be left over."""

    stored: Stored
    used: set[str] = field(default_factory=set)

    def get(self, name: str, shapes: list[tuple[int, ...]], share: bool = False) -> Array | None:
        """A finite float64 copy of an array of one of the shapes, within [0, 1] if it is a share; or None."""
        value = self.stored.tensors.get(name)
        if value is None:
            return None
        self.used.add(name)
        if value.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise RejectedError(f"{name} has shape {list(value.shape)}, expected {wanted}")
        wide = value.astype(np.float64)
        if not (np.abs(wide) <= LARGEST).all():
            raise RejectedError(f"{name} holds NaN, infinity or an absurd number")
        if share and not ((wide >= 0) & (wide <= 1)).all():
            raise RejectedError(f"{name} holds a number outside [0, 1]")
        return wide

    def need(self, name: str, shapes: list[tuple[int, ...]], share: bool = False) -> Array:
        value = self.get(name, shapes, share)
        if value is None:
            raise RejectedError(f"{name} is missing")
        return value

    def leftover(self) -> None:
        rest = sorted(self.stored.tensors.keys() - self.used)
        if rest:
            raise RejectedError(f"{rest[0][:80]!r} is an array that nothing refers to")
