"""Certificates that claim what no proof could show: true ones altered by hand."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from buffet_checker.network import Checkpoint
from corruptions import Opened
from false_certificates import base


def _claimed_margins(opened: Opened) -> None:
    opened.claim["margins"] = [100.0 for _ in opened.claim["margins"]]


def _no_margin(opened: Opened) -> None:
    opened.claim["margins"] = [0.0 for _ in opened.claim["margins"]]


def _fewer_margins(opened: Opened) -> None:
    opened.claim["margins"].pop()


def _tight_boxes(opened: Opened) -> None:
    for name, value in opened.tensors.items():
        if ".box." in name:
            opened.tensors[name] = value * 0.5


def _alpha(opened: Opened) -> None:
    kinds = opened.claim["nodes"]
    for name, value in opened.tensors.items():
        if name.count(".") == 3 and kinds[int(name.split(".")[2])] in ("scores", "mix", "normalise"):
            opened.tensors[name] = np.full_like(value, 1.0001)


def _other_model(opened: Opened) -> None:
    opened.head["model"]["model.safetensors"] = "0" * 64


def _other_config(opened: Opened) -> None:
    opened.head["model"]["config.json"] = "0" * 64


def _other_input(opened: Opened) -> None:
    opened.head["input"] = "0" * 64


def _other_nodes(opened: Opened) -> None:
    opened.claim["nodes"][3] = "identity"


def _more_tensors(opened: Opened) -> None:
    opened.tensors["more"] = np.zeros(2, np.float32)


def _lost_cell(opened: Opened) -> None:
    opened.head["claims"].pop()
    opened.tensors = {k: v for k, v in opened.tensors.items() if not k.startswith("1.")}


def _gap(opened: Opened) -> None:
    region = opened.head["claims"][1]["region"]
    region["lower"] = [region["lower"][0] + 1e-6]


def _other_ball(opened: Opened) -> None:
    opened.head["claims"][1]["region"]["eps"] *= 0.5


def _fewer_choices(opened: Opened) -> None:
    opened.head["claims"][1]["region"]["choices"] = [[1], [0]]


def _lower_end(opened: Opened) -> None:
    opened.tensors["1.region.lower"][0, 0] += 1e-7


def _wider_whole(opened: Opened) -> None:
    opened.tensors["whole.0.upper"] = opened.tensors["whole.0.upper"] + 1e-7


def _larger_budget(opened: Opened) -> None:
    opened.head["claims"][0]["region"]["budget"] += 1


def _leaves(opened: Opened) -> list[dict[str, Any]]:
    """The leaves of the first tree, and margins as large as they prove."""
    opened.claim["margins"] = [m - 1e-12 for m in base("tree").result.proofs[0].margins]
    return opened.claim["trees"][0]


def _lost_leaf(opened: Opened) -> None:
    number = len(_leaves(opened)) - 1
    _leaves(opened).pop()
    lost = f"0.leaf.0.{number}."
    opened.tensors = {k: v for k, v in opened.tensors.items() if not k.startswith(lost)}


def _gap_between_leaves(opened: Opened) -> None:
    first = _leaves(opened)[0]["cuts"][0]
    first[2] += -1e-6 if first[3] == "below" else 1e-6


def _another_entry(opened: Opened) -> None:
    opened.claim["trees"][0][-1]["cuts"][-1][1] += 1  # claims little, which this leaf proves anyway


def _one_side_twice(opened: Opened) -> None:
    sides = {True: "above", False: "below"}
    cut = _leaves(opened)[-1]["cuts"][-1]
    cut[3] = sides[cut[3] == "below"]


def _other_sides(opened: Opened) -> None:
    for leaf in _leaves(opened):
        for cut in leaf["cuts"]:
            cut[3] = "below" if cut[3] == "above" else "above"


def _more_than_leaves_prove(opened: Opened) -> None:
    _leaves(opened)
    opened.claim["margins"][0] += 1e-9


def _whole_only(opened: Opened) -> None:
    _leaves(opened)
    del opened.claim["trees"]
    derived = {d["choices"] for d in opened.claim["derivations"] if "choices" in d}
    opened.tensors = {
        k: v
        for k, v in opened.tensors.items()
        if k.count(".") < 3 or (k.count(".") == 3 and int(k.split(".")[1]) in derived)
    }


def _another_network(opened: Opened) -> None:
    number = len(opened.head["network"]["steps"])
    opened.tensors[f"network.{number}.weight"] = 1.01 * opened.tensors[f"network.{number}.weight"]


def _other_file(opened: Opened) -> None:
    opened.head["model"]["onnx"] = "0" * 64


def _entry_twice(opened: Opened) -> None:
    layout = opened.tensors["network.layout"]
    layout[layout == layout.max()] = 0


def _row_of_nothing(opened: Opened) -> None:
    center = opened.tensors["query.0.center"]
    center[-1, 0] = 1e-3
    _rehashed(opened)


def _rehashed(opened: Opened) -> None:
    center = np.ascontiguousarray(opened.tensors["query.0.center"])
    opened.head["queries"][0]["input"] = hashlib.sha256(center.tobytes()).hexdigest()


def _blank_moves(opened: Opened) -> None:
    """The row that nothing is read into is no longer 0 in the region."""
    opened.claim["region"]["moved"].append(len(opened.tensors["query.0.center"]) - 1)
    for side in ("lower", "upper"):
        ends = opened.tensors[f"0.region.{side}"]
        opened.tensors[f"0.region.{side}"] = np.concatenate([ends, np.full_like(ends[:1], 1e-9)])


def _open_case(opened: Opened) -> None:
    asked = opened.head["queries"][0]["property"]
    asked["cases"].append([len(asked["rows"]) - 1])


def _unclaimed_row(opened: Opened) -> None:
    opened.claim["margins"] = [None for _ in opened.claim["margins"]]


def _open_query(opened: Opened) -> None:
    opened.head["queries"].append(copy.deepcopy(opened.head["queries"][0]))
    opened.tensors["query.1.center"] = opened.tensors["query.0.center"]


def _turned_property(opened: Opened) -> None:
    asked = opened.head["queries"][0]["property"]
    asked["rows"] = [[-value for value in row] for row in asked["rows"]]


def _rounded_twice(opened: Opened) -> None:
    """A constant that is rounded where outputs are subtracted, though it is no layer of its own."""
    number = len(opened.head["network"]["steps"])
    bias = opened.tensors[f"network.{number}.bias"].astype(np.float64)
    opened.tensors[f"network.{number}.bias"] = bias * (1 + 1e-9)
    opened.head["queries"][0]["property"]["offsets"][0] = 1e-9


def _negative_scale(opened: Opened) -> None:
    """The same network, its scores the negative ones of negative queries."""
    for step in opened.head["network"]["steps"]:
        if step["kind"] == "scores":
            step["scale"] *= -1
            for part in ("weight", "bias"):
                opened.tensors[f"network.{step['inputs'][0]}.{part}"] *= -1


def _more_than_stored_proves(opened: Opened) -> None:
    opened.claim["margins"] = [m and 100.0 for m in opened.claim["margins"]]


def _stem_of_another_leaf(opened: Opened) -> None:
    leaves = opened.claim["trees"][0]
    first = next(k for k, leaf in enumerate(leaves) if "stem" in leaf)
    other = next(k for k, leaf in enumerate(leaves) if leaf.get("stem") != leaves[first]["stem"])
    lost, own = f"0.stem.{leaves[other]['stem']}.", [f"0.leaf.0.{k}." for k in (first, other)]
    kept = {n: v for n, v in opened.tensors.items() if not n.startswith((lost, own[1]))}
    again = {n.replace(own[0], own[1]): v for n, v in kept.items() if n.startswith(own[0])}
    opened.tensors = {**kept, **again}
    for leaf in leaves[other:]:
        leaf |= {key: leaves[first][key] for key in ("stem", "derivations")}


def _more_than_stems_prove(opened: Opened) -> None:
    opened.claim["margins"] = [m + 1e-9 for m in base("stems").result.proofs[0].margins]


def _huge(opened: Opened) -> None:
    box = next(name for name in opened.tensors if ".box." in name)
    opened.tensors[box] = opened.tensors[box] * 1e200 + np.array([-1e200, 1e200])[:, None, None]


FORGED: Mapping[str, tuple[str, Callable[[Opened], None]]] = {
    "larger margins": ("baseline", _claimed_margins),
    "margins of 0": ("baseline", _no_margin),
    "a margin too few": ("baseline", _fewer_margins),
    "tighter boxes": ("baseline", _tight_boxes),
    "a share above 1": ("baseline", _alpha),
    "other weights": ("baseline", _other_model),
    "another configuration": ("baseline", _other_config),
    "other rows": ("baseline", _other_input),
    "another network": ("baseline", _other_nodes),
    "an array too many": ("baseline", _more_tensors),
    "a cell too few": ("cells", _lost_cell),
    "a gap between cells": ("cells", _gap),
    "cells of two balls": ("cells", _other_ball),
    "a candidate too few": ("parts of candidates", _fewer_choices),
    "parts of two budgets": ("parts of candidates", _larger_budget),
    "a part of candidates too few": ("parts of candidates", _lost_cell),
    "a gap between boxes": ("parts of a box", _lower_end),
    "a larger box": ("parts of a box", _wider_whole),
    "a box too few": ("parts of a box", _lost_cell),
    "a leaf too few": ("tree", _lost_leaf),
    "a gap between leaves": ("tree", _gap_between_leaves),
    "a leaf that is cut elsewhere": ("tree", _another_entry),
    "one side of a cut twice": ("tree", _one_side_twice),
    "other sides of all cuts": ("tree", _other_sides),
    "more than leaves prove": ("tree", _more_than_leaves_prove),
    "a whole that only leaves prove": ("tree", _whole_only),
    "another network than the file's": ("stored", _another_network),
    "another file": ("stored", _other_file),
    "an entry of the input in two places": ("stored", _entry_twice),
    "a row of nothing that is something": ("stored", _row_of_nothing),
    "an entry of nothing that is never 0": ("stored", _blank_moves),
    "a case that nothing proves": ("stored", _open_case),
    "rows of which nothing is claimed": ("stored", _unclaimed_row),
    "a query that nothing answers": ("stored", _open_query),
    "the opposite of a property": ("stored", _turned_property),
    "a constant that is rounded twice": ("stored", _rounded_twice),
    "a negative factor": ("stored", _negative_scale),
    "more than what is stored proves": ("stored", _more_than_stored_proves),
    "a leaf of another stem": ("stems", _stem_of_another_leaf),
    "more than stems prove": ("stems", _more_than_stems_prove),
    "absurd numbers": ("baseline", _huge),
}


UNRUN = ("an entry of the input in two places", "an entry of nothing that is never 0")
"""Where nobody runs the file, which would be noticed otherwise."""


@cache
def forged(name: str) -> tuple[bytes, Checkpoint]:
    """A certificate that claims what it does not prove."""
    source, change = FORGED[name]
    known = base(source)
    opened = Opened.of(known.content)
    change(opened)
    if name in UNRUN:
        return opened.close(), replace(known.checkpoint, run=None)
    return opened.close(), known.checkpoint
