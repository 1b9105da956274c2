"""Mistakes in regions, in what is compared with a claim, and in what is said of a deployed run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

from buffet_checker import (
    cells,
    certificate,
    deployed,
    known,
    pieces,
    programs,
    properties,
    regions,
    rows,
    substitution,
    trees,
)
from buffet_checker.functions import Function
from buffet_checker.substitution import Claimed
from checker_mutants.wrong import (
    NONE,
    Mutant,
    Wrong,
    fixed,
    half,
    nothing,
    only,
    result,
)

check = import_module("buffet_checker.check")  # the package has a function of this name


# --- regions ------------------------------------------------------------------------------------------------


def _raised(when: Callable[[Any], bool]) -> Wrong:
    """Minima that are a billionth too large."""
    return lambda right: (
        lambda self, form: right(self, form) * (1 - 1e-9) if when(self) else right(self, form)
    )


def _other_norm(right: Any) -> Any:
    dual = {1.0: math.inf, math.inf: 1.0, 1.5: 3.0, 3.0: 1.5}
    return lambda self, form: right(replace(self, p=dual.get(self.p, self.p)), form)


def _free_gain(right: Any) -> Any:
    def wrong(self: regions.Cell, form: Any) -> Any:
        nearer = replace(self, low=tuple(v + 1e-9 for v in self.low), high=tuple(v - 1e-9 for v in self.high))
        return right(nearer, form)

    return wrong


def _one_fewer(right: Any) -> Any:
    return lambda self, form: right(replace(self, budget=self.budget - 1), form)


def _known_offsets(right: Any) -> Any:
    return lambda self, form: right(replace(self, error=0 * self.error), form)


def _first_choice(right: Any) -> Any:
    return lambda self, form: right(replace(self, offsets=self.offsets[:, :1], error=self.error[:, :1]), form)


def _same_rounding(right: Any) -> Any:
    """Ends of a box without the rounding of their difference to the rows."""

    def wrong(*args: Any, **whole: Any) -> Any:
        region = right(*args, **whole)
        if type(region) is regions.Box:
            low, high = np.nextafter(region.lower, np.inf), np.nextafter(region.upper, -np.inf)
            return replace(region, lower=low, upper=high)
        return region

    return wrong


def _less(found: Any) -> Any:
    return found * (1 - 1e-6)


def _without_last(right: Any) -> Any:
    return lambda self, form, far: right(
        replace(self, offsets=self.offsets[:, :1], error=self.error[:, :1]), form, far
    )


_REGIONS = (
    *(
        Mutant(f"minimum over L{p:g}", regions.Ball, "minimum", _raised(lambda self, p=p: self.p == p))
        for p in (1.0, 1.5, 2.0, 3.0, math.inf)
    ),
    Mutant("dual norm", regions.Ball, "minimum", _other_norm),
    Mutant("errors of powers", regions, "FUNCTION", fixed(0.0)),
    Mutant("unit of a norm", regions, "U", fixed(0.0)),
    Mutant("minimum over a box", regions.Box, "minimum", _raised(lambda self: True)),
    Mutant("ends of a box", check, "region_of", _same_rounding),
    Mutant("reach of a region", regions.Region, "reach", result(half)),
    Mutant("minimum over candidates", regions.Candidates, "minimum", _raised(lambda self: True)),
    Mutant("budget", regions.Candidates, "minimum", _one_fewer),
    Mutant("last candidate", regions.Candidates, "minimum", _first_choice),
    Mutant("offsets of candidates", regions.Candidates, "minimum", _known_offsets),
    Mutant("minimum over a cell", regions.Cell, "minimum", _raised(lambda self: True)),
    Mutant("planes of a cell", regions.Cell, "minimum", _free_gain),
    Mutant("sizes of values", regions.Region, "size", result(nothing)),
    Mutant("left in a ball", regions.Ball, "left", result(_less)),
    Mutant("left in a box", regions.Box, "left", result(_less)),
    Mutant("left among candidates", regions.Candidates, "left", result(_less)),
    Mutant("candidates' distances", regions.Candidates, "left", _without_last),
    Mutant("chosen candidates", certificate, "_picked", lambda right: _one_fewer_chosen(right)),
    Mutant("moved rows", rows.Local, "compose", lambda right: _first_word(right)),
)


def _one_fewer_chosen(right: Any) -> Any:
    return lambda given, own, words: right(given, own, tuple(frozenset(sorted(w)[1:]) for w in words))


def _first_word(right: Any) -> Any:
    def wrong(self: rows.Local, given: Any, moved: Any) -> Any:
        found = right(self, given, moved)
        if len(found) > 1:
            found[1:] *= 1 - 1e-9
        return found

    return wrong


# --- what a certificate claims ------------------------------------------------------------------------------


def _hashes(right: Any) -> Any:
    return lambda found, model: right(replace(found, model=dict(model.hashes)), model)


def _input(right: Any) -> Any:
    def wrong(found: Any, query: Any, network: Any) -> Any:
        stored = np.ascontiguousarray(found.tensors.stored.tensors[query.center])
        return right(found, replace(query, input=check.sha256(stored.tobytes())), network)

    return wrong


def _claim(**changed: Callable[[Any, Any], Any]) -> Wrong:
    """A proof of another claim than the one that is made."""

    def wrong(right: Any) -> Any:
        def prove(found: Any, claim: Any, checkpoint: Any, given: Any, *rest: Any) -> Any:
            nodes = check.build(checkpoint, given, found.goal(claim), claim.graph)[0]
            fields = {name: change(claim, nodes) for name, change in changed.items()}
            return right(found, replace(claim, **fields), checkpoint, given, *rest)

        return prove

    return wrong


def _unchecked_boxes(right: Any) -> Any:
    def wrong(self: Claimed, index: int, node: Any) -> None:
        claimed = self.tensors.get(f"{self.claim.number}.box.{index}", [(2, *self.values[index].shape)])
        if claimed is not None:
            self.boxes[index] = claimed[0], claimed[1]
            self.derived.pop(index, None)
        right(self, index, node)

    return wrong


def _all_shares(right: Any) -> Any:
    return lambda self, name, shapes, share=False: right(self, name, shapes, False)


def _margins(claim: Any, nodes: Any) -> tuple[float, ...]:
    return (1e-9,) * len(nodes[-1].bias)


_CLAIMS = (
    Mutant("hashes of the model", check, "_network", _hashes, "forgery"),
    Mutant("hash of the input", check, "_rows", _input, "forgery"),
    Mutant("margins", check, "_prove", _claim(margins=_margins), "forgery"),
    Mutant("nodes", check, "_prove", _claim(kinds=lambda c, nodes: tuple(n.kind for n in nodes)), "forgery"),
    Mutant("boxes", Claimed, "_settle", _unchecked_boxes, "forgery"),
    Mutant("shares", certificate.Tensors, "get", _all_shares, "forgery"),
    Mutant("arrays left over", certificate.Tensors, "leftover", fixed(lambda self: None), "forgery"),
    Mutant("coverage", cells, "_check_cover", fixed(lambda claims, rows, tensors: None), "forgery"),
    Mutant("coverage of boxes", cells, "_ends_cover", fixed(lambda whole, ends: True), "forgery"),
    Mutant("coverage of candidates", cells, "_choices_cover", fixed(lambda whole, sets: True), "forgery"),
    Mutant("ends of parts", cells, "_box_ends", lambda right: _first_part_twice(right), "forgery"),
    Mutant("what parts share", cells, "SAME", fixed(dict.fromkeys(cells.SAME, ("kind",))), "forgery"),
    Mutant("meeting of two derivations", substitution, "_meet", lambda right: _first_kept(right)),
)


def _first_part_twice(right: Any) -> Any:
    def wrong(*args: Any) -> Any:
        whole, _ = right(*args)
        return whole, [whole]

    return wrong


def _first_kept(right: Any) -> Any:
    def wrong(a: Any, b: Any) -> Any:
        low, high, below, above = right(a, b)
        return low + 1e-9 * (high - low), high, below, above

    return wrong


# --- networks that are stored, and properties -----------------------------------------------------------


def _unread_layout(right: Any) -> Any:
    def wrong(tensors: Any) -> Any:
        return tensors.need("network.layout", [tensors.stored.tensors["network.layout"].shape])

    return wrong


def _first_case(right: Any) -> Any:
    return lambda goal, rows: right(goal, rows)[:2]


def _always_least(right: Any) -> Any:
    return lambda source, weight, bias: float(bias.min())


def _fits(*given: Any) -> None:
    pass


_STORED = (
    Mutant("agreement with the file", check, "measured", fixed(_fits), "forgery"),
    Mutant("places of entries", programs, "_layout", _unread_layout, "forgery"),
    Mutant("rows of nothing", check, "_check_zero", fixed(_fits), "forgery"),
    Mutant("entries of nothing", check, "_check_blank", fixed(_fits), "forgery"),
    Mutant("cases", check, "cases_of", _first_case, "forgery"),
    Mutant("what is claimed", check, "_check_margins", fixed(_fits), "forgery"),
    Mutant("queries", check, "_check_answered", fixed(_fits), "forgery"),
    Mutant("factors", programs, "_positive", fixed(lambda value, where: value), "forgery"),
    Mutant("constants of rows", properties, "_exact", fixed(lambda *given: True), "forgery"),
    Mutant("least of any sum", programs, "_least", _always_least),
)


# --- trees --------------------------------------------------------------------------------------------------


def _best_leaf(right: Any) -> Any:
    def wrong(whole: Claimed, margins: Any) -> Any:
        exact, strayed = margins
        for number, tree in enumerate(whole.claim.trees):
            for k, leaf in enumerate(tree):
                found = trees.leaf_margins(whole, leaf, f"{whole.claim.number}.leaf.{number}.{k}")
                exact = np.maximum(exact, found[0])
        return exact, strayed

    return wrong


def _other_side(right: Any) -> Any:
    return lambda box, cut: right(box, replace(cut, above=not cut.above))


def _both_nearer(right: Any) -> Any:
    def wrong(box: Any, cut: Any) -> Any:
        return right(box, replace(cut, threshold=cut.threshold + (1e-6 if cut.above else -1e-6)))

    return wrong


def _without_threshold(right: Any) -> Any:
    return property(lambda self: (self.node, self.entry))


def _by_thresholds(right: Any) -> Any:
    return property(lambda self: self.threshold)


def _halves_may_miss(right: Any) -> Any:
    """Where a single leaf is left, it is taken for everything there."""

    def wrong(paths: Any) -> bool:
        parts = [(list(paths), 0)]
        while parts:
            leaves, depth = parts.pop()
            if len(leaves) <= 1:
                continue
            if any(len(path) == depth for path in leaves) or len({p[depth].place for p in leaves}) > 1:
                return False
            parts += [([p for p in leaves if p[depth].above == side], depth + 1) for side in (False, True)]
        return True

    return wrong


def _any_stem(right: Any) -> Any:
    def wrong(self: Any, leaf: Any, name: str) -> Any:
        cuts = () if leaf.stem is None else self.whole.claim.stems[leaf.stem].cuts
        return right(self, replace(leaf, cuts=(*leaf.cuts, *cuts)), name)

    return wrong


_TREES = (
    Mutant("parts of stems", trees._Stems, "of", _any_stem, "forgery"),
    Mutant("coverage of leaves", trees, "covers", fixed(lambda paths: True), "forgery"),
    Mutant("both halves of a cut", trees, "covers", _halves_may_miss, "forgery"),
    Mutant("thresholds of cuts", certificate.Cut, "place", _without_threshold, "forgery"),
    Mutant("entries of cuts", certificate.Cut, "place", _by_thresholds, "forgery"),
    Mutant("sides of cuts", trees, "clipped", _other_side, "forgery"),
    Mutant("ends at cuts", trees, "clipped", _both_nearer, "forgery"),
    Mutant("the worst leaf", check, "with_trees", _best_leaf, "forgery"),
)


# --- a deployed run -----------------------------------------------------------------------------------------


def _rounding_of(kind: str) -> Wrong:
    return lambda right: (
        lambda nodes, index, *rest: right(nodes, index, *rest) * (0.0 if nodes[index].kind == kind else 1.0)
    )


def _strain_of(when: Callable[[Any, Any], bool]) -> Wrong:
    return only(lambda node, piece, *rest: when(node, piece), nothing)


def _wobble(right: Any) -> Any:
    def wrong(self: Claimed, *args: Any) -> Any:
        form = right(self, *args)
        return rows.Form(form.lower, form.upper, 0.5 * form.wobble)

    return wrong


def _local_wobble(right: Any) -> Any:
    def wrong(self: Claimed, index: int, node: Any) -> None:
        right(self, index, node)
        if index in self.locals:
            self.locals[index] = replace(self.locals[index], wobble=0.5 * self.locals[index].wobble)

    return wrong


def _no_escape(right: Any) -> Any:
    def wrong(self: Claimed, index: int, node: Any) -> None:
        right(self, index, node)
        self.escapes[index] = 0.5 * self.escapes[index]

    return wrong


_DEPLOYED = (
    *(
        Mutant(f"rounding of {kind}", substitution, "local_rounding", _rounding_of(kind), "slack")
        for kind in (
            "affine",
            "diagonal",
            "center",
            "mean",
            "add",
            "scores",
            "mix",
            "rescale",
            "softmax",
            "normalise",
            "apply",
        )
    ),
    Mutant("sums in float32", deployed, "_gamma", NONE, "slack"),
    Mutant("sizes of products", deployed, "_products", result(half), "slack"),
    *(
        Mutant(f"units of {name}", deployed, "_UNITS", lambda units, name=name: {**units, name: 0.0}, "slack")
        for name in ("tanh", "gelu", "gelu_tanh", "square", "rsqrt")
    ),
    Mutant(
        "strain of lines",
        known,
        "strain",
        _strain_of(lambda node, piece: isinstance(piece, pieces.LinesPiece)),
        "slack",
    ),
    Mutant(
        "strain of softmax",
        known,
        "strain",
        _strain_of(lambda node, p: node.kind == "softmax"),
        "slack",
    ),
    Mutant(
        "strain of products",
        known,
        "strain",
        _strain_of(lambda node, piece: isinstance(piece, pieces.PlanesPiece)),
        "slack",
    ),
    Mutant("overshoot", deployed, "_overshoot", result(half), "slack"),
    Mutant("slopes beyond an end", Function, "slopes", result(lambda s: (half(s[0]), half(s[1]))), "slack"),
    Mutant("drift", substitution, "drift", result(half), "slack"),
    Mutant("variation", deployed, "_variation", result(half), "slack"),
    Mutant("escapes", Claimed, "_settle", _no_escape, "slack"),
    Mutant("wobble of pushed forms", Claimed, "_pushed", _wobble, "slack"),
    Mutant("wobble of exact forms", Claimed, "_visit", _local_wobble, "slack"),
)

MUTANTS: tuple[Mutant, ...] = (*_REGIONS, *_CLAIMS, *_STORED, *_TREES, *_DEPLOYED)
