"""Writes the program: operations of our network on views of its values."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from buffet.loading.onnx.arrays import UnsupportedError
from buffet.loading.onnx.file import Array
from buffet.loading.onnx.masks import HIDDEN, check_mask, hides, is_mask
from buffet.loading.onnx.views import Layout, Rearranged, View, is_all, per_head, per_token
from buffet.network import (
    Add,
    Affine,
    Apply,
    Bilinear,
    Builder,
    Center,
    Diagonal,
    First,
    Mean,
    Mix,
    Offset,
    Op,
    Rescale,
    Scores,
    Softmax,
)

NOWHERE = torch.device("meta")
"""Where tensors have a shape and no content."""


class Writer(Builder):
    """A `Builder` in float64 that knows the size of every node.

    Nothing is ever changed: an Affine that gets a bias is written once more, with it. What nobody reads in
    the end is left out (`tidy`). While the `layout` is None, the first operation that reads tokens of the
    input decides it, by raising `Rearranged`.
    """

    def __init__(self, layout: Layout | None, shape: tuple[int, ...]) -> None:
        self.layout = layout
        self.claimed = [0, 0]
        self.sizes: list[tuple[int, int]] = []
        super().__init__()
        flat = np.arange(int(np.prod(shape))).reshape(shape)
        self.start = View(self.input, flat if layout is None else layout.places(shape))

    def add(self, op: Op, *inputs: int) -> int:
        self.sizes.append(self._size(op, *(self.sizes[i] for i in inputs)))
        return super().add(op, *inputs)

    def _size(self, op: Op, *inputs: tuple[int, int]) -> tuple[int, int]:
        """The tokens and features that an operation makes of values of these sizes; nothing is computed."""
        if not inputs:
            return (self.layout.count, self.layout.width) if self.layout else (0, 0)
        values = (torch.empty(size, dtype=torch.float64, device=NOWHERE) for size in inputs)
        tokens, features = op.to(NOWHERE).evaluate(*values).shape
        return tokens, features

    def op(self, node: int) -> Op:
        return self._nodes[node].op

    def _again(self, node: int, op: Op) -> int:
        """Another operation on what a node reads."""
        return self.add(op, *self._nodes[node].inputs)

    def unplaced(self, view: View) -> bool:
        """Whether a view is of the input, whose rows are not known yet."""
        return self.layout is None and view.node == self.input

    def per_token(self, view: View, places: Array | None = None) -> tuple[Array, Array]:
        """Tokens and features of a view whose last axis is that of the features."""
        if places is None:
            places = (
                view.places.reshape(-1, view.shape[-1]) if view.places.ndim else view.places.reshape(1, 1)
            )
        if self.unplaced(view):
            raise Rearranged(Layout(places))
        return per_token(places, self.sizes[view.node][1])

    # --- one value ------------------------------------------------------------------------------------------

    def select(self, node: int, features: Array) -> int:
        """A node with these features of another one, in this order."""
        width = self.sizes[node][1]
        if len(features) == width and (features == np.arange(width)).all():
            return node
        op = self.op(node)
        if isinstance(op, Affine):
            chosen = torch.from_numpy(features)
            return self._again(node, replace(op, weight=op.weight[chosen], bias=op.bias[chosen]))
        picked = np.zeros((len(features), width))
        picked[np.arange(len(features)), features] = 1
        return self.add(Affine(tensor(picked), torch.zeros(len(features), dtype=torch.float64)), node)

    def settled(self, view: View) -> View:
        """The view without a factor."""
        if view.factor == 1 or self.unplaced(view):
            return replace(view, factor=1.0)
        op = self.op(view.node)
        if isinstance(op, Bilinear):
            return View(self._again(view.node, replace(op, scale=op.scale * view.factor)), view.places)
        weight = torch.full((self.sizes[view.node][1],), view.factor, dtype=torch.float64)
        return View(self.add(Diagonal(weight, torch.zeros_like(weight)), view.node), view.places)

    def dense(self, view: View, weight: Array, places: Array | None = None) -> tuple[int, Array]:
        """``W x`` per token, with ``weight[out, in]``: the node, and the token of every row of places."""
        tokens, features = self.per_token(view, places)
        if weight.shape[1] != len(features):
            raise UnsupportedError(f"its weight has {weight.shape[1]} columns for {len(features)} features")
        full = np.zeros((weight.shape[0], self.sizes[view.node][1]))
        np.add.at(full.T, features, weight.T.astype(np.float64) * view.factor)
        zero = torch.zeros(len(full), dtype=torch.float64)
        return self.add(Affine(tensor(full), zero), view.node), tokens

    def linear(self, view: View, weight: Array) -> View:
        """``W x`` along the last axis."""
        node, tokens = self.dense(view, weight)
        out = weight.shape[0]
        places = tokens[:, None] * out + np.arange(out)
        return View(node, places.reshape(*view.shape[:-1], out))

    def apply(self, view: View, function: str) -> View:
        view = self.settled(view)
        if self.unplaced(view):
            self.per_token(view)
        return View(self.add(Apply(function), view.node), view.places)

    def _matrix(self, view: View, array: Array, fill: float) -> tuple[Array, bool]:
        """An array for the entries of a view as one for its node, and whether all tokens have the same."""
        array = np.broadcast_to(array, view.shape).astype(np.float64)
        tokens, width = self.sizes[view.node]
        flat = np.full(tokens * width, fill)
        flat[view.places] = array
        if (flat[view.places] != array).any():
            raise UnsupportedError("the same entry gets different constants")
        matrix = flat.reshape(tokens, width)
        touched = np.zeros(tokens * width, bool)
        touched[view.places] = True
        some = matrix[touched.reshape(tokens, width).any(1)]
        shared = bool((some == some[:1]).all())
        return (np.broadcast_to(some[:1], matrix.shape) if shared else matrix), shared

    def plus(self, view: View, array: Array) -> View:
        """A constant added."""
        if not array.any():
            return self._enlarged(view, array)
        array = np.asarray(np.maximum(array, HIDDEN)) if is_mask(array) else array
        view = self.settled(self._enlarged(view, array))
        if self.unplaced(view):
            return view
        matrix, shared = self._matrix(view, array, 0.0)
        op = self.op(view.node)
        if is_mask(array):
            if not isinstance(op, Scores | Offset):
                raise UnsupportedError("it masks other things than attention scores")
            node = self.add(Offset(tensor(matrix)), view.node)
        elif shared and isinstance(op, Affine | Diagonal):
            node = self._again(view.node, replace(op, bias=op.bias + tensor(matrix[0])))
        elif isinstance(op, Offset) and not hides(self._nodes[view.node]):
            node = self._again(view.node, Offset(op.value + tensor(matrix)))
        else:
            node = self.add(Offset(tensor(matrix)), view.node)
        return View(node, view.places)

    def times(self, view: View, array: Array) -> View:
        """A constant multiplied with."""
        array = array.astype(np.float64)
        view = self._enlarged(view, array)
        if (array == array.reshape(-1)[:1]).all():
            return replace(view, factor=view.factor * float(array.reshape(-1)[0]))
        view = self.settled(view)
        if self.unplaced(view):
            return view
        matrix, shared = self._matrix(view, array, 1.0)
        if not shared:
            raise UnsupportedError("every token is multiplied by constants of its own")
        weight, op = tensor(matrix[0]), self.op(view.node)
        if isinstance(op, Diagonal):
            node = self._again(view.node, Diagonal(op.weight * weight, op.bias * weight))
        else:
            node = self.add(Diagonal(weight, torch.zeros_like(weight)), view.node)
        return View(node, view.places)

    def _enlarged(self, view: View, array: Array) -> View:
        """The view with axes in front where a constant has more of them."""
        shape = (1,) * (array.ndim - view.places.ndim) + view.shape
        if np.broadcast_shapes(array.shape, shape) != shape:
            raise UnsupportedError(f"a constant of shape {list(array.shape)} enlarges {list(view.shape)}")
        return replace(view, places=view.places.reshape(shape))

    # --- norms and pooling ----------------------------------------------------------------------------------

    def centred(self, view: View) -> View:
        """``x − mean(x)`` along the last axis."""
        view = self.settled(view)
        tokens, features = self.per_token(view)
        node = self.add(Center(), self.select(view.node, features))
        width = len(features)
        return View(node, (tokens[:, None] * width + np.arange(width)).reshape(view.shape))

    def normalised(self, centred: View, eps: float) -> View:
        """What is centred over its standard deviation."""
        centred = self.settled(centred)
        width = self.sizes[centred.node][1]
        if not isinstance(self.op(centred.node), Center) or centred.shape[-1] != width:
            raise UnsupportedError("it divides by a deviation, and is no LayerNorm")
        square = self.add(Apply("square"), centred.node)
        mean, bias = (
            torch.full(s, v, dtype=torch.float64) for s, v in (((1, width), 1 / width), ((1,), eps))
        )
        variance = self.add(Affine(mean, bias, least=eps), square)
        inverse = self.add(Apply("rsqrt"), variance)
        return View(self.add(Rescale(heads=1), centred.node, inverse), centred.places)

    def mean(self, view: View, axes: tuple[int, ...], keep: bool) -> View:
        """The mean of all tokens along some axes."""
        if self.unplaced(view):
            self.per_token(view)
        count, width = self.sizes[view.node]
        last = tuple(range(-len(axes), 0))
        moved = np.moveaxis(view.places, axes, last)
        places = moved.reshape(*moved.shape[: moved.ndim - len(axes)], -1)
        tokens, features = places // width, places % width
        if (features != features[..., :1]).any() or not is_all(tokens, count):
            raise UnsupportedError("it averages other things than all tokens")
        found = features[..., 0]
        shape = tuple(1 if a in axes else s for a, s in enumerate(view.shape)) if keep else found.shape
        return View(self.add(Mean(), view.node), found.reshape(shape), view.factor)

    # --- two values -----------------------------------------------------------------------------------------

    def sum(self, x: View, y: View) -> View:
        if x.node == y.node and x.shape == y.shape and (x.places == y.places).all():
            return replace(x, factor=x.factor + y.factor)
        shape = np.broadcast_shapes(x.shape, y.shape)
        if x.places.size != y.places.size or x.places.size != int(np.prod(shape)):
            raise UnsupportedError(f"it adds values of the shapes {list(x.shape)} and {list(y.shape)}")
        x, y = (self.settled(replace(v, places=v.places.reshape(shape))) for v in (x, y))
        for view in (x, y):
            if self.unplaced(view):
                self.per_token(view)
        same = self.sizes[x.node] == self.sizes[y.node] and (x.places == y.places).all()
        if same:
            return View(self.add(Add(), x.node, y.node), x.places)
        (tokens, mine), (others, theirs) = self.per_token(x), self.per_token(y)
        if (tokens != others).any() or self.sizes[x.node][0] != self.sizes[y.node][0]:
            raise UnsupportedError("it adds different tokens to each other")
        node = self.add(Add(), self.select(x.node, mine), self.select(y.node, theirs))
        return View(node, (tokens[:, None] * len(mine) + np.arange(len(mine))).reshape(shape))

    def product(self, x: View, y: View) -> View:
        """A matrix product per head: of queries and keys, or of attention weights and values."""
        lead = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
        for view in (x, y):
            if self.unplaced(view):
                self.per_token(view)
        a, b = (np.broadcast_to(v.places, (*lead, *v.shape[-2:])).reshape(-1, *v.shape[-2:]) for v in (x, y))
        if a.shape[-1] != b.shape[-2]:
            raise UnsupportedError(
                f"it multiplies matrices of the shapes {list(x.shape)} and {list(y.shape)}"
            )
        mixing = isinstance(self.op(x.node), Softmax)
        node, places = (self._mix if mixing else self._scores)(x, y, a, b)
        found = View(node, places.reshape(*lead, a.shape[1], b.shape[2]), x.factor * y.factor)
        return self.settled(found) if mixing else found

    def _scores(self, x: View, y: View, a: Array, b: Array) -> tuple[int, Array]:
        heads = len(a)
        queries, wanted = per_head(a, self.sizes[x.node][1])
        keys, given = per_head(b.swapaxes(1, 2), self.sizes[y.node][1])
        count = self.sizes[y.node][0]
        if not is_all(keys, count):
            raise UnsupportedError("its keys are not all tokens")
        q, k = self.select(x.node, wanted.reshape(-1)), self.select(y.node, given.reshape(-1))
        node = self.add(Scores(heads=heads), q, k)
        head = np.arange(heads)[:, None, None]
        return node, queries[None, :, None] * (heads * count) + head * count + keys

    def _mix(self, x: View, y: View, a: Array, b: Array) -> tuple[int, Array]:
        heads = len(a)
        queries, weights = per_head(a, self.sizes[x.node][1])
        values, given = per_head(b, self.sizes[y.node][1])
        count = self.sizes[y.node][0]
        if not is_all(values, count) or (weights != np.arange(heads)[:, None] * count + values).any():
            raise UnsupportedError("its attention weights and values are not of the same tokens")
        node = self.add(Mix(heads=heads), x.node, self.select(y.node, given.reshape(-1)))
        width = given.shape[1]
        head = np.arange(heads)[:, None, None]
        return node, queries[None, :, None] * (heads * width) + head * width + np.arange(width)

    def softmax(self, view: View) -> View:
        """Along the last axis."""
        view = self.settled(view)
        keys, width = view.shape[-1], self.sizes[view.node][1]
        groups = view.places.reshape(-1, keys)
        tokens, features = groups // width, groups % width
        whole = (tokens == tokens[:, :1]).all() and (features // keys == features[:, :1] // keys).all()
        if width % keys or not whole or not is_all(features % keys, keys):
            raise UnsupportedError("it is no softmax of attention, over all keys of a head")
        check_mask(self._nodes, self.sizes, view.node, width // keys)
        return View(self.add(Softmax(width // keys), view.node), view.places)

    # --- tokens that are not read from the input ------------------------------------------------------------

    def with_tokens(self, view: View, before: Array, after: Array, axis: int) -> View:
        """Constant tokens put before and after those of a view, along an axis of it.

        Rows of zeros of the input become these tokens: whatever the program made of them is taken off.
        """
        if self.unplaced(view):
            self.per_token(view)
        assert self.layout is not None
        layout = self.layout
        count, width = self.sizes[view.node]
        places = np.moveaxis(view.places, axis, 0)
        flat = places.reshape(len(places), -1)
        tokens, features = per_token(flat, width)
        parts = [np.moveaxis(part, axis, 0) for part in (before, after)]
        needed = [taken + len(part) for taken, part in zip(self.claimed, parts, strict=True)]
        if count != layout.count or not self._every_token_alone(view.node):
            raise UnsupportedError("it adds a token after the first attention")
        if needed[0] > layout.before or needed[1] > layout.after:
            raise Rearranged(
                replace(layout, before=max(needed[0], layout.before), after=max(needed[1], layout.after))
            )
        behind = layout.count - layout.after + self.claimed[1]
        fresh = [
            layout.position(np.arange(layout.before - needed[0], layout.before - self.claimed[0])),
            layout.position(np.arange(behind, behind + len(parts[1]))),
        ]
        self.claimed = needed
        view = self.settled(view)
        blank = self.build().values(torch.zeros(layout.count, layout.width, dtype=torch.float64))[view.node]
        shift = np.zeros((count, width))
        for rows, part in zip(fresh, parts, strict=True):
            wanted = part.reshape(len(part), len(features)).astype(np.float64)
            shift[rows[:, None], features] = wanted - blank.numpy()[rows[:, None], features]
        node = self.add(Offset(tensor(shift)), view.node)
        every = np.concatenate([fresh[0], tokens, fresh[1]])
        found = (every[:, None] * width + features).reshape(len(every), *places.shape[1:])
        return View(node, np.moveaxis(found, 0, axis))

    def _every_token_alone(self, node: int) -> bool:
        """Whether no token of a node depends on another one."""
        seen, open_nodes = set(), [node]
        while open_nodes:
            current = open_nodes.pop()
            if current in seen:
                continue
            seen.add(current)
            op = self.op(current)
            if op.mixes or isinstance(op, First):
                return False
            open_nodes += self._nodes[current].inputs
        return True

    # --- the end --------------------------------------------------------------------------------------------

    def finish(self, view: View) -> int:
        """The node of the outputs: one token, of an Affine that margins can be taken in."""
        view = self.settled(view)
        if self.unplaced(view):
            self.per_token(view)
        tokens, features = per_token(view.places.reshape(1, -1), self.sizes[view.node][1])
        if row := int(tokens[0]):
            assert self.layout is not None
            if self.sizes[view.node][0] != self.layout.count:
                raise UnsupportedError("it reads a token that is not one of the input's")
            logical = int(np.argmax(self.layout.position(np.arange(self.layout.count)) == row))
            raise Rearranged(replace(self.layout, first=logical))
        node = self.select(view.node, features)
        if not isinstance(self.op(node), Affine):
            eye = torch.eye(len(features), dtype=torch.float64)
            node = self.add(Affine(eye, torch.zeros_like(eye[0])), node)
        return self.add(First(), node) if self.sizes[node][0] > 1 else node


def tensor(array: Array) -> Tensor:
    """A constant of the program: float64, every value finite."""
    found = np.array(array, np.float64)
    if not np.isfinite(found).all():
        raise UnsupportedError("its weights have values that are not finite")
    return torch.from_numpy(found)
