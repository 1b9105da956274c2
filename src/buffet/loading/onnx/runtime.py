"""Runs an ONNX file in onnxruntime, one input after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from buffet.errors import optional

Array = npt.NDArray[np.float64]


def run(path: Path, inputs: Array, shape: Sequence[int] | None = None) -> Array:
    """The outputs for some inputs, one a row; each has the shape that the file says, or this one."""
    onnxruntime = optional("onnxruntime", "onnx", "this runs the network in onnxruntime")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    sizes = [s if isinstance(s, int) else 1 for s in given.shape] if shape is None else shape
    kind = np.float64 if given.type == "tensor(double)" else np.float32
    answers = [session.run(None, {given.name: one.astype(kind).reshape(sizes)})[0] for one in inputs]
    return np.stack([np.asarray(answer, np.float64).reshape(-1) for answer in answers])


def run_if_possible(path: Path, inputs: Array) -> Array | None:
    """The same; None where onnxruntime is not installed, or cannot run the file."""
    try:
        return run(path, inputs)
    except Exception:  # whatever goes wrong in there
        return None
