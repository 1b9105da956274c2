"""A network read from an ONNX file, and how its input and the rows of our program belong together."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from buffet.errors import BuffetError, one_line, show
from buffet.loading.agreement import largest_difference
from buffet.loading.onnx.file import read_graph
from buffet.loading.onnx.reader import build
from buffet.loading.onnx.runtime import run
from buffet.network import Program
from buffet.printing import counted
from buffet.regions import Box

SAMPLES = 4
"""Random inputs on which onnxruntime has to agree."""


@dataclass(frozen=True, eq=False, repr=False)
class OnnxModel:
    """A classifier or regressor ready to be verified, with the weights that are stored.

    Its rows are tokens × features, as of every program; `rows_of` and `flat_of` translate between them and
    the input of the ONNX network, flattened. Rows of zeros that no input is read from may be among them:
    they become a class token.
    """

    name: str
    path: Path
    program64: Program
    input_shape: tuple[int, ...]
    layout: Int[Tensor, "tokens width"]  # the flat index of every entry, −1 where there is none

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.input_shape))
        outputs, layers = counted(self.outputs, "output"), counted(self.program64.layers, "attention layer")
        return f"OnnxModel({show(self.name)}, input {shape}, {outputs}, {layers})"

    @cached_property
    def program(self) -> Program:
        """The program in float32."""
        return self.program64.to(torch.float32)

    @property
    def inputs(self) -> int:
        """The number of entries of the input."""
        return int((self.layout >= 0).sum())

    @property
    def outputs(self) -> int:
        return self.program64.nodes[-1].op.weight.shape[0]  # type: ignore[attr-defined]

    def rows_of(self, flat: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch tokens width"]:
        """The rows of inputs, given as the flattened input of the ONNX network, one sample each."""
        if flat.shape[-1] != self.inputs:
            raise BuffetError(f"{flat.shape[-1]} numbers, {self.name} reads {self.inputs}")
        padded = torch.nn.functional.pad(flat, (0, 1))
        return padded[..., self.layout.to(flat.device)]  # −1 is the zero at the end

    def flat_of(self, rows: Float[Tensor, "*batch tokens width"]) -> Float[Tensor, "*batch inputs"]:
        """The flattened inputs of rows: what `rows_of` makes rows of."""
        if rows.shape[-2:] != self.layout.shape:
            raise BuffetError(
                f"rows of shape {list(rows.shape[-2:])}, those of {self.name} are {list(self.layout.shape)}"
            )
        read = self.layout.flatten() >= 0
        flat = rows.new_empty(*rows.shape[:-2], self.inputs)
        flat[..., self.layout.flatten()[read]] = rows.flatten(-2)[..., read]
        return flat

    def outputs_of(self, flat: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        """The outputs for flattened inputs, in float64."""
        return self.program64.evaluate(self.rows_of(flat.double()))

    def box(self, lower: Float[Tensor, " inputs"], upper: Float[Tensor, " inputs"]) -> Box:
        """The region of all inputs between two flattened ones; rows that cannot move are not among its words.

        The unmoved rows are in the middle.
        """
        low, high = self.rows_of(lower.double()), self.rows_of(upper.double())
        middle = low + (high - low) / 2
        words = (low != high).any(-1).nonzero()[:, 0]
        if not len(words):
            words = (self.layout >= 0).any(-1).nonzero()[:1, 0]
        return Box(middle, low[words], high[words], words)


def read_onnx(path: str | Path, *, check: bool | None = None) -> OnnxModel:
    """The network of an ONNX file.

    Where onnxruntime is installed and can run the file, its outputs are compared with those of the program
    on random inputs, and a network that differs by more than 1e-4 is refused; with ``check=True`` it has to
    run, with ``check=False`` it is not asked.
    """
    path = Path(path)
    graph = read_graph(path)
    program, layout = build(graph)
    model = OnnxModel(path.stem, path, program, graph.shape, torch.from_numpy(layout.rows()))
    if check or (check is None and find_spec("onnxruntime")):
        compare(model, must_run=bool(check))
    return model


def compare(model: OnnxModel, *, must_run: bool = True) -> float | None:
    """How far the outputs are from those of onnxruntime, relative to outputs above 1; too far is refused.

    None where onnxruntime cannot run the file, unless it must.
    """
    generator = torch.Generator().manual_seed(0)
    flat = torch.randn(SAMPLES, model.inputs, generator=generator)
    flat[SAMPLES // 2 :] = torch.rand(flat[SAMPLES // 2 :].shape, generator=generator)
    try:
        found = run_onnx(model, flat)
    except Exception as error:  # whatever goes wrong in there
        if must_run:
            raise BuffetError(f"{model.path}: onnxruntime cannot run it: {one_line(error)}") from None
        return None
    return largest_difference(model.outputs_of(flat), found, str(model.path))


def run_onnx(model: OnnxModel, flat: Float[Tensor, "batch inputs"]) -> Float[Tensor, "batch outputs"]:
    """The outputs that onnxruntime computes, one sample after the other."""
    return torch.from_numpy(run(model.path, flat.double().numpy(), model.input_shape))
