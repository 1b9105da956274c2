"""The words of the vocabulary nearest to a word of a text: what a ball around it holds, or how little."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from buffet.loading import Encoding, Model

CHUNK = 1 << 22
"""Numbers of the table that are compared at a time."""
SLACK = 1e-12
"""More than the relative rounding of a distance in float64: a word that counts as inside certainly is."""


@dataclass(frozen=True)
class Neighbour:
    """Another word of the vocabulary in the place of one of the text."""

    row: int
    token: str
    distance: float  # between the two embedding rows, in the norm of the ball
    inside: bool  # whether the ball holds it


def nearest_words(
    model: Model, encoding: Encoding, rows: Sequence[int], norm: float, radius: float, most: int
) -> tuple[tuple[Neighbour, ...], int]:
    """For each of some rows of a text its `most` nearest words; and how many a ball of this radius holds.

    Distances are between the rows that the network reads (word + token type + position, before any
    LayerNorm), where the balls are. Special tokens are no words, nor are rows that no token has.
    """
    found: list[Neighbour] = []
    held = 0
    for row in rows:
        distances = _distances(model, encoding, row, norm)
        held += int((distances * (1 + SLACK) <= radius).sum())
        order = distances.argsort()[:most]
        for number, distance in zip(order.tolist(), distances[order].tolist(), strict=True):
            if math.isfinite(distance):
                inside = distance * (1 + SLACK) <= radius
                found.append(Neighbour(row, model.spelling(number) or "", distance, inside))
    return tuple(found), held


def _distances(model: Model, encoding: Encoding, row: int, norm: float) -> Tensor:
    """Distances from a row of the text to those of all other words in its place; infinite for non-words."""
    tables, tokenizer = model.embeddings, model.tokenizer
    assert tokenizer is not None
    rest = tables.types[encoding.types[row]], tables.positions[row]
    own = (tables.words[encoding.ids[row]] + rest[0] + rest[1]).double()
    size = max(1, CHUNK // tables.words.shape[1])
    parts = [
        torch.linalg.vector_norm((some + rest[0] + rest[1]).double() - own, ord=norm, dim=-1)
        for some in tables.words.split(size)
    ]
    distances = torch.cat(parts).cpu()
    known = set(tokenizer.inner.get_vocab(with_added_tokens=True).values())
    nothing = {encoding.ids[row], *tokenizer.special_ids, *(set(range(len(distances))) - known)}
    if tokenizer.unknown_id is not None:
        nothing.add(tokenizer.unknown_id)
    distances[sorted(index for index in nothing if index < len(distances))] = math.inf
    return distances
