"""Certificates: proofs that `buffet_checker` re-checks on its own (`docs/certificates.md` has the format).

A certificate holds what an engine chooses and a checker cannot guess cheaply: boxes of the nodes that
nonlinearities read, and the free numbers of every relaxation (`proof`). Networks that the checker cannot read
from their own files are stored in it too (`stored_network`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from buffet.branching.stems import Effort
from buffet.certificates.naming import sentence_of, spelling, substitutes
from buffet.certificates.proof import Proof, Tensors
from buffet.certificates.search import ROUNDING, Goal, Task, proofs
from buffet.certificates.stored_network import stored
from buffet.certificates.trees import stem_facts
from buffet.errors import BuffetError
from buffet.loading import Encoding, Model, OnnxModel
from buffet.loading.onnx.runtime import run_if_possible
from buffet.methods import Method, method_named
from buffet.network import Program
from buffet.properties import Property, program_of
from buffet.query import deadline_of, question, sized
from buffet.regions import Region
from buffet.regions.base import Description
from buffet.search.policy import POLICY
from buffet.system.files import write_atomically
from buffet.system.precision import full_precision
from buffet_checker import BadInputError
from buffet_checker.agreement import read_network_file
from buffet_checker.certificate import KEY, OF_QUERIES, SCHEMA
from buffet_checker.check import Model as Checked
from buffet_checker.check import judge
from buffet_checker.network import read_checkpoint

GRAPHS = {"lse": "plain", "decomposed": "decomposed", "differences": "differences"}
"""How the graph has softmax, in the words of the schema."""
STEMS = 8
"""Parts of a region with parameters of their own that a tree may grow from."""


@dataclass(frozen=True)
class Certificate:
    """What was written: the margins of every claim (of a property, by case), and the size of the file."""

    margins: tuple[tuple[float, ...], ...]
    size: int


@dataclass(frozen=True, eq=False)
class Question:
    """A region of a model, and what is to be proven of it: an answer, or a property."""

    region: Region
    goal: Goal

    @staticmethod
    def of(
        model: Model | OnnxModel,
        region: Region,
        label: int | None = None,
        property: Property | None = None,
    ) -> Question:
        """That the answer stays the same, by default. Of a network in ONNX that is a property too."""
        asked, _ = question(model, region, label, property)
        answers = asked.label is not None and isinstance(model, Model)
        return Question(region, asked.label if answers and asked.label is not None else asked)


def certify_to(
    path: str | Path,
    model: Model | OnnxModel,
    region: Region,
    eps: float | Sequence[float] | Tensor | None = None,
    method: str | Method = "buffet",
    *,
    label: int | None = None,
    property: Property | None = None,
    text: str | None = None,
    budget: float | None = None,
) -> Certificate:
    """Prove every task of a region and write the proofs to one file that ``buffet check`` accepts.

    Tasks that are not proven as a whole are cut: with a `budget` until that many seconds have passed, else
    where they are close to a proof, a few times.

    With the `text` that the region's rows are the embeddings of, the certificate names its tokens, which are
    checked; without, it is about rows of numbers only, and says so. With a `property`, it is about that
    instead of the answer.

    Raises `BuffetError`, and writes nothing, where a task cannot be proven with numbers as they are stored.

    Example:
        >>> import buffet
        >>> model = buffet.load()
        >>> text = "a gripping , moving film"
        >>> region = buffet.LpBall(model.embed(text), words=[2])
        >>> buffet.certify_to("proof.safetensors", model, region, eps=0.01, text=text)  # doctest: +SKIP
    """
    asked = Question.of(model, sized(region, eps), label, property)
    return write_certificate(Path(path), model, [asked], method_named(method), text, deadline_of(budget))


def write_certificate(
    path: Path,
    model: Model | OnnxModel,
    questions: Sequence[Question],
    method: Method,
    text: str | None = None,
    deadline: float | None = None,
) -> Certificate:
    """Prove every task of some questions, all about the sentence that `text` names, if it does.

    The file is written only if the checker accepts it.
    """
    certificate, content, checked = certify(model, questions, method, text, deadline)
    try:
        result = judge(content, str(path), checked)
    except BadInputError as error:
        raise BuffetError(f"certificate: not written, as it cannot be checked: {error}") from None
    if not result.accepted:
        raise BuffetError(f"certificate: not written, as the checker rejects it: {result.reason}")
    write_atomically(path, content)
    return certificate


@full_precision()
def certify(
    model: Model | OnnxModel,
    questions: Sequence[Question],
    method: Method,
    text: str | None = None,
    deadline: float | None = None,
) -> tuple[Certificate, bytes, Checked]:
    """The proofs of every task of some questions, as the content of a certificate, unchecked.

    Questions that are the label that stays the answer are about the same rows.
    """
    checked = _checked(model)
    first = questions[0]
    sentence = None
    if text is not None:
        if not isinstance(model, Model):
            raise BuffetError("certificate: a network in ONNX reads no text; leave the text out")
        sentence = sentence_of(model, text, first.region.center)
    tensors: Tensors = {}
    network: dict[str, object] | None = None
    if isinstance(model, OnnxModel):
        network, tensors = stored(model)
    of_label = isinstance(first.goal, int)
    written = _Claims(model, sentence, tensors)
    effort = Effort(None, STEMS, POLICY.leaves) if deadline is None else Effort(deadline)
    for number, asked in enumerate(questions):
        rows = asked.region.center.contiguous()
        tensors["center" if of_label else f"query.{number}.center"] = rows
        for task in range(asked.region.tasks):
            one = Task(model, asked.region.select([task]), asked.goal, method, effort)
            for part, used, proof in proofs(one):
                written.add(part, used, proof, None if of_label else number)
    hashes = [hashlib.sha256(q.region.center.contiguous().numpy().tobytes()).hexdigest() for q in questions]
    head: dict[str, object] = {
        "schema": SCHEMA if of_label else OF_QUERIES,
        "made": f"buffet {version('buffet')}",
        "model": {**checked.hashes, **_spelling(model, sentence)},
        "sentence": sentence and {"ids": list(sentence.ids), "types": list(sentence.types)},
    }
    if of_label:
        head |= {"input": hashes[0], "label": first.goal}
    else:
        facts = [_facts(model.program64, asked.goal) for asked in questions]
        asked_all = [{"input": i, "property": p} for i, p in zip(hashes, facts, strict=True)]
        head |= {"network": network, "queries": asked_all}
    head["claims"] = written.claims
    kept = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    content = save(kept, {KEY: json.dumps(head)})
    return Certificate(tuple(written.margins), len(content)), content, checked


class _Claims:
    """The claims of a certificate, as they are added one by one."""

    def __init__(self, model: Model | OnnxModel, sentence: Encoding | None, tensors: Tensors) -> None:
        self.model, self.sentence, self.tensors = model, sentence, tensors
        self.claims: list[dict[str, object]] = []
        self.margins: list[tuple[float, ...]] = []
        self._wholes: dict[int, int] = {}

    def add(self, region: Region, used: Method, proof: Proof, query: int | None) -> None:
        """A claim about a region, or a part of one."""
        task, asked = len(self.claims), proof.clean_run.asked
        rounded = proof.margins - ROUNDING * (1 + proof.margins.abs())
        self.margins.append(tuple((asked.by_case(rounded) if asked else rounded).tolist()))
        claimed = [m if query is None or 0 < m < float("inf") else None for m in rounded.tolist()]
        description = region.describe()
        described, extra = described_in(description, task, self._wholes)
        if self.sentence is not None and description.choices is not None:
            assert isinstance(self.model, Model)
            moved = region.moved[0].tolist()
            described |= substitutes(self.model, self.sentence, moved, description.choices)
        self.tensors |= {**extra, **proof.tensors(str(task))}
        self.claims.append(
            {
                "method": ", ".join((used.propagation, used.product, used.softmax, used.optimise)),
                "graph": GRAPHS[used.graph],
                "nodes": kinds(proof.clean_run.program),
                "region": described,
                "margins": claimed,
                "derivations": proof.derivations,
                **({"stems": [stem_facts(*stem) for stem in proof.stems]} if proof.stems else {}),
                **({"trees": proof.trees} if proof.trees else {}),
                **({} if query is None else {"query": query}),
            }
        )


def _checked(model: Model | OnnxModel) -> Checked:
    """The model's files as the checker reads them."""
    try:
        if isinstance(model, OnnxModel):
            return read_network_file(model.path, run_if_possible)
        if model.directory is None:
            raise BuffetError(
                "certificate: the model is in memory only; a certificate names the files of a directory"
            )
        return read_checkpoint(model.directory)
    except BadInputError as error:
        raise BuffetError(f"certificate: {error}") from None


def _spelling(model: Model | OnnxModel, sentence: Encoding | None) -> dict[str, str]:
    """The hash of the vocabulary that spells a sentence."""
    if sentence is None or not isinstance(model, Model) or model.directory is None:
        return {}
    return spelling(model.directory, sentence)


def _facts(program: Program, goal: Goal) -> dict[str, object]:
    """A property in the words of the schema."""
    assert isinstance(goal, Property)
    behind = len(program_of(program, goal).nodes) > len(program.nodes)
    return {
        "rows": goal.rows.tolist(),
        "offsets": goal.offsets.tolist(),
        "cases": [list(case) for case in goal.cases],
        "layer": behind,
    }


def described_in(
    description: Description, task: int, wholes: dict[int, int]
) -> tuple[dict[str, object], Tensors]:
    """The facts and arrays of a region; parts of a whole name it by the number of the first of them."""
    arrays = {f"{task}.region.{name}": value for name, value in description.arrays.items()}
    if not description.common:
        return description.facts, arrays
    number = wholes.setdefault(id(description.whole), task)
    (fact,) = {name.partition(".")[0] for name in description.common}
    common = {name.format(number): value for name, value in description.common.items()}
    return {**description.facts, fact: number}, {**arrays, **common}


def kinds(program: Program) -> list[str]:
    """The operations of a program in the words of the schema."""

    return [type(node.op).__name__.lower() for node in program.nodes]
