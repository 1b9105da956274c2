"""The cost model: what a verification computes, from the sizes of the network alone.

`estimate` walks the program as `propagation` does, with the sizes of tensors in place of tensors: which
nodes get their rows substituted, what every linear piece does to so many rows, where they stop. It knows no
numbers, so what depends on them is a fixed assumption: forms that are not exact have slopes of both signs,
except behind attention weights and sums, which are positive. docs/scaling.md derives the leading terms.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from buffet.engine import Engine
from buffet.lab.bench.cases import BenchCase
from buffet.lab.bench.measuring import Unit, bench_config, clocked
from buffet.loading.network import build_program
from buffet.methods import Method
from buffet.network import (
    Add,
    Affine,
    Apply,
    Center,
    Diagonal,
    First,
    Input,
    Mean,
    Mix,
    Node,
    Offset,
    Rescale,
    Scores,
    Softmax,
)
from buffet.network.structure import local_nodes
from buffet.optimisation.boxes import Tuning, learns
from buffet.propagation.clean_run import Scene
from buffet.propagation.key_split import pays, splits
from buffet.propagation.plan import needed_boxes, together, widest_rows
from buffet.system.devices import device_named

Number = int | float
NUMBER = 4  # bytes: forms are float32
GRADIENT = 3.0
"""A pass with gradients, in passes without: forward, and two products backward for every one."""
PYTHON = 6
"""What a kernel on a tiny tensor costs with the Python around it, in bare kernels."""
ALIVE = 10
"""Tensors of the size of a chunk that a backward pass holds at once."""


@dataclass(frozen=True)
class Estimate:
    """What is computed, whatever the machine."""

    flops: Number = 0  # of matrix products
    moved_bytes: Number = 0
    kernels: Number = 0
    peak_bytes: Number = 0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            self.flops + other.flops,
            self.moved_bytes + other.moved_bytes,
            self.kernels + other.kernels,
            max(self.peak_bytes, other.peak_bytes),
        )

    def times(self, factor: Number) -> Estimate:
        return replace(
            self,
            flops=factor * self.flops,
            moved_bytes=factor * self.moved_bytes,
            kernels=factor * self.kernels,
        )


@dataclass(frozen=True)
class Machine:
    """How fast something computes, moves bytes and starts kernels."""

    flop_rate: float
    byte_rate: float
    kernel_seconds: float
    unit_seconds: float  # M

    @classmethod
    def here(cls, device: str = "cpu") -> Machine:
        """This machine, measured in about a second, on one thread."""
        place = device_named(device)
        torch.set_num_threads(1)
        unit = min(Unit(place).seconds() for _ in range(3))
        values = torch.randn(2 << 20, device=place)
        small = torch.randn(8, device=place)

        def best(run: Callable[[], object]) -> float:
            run()
            return min(clocked(run, place)[0] for _ in range(5))

        moved = best(lambda: [values + values for _ in range(4)]) / (4 * 2 * values.numel() * NUMBER)
        kernel = PYTHON * best(lambda: [small + small for _ in range(500)]) / 500
        return cls(2 * 1024**3 / unit, 1 / moved, kernel, unit)

    def seconds(self, work: Estimate) -> float:
        """The time of work whose parts wait for each other."""
        return (
            work.flops / self.flop_rate
            + work.moved_bytes / self.byte_rate
            + work.kernels * self.kernel_seconds
        )


@dataclass(frozen=True)
class _Rows:
    """Rows on their way down: `Rows` of `forms`, in sizes."""

    groups: int
    rows: int  # of a group
    dense: bool = False
    shared: bool = True  # the same at every token and task

    def entries(self, walk: _Walk, node: int) -> int:
        """How many coefficients they have at a node."""
        tokens, features = walk.shape(node)
        if self.dense:
            return walk.tasks * tokens * features * self.groups * self.rows
        return features * self.rows * (1 if self.shared else walk.tasks * self.groups)


def estimate(case: BenchCase) -> Estimate | None:
    """What a case computes; None for methods that the model does not cover."""
    method = case.chosen
    if method.propagation in ("interval", "forward") or method.product == "rule":
        return None
    if method.optimise not in ("none", "tuned"):
        return None
    return _Walk.of(case, method).total()


@dataclass(frozen=True)
class _Walk:
    """A program in sizes, and how it is walked."""

    scene: Scene
    method: Method
    tasks: int
    moved: int
    local: frozenset[int]  # nodes behind linear operations on single tokens
    kept: frozenset[int]  # nodes that keep forms

    @classmethod
    def of(cls, case: BenchCase, method: Method) -> _Walk:
        config = bench_config(case)
        weights = {name: torch.empty(shape, device="meta") for name, shape in config.shapes().items()}
        x = torch.empty(case.tokens, case.width, device="meta", dtype=torch.float64)
        double = {name: weight.double() for name, weight in weights.items()}
        scene = method.scene(build_program(config, double), x, 0)
        kept = method.describe().kept(scene.program)
        return cls(scene, method, case.words, 1, local_nodes(scene.program), kept)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.scene.program.nodes

    @property
    def inputs(self) -> int:
        return self.moved * self.scene.program.input_width

    def shape(self, node: int) -> tuple[int, int]:
        tokens, features = self.scene.clean[node].shape
        return tokens, features

    def total(self) -> Estimate:
        """All nodes in order, then the margin."""
        program, propagation = self.scene.program, self.method.describe()
        needed = needed_boxes(program)
        groups = together(program, needed | self.kept)
        done: set[int] = set()
        work = Estimate()
        for index, node in enumerate(self.nodes):
            if index in self.local:
                continue
            if not (node.op.linear or isinstance(node.op, Input)):
                work += Estimate(kernels=120)  # lines, planes and boxes: small tensors, but many
            wanted = index in self.kept or index in needed
            if not wanted or index in done:
                continue
            if index in self.kept and all(i in self.kept | self.local for i in node.inputs):
                work += self.push(index, node)
            else:
                done.update(groups[index])
                work += self.rows_of(groups[index])
        stops = not propagation.to_input
        last = len(self.nodes) - 1
        steps = 1.0 + (GRADIENT * self.method.steps if self.method.optimise == "tuned" else 0.0)
        margin = self.pull(last, _Rows(1, self.shape(last)[1]), self.stops(last) if stops else self.local)
        return work + margin.times(2 * steps)

    def stops(self, root: int) -> frozenset[int]:
        """Where rows of a node stop."""
        window = self.method.window
        if window is None:
            return self.kept | self.local
        layers = 0
        for index in range(root, 0, -1):
            if layers >= window and index in self.kept:
                return self.local | {index}
            layers += isinstance(self.nodes[index].op, Mix)
        return self.local

    def rows_of(self, group: tuple[int, ...]) -> Estimate:
        """All unit rows of a group of nodes and their negatives, chunk by chunk; tuned first if need be."""
        first = self.nodes[group[0]]
        root = first.inputs[0] if isinstance(first.op, Affine) else group[0]
        features = sum(self.shape(n)[1] for n in group)
        tokens, stops = self.shape(root)[0], self.stops(group[0])
        widest = 2 * NUMBER * self.tasks * widest_rows(self.scene, root, stops)
        chunks = math.ceil(features / max(1, Engine().chunk // widest))
        work = self.pull(root, _Rows(tokens, 2 * features), stops)
        peak = ALIVE * max(Engine().chunk, widest) + self.forms()
        work = replace(work, kernels=work.kernels * chunks, peak_bytes=peak)
        if self.method.optimise == "tuned" and learns(first):
            tuning = Tuning(self.method.steps)
            step = self.pull(root, _Rows(tokens, 2 * min(tuning.sample(self.scene, root), features)), stops)
            work += step.times(GRADIENT * tuning.each(self.scene.program))
        return work

    def pull(self, root: int, rows: _Rows, stops: frozenset[int]) -> Estimate:
        """Rows of a node, substituted down to the stops and minimised there."""
        pending, work = {root: rows}, Estimate()
        for index in range(root, -1, -1):
            if index not in pending:
                continue
            rows = pending.pop(index)
            if index in stops:
                work += self.compose(index, rows)
                continue
            node = self.nodes[index]
            if self._split(root, index, rows, stops):
                work += self._keys(index, rows, stops)
                pending[node.inputs[0]] = replace(rows, shared=False)
                continue
            done, below = self._through(index, node, rows)
            work += done
            for source, pulled in zip(node.inputs, below, strict=False):
                if source in pending:
                    work += Estimate(moved_bytes=3 * NUMBER * pulled.entries(self, source), kernels=1)
                    other = pending[source]
                    pulled = replace(
                        pulled, dense=pulled.dense or other.dense, shared=pulled.shared and other.shared
                    )
                pending[source] = pulled
        total = rows.groups * rows.rows * self.tasks
        return work + Estimate(0, 4 * NUMBER * total * self.inputs, 20)

    def compose(self, index: int, rows: _Rows) -> Estimate:
        """Rows that meet a form of the input."""
        tokens, features = self.shape(index)
        columns = rows.groups * rows.rows
        if index in self.local:
            flops = 2.0 * self.tasks * self.moved * features * self.inputs
            flops *= columns if rows.dense else rows.rows
        else:
            reads = tokens if rows.dense else 1
            flops = 2 * 2.0 * self.tasks * reads * features * (self.inputs + 1) * columns
        moved = rows.entries(self, index) + 2 * self.tasks * self.inputs * columns
        return Estimate(flops, NUMBER * moved, 6)

    def _split(self, root: int, index: int, rows: _Rows, stops: frozenset[int]) -> bool:
        """Whether the rows are split by token here."""
        op = self.nodes[index].op
        if rows.dense or not isinstance(op, Scores) or not pays(rows.rows, op):
            return False
        return splits(self.nodes, root, index, stops, self.local)

    def _keys(self, index: int, rows: _Rows, stops: frozenset[int]) -> Estimate:
        """The key parts of all scores, substituted once, and what rows take of them and of their queries."""
        op, y = self.nodes[index].op, self.nodes[index].inputs[1]
        assert isinstance(op, Scores)
        queries, features = self.shape(index)
        keys, width = self.shape(y)
        parts = self.pull(y, _Rows(keys, 2 * queries * op.heads, shared=False), stops)
        columns = self.tasks * rows.groups * rows.rows
        flops = 2.0 * columns * (2 * features * (self.inputs + 1) + 2 * keys * width)
        moved = 3 * self.inputs + 8 * features + 2 * width
        return parts + Estimate(flops, NUMBER * columns * moved, 20)

    def _through(self, index: int, node: Node, rows: _Rows) -> tuple[Estimate, tuple[_Rows, ...]]:
        """What a piece does to rows of its output, and the rows of its inputs."""
        own = replace(rows, shared=False)
        entries = rows.entries(self, index)
        signed = 13 * NUMBER * own.entries(self, index)  # split by sign, slopes, constants
        tokens, features = self.shape(index)
        match node.op:
            case Affine():
                inner = self.shape(node.inputs[0])[1]
                moved = NUMBER * (entries + rows.entries(self, node.inputs[0]))
                return Estimate(2.0 * inner * entries, moved, 1), (rows,)
            case Diagonal():
                return Estimate(0, 2 * NUMBER * entries, 1), (rows,)
            case Center():
                return Estimate(0, 3 * NUMBER * entries, 2), (rows,)
            case Add():
                return Estimate(), (rows, rows)
            case Offset():
                return Estimate(), (rows,)
            case First() | Mean():
                pooled = replace(rows, dense=True, shared=False) if node.op.mixes else rows
                return Estimate(0, NUMBER * pooled.entries(self, node.inputs[0]), 2), (pooled,)
            case Apply():
                return Estimate(4 * own.entries(self, index), signed, 8), (own,)
            case Softmax():
                keys = features // node.op.heads
                return Estimate((4 * keys + 4) * own.entries(self, index), 1.6 * signed, 16), (own,)
            case Rescale():
                flops = (2 + 4) * own.entries(self, index)
                return Estimate(flops, 1.3 * signed, 14), (own, own)
            case Scores() | Mix():
                # Per row: every term of its query (dense: of all queries), twice towards x, once towards y;
                # of inputs with exact forms, only the moved tokens count.
                x, y = node.inputs
                keys, width = self.shape(y)
                queries = tokens if rows.dense else 1
                terms = self.tasks * queries * keys * width * rows.groups * rows.rows
                to_x = self.moved / queries if x in self.local and rows.dense else 1.0
                to_y = self.moved / keys if y in self.local else 1.0
                dense = replace(own, dense=True)
                looked = to_x * own.entries(self, x) + to_y * dense.entries(self, y)
                work = (4 * to_x + 2 * to_y) * terms + 4 * own.entries(self, index)
                return Estimate(work, signed + 3 * NUMBER * looked, 20), (own, dense)
        raise NotImplementedError(type(node.op).__name__)

    def push(self, index: int, node: Node) -> Estimate:
        """The form of a node from the forms of its inputs: two sides, two signs."""
        tokens, features = self.shape(index)
        columns = self.inputs + 1
        size = self.tasks * tokens * features * columns
        moved = 3 * NUMBER * size
        exact = all(i in self.local for i in node.inputs)
        match node.op:
            case Affine():
                return Estimate(2 * 2.0 * self.shape(node.inputs[0])[1] * size, 2 * moved, 4)
            case Scores() | Mix():
                keys, width = self.shape(node.inputs[1])
                product = 2.0 * self.tasks * tokens * keys * width * columns
                # Attention weights and exact forms need no second product for slopes of the other sign.
                passes = 3 if exact else 8 if isinstance(node.op, Scores) else 6 - 3 * self._first(node)
                return Estimate(passes * product, passes * moved, 20)
            case Rescale():
                return Estimate(2 * 2.0 * size, 5 * moved, 12)
            case Softmax():
                return Estimate(4 * 2.0 * features // node.op.heads * size, 5 * moved, 12)
        return Estimate(0, 3 * moved, 8)

    def _first(self, node: Node) -> bool:
        """Whether the values that are mixed are exact."""
        return node.inputs[1] in self.local

    def forms(self) -> int:
        """The bytes of the forms that are kept."""
        entries = sum(math.prod(self.shape(i)) for i in self.kept - self.local)
        return 2 * NUMBER * self.tasks * (self.inputs + 1) * entries
