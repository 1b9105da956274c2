"""The check itself: files in, accepted or rejected out. It trusts the model's files and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from buffet_checker.agreement import Agreement, NetworkFile, Run, measured, read_network_file
from buffet_checker.balls import Array, underflows_gradually
from buffet_checker.cells import groups
from buffet_checker.certificate import Certificate, Claim, Query, candidate_rows, read_certificate, region_of
from buffet_checker.errors import BadInputError, RejectedError
from buffet_checker.network import Checkpoint, Network, build, read_checkpoint
from buffet_checker.programs import Program
from buffet_checker.properties import Goal, Property, by_case, cases_of
from buffet_checker.regions import Region
from buffet_checker.sentence import Sentence, check_rows, check_substitutes, read_vocabulary
from buffet_checker.storage import LARGEST_TEXT, read_bytes, sha256
from buffet_checker.substitution import Claimed
from buffet_checker.trees import with_trees

Model = Checkpoint | NetworkFile
"""What a certificate is checked against."""


@dataclass(frozen=True)
class Subject:
    """What a certificate is about, all of it checked."""

    files: Mapping[str, str]  # of the model: file → SHA-256
    label: int | None  # None: it is about properties
    answer: str | None  # what config.json calls the label
    certificate: str  # SHA-256 of the file
    rows: str  # that of the unmoved rows, of the first query
    sentence: Sentence | None  # None: rows that no sentence is named for
    program: Program | None = None  # the network, if the certificate stores it
    agreement: Agreement | None = None  # with the file that it is said to be of; None: not measured

    @property
    def model(self) -> str:
        """One hash of all files: that of what ``sha256sum FILES`` prints, with the files in order."""
        lines = "".join(f"{self.files[name]}  {name}\n" for name in sorted(self.files))
        return sha256(lines.encode())


@dataclass(frozen=True)
class Proof:
    """What was derived for one claim: lower bounds of its margins in exact arithmetic.

    `slacks` is how much smaller a margin may come out in deployed float32 arithmetic: where ``margin −
    slack`` is positive, the deployed network gives the same answer too. Of a property there is a margin for
    every case, and of a network that is stored, deployed arithmetic is not covered.
    """

    moved: tuple[int, ...]
    region: Region  # of parts what they are parts of; of cells, one of them
    cells: int  # parts that the region was proven in
    margins: tuple[float, ...]
    slacks: tuple[float, ...]
    substitutes: tuple[tuple[int, ...], ...] | None = None  # of candidates that are tokens: ids per moved row
    leaves: int = 0  # of the trees by which margins were proven
    asked: Property | None = None  # None: that the label is the answer
    rows: str = ""  # the hash of the unmoved rows

    @property
    def deployed(self) -> bool:
        return all(m - s > 0 for m, s in zip(self.margins, self.slacks, strict=True))


@dataclass(frozen=True)
class Result:
    """The outcome of a check; a rejection says why, and at which node."""

    accepted: bool
    reason: str
    label: int | None
    proofs: tuple[Proof, ...]
    seconds: float
    subject: Subject | None = None  # of what is accepted


def check(certificate: str | Path, model: str | Path, run: Run | None = None) -> Result:
    """Check a certificate file against the checkpoint in a directory, or the file of another network.

    Accepted means: for every claim and every point of its region, the network of the directory (or the one
    that the certificate stores), in exact arithmetic with its stored weights, has a larger logit for the
    label than for any other class, or the property, by at least the margins. Where the network is stored,
    whoever can `run` its file lets its outputs be compared. Raises `BadInputError` for files that cannot be
    judged.
    """
    try:
        return judge(read_bytes(Path(certificate)), str(certificate), read_model(Path(model), run))
    except MemoryError:
        raise BadInputError(f"{certificate}: not enough memory to check it: it is not judged") from None


def read_model(path: Path, run: Run | None = None) -> Model:
    """A checkpoint's files, or the hash of a file of another kind."""
    return read_network_file(path, run) if path.is_file() else read_checkpoint(path)


def judge(content: bytes, where: str, model: Model) -> Result:
    """The same for a certificate in memory; `where` names it in messages."""
    if not underflows_gradually():
        raise BadInputError("this process takes numbers below 2⁻¹⁰²² for 0, so nothing can be judged in it")
    begin = time.perf_counter()
    proofs: list[Proof] = []
    label = None
    try:
        # overflow and NaN are no proof: every comparison below is false for them
        with np.errstate(all="ignore"):
            found = read_certificate(content, where)
            label = found.label
            network = _network(found, model)
            subject = _subject(found, model, network, sha256(content))
            for number, query in enumerate(found.queries):
                proofs += _proofs(found, number, query, network, subject)
            found.tensors.leftover()
            if found.program is not None and isinstance(model, NetworkFile):
                subject = replace(subject, agreement=measured(found.program, model, _points(found, proofs)))
    except RejectedError as error:
        return Result(False, str(error), label, (), time.perf_counter() - begin)
    except MemoryError:
        raise BadInputError(f"{where}: not enough memory to check it: it is not judged") from None
    return Result(True, "", label, tuple(proofs), time.perf_counter() - begin, subject)


def _proofs(found: Certificate, number: int, query: Query, network: Network, subject: Subject) -> list[Proof]:
    """The proofs of all claims of a query."""
    rows = _rows(found, query, network)
    claims = [claim for claim in found.claims if claim.query == number]
    _check_answered(claims, number)
    proofs = []
    for members in groups(claims, rows, found.tensors):
        parts = [_prove(found, claim, network, rows, subject) for claim in members]
        proofs.append(_together(parts, region_of(members[0], rows, found.tensors, whole=True)))
    return proofs


def _check_answered(claims: Sequence[Claim], number: int) -> None:
    if not claims:
        raise RejectedError(f"queries[{number}]: no claim answers it")


def _network(certificate: Certificate, model: Model) -> Network:
    """The network that a certificate is about; its files must be those of the model."""
    stored = certificate.program
    if isinstance(model, NetworkFile) != (stored is not None):
        wanted = f"--model {'FILE.onnx' if stored is not None else 'DIRECTORY'}"
        raise BadInputError(f"{model.where}: the certificate is about another kind of model; give {wanted}")
    for name, value in model.hashes.items():
        if certificate.model[name] != value:
            raise RejectedError(f"model: {name} has another hash; the certificate is about another model")
    if stored is not None:
        return stored
    assert isinstance(model, Checkpoint)
    if certificate.label is not None and certificate.label >= model.classes:
        raise RejectedError(f"label {certificate.label} is not a class of the model")
    return model


def _rows(certificate: Certificate, query: Query, network: Network) -> Array:
    """The unmoved rows of a query."""
    stored = certificate.tensors.stored.tensors.get(query.center)
    tokens = 0 if stored is None or stored.ndim != 2 else stored.shape[0]
    rows = certificate.tensors.need(query.center, [network.shape(tokens)])
    assert stored is not None
    if sha256(np.ascontiguousarray(stored).tobytes()) != query.input:
        raise RejectedError("input: the rows of the sentence have another hash")
    if isinstance(network, Program):
        _check_zero(network, rows, query)
    return rows


def _check_zero(program: Program, rows: Array, query: Query) -> None:
    if rows[program.layout < 0].any():
        raise RejectedError(f"{query.center}: rows that nothing is read into have to be 0")


def _subject(certificate: Certificate, model: Model, network: Network, digest: str) -> Subject:
    """What the certificate is about; a sentence that it names must have the rows of every query."""
    sentence, answer, label = certificate.sentence, None, certificate.label
    if isinstance(model, Checkpoint):
        for name in certificate.model.keys() - model.hashes.keys():  # a vocabulary, if any
            path = model.directory / name
            content = read_bytes(path, LARGEST_TEXT)
            if sha256(content) != certificate.model[name]:
                raise RejectedError(
                    f"model: {name} has another hash; the certificate is about another vocabulary"
                )
            assert sentence is not None
            sentence = replace(sentence, vocabulary=read_vocabulary(name, content, str(path)))
        if sentence is not None:
            for query in certificate.queries:
                check_rows(sentence, _rows(certificate, query, network), model)
        answer = None if label is None else model.class_name(label)
    return Subject(
        files=dict(certificate.model),
        label=label,
        answer=answer,
        certificate=digest,
        rows=certificate.queries[0].input,
        sentence=sentence,
        program=certificate.program,
    )


def _points(certificate: Certificate, proofs: Sequence[Proof]) -> list[Array]:
    """Some inputs of every region that was proven: the unmoved rows, and random ones."""
    program, rng, points = certificate.program, np.random.default_rng(0), []
    assert program is not None
    read = program.layout >= 0
    rows = {query.input: certificate.tensors.stored.tensors[query.center] for query in certificate.queries}
    for proof in proofs:
        center, region = rows[proof.rows].astype(np.float64), proof.region
        for share in (
            None,
            *rng.random((4, *region.lower.shape)),
            *rng.integers(0, 2, (4, *region.lower.shape)),
        ):
            point = center.copy()
            if share is not None:
                point[region.moved] += region.lower + share * (region.upper - region.lower)
            entries = np.zeros(program.inputs)
            entries[program.layout[read].astype(np.int64)] = point[read]
            points.append(entries)
    return points


def _together(parts: list[Proof], whole: Region) -> Proof:
    """What the proofs of all parts of a region prove of it."""
    margins = tuple(min(values) for values in zip(*(p.margins for p in parts), strict=True))
    slacks = tuple(max(values) for values in zip(*(p.slacks for p in parts), strict=True))
    first = parts[0]
    leaves = sum(part.leaves for part in parts)
    return replace(first, region=whole, cells=len(parts), margins=margins, slacks=slacks, leaves=leaves)


def _prove(certificate: Certificate, claim: Claim, network: Network, rows: Array, subject: Subject) -> Proof:
    goal = certificate.goal(claim)
    nodes, values = build(network, rows, goal, claim.graph)
    kinds = tuple(node.kind for node in nodes)
    if claim.kinds != kinds:
        raise RejectedError(f"claims[{claim.number}].nodes does not list the operations of this network")
    region = region_of(claim, rows, certificate.tensors)
    if isinstance(network, Program):
        _check_blank(network, region, claim)
    moved, substitutes = tuple(region.moved.tolist()), None
    if "ids" in claim.region:
        if not isinstance(network, Checkpoint):
            raise RejectedError(
                f"claims[{claim.number}].region.ids: a network that is stored knows no tokens"
            )
        given = certificate.tensors.stored.tensors[candidate_rows(claim)].astype(np.float64)
        where = f"claims[{claim.number}].region.ids"
        named = claim.region["ids"], moved, given, subject.sentence
        substitutes = check_substitutes(*named, network, where)
    whole = Claimed(nodes, values, region, claim, certificate.tensors)
    margins, deployed = with_trees(whole, whole.margins())
    _check_margins(claim, goal, margins, f"claims[{claim.number}], node {len(nodes) - 1} (margin)")
    if isinstance(network, Program):
        deployed = np.full_like(deployed, -np.inf)  # what runs is another file's network
    proven = by_case(goal, margins.tolist())
    strayed = by_case(goal, np.where(np.isnan(deployed), -np.inf, deployed).tolist())
    slacks = np.nextafter(np.subtract(proven, strayed), np.inf)
    return Proof(
        moved=moved,
        region=region,
        cells=1,
        margins=proven,
        slacks=tuple(slacks.tolist()),
        substitutes=substitutes,
        leaves=sum(map(len, claim.trees)),
        asked=None if isinstance(goal, int) else goal,
        rows=certificate.queries[claim.query].input,
    )


def _check_margins(claim: Claim, goal: Goal, proven: Array, where: str) -> None:
    """What is claimed has to follow, and has to be enough: of every case some margin > 0."""
    if len(claim.margins) != len(proven):
        raise RejectedError(f"{where}: {len(claim.margins)} margins are claimed, there are {len(proven)}")
    for case in cases_of(goal, len(proven)):
        best = max(case, key=lambda row: claim.margins[row])
        if not claim.margins[best] > 0:
            raise RejectedError(
                f"{where}: margin {best} is claimed to be {claim.margins[best]:.9g}, which proves nothing"
            )
    for row, (claimed, derived) in enumerate(zip(claim.margins, proven.tolist(), strict=True)):
        if not derived >= claimed:
            raise RejectedError(
                f"{where}: margin {row} is claimed to be {claimed:.9g}, derived is {derived:.9g}"
            )


def _check_blank(program: Program, region: Region, claim: Claim) -> None:
    """Entries that nothing is read into are 0 in every input."""
    blank = program.layout[region.moved] < 0
    if not ((region.lower <= 0) & (region.upper >= 0))[blank].all():
        raise RejectedError(f"claims[{claim.number}].region: an entry that nothing is read into is not 0")
