"""A certificate as it is stored, read with suspicion: `docs/certificates.md` describes the format.

Whatever is malformed is a `RejectedError` that says where; nothing in a certificate is trusted beyond its
syntax here.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from buffet_checker.balls import Array
from buffet_checker.errors import BadInputError, RejectedError
from buffet_checker.network import GRAPHS
from buffet_checker.regions import Ball, Box, Candidates, Cell, Region
from buffet_checker.sentence import Sentence
from buffet_checker.storage import Stored, parse, parse_json

SCHEMA, SCHEMAS = 2, (1, 2)
"""What is written, and what is read: schema 1 names no sentence, and has no key for one."""
KEY = "buffet-certificate"
VOCABULARIES = ("tokenizer.json", "vocab.txt")
"""Files that say how token ids are spelled; a certificate may name one of them."""
LARGEST = 1e100
"""No number of a certificate may be larger: far beyond any proof, and far from overflow."""
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


@dataclass
class Tensors:
    """The arrays of one file; every one has to be asked for exactly as it is, and none may be left over."""

    stored: Stored
    used: set[str] = field(default_factory=set)

    def get(self, name: str, shapes: list[tuple[int, ...]], share: bool = False) -> Array | None:
        """A finite float64 copy of an array of one of the shapes, within [0, 1] if it is a share; or None."""
        value = self.stored.tensors.get(name)
        if value is None:
            return None
        self.used.add(name)
        if value.shape not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise RejectedError(f"{name} has shape {list(value.shape)}, expected {wanted}")
        wide = value.astype(np.float64)
        if not (np.abs(wide) <= LARGEST).all():
            raise RejectedError(f"{name} holds NaN, infinity or an absurd number")
        if share and not ((wide >= 0) & (wide <= 1)).all():
            raise RejectedError(f"{name} holds a number outside [0, 1]")
        return wide

    def need(self, name: str, shapes: list[tuple[int, ...]], share: bool = False) -> Array:
        value = self.get(name, shapes, share)
        if value is None:
            raise RejectedError(f"{name} is missing")
        return value

    def leftover(self) -> None:
        rest = sorted(self.stored.tensors.keys() - self.used)
        if rest:
            raise RejectedError(f"{rest[0][:80]!r} is an array that nothing refers to")


@dataclass(frozen=True)
class Claim:
    """One task: for no point of the region is a margin below what is claimed."""

    number: int
    graph: str
    kinds: tuple[str, ...]
    region: dict[str, Any]
    margins: tuple[float, ...]
    derivations: tuple[Derivation, ...]
    trees: tuple[tuple[Leaf, ...], ...] = ()  # each covers the region


@dataclass(frozen=True)
class Certificate:
    model: dict[str, str]
    input: str
    label: int
    sentence: Sentence | None  # without its vocabulary
    claims: tuple[Claim, ...]
    tensors: Tensors


def read_certificate(content: bytes, where: str) -> Certificate:
    stored = parse(content, where)
    if KEY not in stored.metadata:
        raise BadInputError(f"{where}: no certificate: its metadata have no {KEY!r}")
    head = parse_json(stored.metadata[KEY], where)
    found = head.get("schema") if isinstance(head, dict) else None
    if type(found) is not int or found not in SCHEMAS:
        known = " and ".join(map(str, SCHEMAS))
        raise BadInputError(f"{where}: schema {found!r:.20}; this checker reads schemas {known}")
    needed = {"schema", "model", "input", "label", "claims"} | ({"sentence"} if found > 1 else set())
    keys = _object(head, "head", needed, {"made"})
    sentence = None if keys.get("sentence") is None else _sentence(keys["sentence"])
    spelling = set() if sentence is None else set(VOCABULARIES)
    model = _object(keys["model"], "model", {"config.json", "model.safetensors"}, spelling)
    if len(model) > 3:
        raise RejectedError("model: names two vocabularies")
    claims = _list(keys["claims"], "claims")
    if not claims:
        raise RejectedError("claims is empty: there is nothing to check")
    return Certificate(
        model={name: _text(value, f"model.{name}") for name, value in model.items()},
        input=_text(keys["input"], "input"),
        label=_count(keys["label"], "label"),
        sentence=sentence,
        claims=tuple(_claim(i, claim) for i, claim in enumerate(claims)),
        tensors=Tensors(stored),
    )


def _sentence(raw: Any) -> Sentence:
    keys = _object(raw, "sentence", {"ids", "types"})
    return Sentence(_counts(keys["ids"], "sentence.ids"), _counts(keys["types"], "sentence.types"))


def _claim(number: int, raw: Any) -> Claim:
    where = f"claims[{number}]"
    claim = _object(raw, where, {"graph", "nodes", "region", "margins", "derivations"}, {"method", "trees"})
    if claim["graph"] not in GRAPHS:
        raise RejectedError(f"{where}.graph is {claim['graph']!r:.40}; known are {', '.join(GRAPHS)}")
    region = _object(
        claim["region"],
        f"{where}.region",
        {"kind", "moved"},
        {"p", "eps", "lower", "upper", "budget", "cuts", "rows", "ids", "whole", "choices"},
    )
    if not isinstance(region["kind"], str):
        raise RejectedError(f"{where}.region.kind is no text")
    if "whole" in region:
        _count(region["whole"], f"{where}.region.whole")
    if region["kind"] == "cell":
        _object(region, f"{where}.region", {"kind", "moved", "p", "eps", "cuts", "rows", "lower", "upper"})
        _count(region["cuts"], f"{where}.region.cuts")
    return Claim(
        number=number,
        graph=claim["graph"],
        kinds=tuple(_text(k, f"{where}.nodes") for k in _list(claim["nodes"], f"{where}.nodes")),
        region=region,
        margins=tuple(_number(m, f"{where}.margins") for m in _list(claim["margins"], f"{where}.margins")),
        derivations=_derivations(claim["derivations"], f"{where}.derivations"),
        trees=tuple(
            _tree(tree, f"{where}.trees[{i}]")
            for i, tree in enumerate(_list(claim.get("trees", []), f"{where}.trees"))
        ),
    )


def _tree(raw: Any, where: str) -> tuple[Leaf, ...]:
    leaves = _list(raw, where)
    if len(leaves) > MOST_LEAVES:
        raise RejectedError(f"{where} has {len(leaves)} leaves; at most {MOST_LEAVES} are read")
    found = []
    for number, raw_leaf in enumerate(leaves):
        own = f"{where}[{number}]"
        leaf = _object(raw_leaf, own, {"cuts", "derivations"})
        cuts = tuple(_cut(cut, f"{own}.cuts") for cut in _list(leaf["cuts"], f"{own}.cuts"))
        found.append(Leaf(cuts, _derivations(leaf["derivations"], f"{own}.derivations")))
    return tuple(found)


def _cut(raw: Any, where: str) -> Cut:
    parts = _list(raw, where)
    if len(parts) != 4 or parts[3] not in ("below", "above"):
        raise RejectedError(f"{where}: a cut is [node, entry, threshold, 'below' or 'above']")
    node, entry = _counts(parts[:2], where)
    return Cut(node, entry, _number(parts[2], where), parts[3] == "above")


def _derivations(raw: Any, where: str) -> tuple[Derivation, ...]:
    return tuple(_derivation(d, f"{where}[{i}]") for i, d in enumerate(_list(raw, where)))


def _derivation(raw: Any, where: str) -> Derivation:
    entry = _object(raw, where, {"nodes"}, {"push", "choices", "stops", "keep"})
    nodes = _counts(entry["nodes"], f"{where}.nodes")
    if not nodes or any(a >= b for a, b in pairwise(nodes)):
        raise RejectedError(f"{where}.nodes must be rising numbers")
    flags = [entry.get(key, False) for key in ("push", "keep")]
    if not all(isinstance(flag, bool) for flag in flags):
        raise RejectedError(f"{where}: push and keep are true or false")
    stops = _counts(entry.get("stops", []), f"{where}.stops")
    choices = _count(entry.get("choices", 0), f"{where}.choices")
    return Derivation(nodes, flags[0], choices, stops, flags[1])


def region_of(claim: Claim, rows: Array, tensors: Tensors, whole: bool = False) -> Region:
    """The region of a claim, around the rows of the sentence; or the whole that it says to be a part of."""
    where, raw = f"claims[{claim.number}].region", claim.region
    moved = _counts(raw["moved"], f"{where}.moved")
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
        _object(raw, where, {"kind", "moved", "p", "eps"})
    eps = _number(raw["eps"], f"{where}.eps")
    p = math.inf if raw["p"] == "inf" else _number(raw["p"], f"{where}.p")
    if not 0 <= eps <= LARGEST or not p >= 1:
        raise RejectedError(f"{where}: eps {eps} must be ≥ 0 and p {p} ≥ 1")
    end = np.full((len(index), rows.shape[1]), eps)
    if raw["kind"] == "ball":
        return Ball(index, -end, end, p, eps)
    places = _counts(raw["rows"], f"{where}.rows")
    if not places or max(places) >= len(index):
        raise RejectedError(f"{where}.rows must name moved rows")
    directions = tensors.need(f"cuts.{raw['cuts']}", [(len(places), rows.shape[1])])
    low, high = zip(*cell_ends(claim), strict=True)
    return Cell(index, -end, end, p, eps, places, directions, low, high)


def _box(claim: Claim, index: Array, rows: Array, tensors: Tensors, whole: bool) -> Box:
    where, raw = f"claims[{claim.number}].region", claim.region
    _object(raw, where, {"kind", "moved"}, {"whole"})
    name = f"whole.{raw['whole']}" if whole and "whole" in raw else f"{claim.number}.region"
    own = rows[index]
    lower, upper = (tensors.need(f"{name}.{side}", [own.shape]) for side in ("lower", "upper"))
    if not (lower <= upper).all():
        raise RejectedError(f"{where}: a lower end is above its upper end")
    return Box(index, np.nextafter(lower - own, -np.inf), np.nextafter(upper - own, np.inf))


def _candidates(claim: Claim, index: Array, rows: Array, tensors: Tensors, whole: bool) -> Candidates:
    where, name = f"claims[{claim.number}].region", candidate_rows(claim)
    _object(claim.region, where, {"kind", "moved", "budget"}, {"ids", "whole", "choices"})
    found = tensors.stored.tensors.get(name)
    choices = 0 if found is None or found.ndim != 3 else found.shape[1]
    given, own = tensors.need(name, [(len(index), choices, rows.shape[1])]), rows[index][:, None]
    if "whole" in claim.region and not whole:
        given = _picked(given, own, picked(claim, choices))
    offsets = given - own
    error = np.spacing(np.abs(offsets)) * (given != own)
    low = np.minimum(np.nextafter((offsets - error).min(1), -np.inf), 0.0)
    high = np.maximum(np.nextafter((offsets + error).max(1), np.inf), 0.0)
    return Candidates(index, low, high, offsets, error, _count(claim.region["budget"], f"{where}.budget"))


def candidate_rows(claim: Claim) -> str:
    """The name of the array of candidates: that of the whole, of which a part has some."""
    return f"whole.{claim.region['whole']}.rows" if "whole" in claim.region else f"{claim.number}.region.rows"


def picked(claim: Claim, choices: int) -> tuple[frozenset[int], ...]:
    """Which of the candidates of its whole every word of a part has; the original besides."""
    where = f"claims[{claim.number}].region.choices"
    words = [_list(word, where) for word in _list(claim.region.get("choices"), where)]
    found = tuple(frozenset(_count(i, where) for i in word) for word in words)
    if len(found) != len(_list(claim.region["moved"], where)) or any(
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
        side = _list(raw[key], f"{where}.{key}")
        sides.append([none if end is None else _number(end, f"{where}.{key}") for end in side])
    if not len(sides[0]) == len(sides[1]) == len(_list(raw["rows"], f"{where}.rows")):
        raise RejectedError(f"{where}: lower and upper have an end for every cut")
    if not all(low < high for low, high in zip(*sides, strict=True)):
        raise RejectedError(f"{where}: a lower end is not below its upper end")
    return tuple(zip(*sides, strict=True))


def _object(raw: Any, where: str, needed: Set[str], optional: Set[str] = frozenset()) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise RejectedError(f"{where} is no object")
    if missing := needed - raw.keys():
        raise RejectedError(f"{where} has no {min(missing)}")
    if extra := raw.keys() - needed - optional:
        raise RejectedError(f"{where} has an unknown key {min(extra)!r:.40}")
    return raw


def _list(raw: Any, where: str) -> list[Any]:
    if not isinstance(raw, list):
        raise RejectedError(f"{where} is no list")
    return raw


def _text(raw: Any, where: str) -> str:
    if not isinstance(raw, str):
        raise RejectedError(f"{where} is no text")
    return raw


def _count(raw: Any, where: str) -> int:
    if type(raw) is not int or not 0 <= raw < 1 << 31:
        raise RejectedError(f"{where} is {raw!r:.40}; expected a whole number ≥ 0")
    return raw


def _counts(raw: Any, where: str) -> tuple[int, ...]:
    return tuple(_count(number, where) for number in _list(raw, where))


def _number(raw: Any, where: str) -> float:
    if type(raw) not in (int, float) or not -LARGEST <= raw <= LARGEST:
        raise RejectedError(f"{where} is {raw!r:.40}; expected a number")
    return float(raw)
