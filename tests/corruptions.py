"""Certificates with one field altered so that they prove nothing any more: none of them may be accepted."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from safetensors.numpy import load, save

KEY = "buffet-certificate"


@dataclass
class Opened:
    """A certificate taken apart."""

    head: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @staticmethod
    def of(content: bytes) -> Opened:
        size = int.from_bytes(content[:8], "little")
        head = json.loads(json.loads(content[8 : 8 + size])["__metadata__"][KEY])
        return Opened(head, {name: value.copy() for name, value in load(content).items()})

    def close(self) -> bytes:
        return save(self.tensors, {KEY: json.dumps(self.head)})

    @property
    def claim(self) -> dict[str, Any]:
        return self.head["claims"][0]


Corrupt = Callable[[Opened, np.random.Generator], None]
"""Alters one field of a certificate, in place."""


def _pick(names: list[str], rng: np.random.Generator) -> str:
    return names[rng.integers(len(names))]


def _choices(opened: Opened) -> list[str]:
    """Names of what is free in relaxations."""
    return [k for k in opened.tensors if k.count(".") == 3]


def _moving(opened: Opened, rng: np.random.Generator) -> tuple[np.ndarray, tuple[int, ...], float]:
    """A box, one of the widest tenth of its entries, and its width."""
    boxes = [v for k, v in opened.tensors.items() if ".box." in k]
    box = boxes[rng.integers(len(boxes))]
    width = box[1] - box[0]
    places = np.argwhere(width >= np.quantile(width, 0.9))
    place = tuple(places[rng.integers(len(places))])
    return box, place, float(width[place])


def shrink_interval(opened: Opened, rng: np.random.Generator) -> None:
    box, place, width = _moving(opened, rng)
    side = int(rng.integers(2))
    box[(side, *place)] += (1 - 2 * side) * width * rng.uniform(0.3, 0.9)


def move_interval(opened: Opened, rng: np.random.Generator) -> None:
    box, place, width = _moving(opened, rng)
    box[(slice(None), *place)] += width * rng.choice([-1, 1]) * rng.uniform(0.5, 20)


def swap_ends(opened: Opened, rng: np.random.Generator) -> None:
    box, place, _ = _moving(opened, rng)
    box[(slice(None), *place)] = box[(slice(None, None, -1), *place)].copy()


def swap_boxes(opened: Opened, rng: np.random.Generator) -> None:
    """Exchange the boxes of two nodes of the same shape."""
    names = [k for k in opened.tensors if ".box." in k]
    pairs = [
        (a, b)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if opened.tensors[a].shape == opened.tensors[b].shape
        and np.abs(opened.tensors[a] - opened.tensors[b]).max() > 1e-2
    ]
    if not pairs:
        return shrink_interval(opened, rng)
    a, b = pairs[rng.integers(len(pairs))]
    opened.tensors[a], opened.tensors[b] = opened.tensors[b], opened.tensors[a]
    return None


def raise_margin(opened: Opened, rng: np.random.Generator) -> None:
    margins = opened.claim["margins"]
    place = int(rng.integers(len(margins)))
    margins[place] = abs(margins[place]) * rng.uniform(1.01, 3) + 1e-2


def lower_margin(opened: Opened, rng: np.random.Generator) -> None:
    margins = opened.claim["margins"]
    margins[int(rng.integers(len(margins)))] = float(rng.choice([0.0, -1e-9, -1.0]))


def forget_margin(opened: Opened, rng: np.random.Generator) -> None:
    opened.claim["margins"].pop()


def other_hash(opened: Opened, rng: np.random.Generator) -> None:
    files = opened.head["model"]
    owner, key = [(opened.head, "input"), *((files, name) for name in files)][rng.integers(1 + len(files))]
    digit = int(rng.integers(64))
    old = owner[key]
    owner[key] = old[:digit] + ("0" if old[digit] != "0" else "1") + old[digit + 1 :]


def larger_eps(opened: Opened, rng: np.random.Generator) -> None:
    opened.claim["region"]["eps"] *= float(rng.uniform(1.1, 5))


def absurd_eps(opened: Opened, rng: np.random.Generator) -> None:
    opened.claim["region"]["eps"] = rng.choice([-0.1, 1e308, "0.1", None], 1).tolist()[0]


def larger_norm(opened: Opened, rng: np.random.Generator) -> None:
    """The ball of p grows with p; below 1 it is none."""
    region = opened.claim["region"]
    region["p"] = 0.5 if region["p"] == "inf" else "inf"


def other_label(opened: Opened, rng: np.random.Generator) -> None:
    opened.head["label"] = opened.head["label"] + 1 if rng.integers(2) else abs(opened.head["label"] - 1)


def other_rows(opened: Opened, rng: np.random.Generator) -> None:
    region, rows = opened.claim["region"], len(opened.tensors["center"])
    still = [i for i in range(rows) if i not in region["moved"]]
    row = still[rng.integers(len(still))]
    change = rng.integers(4)
    if change == 0:
        region["moved"] = [row, *region["moved"][1:]]
    elif change == 1:
        region["moved"] = [*region["moved"], row]
    else:
        region["moved"] = [*region["moved"], region["moved"][0]] if change == 2 else [rows]


def other_center(opened: Opened, rng: np.random.Generator) -> None:
    place = tuple(rng.integers(n) for n in opened.tensors["center"].shape)
    opened.tensors["center"][place] += np.float32(rng.choice([-1, 1]) * 10.0 ** rng.uniform(-4, 2))


def alpha_outside(opened: Opened, rng: np.random.Generator) -> None:
    """A share below 0 or above 1."""
    kinds = opened.claim["nodes"]
    names = [k for k in _choices(opened) if kinds[int(k.split(".")[2])] != "apply"]
    value = opened.tensors[_pick(names, rng)]
    value[tuple(rng.integers(n) for n in value.shape)] = rng.choice([-1e-6, -0.5, 1.0000002, 1.5, 1e30])


def not_a_number(opened: Opened, rng: np.random.Generator) -> None:
    value = opened.tensors[_pick(list(opened.tensors), rng)]
    value[tuple(rng.integers(n) for n in value.shape)] = rng.choice([math.nan, math.inf, -math.inf])


def lose_choice(opened: Opened, rng: np.random.Generator) -> None:
    names = [k for k in _choices(opened) if not k.endswith("shift")]
    del opened.tensors[_pick(names, rng)]


def add_tensor(opened: Opened, rng: np.random.Generator) -> None:
    name = str(rng.choice(["more", "0.box.999", "0.7.1.lower", "1.box.3", "0.region.lower"]))
    opened.tensors[name] = np.zeros((2, 2), np.float32)


def other_shape(opened: Opened, rng: np.random.Generator) -> None:
    name = _pick([k for k, v in opened.tensors.items() if v.ndim], rng)
    value = opened.tensors[name]
    opened.tensors[name] = [value[None], value[..., :-1], np.concatenate([value, value], -1)][
        rng.integers(3)
    ].copy()


def other_network(opened: Opened, rng: np.random.Generator) -> None:
    claim = opened.claim
    if rng.integers(2):
        graphs = ["plain", "decomposed", "differences", "none"]
        claim["graph"] = str(rng.choice([g for g in graphs if g != claim["graph"]]))
    else:
        place = int(rng.integers(len(claim["nodes"])))
        claim["nodes"][place] = "identity"


def broken_plan(opened: Opened, rng: np.random.Generator) -> None:
    """A derivation that refers to what is not there."""
    steps = opened.claim["derivations"]
    step = steps[rng.integers(len(steps))]
    change = rng.integers(5)
    if change == 0:
        step["nodes"] = [len(opened.claim["nodes"])]
    elif change == 1:
        step["nodes"] = [*step["nodes"], step["nodes"][0]]
    elif change == 2:
        step.pop("push", None)
        step["stops"] = [10**6]
    elif change == 3:
        step["choices"] = "0"
    else:
        step["nodes"] = [str(n) for n in step["nodes"]]


def other_key(opened: Opened, rng: np.random.Generator) -> None:
    owner = [opened.head, opened.claim, opened.claim["region"]][rng.integers(3)]
    key = _pick([k for k in owner if k not in ("made", "method")], rng)
    owner[key.upper()] = owner.pop(key)


def other_schema(opened: Opened, rng: np.random.Generator) -> None:
    """One that is not known, or an older one, which has no key for a sentence."""
    opened.head["schema"] = [0, 1, 3, "2", True, None][rng.integers(6)]


def other_tokens(opened: Opened, rng: np.random.Generator) -> None:
    """A sentence that the rows are not those of."""
    sentence = opened.head["sentence"]
    if sentence is None:
        opened.head["sentence"] = {"ids": [0] * len(opened.tensors["center"]), "types": []}
        return
    ids, place = sentence["ids"], int(rng.integers(len(sentence["ids"])))
    change = rng.integers(6)
    if change == 0:
        ids[place] = 1 if ids[place] != 1 else 2
    elif change == 1:
        sentence["types"][place] += 1
    elif change == 2:
        ids.append(ids.pop(0))
    elif change == 3:
        ids.pop()
    elif change == 4:
        ids[place] = [10**6, -1, True, 2.0, str(ids[place]), None][rng.integers(6)]
    else:
        sentence["tokens"] = ["good"] * len(ids)


def no_claims(opened: Opened, rng: np.random.Generator) -> None:
    opened.head["claims"] = [[], {}, None, [{}]][rng.integers(4)]


CORRUPTIONS: Mapping[str, Corrupt] = {
    f.__name__: f
    for f in (
        shrink_interval,
        move_interval,
        swap_ends,
        swap_boxes,
        raise_margin,
        lower_margin,
        forget_margin,
        other_hash,
        larger_eps,
        absurd_eps,
        larger_norm,
        other_label,
        other_rows,
        other_center,
        alpha_outside,
        not_a_number,
        lose_choice,
        add_tensor,
        other_shape,
        other_network,
        broken_plan,
        other_key,
        other_schema,
        other_tokens,
        no_claims,
    )
}


def corrupted(content: bytes, name: str, rng: np.random.Generator) -> bytes:
    """The certificate with one field altered as the corruption of that name does."""
    opened = copy.deepcopy(Opened.of(content))
    CORRUPTIONS[name](opened, rng)
    return opened.close()


def damaged(content: bytes, rng: np.random.Generator) -> bytes:
    """The file cut off, with bytes too many, or with a key of its header there twice."""
    change = rng.integers(4)
    if change == 0:
        return content[: int(rng.integers(len(content)))]
    if change == 1:
        return content + bytes(int(rng.integers(1, 9)))
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].rstrip()
    if change == 2:
        header = header[:-1] + b', "center": ' + json.dumps(json.loads(header)["center"]).encode() + b"}"
    else:
        header = header.replace(b'"F32"', [b'"I32"', b'"U8"', b'"F8"'][rng.integers(3)], 1)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]
