"""Networks in ONNX, properties in VNN-LIB and lists of instances, put wrong."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from typing import Any

import onnx
import torch

from buffet import Property
from buffet.loading.onnx.model import read_onnx
from buffet.loading.vnnlib import parse_vnnlib, read_vnnlib
from buffet.verification.verify import verify
from fuzz.mutate import NUMBERS, hostile_bytes, hostile_text
from fuzz.place import FoundError, Place, command

OPS = ("Relu", "Add", "Mul", "MatMul", "Reshape", "Transpose", "Softmax", "Expand", "Loop", "If", "Tile", "")
SIZES = (0, 1, 2, 3, -1, 7, 2**20, 2**31, 2**40, 2**62, -(2**63))
FORMULAS = (
    "(assert (or (and (>= Y_0 Y_1)) (and (<= Y_0 -3.5))))",
    "(assert (and (>= (+ Y_0 (* 2 Y_1)) 1e300) (<= Y_1 (- 4.0))))",
    "(assert (<= X_0 1e400))",
    "(assert (>= X_99 0))",
    "(assert (= Y_0 Y_1))",
    "(assert (or " + "(and (>= Y_0 0.1) (or (<= Y_1 1) (>= Y_1 2)))" * 12 + "))",
    "(assert (and " + "(or (<= Y_1 1) (>= Y_1 2))" * 40 + "))",
    "(assert " + "(not " * 500 + ")" * 500 + ")",
    "(" * 5000,
    "(declare-const X_999999999 Real)",
    "(assert (<= X_0 " + "9" * 5000 + "))",
    "(assert (<= X_0 1e-999999999))",
    "; only words",
)
"""What may be put into a property."""


def onnx_bytes(rng: random.Random, place: Place) -> None:
    """The bytes of a file put wrong."""
    _use(place, hostile_bytes(rng, rng.choice(place.networks)))


def onnx_graph(rng: random.Random, place: Place) -> None:
    """Nodes, names, attributes, shapes and weights of a graph put wrong: still a file that can be parsed."""
    model = onnx.ModelProto.FromString(rng.choice(place.networks))
    for _ in range(rng.choice((1, 1, 2, 4))):
        rng.choice(CHANGES)(rng, model.graph)
    _use(place, model.SerializeToString())


def _rewire(rng: random.Random, graph: Any) -> None:
    node = rng.choice(graph.node)
    names = [name for other in graph.node for name in (*other.input, *other.output)]
    side = node.input if rng.random() < 0.8 else node.output
    if side:
        side[rng.randrange(len(side))] = rng.choice((*names, "", "x" * 3000, "\x1b[31m\n"))


def _other_op(rng: random.Random, graph: Any) -> None:
    rng.choice(graph.node).op_type = rng.choice((*OPS, *(node.op_type for node in graph.node)))


def _drop_or_double(rng: random.Random, graph: Any) -> None:
    node = rng.choice(graph.node)
    if rng.random() < 0.5:
        graph.node.remove(node)
    else:
        graph.node.append(node)


def _attribute(rng: random.Random, graph: Any) -> None:
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    if not attributes:
        return
    attribute = rng.choice(attributes)
    if attribute.ints and rng.random() < 0.7:
        attribute.ints[rng.randrange(len(attribute.ints))] = rng.choice(SIZES)
    elif attribute.HasField("t"):
        _wrong_tensor(rng, attribute.t)
    else:
        attribute.type = rng.randrange(1, 15)
        attribute.i, attribute.f = rng.choice(SIZES), float(rng.choice(NUMBERS))


def _tensor(rng: random.Random, graph: Any) -> None:
    if graph.initializer:
        _wrong_tensor(rng, rng.choice(graph.initializer))


def _wrong_tensor(rng: random.Random, tensor: Any) -> None:
    roll = rng.randrange(4)
    if roll == 0 and tensor.dims:
        tensor.dims[rng.randrange(len(tensor.dims))] = rng.choice(SIZES)
    elif roll == 1:
        tensor.data_type = rng.randrange(25)
    elif roll == 2:
        tensor.raw_data = hostile_bytes(rng, tensor.raw_data)
    else:
        wild = rng.choice((float("nan"), float("inf"), 1e38, -1e38, 1e30, 1e-45))
        count = len(tensor.raw_data) // 4
        tensor.raw_data = torch.full((count,), wild).numpy().tobytes()


def _input_shape(rng: random.Random, graph: Any) -> None:
    dims = rng.choice((*graph.input, *graph.output)).type.tensor_type.shape.dim
    if dims:
        dims[rng.randrange(len(dims))].dim_value = rng.choice(SIZES)


CHANGES = (_rewire, _other_op, _drop_or_double, _attribute, _tensor, _tensor, _input_shape)


def _use(place: Place, data: bytes) -> None:
    """Load a network and, if it is taken, ask something of it: only finite outputs may be proven."""
    path = place.root / "hostile.onnx"
    path.write_bytes(data)
    model = read_onnx(path)
    flat = torch.zeros(model.inputs, dtype=torch.float64)
    bounded = Property.within([-10.0] * model.outputs, [10.0] * model.outputs)
    box = model.box(flat - 0.001, flat + 0.001)
    answer = verify(model, box, method="interval", property=bounded, falsify=False)
    if answer.verdict == "certified" and bool(bounded.violated(model.outputs_of(flat))):
        raise FoundError("certified a network that violates the property")


def vnnlib(rng: random.Random, place: Place) -> None:
    """Lines of a property put wrong, packed or not."""
    path = _spec(rng, place)
    queries = read_vnnlib(path)
    if len(queries[0].lower) == 12 and rng.random() < 0.5:
        read_vnnlib(path, inputs=12, outputs=2)
    for query in queries:
        if not bool((query.lower <= query.upper).all() and query.lower.isfinite().all()):
            raise FoundError("took a box without inside")


def _spec(rng: random.Random, place: Place) -> Path:
    lines = [f"(declare-const {name} Real)" for name in (*(f"X_{i}" for i in range(12)), "Y_0", "Y_1")]
    lines += [f"(assert (<= X_{i} 0.25))\n(assert (>= X_{i} -0.5))" for i in range(12)]
    lines.append("(assert (or (and (>= Y_0 2.0)) (and (>= Y_1 Y_0) (<= Y_1 0.5))))")
    if rng.random() < 0.5:
        lines.insert(rng.randrange(len(lines) + 1), rng.choice(FORMULAS))
        data = "\n".join(lines).encode()
        parse_vnnlib("\n".join(lines)) if rng.random() < 0.1 else None
    else:
        data = hostile_text(rng, "\n".join(lines))
    if rng.random() < 0.3:
        data = hostile_bytes(rng, gzip.compress(data, mtime=0)) if rng.random() < 0.7 else gzip.compress(data)
    path = place.root / "hostile.vnnlib"
    path.write_bytes(data)
    return path


def instances(rng: random.Random, place: Place) -> None:
    """`buffet vnncomp` of one instance or a list; results that are there already may be anything."""
    network, spec = place.root / "network.onnx", _spec(rng, place)
    network.write_bytes(place.networks[0])
    if rng.random() < 0.4:
        command(
            ["vnncomp", str(network), str(spec), "--timeout", "1", "--method", "interval", "--threads", "1"]
        )
        return
    text = f"{network.name},{spec.name},1\n{network.name},gone.vnnlib,1\n"
    (place.root / "instances.csv").write_bytes(hostile_text(rng, text))
    results = place.root / "results.csv"
    results.unlink(missing_ok=True)
    if rng.random() < 0.5:
        known = f"onnx,vnnlib,timeout,result,seconds,reason\n{network.name},{spec.name},1,unsat,0.5,\n"
        results.write_bytes(hostile_text(rng, known))
    options = ["--workers", "1", "--threads", "1", "--method", "interval", "--json"]
    command(["vnncomp", str(place.root / "instances.csv"), "-o", str(results), *options])
