"""Certificates that claim what no proof could show: true ones altered by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    "absurd numbers": ("baseline", _huge),
}


@cache
def forged(name: str) -> tuple[bytes, Checkpoint]:
    """A certificate that claims what it does not prove."""
    source, change = FORGED[name]
    known = base(source)
    opened = Opened.of(known.content)
    change(opened)
    return opened.close(), known.checkpoint
