"""Certificates: proofs that `buffet_checker` re-checks on its own (`docs/certificates.md` has the format).

A certificate holds what an engine chooses and a checker cannot guess cheaply: boxes of the nodes that
nonlinearities read, and the free numbers of every relaxation (`proof`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from buffet.branching.prove import can_cut
from buffet.branching.stems import Effort
from buffet.certificates.naming import sentence_of, spelling, substitutes
from buffet.certificates.proof import ROOMS, Proof, Tensors, prove
from buffet.certificates.trees import add_trees
from buffet.engine import Engine
from buffet.errors import BuffetError
from buffet.loading import Model
from buffet.methods import Method, method_named
from buffet.network import Program
from buffet.optimisation.context import Context
from buffet.optimisation.warm_starts import WarmStarts
from buffet.propagation.clean_run import CleanRun
from buffet.query import clean_answer, deadline_of, sized
from buffet.regions import Region
from buffet.regions.base import Description
from buffet.relaxations.relaxation import Parameters
from buffet.search.cells import tree_of_proofs
from buffet.search.policy import POLICY
from buffet.search.portfolio import Ladder
from buffet.system.files import write_atomically
from buffet_checker import BadInputError
from buffet_checker.certificate import KEY, SCHEMA
from buffet_checker.check import judge
from buffet_checker.network import Checkpoint, read_checkpoint

GRAPHS = {"lse": "plain", "decomposed": "decomposed", "differences": "differences"}
"""How the graph has softmax, in the words of the schema."""
ROUNDING = 1e-7
"""Claimed margins are rounded down by this share, more than the checker's own rounding takes off."""
STEMS = 8
"""Parts of a region with parameters of their own that a tree may grow from."""


@dataclass(frozen=True)
class Certificate:
    """What was written: the margins of every claim, and the size of the file."""

    margins: tuple[tuple[float, ...], ...]
    size: int


def certify_to(
    path: str | Path,
    model: Model,
    region: Region,
    eps: float | Sequence[float] | Tensor | None = None,
    method: str | Method = "buffet",
    *,
    label: int | None = None,
    text: str | None = None,
    budget: float | None = None,
) -> Certificate:
    """Prove every task of a region and write the proofs to one file that ``buffet check`` accepts.

    Tasks that are not proven as a whole are cut: with a `budget` until so many seconds have passed, else
    where they are close to a proof, a few times.

    With the `text` that the region's rows are the embeddings of, the certificate names its tokens, which are
    checked; without, it is about rows of numbers only, and says so.

    Raises `BuffetError`, and writes nothing, where a task cannot be proven with numbers as they are stored.

    Example:
        >>> import buffet
        >>> model = buffet.load()
        >>> text = "a gripping , moving film"
        >>> region = buffet.LpBall(model.embed(text), words=[2])
        >>> buffet.certify_to("proof.safetensors", model, region, eps=0.01, text=text)  # doctest: +SKIP
    """
    chosen = method_named(method)
    return write_certificate(Path(path), model, [sized(region, eps)], chosen, label, text, budget)


def write_certificate(
    path: Path,
    model: Model,
    regions: Sequence[Region],
    method: Method,
    label: int | None = None,
    text: str | None = None,
    budget: float | None = None,
) -> Certificate:
    """Prove every task of some regions of one sentence, which `text` names.

    The file is written only if the checker accepts it.
    """
    certificate, content, checkpoint = certify(model, regions, method, label, text, budget)
    try:
        result = judge(content, str(path), checkpoint)
    except BadInputError as error:
        raise BuffetError(f"certificate: not written, as it cannot be checked: {error}") from None
    if not result.accepted:
        raise BuffetError(f"certificate: not written, as the checker rejects it: {result.reason}")
    write_atomically(path, content)
    return certificate


def certify(
    model: Model,
    regions: Sequence[Region],
    method: Method,
    label: int | None = None,
    text: str | None = None,
    budget: float | None = None,
) -> tuple[Certificate, bytes, Checkpoint]:
    """The proofs of every task of some regions of one sentence, as the content of a certificate,
    unchecked.
    """
    if model.directory is None:
        raise BuffetError(
            "certificate: the model is in memory only; a certificate names the files of a directory"
        )
    try:
        checkpoint = read_checkpoint(model.directory)
    except BadInputError as error:
        raise BuffetError(f"certificate: {error}") from None
    label, _ = clean_answer(model, regions[0], label)
    center = regions[0].center.contiguous()
    sentence = None if text is None else sentence_of(model, text, center)
    tensors: Tensors = {"center": center}
    wholes: dict[int, int] = {}
    claims: list[dict[str, object]] = []
    claimed: list[tuple[float, ...]] = []
    tasks = [region.select([task]) for region in regions for task in range(region.tasks)]
    deadline = deadline_of(budget)
    effort = Effort(None, STEMS, POLICY.leaves) if deadline is None else Effort(deadline)
    proven = [part for one in tasks for part in _proofs(model, one, method, label, effort)]
    for task, (one, used, proof) in enumerate(proven):
        claimed.append(tuple((proof.margins - ROUNDING * (1 + proof.margins.abs())).tolist()))
        description = one.describe()
        described, extra = described_in(description, task, wholes)
        if sentence is not None and description.choices is not None:
            described |= substitutes(model, sentence, one.moved[0].tolist(), description.choices)
        tensors |= {**extra, **proof.tensors(task)}
        claims.append(
            {
                "method": ", ".join((used.propagation, used.product, used.softmax, used.optimise)),
                "graph": GRAPHS[used.graph],
                "nodes": kinds(proof.clean_run.program),
                "region": described,
                "margins": claimed[-1],
                "derivations": proof.derivations,
                **({"trees": proof.trees} if proof.trees else {}),
            }
        )
    head = {
        "schema": SCHEMA,
        "made": f"buffet {version('buffet')}",
        "model": {**checkpoint.hashes, **({} if sentence is None else spelling(model.directory, sentence))},
        "sentence": sentence and {"ids": list(sentence.ids), "types": list(sentence.types)},
        "input": hashlib.sha256(center.numpy().tobytes()).hexdigest(),
        "label": label,
        "claims": claims,
    }
    stored = {name: value.detach().clone().contiguous() for name, value in tensors.items()}
    content = save(stored, {KEY: json.dumps(head)})
    return Certificate(tuple(claimed), len(content)), content, checkpoint


def _proofs(
    model: Model, region: Region, method: Method, label: int, effort: Effort
) -> list[tuple[Region, Method, Proof]]:
    """A proof of one task: as a whole, by a tree of cuts, or of every part that its region is cut into."""
    try:
        return [(region, *_first_proof(model, region, method, label))]
    except BuffetError:
        if method.cells == 1:
            proof = _proof_by_cuts(model, region, method, label, effort) if can_cut(method) else None
            if proof is None:
                raise
            return [(region, method, proof)]
        warm_starts = WarmStarts()
        tree = tree_of_proofs(model, region, method, label, Engine(), Context(warm_starts))
        if tree is None:
            raise
    parts = [leaf.part if region.eps is None else leaf.part.with_eps(region.eps) for leaf in tree.leaves]
    return [(part, *_first_proof(model, part, method, label, warm_starts)) for part in parts]


def _proof_by_cuts(model: Model, region: Region, method: Method, label: int, effort: Effort) -> Proof | None:
    """A proof by trees; where there is no deadline, if the whole is close to one."""
    clean_run = method.clean_run(model.program64, region.center, label)
    *_, learned = _learned(method, clean_run, region, None)
    for room, part in zip(ROOMS, (0.5, 1.0), strict=True):
        proof, bounds = prove(clean_run, region, method, learned, room)
        least, clean = float(proof.margins.min()), float(clean_run.clean[-1].min())
        close = least > -POLICY.close * clean if effort.deadline is None else math.isfinite(least)
        if close and add_trees(proof, bounds, method, learned, effort.share(part)) and _holds(proof):
            return proof
    return None


def _least(proof: Proof) -> float:
    """The least margin, less than what rounding takes off it."""
    return float((proof.margins - 2 * ROUNDING * (1 + proof.margins.abs())).min())


def _holds(proof: Proof) -> bool:
    return 0 < _least(proof) < math.inf


def _first_proof(
    model: Model, region: Region, method: Method, label: int, warm_starts: WarmStarts | None = None
) -> tuple[Method, Proof]:
    """A proof by the method, which may remember something, or one of its rivals, the cheapest first."""
    best = -math.inf
    for candidate in Ladder.of(method, model.program64):
        clean_run = candidate.clean_run(model.program64, region.center, label)
        for learned in _learned(candidate, clean_run, region, warm_starts if candidate is method else None):
            for room in ROOMS:
                proof, _ = prove(clean_run, region, candidate, learned, room)
                if _holds(proof):
                    return candidate, proof
                best = max(best, _least(proof))  # a NaN is no better
    words = "+".join(str(i) for i in region.moved[0].tolist())
    raise BuffetError(
        f"certificate: word {words} is not proven (the best margin is {best:.4g}); nothing was written, "
        "try a smaller eps or a tighter method"
    )


def _learned(
    method: Method, clean_run: CleanRun, region: Region, warm_starts: WarmStarts | None
) -> Iterator[dict[int, dict[int, Parameters]]]:
    """Choices to try: none learned, where a method starts from that, and then what it learns."""
    optimiser = method.optimiser
    if not optimiser.learns_boxes:
        yield {}
    if optimiser.learns:
        learned: dict[int, dict[int, Parameters]] = {}
        method.bound(clean_run, region, context=Context(warm_starts, learned=learned))
        yield learned


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
