"""A certificate as it is stored, read with suspicion: `docs/certificates.md` describes the format.

Whatever is malformed is a `RejectedError` that says where; nothing in a certificate is trusted beyond its
syntax here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from buffet_checker import fields
from buffet_checker.arrays import Tensors
from buffet_checker.balls import Array
from buffet_checker.errors import BadInputError, RejectedError
from buffet_checker.fields import LARGEST
from buffet_checker.graph import GRAPHS
from buffet_checker.programs import Program, read_program
from buffet_checker.properties import Goal, read_property
from buffet_checker.regions import Ball, Box, Candidates, Cell, Region
from buffet_checker.sentence import Sentence
from buffet_checker.storage import parse, parse_json

SCHEMA, OF_QUERIES, SCHEMAS = 2, 3, (1, 2, 3)
"""What is written, of a label and of queries, and what is read: schema 1 names no sentence, and has no key
for one; schema 3 is about properties, and may store its network."""
KEY = "buffet-certificate"
VOCABULARIES = ("tokenizer.json", "vocab.txt")
"""Files that say how token ids are spelled; a certificate may name one of them."""
MOST_LEAVES = 1 << 16
"""Of one tree."""


@dataclass(frozen=True)
class Derivation:
    """How boxes (and linear forms, if they are kept) of some nodes are derived."""

    nodes: tuple[int, ...]
    push: bool  # from the forms of the inputs; otherwise rows are substituted backwards
    choices: int = 0  # which set of choices relaxes the nonlinearities on the way
    stops: tuple[int, ...] = ()  # nodes whose kept forms end the substitution
    keep: bool = False


@dataclass(frozen=True)
class Cut:
    """One side of a threshold on the deviation of an entry of a node."""

    node: int
    entry: int  # of its flattened values
    threshold: float
    above: bool

    @property
    def place(self) -> tuple[int, int, float]:
        """What both sides have in common."""
        return self.node, self.entry, self.threshold


@dataclass(frozen=True)
class Leaf:
    """A part of a region: on these sides of the cuts, which are named in the order they were made."""

    cuts: tuple[Cut, ...]
    derivations: tuple[Derivation, ...]
    stem: int | None = None  # whose boxes and choices it shares; None: those of the whole


@dataclass(frozen=True)
class Stem:
    """A part of a region in which everything is derived anew."""

    cuts: tuple[Cut, ...]
    derivations: tuple[Derivation, ...]


@dataclass(frozen=True)
class Claim:
    """One task: for no point of the region is a margin below what is claimed."""

    number: int
    graph: str
    kinds: tuple[str, ...]
    region: dict[str, Any]
    margins: tuple[float, ...]  # −inf: nothing is claimed of it
    derivations: tuple[Derivation, ...]
    trees: tuple[tuple[Leaf, ...], ...] = ()  # each covers the region
    query: int = 0
    stems: tuple[Stem, ...] = ()


@dataclass(frozen=True)
class Query:
    """What the network is asked around some rows."""

    center: str  # the name of the array of these rows
    input: str  # its hash
    goal: Goal


@dataclass(frozen=True)
class Certificate:
    model: dict[str, str]
    program: Program | None  # a network that is stored; None: it is that of a checkpoint
    queries: tuple[Query, ...]
    sentence: Sentence | None  # without its vocabulary
    claims: tuple[Claim, ...]
    tensors: Tensors

    @property
    def label(self) -> int | None:
        """The class that is defended, if that is what all is about."""
        goal = self.queries[0].goal
        return goal if isinstance(goal, int) else None

    def goal(self, claim: Claim) -> Goal:
        return self.queries[claim.query].goal


def read_certificate(content: bytes, where: str) -> Certificate:
    stored = parse(content, where)
    if KEY not in stored.metadata:
        raise BadInputError(f"{where}: no certificate: its metadata have no {KEY!r}")
    head = parse_json(stored.metadata[KEY], where)
    schema = head.get("schema") if isinstance(head, dict) else None
    if type(schema) is not int or schema not in SCHEMAS:
        known = ", ".join(map(str, SCHEMAS))
        raise BadInputError(f"{where}: schema {schema!r:.20}; this checker reads schemas {known}")
    about = {"queries", "network"} if schema == OF_QUERIES else {"input", "label"}
    needed = {"schema", "model", "claims"} | about | ({"sentence"} if schema > 1 else set())
    keys = fields.mapping(head, "head", needed, {"made"})
    tensors = Tensors(stored)
    program = None if keys.get("network") is None else read_program(keys["network"], tensors)
    sentence = None if keys.get("sentence") is None else _sentence(keys["sentence"])
    if program is not None and sentence is not None:
        raise RejectedError("sentence: a network that is stored knows no tokens")
    claims = fields.sequence(keys["claims"], "claims")
    if not claims:
        raise RejectedError("claims is empty: there is nothing to check")
    queries = _queries(keys)
    return Certificate(
        model=_model(keys["model"], program is not None, sentence is not None),
        program=program,
        queries=queries,
        sentence=sentence,
        claims=tuple(_claim(i, claim, schema, len(queries)) for i, claim in enumerate(claims)),
        tensors=tensors,
    )


def _model(raw: Any, stored: bool, named: bool) -> dict[str, str]:
    """The hashes of the files of a model."""
    needed = {"onnx"} if stored else {"config.json", "model.safetensors"}
    model = fields.mapping(raw, "model", needed, set(VOCABULARIES) if named else set())
    if len(model) > 3:
        raise RejectedError("model: names two vocabularies")
    return {name: fields.text(value, f"model.{name}") for name, value in model.items()}


def _queries(keys: dict[str, Any]) -> tuple[Query, ...]:
    if "queries" not in keys:
        return (Query("center", fields.text(keys["input"], "input"), fields.count(keys["label"], "label")),)
    found = []
    for number, raw in enumerate(fields.sequence(keys["queries"], "queries")):
        where = f"queries[{number}]"
        query = fields.mapping(raw, where, {"input", "property"})
        goal = read_property(query["property"], f"{where}.property")
        found.append(Query(f"query.{number}.center", fields.text(query["input"], f"{where}.input"), goal))
    return tuple(found)


def _sentence(raw: Any) -> Sentence:
    keys = fields.mapping(raw, "sentence", {"ids", "types"})
    return Sentence(
        fields.counts(keys["ids"], "sentence.ids"), fields.counts(keys["types"], "sentence.types")
    )


def _claim(number: int, raw: Any, schema: int, queries: int) -> Claim:
    where, of_query = f"claims[{number}]", {"query"} if schema == OF_QUERIES else set()
    needed = {"graph", "nodes", "region", "margins", "derivations"} | of_query
    claim = fields.mapping(raw, where, needed, {"method", "trees", "stems"})
    query = fields.count(claim.get("query", 0), f"{where}.query")
    if query >= queries:
        raise RejectedError(f"{where}.query is {query}; there are {queries} queries")
    if claim["graph"] not in GRAPHS:
        raise RejectedError(f"{where}.graph is {claim['graph']!r:.40}; known are {', '.join(GRAPHS)}")
    region = fields.mapping(
        claim["region"],
        f"{where}.region",
        {"kind", "moved"},
        {"p", "eps", "lower", "upper", "budget", "cuts", "rows", "ids", "whole", "choices"},
    )
    if not isinstance(region["kind"], str):
        raise RejectedError(f"{where}.region.kind is no text")
    if "whole" in region:
        fields.count(region["whole"], f"{where}.region.whole")
    if region["kind"] == "cell":
        fields.mapping(
            region, f"{where}.region", {"kind", "moved", "p", "eps", "cuts", "rows", "lower", "upper"}
        )
        fields.count(region["cuts"], f"{where}.region.cuts")
    return Claim(
        number=number,
        graph=claim["graph"],
        kinds=tuple(
            fields.text(k, f"{where}.nodes") for k in fields.sequence(claim["nodes"], f"{where}.nodes")
        ),
        region=region,
        margins=tuple(
            -math.inf if m is None and of_query else fields.number(m, f"{where}.margins")
            for m in fields.sequence(claim["margins"], f"{where}.margins")
        ),
        derivations=_derivations(claim["derivations"], f"{where}.derivations"),
        trees=tuple(
            _tree(tree, f"{where}.trees[{i}]")
            for i, tree in enumerate(fields.sequence(claim.get("trees", []), f"{where}.trees"))
        ),
        query=query,
        stems=_stems(claim.get("stems", []), f"{where}.stems"),
    )


def _tree(raw: Any, where: str) -> tuple[Leaf, ...]:
    leaves = fields.sequence(raw, where)
    if len(leaves) > MOST_LEAVES:
        raise RejectedError(f"{where} has {len(leaves)} leaves; at most {MOST_LEAVES} are read")
    found = []
    for number, raw_leaf in enumerate(leaves):
        own = f"{where}[{number}]"
        leaf = fields.mapping(raw_leaf, own, {"cuts", "derivations"}, {"stem"})
        stem = fields.count(leaf["stem"], f"{own}.stem") if "stem" in leaf else None
        derivations = _derivations(leaf["derivations"], f"{own}.derivations")
        found.append(Leaf(_cuts(leaf["cuts"], f"{own}.cuts"), derivations, stem))
    return tuple(found)


def _stems(raw: Any, where: str) -> tuple[Stem, ...]:
    found = []
    for number, given in enumerate(fields.sequence(raw, where)):
        own = f"{where}[{number}]"
        stem = fields.mapping(given, own, {"cuts", "derivations"})
        derivations = _derivations(stem["derivations"], f"{own}.derivations")
        found.append(Stem(_cuts(stem["cuts"], f"{own}.cuts"), derivations))
    return tuple(found)


def _cuts(raw: Any, where: str) -> tuple[Cut, ...]:
    return tuple(_cut(cut, where) for cut in fields.sequence(raw, where))


def _cut(raw: Any, where: str) -> Cut:
    parts = fields.sequence(raw, where)
    if len(parts) != 4 or parts[3] not in ("below", "above"):
        raise RejectedError(f"{where}: a cut is [node, entry, threshold, 'below' or 'above']")
    node, entry = fields.counts(parts[:2], where)
    return Cut(node, entry, fields.number(parts[2], where), parts[3] == "above")


def _derivations(raw: Any, where: str) -> tuple[Derivation, ...]:
    return tuple(_derivation(d, f"{where}[{i}]") for i, d in enumerate(fields.sequence(raw, where)))


def _derivation(raw: Any, where: str) -> Derivation:
    entry = fields.mapping(raw, where, {"nodes"}, {"push", "choices", "stops", "keep"})
    nodes = fields.counts(entry["nodes"], f"{where}.nodes")
    if not nodes or any(a >= b for a, b in pairwise(nodes)):
        raise RejectedError(f"{where}.nodes must be rising numbers")
    flags = [entry.get(key, False) for key in ("push", "keep")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise RejectedError(f"{where}: push and keep are true or false")
    stops = fields.counts(entry.get("stops", []), f"{where}.stops")
    choices = fields.count(entry.get("choices", 0), f"{where}.choices")
    return Derivation(nodes, flags[0], choices, stops, flags[1])


def region_of(claim: Claim, rows: Array, tensors: Tensors, whole: bool = False) -> Region:
    """The region of a claim, around the rows of the sentence; or the whole that it says to be a part of."""
    where, raw = f"claims[{claim.number}].region", claim.region
    moved = fields.counts(raw["moved"], f"{where}.moved")
    if not moved or len(set(moved)) < len(moved) or max(moved) >= len(rows):
        raise RejectedError(f"{where}.moved must be different rows of the sentence (0 to {len(rows) - 1})")
    index = np.array(moved)
    match raw["kind"]:
        case "ball" | "cell":
            return _ball(claim, index, rows, tensors)
        case "box":
            return _box(claim, index, rows, tensors, whole)
        case "candidates":
            return _candidates(claim, index, rows, tensors, whole)
    raise RejectedError(f"{where}.kind is {raw['kind']!r:.40}; known are ball, cell, box and candidates")


def _ball(claim: Claim, index: Array, rows: Array, tensors: Tensors) -> Ball:
    where, raw = f"claims[{claim.number}].region", claim.region
    if raw["kind"] == "ball":
        fields.mapping(raw, where, {"kind", "moved", "p", "eps"})
    eps = fields.number(raw["eps"], f"{where}.eps")
    p = math.inf if raw["p"] == "inf" else fields.number(raw["p"], f"{where}.p")
    if not 0 <= eps <= LARGEST or not p >= 1:
        raise RejectedError(f"{where}: eps {eps} must be ≥ 0 and p {p} ≥ 1")
    end = np.full((len(index), rows.shape[1]), eps)
    if raw["kind"] == "ball":
        return Ball(index, -end, end, p, eps)
    places = fields.counts(raw["rows"], f"{where}.rows")
    if not places or max(places) >= len(index):
        raise RejectedError(f"{where}.rows must name moved rows")
    directions = tensors.need(f"cuts.{raw['cuts']}", [(len(places), rows.shape[1])])
    low, high = zip(*cell_ends(claim), strict=True)
    return Cell(index, -end, end, p, eps, places, directions, low, high)


def _box(claim: Claim, index: Array, rows: Array, tensors: Tensors, whole: bool) -> Box:
    where, raw = f"claims[{claim.number}].region", claim.region
    fields.mapping(raw, where, {"kind", "moved"}, {"whole"})
    name = f"whole.{raw['whole']}" if whole and "whole" in raw else f"{claim.number}.region"
    own = rows[index]
    lower, upper = (tensors.need(f"{name}.{side}", [own.shape]) for side in ("lower", "upper"))
    if not (lower <= upper).all():
        raise RejectedError(f"{where}: a lower end is above its upper end")
    return Box(index, np.nextafter(lower - own, -np.inf), np.nextafter(upper - own, np.inf))


def _candidates(claim: Claim, index: Array, rows: Array, tensors: Tensors, whole: bool) -> Candidates:
    where, name = f"claims[{claim.number}].region", candidate_rows(claim)
    fields.mapping(claim.region, where, {"kind", "moved", "budget"}, {"ids", "whole", "choices"})
    found = tensors.stored.tensors.get(name)
    choices = 0 if found is None or found.ndim != 3 else found.shape[1]
    given, own = tensors.need(name, [(len(index), choices, rows.shape[1])]), rows[index][:, None]
    if "whole" in claim.region and not whole:
        given = _picked(given, own, picked(claim, choices))
    offsets = given - own
    error = np.spacing(np.abs(offsets)) * (given != own)
    low = np.minimum(np.nextafter((offsets - error).min(1), -np.inf), 0.0)
    high = np.maximum(np.nextafter((offsets + error).max(1), np.inf), 0.0)
    return Candidates(
        index, low, high, offsets, error, fields.count(claim.region["budget"], f"{where}.budget")
    )


def candidate_rows(claim: Claim) -> str:
    """The name of the array of candidates: that of the whole, of which a part has some."""
    return f"whole.{claim.region['whole']}.rows" if "whole" in claim.region else f"{claim.number}.region.rows"


def picked(claim: Claim, choices: int) -> tuple[frozenset[int], ...]:
    """Which of the candidates of its whole every word of a part has; the original besides."""
    where = f"claims[{claim.number}].region.choices"
    words = [fields.sequence(word, where) for word in fields.sequence(claim.region.get("choices"), where)]
    found = tuple(frozenset(fields.count(i, where) for i in word) for word in words)
    if len(found) != len(fields.sequence(claim.region["moved"], where)) or any(
        i >= choices for word in found for i in word
    ):
        raise RejectedError(f"{where} must be numbers of candidates (0 to {choices - 1}) for every moved row")
    return found


def _picked(given: Array, own: Array, words: tuple[frozenset[int], ...]) -> Array:
    """These candidates of every word, the original in place of the others."""
    chosen = np.zeros(given.shape[:2], bool)
    for row, word in zip(chosen, words, strict=True):
        row[sorted(word)] = True
    return np.where(chosen[..., None], given, own)


def cell_ends(claim: Claim) -> tuple[tuple[float, float], ...]:
    """The two ends of a cell along every cut; null in the file is no end."""
    where, raw = f"claims[{claim.number}].region", claim.region
    sides = []
    for key, none in (("lower", -math.inf), ("upper", math.inf)):
        side = fields.sequence(raw[key], f"{where}.{key}")
        sides.append([none if end is None else fields.number(end, f"{where}.{key}") for end in side])
    if not len(sides[0]) == len(sides[1]) == len(fields.sequence(raw["rows"], f"{where}.rows")):
        raise RejectedError(f"{where}: lower and upper have an end for every cut")
    if not all(low < high for low, high in zip(*sides, strict=True)):
        raise RejectedError(f"{where}: a lower end is not below its upper end")
    return tuple(zip(*sides, strict=True))
