"""Certificates put wrong, and what they claim when they are accepted all the same: it has to be true."""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from safetensors.numpy import save
from safetensors.torch import load as load_tensors
from torch import Tensor

from buffet.attack import AttackSettings, attack
from buffet.errors import BuffetError
from buffet.loading import load
from buffet.loading.model import Embeddings
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet_checker.__main__ import main as check_alone
from buffet_checker.certificate import KEY, Claim, read_certificate
from buffet_checker.network import build, read_checkpoint
from buffet_checker.storage import Stored
from corruptions import CORRUPTIONS, Opened, corrupted, damaged
from fuzz.models import hostile_weights
from fuzz.mutate import hostile_bytes, hostile_json
from fuzz.place import FoundError, Place, command

WILD = (np.nan, np.inf, -np.inf, 1e300, -1e300, 1e38, 1e-300, 0.0, 1.0, -1.0, 0.5)
SLACK = 1e-9
"""A margin in float64 may be off by this, relatively; no claim is that close to being false by accident."""


def certificate(rng: random.Random, place: Place) -> None:
    """A certificate of the valid model."""
    data = _altered(rng, rng.choice(place.certificates))
    path = place.root / "proof.safetensors"
    path.write_bytes(data)
    if rng.random() < 0.01:
        path = rng.choice((place.root, place.root / "nothing", path / "below"))
    _check(rng, path, place.model)


def certified_model(rng: random.Random, place: Place) -> None:
    """A certificate that names the hashes of another model, put wrong, which it is checked against."""
    name = rng.choice(("config.json", "model.safetensors"))
    data = place.files[name]
    wrong = hostile_weights(rng, data) if name.endswith("tensors") else hostile_json(rng, json.loads(data))
    opened = Opened.of(rng.choice(place.certificates))
    opened.head["model"][name] = hashlib.sha256(wrong).hexdigest()
    path = place.root / "proof.safetensors"
    path.write_bytes(opened.close())
    _check(rng, path, place.checkpoint({name: wrong}))


def _check(rng: random.Random, path: Path, model: Path) -> None:
    """Both checkers' command lines; whatever they accept has to hold."""
    flags = ["--json"] * rng.randrange(2)
    if rng.random() < 0.5:
        code = command(["check", str(path), "--model", str(model), *flags])
    else:
        code = command([str(path), "--model", str(model), *flags], check_alone)
    if code == 0:
        hold(path.read_bytes(), model)
    else:
        raise BuffetError("rejected")


# --- is it true? --------------------------------------------------------------------------------------------


def hold(content: bytes, directory: Path) -> None:
    """Look for a point of a claimed region whose margin is below the claimed one.

    A sentence that is named has to be that of the rows.
    """
    found = read_certificate(content, "accepted")
    if found.sentence is not None:
        tables = Embeddings.of(load_tensors((directory / "model.safetensors").read_bytes()))
        rows = tables.rows(*(torch.tensor(v) for v in (found.sentence.ids, found.sentence.types)))
        if not np.array_equal(rows.numpy(), found.tensors.stored.tensors["center"]):
            raise FoundError("accepted, but the rows are not those of the sentence")
    for claim in found.claims:
        region = _region(claim, found.tensors.stored)
        margins = _margins(directory, region, found.label)
        claimed = torch.tensor(claim.margins, dtype=torch.float64)
        if not bool((margins >= claimed - SLACK * (1 + claimed.abs())).all()):
            raise FoundError(f"accepted, but a point has a margin {(claimed - margins).max():.3g} too small")


def _margins(directory: Path, region: Region, label: int) -> Float[Tensor, "points others"]:
    """The margins of attacked and of sampled points of a region with one task."""
    sampled = region.points(region.sample(64, torch.Generator().manual_seed(0)))[:, 0]
    try:
        program = load(directory).program64
    except BuffetError:  # of what the checker does not read: words, say
        checkpoint = read_checkpoint(directory)
        found = [build(checkpoint, point.numpy(), label, "plain")[1][-1][0] for point in sampled]
        return torch.from_numpy(np.stack(found))
    broken = attack(program, region, label, AttackSettings(steps=12, restarts=3))
    logits = program.evaluate(torch.cat([broken.points, sampled.double()]))
    others = [c for c in range(logits.shape[-1]) if c != label]
    return logits[:, [label]] - logits[:, others]


def _region(claim: Claim, stored: Stored) -> Region:
    """The region of a claim, as the certificate has it."""
    x = torch.from_numpy(stored.tensors["center"].astype(np.float64))
    moved, kind = claim.region["moved"], claim.region["kind"]

    def rows(name: str) -> Tensor:
        return torch.from_numpy(stored.tensors[f"{claim.number}.region.{name}"].astype(np.float64))

    if kind == "ball":
        return LpBall(x, moved, claim.region["p"], claim.region["eps"])
    if kind == "box":
        return Box(x, rows("lower")[None], rows("upper")[None], moved)
    return CandidateSet(x, moved, list(rows("rows")), claim.region["budget"])


# --- what is put wrong --------------------------------------------------------------------------------------


def _altered(rng: random.Random, content: bytes) -> bytes:
    return rng.choice(ALTERATIONS)(rng, content)


def _header(rng: random.Random, content: bytes) -> bytes:
    """The header of the file: names, types, shapes, sizes and places of the arrays."""
    size = struct.unpack("<Q", content[:8])[0]
    header = hostile_json(rng, json.loads(content[8 : 8 + size]))
    length = rng.choice((len(header), len(header), len(header), size, 2**63, 2**64 - 1, 0))
    return struct.pack("<Q", length) + header + content[8 + size :]


def _head(rng: random.Random, content: bytes) -> bytes:
    """The JSON that says what is claimed and how it is derived."""
    opened = Opened.of(content)
    text = hostile_json(rng, opened.head).decode(errors="replace")
    return save(opened.tensors, {KEY: text})


def _values(rng: random.Random, content: bytes) -> bytes:
    """Numbers of the arrays: wild ones, or a little different."""
    opened = Opened.of(content)
    for name in rng.sample(list(opened.tensors), rng.choice((1, 1, 3))):
        value = opened.tensors[name]
        flat = value.reshape(-1).copy()
        places = slice(rng.randrange(flat.size), None, rng.choice((1, 7, flat.size)))
        with np.errstate(all="ignore"):
            roll = rng.randrange(3)
            if roll == 0:
                flat[places] = rng.choice(WILD)
            elif roll == 1:
                flat[places] *= 1 + rng.choice((-1, 1)) * 10.0 ** rng.uniform(-12, 0)
            else:
                flat[places] = rng.random()
        opened.tensors[name] = flat.reshape(value.shape)
    return _sealed(opened)


def _kinds(rng: random.Random, content: bytes) -> bytes:
    """Types and shapes of the arrays, and which of them are there."""
    opened = Opened.of(content)
    name = rng.choice(list(opened.tensors))
    value = opened.tensors[name]
    with np.errstate(all="ignore"):
        changed: Any = rng.choice(
            (
                lambda: value.astype(rng.choice((np.float16, np.float32, np.float64, np.int64, np.bool_))),
                lambda: value.reshape(-1),
                lambda: value.T.copy(),
                lambda: np.concatenate([value.reshape(-1)] * 2),
                lambda: value.reshape(*value.shape, *[1] * rng.choice((1, 9))),
                lambda: np.zeros((0, 3), np.float32),
                lambda: np.zeros(1 << 20, np.float32),
            )
        )()
    opened.tensors[name] = changed
    if rng.random() < 0.3:
        opened.tensors[rng.choice(("0.box.1", "1.box.0", "0.0.0.lower", "x", ""))] = opened.tensors.pop(name)
    return _sealed(opened)


def _corrupted(rng: random.Random, content: bytes) -> bytes:
    numbers = np.random.default_rng(rng.randrange(2**32))
    if rng.random() < 0.1:
        return damaged(content, numbers)
    try:
        return corrupted(content, rng.choice(list(CORRUPTIONS)), numbers)
    except (KeyError, ValueError):  # it asks for a field that regions of this kind have not
        return hostile_bytes(rng, content)


def _forged(rng: random.Random, content: bytes) -> bytes:
    """A claim that is a little, or a lot, too strong, by somebody who mends whatever else it takes."""
    opened = Opened.of(content)
    for forge in rng.sample(FORGERIES, rng.choice((1, 2, 2, 4))):
        forge(rng, opened)
    return _sealed(opened)


def _sealed(opened: Opened) -> bytes:
    """Closed again, with the right hash of the rows."""
    center = np.ascontiguousarray(opened.tensors["center"]) if "center" in opened.tensors else np.zeros(1)
    opened.head["input"] = hashlib.sha256(center.tobytes()).hexdigest()
    return opened.close()


def _humble(rng: random.Random, opened: Opened) -> None:
    """Claim hardly any margin, so that nothing but the region decides."""
    opened.claim["margins"] = [rng.choice((1e-300, 1e-12, 1e-3))] * len(opened.claim["margins"])


def _boast(rng: random.Random, opened: Opened) -> None:
    grown = 1 + 10.0 ** rng.uniform(-9, 1)
    opened.claim["margins"] = [margin * grown for margin in opened.claim["margins"]]


def _widen(rng: random.Random, opened: Opened) -> None:
    """A larger region."""
    region = opened.claim["region"]
    if region["kind"] == "ball":
        region["eps"] *= 1 + 10.0 ** rng.uniform(-9, 2)
        region["p"] = rng.choice((region["p"], region["p"], 1, 1.0000001, 2, 2.5, 1e9, "inf"))
    if region["kind"] == "candidates":
        region["budget"] = rng.choice((0, 1, 2, 3, 2**30))
    for name, value in opened.tensors.items():
        if ".region." in name:
            opened.tensors[name] = value + rng.choice((-1, 1)) * 10.0 ** rng.uniform(-9, 1)


def _move(rng: random.Random, opened: Opened) -> None:
    """Other rows, other words, or another label."""
    rows = opened.tensors["center"]
    roll = rng.randrange(4)
    if roll == 0:
        opened.claim["region"]["moved"] = rng.sample(range(len(rows)), rng.choice((1, 1, 2)))
    elif roll == 1:
        opened.head["label"] = 1 - opened.head["label"]
    elif roll == 2:
        opened.tensors["center"] = rows[:: rng.choice((-1, 1, 2))].copy()
    else:
        rows[rng.randrange(len(rows)), rng.randrange(rows.shape[1])] += 10.0 ** rng.uniform(-6, 2)


def _rename(rng: random.Random, opened: Opened) -> None:
    """Another sentence: other tokens or types, in another order, or none at all."""
    sentence = opened.head["sentence"]
    if sentence is None or rng.random() < 0.1:
        opened.head["sentence"] = None
        return
    values = sentence[rng.choice(("ids", "ids", "types"))]
    roll = rng.randrange(3)
    if roll == 0:
        values[rng.randrange(len(values))] = rng.choice((0, 1, 5, 2**20, -1))
    elif roll == 1:
        rng.shuffle(values)
    else:
        opened.claim["region"]["ids"] = [values[:1] for _ in opened.claim["region"]["moved"]]


def _squeeze(rng: random.Random, opened: Opened) -> None:
    """Boxes a little narrower, or wider, than they are proven to be."""
    share = rng.choice((-1, 1)) * 10.0 ** rng.uniform(-9, 0)
    for name in [name for name in opened.tensors if ".box." in name]:
        if rng.random() < 0.3:
            low, high = opened.tensors[name]
            opened.tensors[name] = np.stack([low + share * (high - low), high - share * (high - low)])


def _replan(rng: random.Random, opened: Opened) -> None:
    """Derivations left out, doubled, exchanged, or of other kinds."""
    steps = opened.claim["derivations"]
    place, other = rng.randrange(len(steps)), rng.randrange(len(steps))
    roll = rng.randrange(6)
    if roll == 0:
        del steps[place]
    elif roll == 1:
        steps += [steps[place]] * rng.choice((1, 3, 30))
    elif roll == 2:
        steps[place], steps[other] = steps[other], steps[place]
    elif roll == 3:
        steps[place]["stops"] = rng.sample(range(len(opened.claim["nodes"])), 2)
    elif roll == 4:
        steps[place][rng.choice(("push", "keep"))] = rng.random() < 0.5
    else:
        steps[place]["choices"] = rng.choice((0, 1, 2, 2**30))


def _again(rng: random.Random, opened: Opened) -> None:
    """A claim twice: the arrays of the second are not there, or are those of the first."""
    claims = opened.head["claims"]
    claims.append(json.loads(json.dumps(rng.choice(claims))))
    if rng.random() < 0.7:
        new = {f"{len(claims) - 1}{n[1:]}": v for n, v in opened.tensors.items() if n.startswith("0.")}
        opened.tensors.update(new)


Forge = Callable[[random.Random, Opened], None]
FORGERIES: tuple[Forge, ...] = (_humble, _boast, _widen, _move, _rename, _squeeze, _replan, _again)
Alter = Callable[[random.Random, bytes], bytes]
ALTERATIONS: tuple[Alter, ...] = (
    *(hostile_bytes, _header, _head, _head, _values, _kinds),
    *(_corrupted, _forged, _forged, _forged, _forged),
)
