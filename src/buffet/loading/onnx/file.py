"""An ONNX file as plain data: its nodes, its constants, its one input and its one output.

Nothing in a file is executed. Sizes that a file declares are compared with the bytes that are there before
anything is allocated, and data outside of the file is read from beside it only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from buffet.errors import BuffetError, one_line, optional, show

DOMAINS = ("", "ai.onnx")
LARGEST = 2 << 30
"""Bytes of a file; protobuf has no larger ones."""
MOST_ELEMENTS = 1 << 22
"""Elements of an input; more is no input that bounds could be computed for."""
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class OnnxNode:
    """An operation of the graph, with the names of what it reads and gives."""

    op: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Any]

    def __str__(self) -> str:
        return f"node {show(self.name or self.outputs[0])} ({one_line(self.op, 40)})"


@dataclass(frozen=True, eq=False)
class OnnxGraph:
    """Nodes in topological order; a batch is one input."""

    where: str
    nodes: tuple[OnnxNode, ...]
    constants: Mapping[str, Array]
    input: str
    shape: tuple[int, ...]
    output: str
    opset: int


def read_graph(path: Path) -> OnnxGraph:
    """The graph of a file, checked as far as it can be without interpreting it."""
    onnx = optional("onnx", "onnx", f"{path}: ONNX files are read by the package onnx")
    from google.protobuf.message import DecodeError

    try:
        if not path.is_file() and path.exists():
            raise BuffetError(f"{path}: is not a regular file")
        if path.stat().st_size > LARGEST:
            raise BuffetError(
                f"{path}: larger than {LARGEST >> 30} GB: export its weights into a file beside it"
            )
        model = onnx.load_model_from_string(path.read_bytes())
    except OSError as error:
        raise BuffetError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (DecodeError, ValueError, RuntimeError, MemoryError) as error:
        raise BuffetError(
            f"{path}: not a complete ONNX file (truncated or damaged): {one_line(error)}"
        ) from None
    where = str(path)
    if len(model.functions):
        raise BuffetError(
            f"{where}: has functions of its own, such as {show(model.functions[0].name)}: export it inlined"
        )
    opset = max((o.version for o in model.opset_import if o.domain in DOMAINS), default=0)
    if not 7 <= opset <= 1000:
        raise BuffetError(f"{where}: has opset {opset}, supported are 7 and later")
    graph = model.graph
    constants = {
        _text(t.name): _tensor(t, path, f"{where}: tensor {show(t.name)}") for t in graph.initializer
    }
    if len(graph.sparse_initializer):
        raise BuffetError(f"{where}: has sparse tensors, which are not supported")
    name, shape = _input(graph, constants, where)
    if len(graph.output) != 1:
        found = ", ".join(show(o.name) for o in graph.output[:5]) or "none"
        raise BuffetError(f"{where}: expected one output, found {found}: export the logits alone")
    nodes = tuple(_node(node, path, where) for node in graph.node)
    return OnnxGraph(where, nodes, constants, name, shape, _text(graph.output[0].name), opset)


def _input(graph: Any, constants: Mapping[str, Array], where: str) -> tuple[str, tuple[int, ...]]:
    """The name and shape of the one input of numbers; the first axis may be a batch of any size."""
    from onnx import TensorProto

    given = [i for i in graph.input if _text(i.name) not in constants]
    if len(given) != 1:
        found = ", ".join(show(i.name) for i in given[:5]) or "none"
        raise BuffetError(
            f"{where}: expected one input, found {found}: export the network as a function of its pixels or "
            "embedding rows alone, with masks and token ids as constants"
        )
    (only,) = given
    kind = only.type.tensor_type
    if kind.elem_type not in (TensorProto.FLOAT, TensorProto.DOUBLE):
        raise BuffetError(
            f"{where}: input {show(only.name)} is not of floating point numbers, maybe token ids: export the "
            "network as a function of its embedding rows (inputs_embeds)"
        )
    sizes = [d.dim_value if d.WhichOneof("value") == "dim_value" else None for d in kind.shape.dim]
    if sizes and sizes[0] is None:
        sizes[0] = 1
    shape = tuple(s or 0 for s in sizes)
    if not sizes or any(s < 1 for s in shape):
        text = " × ".join("?" if s is None else str(s) for s in sizes) or "of nothing"
        raise BuffetError(
            f"{where}: input {show(only.name)} has the shape {text}: all axes but the batch "
            "must have fixed sizes: export it for one sequence length or image size"
        )
    if math.prod(shape) > MOST_ELEMENTS:
        raise BuffetError(f"{where}: input {show(only.name)} has {math.prod(shape)} elements: too many")
    return _text(only.name), shape


def _node(node: Any, path: Path, where: str) -> OnnxNode:
    from onnx import AttributeProto

    op, domain = _text(node.op_type), _text(node.domain)
    op = op if domain in DOMAINS else f"{domain}.{op}"
    if not len(node.output):
        raise BuffetError(f"{where}: node {show(node.name)} ({one_line(op, 40)}) has no output")
    kinds = {
        AttributeProto.FLOAT: lambda a: a.f,
        AttributeProto.INT: lambda a: a.i,
        AttributeProto.STRING: lambda a: a.s.decode("utf-8", "replace"),
        AttributeProto.FLOATS: lambda a: list(a.floats),
        AttributeProto.INTS: lambda a: list(a.ints),
        AttributeProto.TENSOR: lambda a: _tensor(a.t, path, f"{where}: tensor in {show(node.name)}"),
    }
    if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
        raise BuffetError(
            f"{where}: node {show(node.name)} ({one_line(op, 40)}): control flow is not supported"
        )
    attributes = {_text(a.name): kinds[a.type](a) if a.type in kinds else None for a in node.attribute}
    return OnnxNode(op, _text(node.name), _texts(node.input), _texts(node.output), attributes)


def _text(value: str | bytes) -> str:
    """A name; protobuf leaves one that is no UTF-8 as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")


def _texts(values: Iterable[str | bytes]) -> tuple[str, ...]:
    return tuple(map(_text, values))


def _tensor(tensor: Any, path: Path, where: str) -> Array:
    """The values of a stored tensor, if there are as many as its shape says."""
    from onnx import TensorProto, helper, numpy_helper

    try:
        dtype = helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (KeyError, ValueError):
        raise BuffetError(f"{where} has the unknown type {tensor.data_type}") from None
    if (
        tensor.data_type in (TensorProto.STRING, TensorProto.COMPLEX64, TensorProto.COMPLEX128)
        or dtype.itemsize < 1
    ):
        raise BuffetError(f"{where} is not of numbers")
    shape = tuple(tensor.dims)
    if any(size < 0 for size in shape):
        raise BuffetError(f"{where} has the shape {show(shape)}")
    count = math.prod(shape)
    external = tensor.data_location == TensorProto.EXTERNAL
    if external or tensor.HasField("raw_data"):
        raw = _external(tensor, path, count * dtype.itemsize, where) if external else tensor.raw_data
        if len(raw) != count * dtype.itemsize:
            raise BuffetError(
                f"{where} has the shape {show(shape)}, but {len(raw)} bytes: truncated or damaged"
            )
        return np.frombuffer(raw, dtype.newbyteorder("<")).astype(dtype).reshape(shape)
    stored = max(
        len(getattr(tensor, name))
        for name in ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    )
    if stored != count:
        raise BuffetError(f"{where} has the shape {show(shape)}, but {stored} values: truncated or damaged")
    try:
        return numpy_helper.to_array(tensor)
    except Exception as error:  # for a broken tensor it raises nearly anything
        raise BuffetError(f"{where} cannot be read: {one_line(error)}") from None


def _external(tensor: Any, path: Path, size: int, where: str) -> bytes:
    """The bytes of a tensor that is stored in another file, which must lie beside the model."""
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "")
    folder = path.parent.resolve()
    file = (folder / location).resolve()
    if not location or "\0" in location or Path(location).is_absolute() or not file.is_relative_to(folder):
        raise BuffetError(f"{where} is stored in {show(location)}: only files beside the model are read")
    try:
        offset, length = int(entries.get("offset", 0)), int(entries.get("length", size))
        if offset < 0 or length != size or offset + size > file.stat().st_size:
            raise BuffetError(
                f"{where} has {size} bytes, {show(location)} does not have them: truncated or damaged"
            )
        with file.open("rb") as raw:
            raw.seek(offset)
            return raw.read(size)
    except ValueError:
        raise BuffetError(
            f"{where} is stored at offset {show(entries.get('offset'))} of {show(location)}"
        ) from None
    except OSError as error:
        raise BuffetError(
            f"{where} is stored in {show(location)}: cannot be read: {error.strerror or error}"
        ) from None
