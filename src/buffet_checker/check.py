"""The check itself: files in, accepted or rejected out. It trusts the model's files and nothing else."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from buffet_checker.balls import Array, underflows_gradually
from buffet_checker.cells import groups
from buffet_checker.certificate import Certificate, Claim, candidate_rows, read_certificate, region_of
from buffet_checker.errors import BadInputError, RejectedError
from buffet_checker.network import Checkpoint, build, read_checkpoint
from buffet_checker.regions import Region
from buffet_checker.sentence import Sentence, check_rows, check_substitutes, read_vocabulary
from buffet_checker.storage import LARGEST_TEXT, read_bytes, sha256
from buffet_checker.substitution import Claimed
from buffet_checker.trees import with_trees


@dataclass(frozen=True)
class Subject:
    """What a certificate is about, all of it checked."""

    files: Mapping[str, str]  # of the model: file → SHA-256
    label: int
    answer: str  # what config.json calls the label
    certificate: str  # SHA-256 of the file
    rows: str  # that of the unmoved rows
    sentence: Sentence | None  # None: rows that no sentence is named for

    @property
    def model(self) -> str:
        """One hash of all files: that of what ``sha256sum FILES`` prints, with the files in order."""
        lines = "".join(f"{self.files[name]}  {name}\n" for name in sorted(self.files))
        return sha256(lines.encode())


@dataclass(frozen=True)
class Proof:
    """What was derived for one claim: lower bounds of its margins in exact arithmetic.

    `slacks` is how much smaller a margin may come out in deployed float32 arithmetic: where ``margin −
    slack`` is positive, the deployed network gives the same answer too.
    """

    moved: tuple[int, ...]
    region: Region  # of parts what they are parts of; of cells, one of them
    cells: int  # parts that the region was proven in
    margins: tuple[float, ...]
    slacks: tuple[float, ...]
    substitutes: tuple[tuple[int, ...], ...] | None = None  # of candidates that are tokens: ids per moved row
    leaves: int = 0  # of the trees by which margins were proven

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


def check(certificate: str | Path, model: str | Path) -> Result:
    """Check a certificate file against the checkpoint in a directory.

    Accepted means: for every claim and every point of its region, the network of the directory, in exact
    arithmetic with its stored weights, has a larger logit for the label than for any other class, by at least
    the margins. Raises `BadInputError` for files that cannot be judged.
    """
    try:
        return judge(read_bytes(Path(certificate)), str(certificate), read_checkpoint(Path(model)))
    except MemoryError:
        raise BadInputError(f"{certificate}: not enough memory to check it: it is not judged") from None


def judge(content: bytes, where: str, checkpoint: Checkpoint) -> Result:
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
            rows = _rows(found, checkpoint)
            subject = _subject(found, checkpoint, rows, sha256(content))
            for members in groups(found.claims, rows, found.tensors):
                parts = [_prove(found, claim, checkpoint, rows, subject) for claim in members]
                proofs.append(_together(parts, region_of(members[0], rows, found.tensors, whole=True)))
            found.tensors.leftover()
    except RejectedError as error:
        return Result(False, str(error), label, (), time.perf_counter() - begin)
    except MemoryError:
        raise BadInputError(f"{where}: not enough memory to check it: it is not judged") from None
    return Result(True, "", label, tuple(proofs), time.perf_counter() - begin, subject)


def _rows(certificate: Certificate, checkpoint: Checkpoint) -> Array:
    """The rows of the sentence; model, label and rows must be those that the certificate is about."""
    for name, value in checkpoint.hashes.items():
        if certificate.model[name] != value:
            raise RejectedError(f"model: {name} has another hash; the certificate is about another model")
    if certificate.label >= checkpoint.classes:
        raise RejectedError(f"label {certificate.label} is not a class of the model")
    stored = certificate.tensors.stored.tensors.get("center")
    tokens = 0 if stored is None or stored.ndim != 2 else stored.shape[0]
    if tokens > checkpoint.longest:
        raise RejectedError(f"center has {tokens} rows, the model takes at most {checkpoint.longest}")
    rows = certificate.tensors.need("center", [(max(tokens, 1), checkpoint.width)])
    if sha256(np.ascontiguousarray(stored).tobytes()) != certificate.input:
        raise RejectedError("input: the rows of the sentence have another hash")
    return rows


def _subject(certificate: Certificate, checkpoint: Checkpoint, rows: Array, digest: str) -> Subject:
    """What the certificate is about; a sentence that it names must have these rows."""
    sentence = certificate.sentence
    for name in certificate.model.keys() - checkpoint.hashes.keys():  # a vocabulary, if any
        path = checkpoint.directory / name
        content = read_bytes(path, LARGEST_TEXT)
        if sha256(content) != certificate.model[name]:
            raise RejectedError(
                f"model: {name} has another hash; the certificate is about another vocabulary"
            )
        assert sentence is not None
        sentence = replace(sentence, vocabulary=read_vocabulary(name, content, str(path)))
    if sentence is not None:
        check_rows(sentence, rows, checkpoint)
    return Subject(
        files=dict(certificate.model),
        label=certificate.label,
        answer=checkpoint.class_name(certificate.label),
        certificate=digest,
        rows=certificate.input,
        sentence=sentence,
    )


def _together(parts: list[Proof], whole: Region) -> Proof:
    """What the proofs of all parts of a region prove of it."""
    margins = tuple(min(values) for values in zip(*(p.margins for p in parts), strict=True))
    slacks = tuple(max(values) for values in zip(*(p.slacks for p in parts), strict=True))
    first = parts[0]
    leaves = sum(part.leaves for part in parts)
    return Proof(first.moved, whole, len(parts), margins, slacks, first.substitutes, leaves)


def _prove(
    certificate: Certificate, claim: Claim, checkpoint: Checkpoint, rows: Array, subject: Subject
) -> Proof:
    nodes, values = build(checkpoint, rows, certificate.label, claim.graph)
    kinds = tuple(node.kind for node in nodes)
    if claim.kinds != kinds:
        raise RejectedError(f"claims[{claim.number}].nodes does not list the operations of this network")
    region = region_of(claim, rows, certificate.tensors)
    moved, substitutes = tuple(region.moved.tolist()), None
    if "ids" in claim.region:
        given = certificate.tensors.stored.tensors[candidate_rows(claim)].astype(np.float64)
        substitutes = check_substitutes(
            claim.region["ids"],
            moved,
            given,
            subject.sentence,
            checkpoint,
            f"claims[{claim.number}].region.ids",
        )
    whole = Claimed(nodes, values, region, claim, certificate.tensors)
    margins, deployed = with_trees(whole, whole.margins())
    where = f"claims[{claim.number}], node {len(nodes) - 1} (margin)"
    if len(claim.margins) != len(margins):
        raise RejectedError(f"{where}: {len(claim.margins)} margins are claimed, there are {len(margins)}")
    for other, (claimed, proven) in enumerate(zip(claim.margins, margins.tolist(), strict=True)):
        if not claimed > 0:
            raise RejectedError(
                f"{where}: margin {other} is claimed to be {claimed:.9g}, which proves nothing"
            )
        if not proven >= claimed:
            raise RejectedError(
                f"{where}: margin {other} is claimed to be {claimed:.9g}, derived is {proven:.9g}"
            )
    slacks = np.nan_to_num(np.nextafter(margins - deployed, np.inf), nan=np.inf)
    leaves = sum(map(len, claim.trees))
    return Proof(moved, region, 1, tuple(margins.tolist()), tuple(slacks.tolist()), substitutes, leaves)
