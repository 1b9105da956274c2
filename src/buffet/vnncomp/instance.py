"""One instance of the competition: does the network have an input that the VNN-LIB file calls unsafe?

``unsat``: proven that there is none. ``sat``: here is one, evaluated again in float64 and, where it is
installed, by onnxruntime. ``timeout``: neither, within the time; ``unknown``: neither, and nothing left to
try.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.certificates.certificate import Question, write_certificate
from buffet.errors import BuffetError
from buffet.loading.onnx.model import OnnxModel, read_onnx, run_onnx
from buffet.loading.vnnlib import Query, read_vnnlib
from buffet.methods import Method, method_named
from buffet.query import checked_budget
from buffet.regions import Region
from buffet.verification.verify import verify

Result = Literal["unsat", "sat", "unknown", "timeout"]
FIRST_ATTACK = AttackSettings(steps=20, restarts=2)
"""Before any bounds: most counterexamples are found in a fraction of a second."""
LAST_ATTACK = AttackSettings(steps=60, restarts=8)
"""Where bounds have failed and time is left."""
RESERVE, RESERVE_SHARE = 1.0, 0.05
"""Seconds, and the share of the time limit, that are kept for what does not look at the clock."""


@dataclass(frozen=True, eq=False)
class Counterexample:
    """An unsafe input, flattened as the network reads it, and the outputs for it."""

    inputs: Float[Tensor, " inputs"]
    outputs: Float[Tensor, " outputs"]

    def text(self) -> str:
        """As the competition wants it: ``((X_0 0.1)``, a line per number, ``(Y_1 0.2))``."""
        named = [
            f"({name}_{index} {value!r})"
            for name, values in (("X", self.inputs), ("Y", self.outputs))
            for index, value in enumerate(values.tolist())
        ]
        lines = "\n".join(named)
        return f"({lines})"


@dataclass(frozen=True, eq=False)
class Answer:
    """What is known of an instance."""

    result: Result
    seconds: float
    reason: str | None = None  # why it is unknown, or how far the proof had come
    counterexample: Counterexample | None = None
    note: str | None = None  # on the certificate that was to be written
    interrupted: bool = False


def answer(
    onnx: Path,
    vnnlib: Path,
    timeout: float,
    method: str | Method = "buffet",
    *,
    begin: float | None = None,
    certificate: Path | None = None,
) -> Answer:
    """The answer to an instance, within `timeout` seconds from `begin` (`time.perf_counter`; default: now).

    A file may ask about several boxes. It is ``unsat`` only if all of them are. The proof of that is written
    to a `certificate` in the time that is left.
    """
    begin = time.perf_counter() if begin is None else begin
    checked_budget(timeout)
    end = begin + timeout - min(RESERVE, RESERVE_SHARE * timeout)
    model = read_onnx(onnx)
    queries = read_vnnlib(vnnlib, inputs=model.inputs, outputs=model.outputs)
    search = _Search(model, end)
    regions = [model.box(query.lower, query.upper) for query in queries]
    result: Result = "unsat"
    if not search.attacked(queries, regions):
        for query, region in zip(queries, regions, strict=True):
            if (verdict := search.verdict(query, region, method)) != "unsat":
                result = verdict
                break
    found = search.found
    reason = None if result == "unsat" or found else search.doubt or search.progress
    result, note = "sat" if found else result, None
    if certificate is not None and result == "unsat":
        questions = [Question(r, q.property) for r, q in zip(regions, queries, strict=True)]
        note = _certified(certificate, model, questions, method, end)
    return Answer(result, time.perf_counter() - begin, reason, found, note, search.interrupted)


def _certified(
    path: Path, model: OnnxModel, questions: Sequence[Question], method: str | Method, end: float
) -> str:
    """Write the proof of an answer; what became of it, in a line."""
    try:
        written = write_certificate(path, model, questions, method_named(method), deadline=end)
    except BuffetError as problem:
        return f"no certificate: {str(problem).removeprefix('certificate: ')}"
    return f"{path}: checked and written, {written.size} bytes"


class _Search:
    """Looks for a counterexample or proofs until the time is up."""

    def __init__(self, model: OnnxModel, end: float) -> None:
        self.model, self.end = model, end
        self.found: Counterexample | None = None
        self.doubt: str | None = None  # why a counterexample was not taken
        self.progress: str | None = None  # how far the proof of a box had come
        self.interrupted = False

    @property
    def left(self) -> float:
        return self.end - time.perf_counter()

    def attacked(self, queries: Sequence[Query], regions: Sequence[Region]) -> bool:
        """Whether a quick attack finds a counterexample."""
        for query, region in zip(queries, regions, strict=True):
            if self.left <= 0:
                break
            tried = attack(self.model.program64, region, query.property, FIRST_ATTACK, deadline=self.end)
            if bool(tried.success[0]) and self._takes(query, tried.points[0]):
                return True
        return False

    def verdict(self, query: Query, region: Region, method: str | Method) -> Result:
        """What is proven of one box within the time that is left."""
        if self.left <= 0:
            return "timeout"
        answer = verify(
            self.model,
            region,
            method=method,
            property=query.property,
            budget=self.left,
            falsify=LAST_ATTACK,
        )
        if answer.verdict == "certified":
            return "unsat"
        point = answer.counterexamples[0]
        if point is not None and self._takes(query, point):
            return "sat"
        self.progress, self.interrupted = answer.progress, answer.interrupted
        return "timeout" if self.left <= 0 else "unknown"

    def _takes(self, query: Query, point: Float[Tensor, "tokens width"]) -> bool:
        """Whether a point is unsafe in float64 and, if it is there, in onnxruntime.

        The network is deployed in float32, so the point is moved to numbers of float32 first.
        """
        flat = representable(self.model.flat_of(point.double()), query.lower, query.upper)
        outputs = self.model.outputs_of(flat)
        if not bool(query.property.violated(outputs)):
            self.doubt = "a counterexample is none in numbers of float32"
            return False
        if find_spec("onnxruntime"):
            (outputs,) = run_onnx(self.model, flat[None])
            if not bool(query.property.violated(outputs)):
                self.doubt = "a counterexample is none for onnxruntime"
                return False
        self.found = Counterexample(flat, outputs.double())
        return True


def representable(
    x: Float[Tensor, " inputs"], lower: Float[Tensor, " inputs"], upper: Float[Tensor, " inputs"]
) -> Float[Tensor, " inputs"]:
    """Numbers of float32 between the bounds, next to those of `x`; where there are none, of float64."""
    near = x.clamp(lower, upper).float()
    near = torch.where(near.double() > upper, near.nextafter(torch.full_like(near, -math.inf)), near)
    near = torch.where(near.double() < lower, near.nextafter(torch.full_like(near, math.inf)), near)
    found = near.double()
    return torch.where((lower <= found) & (found <= upper), found, x.clamp(lower, upper))
