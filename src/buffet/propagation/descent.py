"""Rows on their way down the graph, each node left only when all that lie above it have been."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from buffet.bounds.forms import Rows


class Descent:
    """Rows on their way down from one node, and what those that have arrived at the input add up to."""

    def __init__(self, root: int, rows: Rows) -> None:
        self._root, self._pending = root, {root: rows}
        self._coefs: Tensor | None = None
        self._constant: Tensor | None = None

    def __iter__(self) -> Iterator[tuple[int, Rows]]:
        """The nodes that are reached, each once: when all that lie above it have been left."""
        for index in range(self._root, -1, -1):
            if index in self._pending:
                yield index, self._pending.pop(index)

    def go_on(self, index: int, rows: Rows) -> None:
        """Rows come to a node further down."""
        self._pending[index] = self._pending[index] + rows if index in self._pending else rows

    def arrive(self, coefs: Tensor, constant: Tensor | None) -> None:
        """Rows have become forms of the input, which may be changed in place."""
        self._coefs = coefs if self._coefs is None else self._coefs.add_(coefs)
        self.leave(constant)

    def leave(self, constant: Tensor | None) -> None:
        """A constant is left over on the way."""
        if constant is not None:
            self._constant = constant if self._constant is None else self._constant + constant

    def total(self) -> tuple[Tensor, Tensor]:
        """The coefficients of the input and the constants of all rows, once every path has ended."""
        assert self._coefs is not None
        assert not self._pending
        coefs = self._coefs.movedim(-1, 1)
        return coefs, coefs.new_zeros(1, *coefs.shape[2:]) if self._constant is None else self._constant
