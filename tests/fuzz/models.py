"""Checkpoints put wrong: configuration, weights, shards, and the same for images."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from pathlib import Path

import torch

from buffet.loading import load
from buffet.training import TrainSettings
from buffet.training.pretrained import read_encoder
from fuzz.mutate import hostile_bytes, hostile_json
from fuzz.place import Place, command, use


def config(rng: random.Random, place: Place) -> None:
    use(place.checkpoint({"config.json": hostile_json(rng, json.loads(place.files["config.json"]))}))


def safetensors(rng: random.Random, place: Place) -> None:
    use(place.checkpoint({"model.safetensors": hostile_weights(rng, place.files["model.safetensors"])}))


def hostile_weights(rng: random.Random, data: bytes) -> bytes:
    """A safetensors file with bytes, its header or its numbers put wrong."""
    if rng.random() < 0.4:
        return hostile_bytes(rng, data)
    size = struct.unpack("<Q", data[:8])[0]
    header = hostile_json(rng, json.loads(data[8 : 8 + size]))
    length = rng.choice((len(header), len(header), len(header), size, 2**63, 2**64 - 1, 0))
    body = data[8 + size :]
    if rng.random() < 0.3:
        numbers = torch.frombuffer(bytearray(body), dtype=torch.float32, count=len(body) // 4).clone()
        wild = rng.choice((float("nan"), float("inf"), 1e38, 1e30, -1e38, 1e-45, 0.0))
        numbers[rng.randrange(len(numbers)) :: rng.choice((1, 7, 10_000))] = wild
        header, length, body = (
            data[8 : 8 + size],
            size,
            numbers.numpy().tobytes() + body[len(body) // 4 * 4 :],
        )
    return struct.pack("<Q", length) + header + body


class _Executed:
    """Creates the mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return open, (str(self.mark), "w")


def torch_file(rng: random.Random, place: Place) -> None:
    """`pytorch_model.bin`: a zip or an old pickle, put wrong, with code in it, or a bomb."""
    tensors: dict[str, object] = dict(load(place.model).tensors)
    roll = rng.randrange(7)
    if roll == 0:
        tensors[rng.choice(list(tensors))] = _Executed(place.mark)
    if roll == 1:
        tensors["extra"] = rng.choice((1, "text", [1, 2], None, {"a": torch.zeros(1)}, torch.zeros(2).int()))
    if roll == 2:
        tensors[rng.choice(list(tensors))] = torch.zeros(1).expand(2**40)
    stream = io.BytesIO()
    torch.save(tensors, stream, _use_new_zipfile_serialization=rng.random() < 0.7)
    data = stream.getvalue()
    if roll == 3:
        data = pickle.dumps(_Executed(place.mark), protocol=rng.choice((0, 2, 4)))
    elif roll == 4:
        bomb = io.BytesIO()
        with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(
                "archive/data.pkl", rng.choice((b"\x80\x02}q\x00.", b"\x80\x02" + b"(" * 10_000))
            )
            archive.writestr("archive/version", "3\n")
            archive.writestr("../../escape", "x")
            archive.writestr("archive/data/0", b"\0" * rng.choice((10, 5_000_000)))
        data = bomb.getvalue()
    elif roll > 4:
        data = hostile_bytes(rng, data)
    use(place.checkpoint({"model.safetensors": None, "pytorch_model.bin": data}))


def index(rng: random.Random, place: Place) -> None:
    """An index of shards that names files it should not."""
    names = (
        "model-1.safetensors",
        "../model/model.safetensors",
        "/etc/passwd",
        "model-1.bin",
        "",
        ".",
        "x\0y.bin",
    )
    base = {"metadata": {"total_size": 1}, "weight_map": {"a": rng.choice(names), "b": rng.choice(names)}}
    files: dict[str, bytes | None] = {
        "model.safetensors": None,
        "model-1.safetensors": place.files["model.safetensors"],
        "model.safetensors.index.json": hostile_json(rng, base),
    }
    use(place.checkpoint(files))


def encoder(rng: random.Random, place: Place) -> None:
    """What `buffet train --from` reads."""
    files = {"config.json": hostile_json(rng, json.loads(place.files["config.json"]))}
    if rng.random() < 0.5:
        files = {"model.safetensors": hostile_weights(rng, place.files["model.safetensors"])}
    read_encoder(place.checkpoint(files), TrainSettings.of(data=place.root, out=place.root / "out"), 2)


def agreement(rng: random.Random, place: Place) -> None:
    """`buffet models --check`: what our loader takes must not upset `transformers` either."""
    files = {"config.json": hostile_json(rng, json.loads(place.standard["config.json"]))}
    if rng.random() < 0.2:
        files = {"model.safetensors": hostile_weights(rng, place.standard["model.safetensors"])}
    directory = place.checkpoint(files, place.standard)
    command(["models", "--check", str(directory), *["--json"] * rng.randrange(2)])


# --- images -------------------------------------------------------------------------------------------------

FORMATS = ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "PPM", "TGA")


def vision(rng: random.Random, place: Place) -> None:
    """The files of an image classifier."""
    name = rng.choice(("config.json", "preprocessor_config.json", "model.safetensors"))
    data = place.vision[name]
    wrong = hostile_weights(rng, data) if name.endswith("tensors") else hostile_json(rng, json.loads(data))
    model = load(place.checkpoint({name: wrong}, place.vision))
    model.embed(torch.full((3, 6, 6), 0.5))


def picture(rng: random.Random, place: Place) -> None:
    """A picture, put wrong, that `buffet certify` is asked about."""
    from PIL import Image

    kind, stream = rng.choice(FORMATS), io.BytesIO()
    size = rng.choice(((6, 6), (6, 6), (6, 6), (16, 16), (200, 3)))
    Image.new(rng.choice(("RGB", "RGB", "L")), size, 7).save(stream, kind)
    data = hostile_bytes(rng, stream.getvalue())
    if rng.random() < 0.1:  # a bomb: a header that promises more than anybody has
        data = b"P6 %d %d 255\n" % (rng.choice((2**16, 2**31, 10**9)), rng.choice((2**16, 2**31))) + data
    path = place.root / "picture"
    path.write_bytes(data)
    if rng.random() < 0.7:
        place.seeing.embed(path)
        return
    directory = place.seeing.directory
    given = ["certify", str(path), "--model", str(directory), "--method", "interval", "--eps", "1e-6"]
    command([*given, "--norm", "inf", "--words", "1", "--no-attack", "--json"])
