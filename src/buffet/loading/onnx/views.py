"""Tensors of an ONNX graph as views of the values of our program.

A value of the program is a matrix of tokens × features. A tensor of the graph holds entries of such a matrix
in some arrangement: heads split off, transposed, one token picked. A view says for every entry of the tensor
its *place* in the matrix, ``token · width + feature``. Rearrangements act on the places alone, and what an
operation does is read off the places of its inputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from buffet.loading.onnx.arrays import UnsupportedError
from buffet.loading.onnx.file import Array


@dataclass(frozen=True, eq=False)
class View:
    """`factor` times the entries of the value of a node, at these places."""

    node: int
    places: Array
    factor: float = 1.0

    @property
    def shape(self) -> tuple[int, ...]:
        return self.places.shape


@dataclass(frozen=True, eq=False)
class Opaque:
    """A tensor that is no view of anything, and why; harmless unless the output needs it."""

    reason: str


Value = Array | View | Opaque


@dataclass(frozen=True, eq=False)
class Layout:
    """How the entries of the input make up the rows of the program.

    `tokens` holds the flat index of the input's entry at every token and feature. Rows `before` and `after`
    these are zeros: they become tokens that no input is read from, such as a class token. The logical row
    `first` is put in front of all others, where classifiers read.
    """

    tokens: Array
    before: int = 0
    after: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        flat = np.sort(self.tokens, axis=None)
        if (flat[1:] == flat[:-1]).any():
            raise UnsupportedError(
                "it reads some entries of the input several times: patches must not overlap"
            )

    @property
    def count(self) -> int:
        """The rows of the program."""
        return self.before + len(self.tokens) + self.after

    @property
    def width(self) -> int:
        return self.tokens.shape[1]

    def position(self, row: Array) -> Array:
        """Where a logical row is."""
        return np.where(row == self.first, 0, np.where(row < self.first, row + 1, row))

    def rows(self) -> Array:
        """The flat index of every row and feature, −1 where there is none."""
        blank = np.full((1, self.width), -1)
        logical = np.concatenate([blank.repeat(self.before, 0), self.tokens, blank.repeat(self.after, 0)])
        found = np.empty_like(logical)
        found[self.position(np.arange(self.count))] = logical
        return found

    def places(self, shape: tuple[int, ...]) -> Array:
        """The place of every entry of an input of some shape."""
        rows = self.rows()
        places = np.full(int(np.prod(shape)), -1)
        read = rows >= 0
        places[rows[read]] = np.arange(rows.size).reshape(rows.shape)[read]
        if (places < 0).any():
            raise UnsupportedError(f"it never reads entry {int((places < 0).argmax())} of the input")
        return places.reshape(shape)


class Rearranged(Exception):  # noqa: N818 (a finding, not an error)
    """The rows of the program have to be different ones: start again with this layout."""

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self.layout = layout


def per_token(places: Array, width: int) -> tuple[Array, Array]:
    """The token of every row, and the feature of every column, of ``[rows, columns]`` places."""
    tokens, features = places // width, places % width
    if (tokens != tokens[:, :1]).any() or (features != features[:1]).any():
        raise UnsupportedError("it combines entries of several tokens, and is neither attention nor a mean")
    return tokens[:, 0], features[0]


def per_head(places: Array, width: int) -> tuple[Array, Array]:
    """The token of every row, and the features of every head, of ``[heads, rows, columns]`` places."""
    tokens, features = places // width, places % width
    if (tokens != tokens[:1, :, :1]).any() or (features != features[:, :1]).any():
        raise UnsupportedError("its tokens and heads are not arranged as those of attention")
    return tokens[0, :, 0], features[:, 0]


def is_all(rows: Array, count: int) -> bool:
    """Whether these are all of `count` rows, each once, along the last axis."""
    return rows.shape[-1] == count and bool((np.sort(rows, -1) == np.arange(count)).all())
