"""The network: operations that say what they are (`operation`, `ops`), and the graph of them (`program`)."""

from buffet.network.operation import Input, Linear, Op
from buffet.network.ops import (
    Add,
    Affine,
    Apply,
    Bilinear,
    Center,
    Diagonal,
    First,
    Mean,
    Mix,
    Normalise,
    Offset,
    Rescale,
    Scores,
    Softmax,
)
from buffet.network.program import Builder, Node, Program

__all__ = [
    "Add",
    "Affine",
    "Apply",
    "Bilinear",
    "Builder",
    "Center",
    "Diagonal",
    "First",
    "Input",
    "Linear",
    "Mean",
    "Mix",
    "Node",
    "Normalise",
    "Offset",
    "Op",
    "Program",
    "Rescale",
    "Scores",
    "Softmax",
]
