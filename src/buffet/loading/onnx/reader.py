"""From the graph of an ONNX file to our program: node by node, in order.

Every tensor is a constant, a view of a value of the program, or opaque: what cannot be expressed is refused
only if the output needs it, since some of it is part of a pattern that is read as a whole (`patterns`).
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from buffet.errors import BuffetError, one_line
from buffet.loading.onnx.arrays import ARRANGING, COMPUTING, UnsupportedError
from buffet.loading.onnx.file import Array, OnnxGraph, OnnxNode
from buffet.loading.onnx.masks import HIDDEN, check_readers
from buffet.loading.onnx.patterns import Patterns
from buffet.loading.onnx.tidy import tidied
from buffet.loading.onnx.views import Layout, Opaque, Rearranged, Value, View
from buffet.loading.onnx.writer import Writer
from buffet.network import Mix, Program, Softmax

ATTEMPTS = 16
"""How often the layout may be replaced: once each for the input, for tokens and for the output."""
MOST_BYTES = 4 << 30
"""Of all arrays that are made on the way."""
ACTIVATIONS = {"Relu": "relu", "Tanh": "tanh"}
Found = Value | tuple[Value, ...]


def build(graph: OnnxGraph) -> tuple[Program, Layout]:
    """The program of a graph, in float64, and how its rows are made up of the input."""
    layout: Layout | None = None
    try:
        for _ in range(ATTEMPTS):
            try:
                reader = _Reader(graph, layout)
                program = reader.read()
            except Rearranged as found:
                layout = found.layout
            else:
                assert layout is not None
                return program, layout
    except UnsupportedError as problem:
        raise BuffetError(f"{graph.where}: {problem}") from None
    raise BuffetError(f"{graph.where}: which parts of its input are tokens cannot be determined")


class _Reader:
    """One pass over a graph."""

    def __init__(self, graph: OnnxGraph, layout: Layout | None) -> None:
        self.graph = graph
        self.writer = Writer(layout, graph.shape)
        self.values: dict[str, Value] = {**graph.constants, graph.input: self.writer.start}
        producers = {name: node for node in graph.nodes for name in node.outputs if name}
        self.patterns = Patterns(producers, self.values)
        self.made = 0

    def read(self) -> Program:
        for node in self.graph.nodes:
            found = self._interpret(node)
            for name, value in zip(
                node.outputs, found if isinstance(found, tuple) else (found,), strict=False
            ):
                if name in self.values:
                    raise UnsupportedError(f"tensor {one_line(name, 60)!r} is given twice")
                self.values[name] = value
                self._account(value)
        output = self.values.get(self.graph.output)
        if output is None:
            raise UnsupportedError(f"no node gives the output {one_line(self.graph.output, 60)!r}")
        if isinstance(output, Opaque):
            raise UnsupportedError(output.reason)
        if isinstance(output, np.ndarray):
            raise UnsupportedError("its output is constant")
        root = self.writer.finish(output)
        program = tidied(self.writer.build(), root, self.writer.sizes)
        check_readers(program.nodes)
        read_by = [{type(n.op) for n in program.nodes if i in n.inputs} for i in range(len(program.nodes))]
        if any(isinstance(n.op, Softmax) and read_by[i] != {Mix} for i, n in enumerate(program.nodes)):
            raise UnsupportedError("it has a softmax that is not one of attention: export the logits")
        return program

    def _account(self, value: Value) -> None:
        array = value.places if isinstance(value, View) else value
        if isinstance(array, np.ndarray) and array.base is None:
            self.made += array.nbytes
            if self.made > MOST_BYTES:
                raise UnsupportedError(f"its tensors take more than {MOST_BYTES >> 30} GB")

    def _interpret(self, node: OnnxNode) -> Found:
        """What a node gives; opaque with the reason, if it cannot be expressed."""
        inputs = [self.values.get(name) if name else None for name in node.inputs]
        unknown = next((n for n, v in zip(node.inputs, inputs, strict=True) if n and v is None), None)
        if unknown is not None:
            raise UnsupportedError(f"{node} reads {one_line(unknown, 60)!r}, which no earlier node gives")
        try:
            with np.errstate(all="ignore"):
                if all(v is None or isinstance(v, np.ndarray) for v in inputs):
                    return _folded(node, inputs)
                handler = getattr(self, f"_{node.op.lower()}", None)
                if node.op in ARRANGING:
                    return self._arranged(node, inputs)
                if handler is None or not node.op.isalnum():
                    raise UnsupportedError(f"not supported; supported: {', '.join(SUPPORTED)}")
                return handler(node, *inputs)
        except UnsupportedError as problem:
            # What something opaque leads to has its reason, not one of its own.
            first = next((v for v in inputs if isinstance(v, Opaque)), None)
            return self._all(node, first or Opaque(f"{node}: {problem}"))
        except Rearranged:
            raise
        except Exception as error:  # shapes that do not fit, attributes of the wrong type, ...
            first = next((v for v in inputs if isinstance(v, Opaque)), None)
            return self._all(node, first or Opaque(f"{node}: malformed: {one_line(error, 120)}"))

    @staticmethod
    def _all(node: OnnxNode, value: Value) -> Found:
        return tuple(value for _ in node.outputs)

    # --- rearranging ----------------------------------------------------------------------------------------

    def _arranged(self, node: OnnxNode, inputs: list[Value | None]) -> Found:
        if node.op == "Concat":
            return self._concat(node, inputs)
        view, rest = inputs[0], inputs[1:]
        if node.op == "Gather" and isinstance(view, np.ndarray):
            raise UnsupportedError("it looks rows up by the input: export the network from embedding rows")
        view = _view(view)
        if any(v is not None and not isinstance(v, np.ndarray) for v in rest):
            raise UnsupportedError("its shape, axes or indices are not constant")
        if node.op == "Dropout" and any(isinstance(v, np.ndarray) and v.any() for v in rest[1:]):
            raise UnsupportedError("it is in training mode: export the network in evaluation mode")
        compute = ARRANGING[node.op]
        attributes = {**node.attributes, "outputs": len(node.outputs)}
        found = compute(view.places, *rest, attributes=attributes)
        if isinstance(found, tuple):
            return tuple(replace(view, places=part) for part in found)
        return replace(view, places=found)

    def _concat(self, node: OnnxNode, inputs: list[Value | None]) -> Value:
        axis = node.attributes["axis"]
        views = [v for v in inputs if isinstance(v, View)]
        if any(isinstance(v, Opaque) for v in inputs):
            raise UnsupportedError("it reads what cannot be expressed")
        if len(views) == len(inputs):
            first = views[0]
            if any(v.node != first.node or v.factor != first.factor for v in views):
                raise UnsupportedError("it concatenates different values")
            return replace(first, places=np.concatenate([v.places for v in views], axis))
        if len(views) > 1:
            raise UnsupportedError("it concatenates several values and constants")
        place = next(i for i, v in enumerate(inputs) if isinstance(v, View))
        view = views[0]
        axis = axis + view.places.ndim if axis < 0 else axis
        none = np.zeros([0 if a == axis else s for a, s in enumerate(view.shape)])
        before, after = (
            np.concatenate([none, *(np.asarray(v) for v in part)], axis)
            for part in (inputs[:place], inputs[place + 1 :])
        )
        return self.writer.with_tokens(view, before, after, axis)

    def _cast(self, node: OnnxNode, x: Value) -> Value:
        from onnx import TensorProto

        if node.attributes["to"] not in (TensorProto.FLOAT, TensorProto.DOUBLE):
            raise UnsupportedError("only casts to float32 and float64 are supported")
        return _view(x)

    def _shape(self, node: OnnxNode, x: Value) -> Value:
        return COMPUTING["Shape"](_view(x).places, attributes=node.attributes)

    def _size(self, node: OnnxNode, x: Value) -> Value:
        return np.array(_view(x).places.size, np.int64)

    def _where(self, node: OnnxNode, condition: Value, x: Value, y: Value) -> Value:
        guard = self.patterns.node(node.inputs[0], "IsNaN")
        if guard and self.patterns.origin(guard.inputs[0]) == self.patterns.origin(node.inputs[2]):
            return _view(y)  # a softmax of finite scores is never NaN
        if isinstance(condition, np.ndarray) and (condition.all() or not condition.any()):
            chosen = x if condition.all() else y
            view = _view(chosen)
            if np.broadcast_shapes(condition.shape, view.shape) == view.shape:
                return view
        if isinstance(condition, np.ndarray):
            for kept, scores, other in ((condition, x, y), (~condition, y, x)):
                if not isinstance(scores, View) or not isinstance(other, np.ndarray):
                    continue
                if (np.where(kept, HIDDEN, other) <= HIDDEN).all():
                    return self.writer.plus(scores, np.where(kept, 0.0, other))
        raise UnsupportedError("it picks entries by a mask; only constant masks of attention are supported")

    # --- elementwise ----------------------------------------------------------------------------------------

    def _relu(self, node: OnnxNode, x: Value) -> Value:
        return self.writer.apply(_view(x), ACTIVATIONS[node.op])

    _tanh = _relu

    def _gelu(self, node: OnnxNode, x: Value) -> Value:
        exact = node.attributes.get("approximate", "none") == "none"
        return self.writer.apply(_view(x), "gelu" if exact else "gelu_tanh")

    def _add(self, node: OnnxNode, x: Value, y: Value) -> Value:
        for one, other in ((x, y), (y, x)):
            if isinstance(other, np.ndarray):
                return self.writer.plus(_view(one), other)
        return self.writer.sum(_view(x), _view(y))

    def _sub(self, node: OnnxNode, x: Value, y: Value) -> Value:
        if self.patterns.mean_of(node.inputs[1]) == self.patterns.origin(node.inputs[0]):
            return self.writer.centred(_view(x))
        if isinstance(y, np.ndarray):
            return self.writer.plus(_view(x), np.asarray(-y.astype(np.float64)))
        minus = self._neg(node, y)
        return self.writer.plus(minus, x) if isinstance(x, np.ndarray) else self.writer.sum(_view(x), minus)

    def _neg(self, node: OnnxNode, x: Value) -> View:
        view = _view(x)
        return replace(view, factor=-view.factor)

    def _mul(self, node: OnnxNode, x: Value, y: Value) -> Value:
        for one, other in ((x, y), (y, x)):
            if isinstance(one, View) and isinstance(other, np.ndarray):
                return self.writer.times(one, other)
        if found := self.patterns.gelu(node.outputs[0]):
            read, form, scale = found
            return replace(self.writer.apply(_view(self.values[read]), form), factor=scale)
        for name, factor in (node.inputs, node.inputs[::-1]):
            deviation = self.patterns.inverse_deviation(factor)
            if deviation and deviation[0] == self.patterns.origin(name):
                return self.writer.normalised(_view(self.values[name]), deviation[1])
        _view(x), _view(y)
        raise UnsupportedError("a product of two values; only GELU, LayerNorm and attention have one")

    def _div(self, node: OnnxNode, x: Value, y: Value) -> Value:
        if isinstance(y, np.ndarray):
            return self.writer.times(_view(x), np.asarray(1 / y.astype(np.float64)))
        found = self.patterns.deviation(node.inputs[1])
        if found and found[0] == self.patterns.origin(node.inputs[0]):
            return self.writer.normalised(_view(x), found[1])
        raise UnsupportedError("it divides by a value; only LayerNorm does that")

    # --- norms and pooling ----------------------------------------------------------------------------------

    def _batchnormalization(
        self, node: OnnxNode, x: Value, scale: Array, shift: Array, mean: Array, variance: Array
    ) -> Value:
        if node.attributes.get("training_mode", 0):
            raise UnsupportedError("it normalises by the batch: export the network in evaluation mode")
        view = _view(x)
        weight = scale.astype(np.float64) / np.sqrt(
            variance.astype(np.float64) + node.attributes.get("epsilon", 1e-5)
        )
        bias = shift.astype(np.float64) - weight * mean.astype(np.float64)
        per_channel = (-1, *(1,) * (view.places.ndim - 2))
        return self.writer.plus(
            self.writer.times(view, weight.reshape(per_channel)), bias.reshape(per_channel)
        )

    def _layernormalization(
        self, node: OnnxNode, x: Value, scale: Array, shift: Array | None = None
    ) -> Value:
        view = _view(x)
        if node.attributes.get("axis", -1) not in (-1, view.places.ndim - 1):
            raise UnsupportedError("only a LayerNorm along the last axis is supported")
        eps = node.attributes.get("epsilon", 1e-5)
        view = self.writer.normalised(self.writer.centred(view), eps)
        view = self.writer.times(view, scale)
        return view if shift is None else self.writer.plus(view, shift)

    def _reducemean(self, node: OnnxNode, x: Value, axes: Array | None = None) -> Value:
        view = _view(x)
        given = node.attributes.get("axes") if axes is None else [int(a) for a in axes.reshape(-1)]
        if not given and node.attributes.get("noop_with_empty_axes", 0):
            return view
        along = tuple(a % view.places.ndim for a in given or range(view.places.ndim))
        return self.writer.mean(view, along, bool(node.attributes.get("keepdims", 1)))

    def _reducesum(self, node: OnnxNode, x: Value, axes: Array | None = None) -> Value:
        mean = self._reducemean(node, x, axes)
        assert isinstance(mean, View)
        return replace(mean, factor=mean.factor * (_view(x).places.size // mean.places.size))

    def _globalaveragepool(self, node: OnnxNode, x: Value) -> Value:
        view = _view(x)
        return self.writer.mean(view, tuple(range(2, view.places.ndim)), True)

    # --- products -------------------------------------------------------------------------------------------

    def _matmul(self, node: OnnxNode, x: Value, y: Value) -> Value:
        if isinstance(y, np.ndarray):
            return self.writer.linear(_view(x), _matrix(y).T)
        if isinstance(x, np.ndarray):
            view = _view(y)
            turned = replace(view, places=view.places.swapaxes(-1, -2))
            found = self.writer.linear(turned, _matrix(x))
            return replace(found, places=found.places.swapaxes(-1, -2))
        return self.writer.product(_view(x), _view(y))

    def _gemm(self, node: OnnxNode, x: Value, weight: Value, bias: Value | None = None) -> Value:
        view, alpha, beta = _view(x), node.attributes.get("alpha", 1.0), node.attributes.get("beta", 1.0)
        if not isinstance(weight, np.ndarray) or not (bias is None or isinstance(bias, np.ndarray)):
            raise UnsupportedError("only constant weights are supported")
        if node.attributes.get("transA", 0):
            view = replace(view, places=view.places.T)
        matrix = weight if node.attributes.get("transB", 0) else weight.T
        found = self.writer.linear(view, matrix if alpha == 1 else matrix.astype(np.float64) * alpha)
        if bias is None or not beta:
            return found
        return self.writer.plus(found, bias if beta == 1 else bias.astype(np.float64) * beta)

    def _conv(self, node: OnnxNode, x: Value, weight: Array, bias: Array | None = None) -> Value:
        """Patches that do not overlap: every window is a row, and the kernel a matrix."""
        view, kernel = _view(x), weight.shape[2:]
        strides = node.attributes.get("strides", [1] * len(kernel))
        plain = not any(node.attributes.get("pads", [])) and node.attributes.get("group", 1) == 1
        plain &= all(d == 1 for d in node.attributes.get("dilations", []))
        plain &= node.attributes.get("auto_pad", "NOTSET") in ("NOTSET", "VALID")
        if not plain or tuple(strides) != kernel or view.places.ndim != weight.ndim or view.shape[0] != 1:
            raise UnsupportedError(
                "only a patch embedding is: kernel and stride of one size, no padding or groups"
            )
        counts = [size // k for size, k in zip(view.shape[2:], kernel, strict=True)]
        inside = tuple(slice(0, n * k) for n, k in zip(counts, kernel, strict=True))
        split = [part for n, k in zip(counts, kernel, strict=True) for part in (n, k)]
        windows = view.places[0][(slice(None), *inside)].reshape(-1, *split)
        axes = len(kernel)
        order = (*range(1, 2 * axes, 2), 0, *range(2, 2 * axes + 1, 2))
        places = windows.transpose(order).reshape(math.prod(counts), -1)
        out = weight.shape[0]
        written, tokens = self.writer.dense(view, weight.reshape(out, -1), places)
        found = (tokens[:, None] * out + np.arange(out)).T.reshape(1, out, *counts)
        result = View(written, found)
        return result if bias is None else self.writer.plus(result, bias.reshape(-1, *(1,) * axes))

    def _softmax(self, node: OnnxNode, x: Value) -> Value:
        view = _view(x)
        axis = node.attributes.get("axis", 1 if self.graph.opset < 13 else -1)
        if axis not in (-1, view.places.ndim - 1):
            raise UnsupportedError("only a softmax along the last axis is supported")
        return self.writer.softmax(view)


def _folded(node: OnnxNode, inputs: list[Value | None]) -> Found:
    compute = ARRANGING.get(node.op) or COMPUTING.get(node.op)
    if compute is None:
        raise UnsupportedError("not supported for constants")
    found = compute(*inputs, attributes={**node.attributes, "outputs": len(node.outputs)})
    return found if isinstance(found, tuple) else np.asarray(found)


def _view(value: Value | None) -> View:
    if not isinstance(value, View):
        raise UnsupportedError(
            "it reads what cannot be expressed" if isinstance(value, Opaque) else "it reads no value"
        )
    return value


def _matrix(array: Array) -> Array:
    """A matrix, whatever axes of size 1 are in front."""
    if array.ndim < 2 or math.prod(array.shape[:-2]) != 1:
        raise UnsupportedError(f"its weight has the shape {list(array.shape)}, expected a matrix")
    return array.reshape(array.shape[-2:])


SUPPORTED = (
    *("Conv", "MatMul", "Gemm", "Add", "Sub", "Mul", "Div", "Softmax", "Relu", "Gelu", "Tanh"),
    *("LayerNormalization", "BatchNormalization", "ReduceMean"),
    "constants and rearrangements",
)
