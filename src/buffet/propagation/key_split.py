"""Rows of attention scores, split by token where nothing is lost by it.

A row of scores reads its query and all keys. Where no tokens are added up on the way from there to exact
forms of the input, as below the second attention layer, the substitution of a sum over tokens is the sum of
their substitutions. It is positively homogeneous too, so a row that reads one head needs nothing of the keys
of *other* tokens but lower forms of the key part ``±y_ij·k_j`` of every single score, and these are made once
for all rows. Key and query of one token stay together.

Other rows may be split as well: sums of lower bounds are lower bounds, if not the largest ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.bounds.forms import Rows
from buffet.network import Bilinear, Node, Scores, Softmax
from buffet.relaxations.enclosures import PlanesEnclosure


def splits(
    nodes: tuple[Node, ...], root: int, index: int, stops: Collection[int], local: Collection[int]
) -> bool:
    """Whether unit rows of the node `root` on their way to the `stops` can be split at `index` without loss.

    They have to read one head, and no tokens may be added up before the rows meet exact, `local` forms.
    """
    if not isinstance(nodes[index].op, Scores) or not isinstance(nodes[root].op, Scores | Softmax):
        return False
    pending = set(nodes[index].inputs)
    if pending & set(stops):
        return False
    while pending := pending - set(local):
        reached = pending.pop()
        node = nodes[reached]
        if reached in stops:
            return False
        if node.op.mixes and (node.op.linear or node.inputs[1] not in local):
            return False
        pending.update(node.followed)
    return True


def pays(rows: int, op: Bilinear) -> bool:
    """Whether so many rows of a query are more than its key parts, of every head and sign, by enough."""
    return rows > 4 * op.heads


def key_rows(enclosure: PlanesEnclosure, keys: int) -> Rows:
    """The key parts of all scores, then of their negatives, as rows of the keys, a group for each of them."""
    both = torch.stack(
        [enclosure.y_lower, -enclosure.y_upper], 1
    )  # tasks, sides, queries, heads, keys, depth
    both = both.expand(-1, -1, -1, -1, keys, -1)
    own = torch.diag_embed(both.movedim(3, -1))  # ..., queries, keys, depth, heads read, heads
    coefs = own.permute(0, 3, 5, 4, 1, 6, 2)
    return Rows(coefs.flatten(4).flatten(2, 3), keys, diagonal=True)


@dataclass(frozen=True)
class KeyForms:
    """Lower forms of the key parts of all scores (heads × keys) and of their negatives, by query.

    The last input is the constant. Those of the query's own token are 0.
    """

    enclosure: PlanesEnclosure
    forms: Float[Tensor, "tasks queries inputs terms"]

    @staticmethod
    def of(
        enclosure: PlanesEnclosure,
        coefs: Float[Tensor, "tasks inputs keys rows"],
        constant: Float[Tensor, "#tasks keys rows"],
    ) -> KeyForms:
        """From the substituted `key_rows`."""
        whole = torch.cat([coefs, constant.expand(len(coefs), -1, -1).unsqueeze(1)], 1)
        whole = whole.unflatten(3, (2, enclosure.op.heads, -1))  # tasks, inputs, keys, sides, heads, queries
        forms = whole.permute(0, 5, 1, 3, 4, 2).clone()
        forms.diagonal(dim1=1, dim2=5).zero_()
        return KeyForms(enclosure, forms.flatten(3))

    def pull(self, rows: Rows) -> tuple[tuple[Rows, ...], Tensor, Tensor]:
        """Diagonal rows of the scores to rows of the query and of the key of their own token.

        Also the coefficients of the input and the constants that the other keys come to.
        """
        positive, negative = rows.parts()
        query, bias = self.enclosure.pull_x(rows)
        weights = torch.cat([positive.coefs, -negative.coefs], 2)
        total = (self.forms[:, : rows.groups] @ weights).mT
        return (query, self._own(positive, negative)), total[..., :-1], total[..., -1] + bias

    def _own(self, positive: Rows, negative: Rows) -> Rows:
        """What diagonal rows of the scores read of the key of their own token."""
        heads, groups = self.enclosure.op.heads, positive.groups
        keys = positive.coefs.shape[2] // heads

        def own(value: Tensor) -> Tensor:
            """``[tasks, queries, heads, keys, last]`` where query and key are equal."""
            whole = value[:, :groups].expand(-1, groups, -1, keys, -1)
            return whole.diagonal(dim1=1, dim2=3).movedim(-1, 1)

        lower, upper = (
            own(planes).unsqueeze(-1) for planes in (self.enclosure.y_lower, self.enclosure.y_upper)
        )
        above, below = (own(r.coefs.unflatten(2, (heads, -1))).unsqueeze(3) for r in (positive, negative))
        return Rows((above * lower + below * upper).flatten(2, 3), groups, diagonal=True)
