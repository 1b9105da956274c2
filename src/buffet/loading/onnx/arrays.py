"""What operations do to arrays: to constants, and to the places that the entries of a value come from.

Operations of `ARRANGING` only pick and rearrange entries, so they act on an array of places just as they act
on an array of numbers. Those of `COMPUTING` are applied to constants alone, to fold them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from buffet.loading.onnx.file import Array

MOST = 1 << 26
"""The most entries of an array that is made."""
Attributes = Mapping[str, Any]
Compute = Callable[..., Any]


class UnsupportedError(Exception):
    """What an operation asks for cannot be expressed; the message says why."""


def fits(shape: tuple[int, ...] | list[int]) -> tuple[int, ...]:
    """A shape that is small enough to be made."""
    sizes = tuple(int(s) for s in shape)
    if any(s < 0 for s in sizes) or math.prod(sizes) > MOST:
        raise UnsupportedError(f"it makes a tensor of shape {list(sizes)[:8]}")
    return sizes


def _ints(values: Any) -> list[int]:
    return [int(v) for v in np.asarray(values).reshape(-1)]


def _reshape(x: Array, shape: Array | None = None, *, attributes: Attributes) -> Array:
    wanted = _ints(attributes["shape"] if shape is None else shape)
    if not attributes.get("allowzero", 0):
        wanted = [x.shape[i] if size == 0 else size for i, size in enumerate(wanted)]
    return x.reshape(wanted)


def _axes(given: Array | None, attributes: Attributes) -> list[int] | None:
    """Axes are an attribute in old versions, and an input in newer ones."""
    return _ints(given) if given is not None else attributes.get("axes")


def _unsqueeze(x: Array, axes: Array | None = None, *, attributes: Attributes) -> Array:
    return np.expand_dims(x, tuple(_axes(axes, attributes) or ()))


def _squeeze(x: Array, axes: Array | None = None, *, attributes: Attributes) -> Array:
    found = _axes(axes, attributes)
    return np.squeeze(x, None if found is None else tuple(found))


def _flatten(x: Array, *, attributes: Attributes) -> Array:
    axis = attributes.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), -1)


def _transpose(x: Array, *, attributes: Attributes) -> Array:
    return x.transpose(attributes.get("perm"))


def _slice(
    x: Array,
    starts: Array | None = None,
    ends: Array | None = None,
    axes: Array | None = None,
    steps: Array | None = None,
    *,
    attributes: Attributes,
) -> Array:
    first = _ints(attributes["starts"] if starts is None else starts)
    last = _ints(attributes["ends"] if ends is None else ends)
    along = _axes(axes, attributes) or list(range(len(first)))
    stride = [1] * len(first) if steps is None else _ints(steps)
    for start, end, axis, step in zip(first, last, along, stride, strict=True):
        place = [slice(None)] * x.ndim
        # a stop before the first entry, going backwards, is one that slices have no number for
        stop = None if step < 0 and end < -x.shape[axis] else end
        place[axis] = slice(start, stop, step)
        x = x[tuple(place)]
    return x


def _gather(x: Array, indices: Array, *, attributes: Attributes) -> Array:
    axis = attributes.get("axis", 0)
    fits((*x.shape[:axis], *indices.shape, *x.shape[axis:][1:]))
    return np.take(x, indices.astype(np.int64), axis=axis)


def _split(x: Array, sizes: Array | None = None, *, attributes: Attributes) -> tuple[Array, ...]:
    axis = attributes.get("axis", 0)
    parts = _ints(sizes) if sizes is not None else attributes.get("split")
    if parts is None:
        count = attributes.get("num_outputs") or attributes["outputs"]
        size = -(-x.shape[axis] // count)
        parts = [size] * (count - 1) + [x.shape[axis] - size * (count - 1)]
    if sum(parts) != x.shape[axis] or min(parts) < 0:
        raise UnsupportedError(f"it splits {x.shape[axis]} into {parts[:8]}")
    return tuple(np.split(x, np.cumsum(parts)[:-1], axis))


def _concat(*parts: Array, attributes: Attributes) -> Array:
    return np.concatenate(parts, attributes["axis"])


def _expand(x: Array, shape: Array, *, attributes: Attributes) -> Array:
    return np.broadcast_to(x, fits(np.broadcast_shapes(x.shape, tuple(_ints(shape)))))


def _tile(x: Array, repeats: Array, *, attributes: Attributes) -> Array:
    times = _ints(repeats)
    fits([size * t for size, t in zip(x.shape, times, strict=True)])
    return np.tile(x, times)


def _same(x: Array, *rest: Array, attributes: Attributes) -> Array:
    return x


ARRANGING: Mapping[str, Compute] = {
    "Reshape": _reshape,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Flatten": _flatten,
    "Transpose": _transpose,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
    "Concat": _concat,
    "Expand": _expand,
    "Tile": _tile,
    "Identity": _same,
    "Dropout": _same,
}
"""Operations that pick and rearrange entries."""


def _cast(x: Array, *, attributes: Attributes) -> Array:
    from onnx import helper

    return x.astype(helper.tensor_dtype_to_np_dtype(attributes["to"]))


def _constant(*, attributes: Attributes) -> Array:
    for name, kind in (
        ("value_float", np.float32),
        ("value_int", np.int64),
        ("value_floats", np.float32),
        ("value_ints", np.int64),
    ):
        if name in attributes:
            return np.asarray(attributes[name], kind)
    return np.asarray(attributes["value"])


def _constant_of_shape(shape: Array, *, attributes: Attributes) -> Array:
    value = np.asarray(attributes.get("value", np.zeros(1, np.float32))).reshape(())
    return np.broadcast_to(value, fits(_ints(shape)))


def _range(start: Array, limit: Array, step: Array, *, attributes: Attributes) -> Array:
    fits([max(0, math.ceil((limit.item() - start.item()) / step.item()))])
    return np.arange(start.item(), limit.item(), step.item(), dtype=start.dtype)


def _gather_elements(x: Array, indices: Array, *, attributes: Attributes) -> Array:
    return np.take_along_axis(x, indices.astype(np.int64), attributes.get("axis", 0))


def _trilu(x: Array, k: Array | None = None, *, attributes: Attributes) -> Array:
    return (np.triu if attributes.get("upper", 1) else np.tril)(x, 0 if k is None else int(k.item()))


def _cumulative(x: Array, axis: Array, *, attributes: Attributes) -> Array:
    if attributes.get("exclusive", 0) or attributes.get("reverse", 0):
        raise UnsupportedError("exclusive and reverse sums are not supported")
    return np.cumsum(x, int(axis.item()))


def _reduction(function: Compute) -> Compute:
    def compute(x: Array, axes: Array | None = None, *, attributes: Attributes) -> Array:
        found = _axes(axes, attributes)
        if not found and attributes.get("noop_with_empty_axes", 0):
            return x
        along = tuple(found) if found else None
        return np.asarray(function(x, axis=along, keepdims=bool(attributes.get("keepdims", 1)))).astype(
            x.dtype
        )

    return compute


def _elementwise(function: Compute) -> Compute:
    def compute(*parts: Array, attributes: Attributes) -> Array:
        fits(np.broadcast_shapes(*(part.shape for part in parts)))
        found = np.asarray(function(*parts))
        floats = [part.dtype for part in parts if part.dtype.kind == "f"]
        return found.astype(floats[0]) if floats and found.dtype.kind == "f" else found

    return compute


def _divide(x: Array, y: Array) -> Array:
    return np.trunc(x / y).astype(x.dtype) if x.dtype.kind in "iu" else x / y


ELEMENTWISE: Mapping[str, Compute] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": _divide,
    "Pow": lambda x, y: np.power(x.astype(np.float64), y.astype(np.float64)).astype(x.dtype),
    "Max": lambda *parts: np.max(np.broadcast_arrays(*parts), 0),
    "Min": lambda *parts: np.min(np.broadcast_arrays(*parts), 0),
    "Sqrt": np.sqrt,
    "Reciprocal": np.reciprocal,
    "Neg": np.negative,
    "Abs": np.abs,
    "Exp": np.exp,
    "Log": np.log,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "And": np.logical_and,
    "Or": np.logical_or,
    "Xor": np.logical_xor,
    "Not": np.logical_not,
    "IsNaN": np.isnan,
    "Where": np.where,
}
COMPUTING: Mapping[str, Compute] = {
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Cast": _cast,
    "Range": _range,
    "GatherElements": _gather_elements,
    "Trilu": _trilu,
    "Shape": lambda x, attributes: np.array(
        x.shape[attributes.get("start", 0) : attributes.get("end")], np.int64
    ),
    "Size": lambda x, attributes: np.array(x.size, np.int64),
    "CumSum": _cumulative,
    "Mod": lambda x, y, attributes: np.asarray((np.fmod if attributes.get("fmod", 0) else np.mod)(x, y)),
    "ReduceSum": _reduction(np.sum),
    "ReduceMean": _reduction(np.mean),
    "ReduceMax": _reduction(np.max),
    "ReduceMin": _reduction(np.min),
    "ReduceProd": _reduction(np.prod),
    **{name: _elementwise(function) for name, function in ELEMENTWISE.items()},
}
"""Operations that compute something of constants."""
