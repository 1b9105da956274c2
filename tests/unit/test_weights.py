"""Weights: every format read, everything else refused in one line, and nothing ever executed."""

from __future__ import annotations

import json
import math
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from buffet.loading import load
from checkpoints import QUERY, config_of, random_tensors, refusal, write


def test_missing_and_unexpected_tensors_are_named(tmp_path: Path) -> None:
    tensors = random_tensors(config_of())
    moved = tensors.pop(QUERY)
    assert QUERY in refusal(write(tmp_path / "missing", tensors))
    message = refusal(
        write(tmp_path / "extra", {**tensors, QUERY: moved, "bert.extra.weight": moved.clone()})
    )
    assert "bert.extra.weight" in message
    assert "bert.encoder.layer.1" in refusal(write(tmp_path / "shallow", num_hidden_layers=1))


def test_a_shape_that_disagrees_is_shown_beside_the_expected_one(tmp_path: Path) -> None:
    message = refusal(write(tmp_path / "m", intermediate_size=16))
    assert "bert.encoder.layer.0.intermediate.dense.weight" in message
    assert "[12, 8]" in message
    assert "[16, 8]" in message


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_weights_are_refused(tmp_path: Path, value: float) -> None:
    tensors = random_tensors(config_of())
    tensors[QUERY][3, 2] = value
    assert f"{QUERY} has 1 non-finite" in refusal(write(tmp_path / "m", tensors))


def test_a_float64_weight_too_large_for_float32_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(config_of())
    tensors[QUERY] = torch.full((8, 8), 1e300, dtype=torch.float64)
    assert "non-finite" in refusal(write(tmp_path / "m", tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_float_types_become_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors(config_of()).items()}
    model = load(write(tmp_path / "m", tensors))
    assert model.embed("a film").dtype == torch.float32
    assert torch.equal(model.tensors[QUERY], tensors[QUERY].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_sixteen_bits_is_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    """All of them are numbers of float32 too, the smallest included: proofs are about weights as stored."""
    patterns = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    words = patterns.where(patterns.isfinite(), 0).reshape(-1, 8)
    name = "bert.embeddings.word_embeddings.weight"
    tensors = {**random_tensors(config_of()), name: words}
    model = load(write(tmp_path / "m", tensors, vocab_size=len(words)), check=False)
    read = model.tensors[name]
    bits = torch.finfo(dtype).bits
    assert read.dtype == torch.float32
    assert torch.equal(read.double(), words.double())
    assert len(read.unique()) == len(words.view(torch.int16).unique()) - 1 > 2**bits * 0.9  # ±0 are one


def in_file(tensors: dict[str, Tensor], directory: Path) -> Path:
    return write(directory, tensors)


def in_torch_file(tensors: dict[str, Tensor], directory: Path) -> Path:
    (write(directory, tensors) / "model.safetensors").unlink()
    torch.save(tensors, directory / "pytorch_model.bin")
    return directory


def in_shards(tensors: dict[str, Tensor], directory: Path) -> Path:
    (write(directory, tensors) / "model.safetensors").rename(directory / "part.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "part.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("stored", [in_file, in_torch_file, in_shards])
def test_float64_is_taken_only_where_nothing_is_rounded(
    stored: Callable[[dict[str, Tensor], Path], Path], tmp_path: Path
) -> None:
    exact = {name: tensor.double() for name, tensor in random_tensors(config_of()).items()}
    model = load(stored(exact, tmp_path / "exact"))
    assert torch.equal(model.tensors[QUERY].double(), exact[QUERY])
    for value in (1 / 3, 1 + 2**-52, 1e-50):  # 1e-50 would become 0
        rounded = exact[QUERY].clone()
        rounded[3, 2] = value
        directory = stored({**exact, QUERY: rounded}, tmp_path / f"{value}")
        message = refusal(directory)
        assert f"{directory}: tensor {QUERY} is float64, and float32 would round 1 of its values" in message
        assert "convert the model to float32, save it again and deploy that" in message


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(config_of())
    tensors[QUERY] = tensors[QUERY].to(dtype)
    message = refusal(write(tmp_path / "m", tensors))
    assert QUERY in message
    assert "supported: F64, F32, F16, BF16" in message


@pytest.mark.parametrize("change", [Tensor.to_sparse, lambda tensor: tensor.to("meta")])
def test_tensors_that_are_not_all_there_are_refused(
    tmp_path: Path, change: Callable[[Tensor], Tensor]
) -> None:
    tensors = random_tensors(config_of())
    directory = in_torch_file(tensors, tmp_path / "m")
    torch.save({**tensors, QUERY: change(tensors[QUERY])}, directory / "pytorch_model.bin")
    assert "sparse or quantised weights are not supported" in refusal(directory)


def test_the_position_buffer_of_older_exports_is_ignored(tmp_path: Path) -> None:
    buffer = {"bert.embeddings.position_ids": torch.arange(9)[None]}
    load(write(tmp_path / "m", {**random_tensors(config_of()), **buffer}))


class Bomb:
    """Unpickling this creates a file: the proof that something was executed."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.target), "w")


def test_a_pickle_is_refused_and_never_executed(tmp_path: Path) -> None:
    directory, target = write(tmp_path / "m"), tmp_path / "executed"
    weights = directory / "model.safetensors"
    for protocol in (2, 5):
        weights.write_bytes(pickle.dumps(Bomb(target), protocol=protocol))
        assert "pickle or zip file, not safetensors" in refusal(directory)
    weights.write_bytes(pickle.dumps(Bomb(target), protocol=0))
    assert "not a complete safetensors file" in refusal(directory)
    with zipfile.ZipFile(weights, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb(target)))
    assert "pickle or zip file" in refusal(directory)
    assert not target.exists()


def test_a_pytorch_file_with_code_in_it_is_refused_and_never_executed(tmp_path: Path) -> None:
    directory, target = as_pytorch(write(tmp_path / "m")), tmp_path / "executed"
    weights, tensors = directory / "pytorch_model.bin", random_tensors(config_of())
    for zipped in (True, False):
        bomb = {**tensors, "bomb": Bomb(target)}
        torch.save(bomb, weights, _use_new_zipfile_serialization=zipped)
        assert "refused, nothing was executed" in refusal(directory)
    for content in (pickle.dumps(Bomb(target)), b"", b"PK\x03\x04", b"\x80\x02"):
        weights.write_bytes(content)
        assert "pytorch_model.bin" in refusal(directory)
    torch.save([1, 2], weights)
    assert "holds a list, expected tensors by name" in refusal(directory)
    torch.save({**tensors, QUERY: "text"}, weights)
    assert f"tensor {QUERY} has type str" in refusal(directory)
    assert not target.exists()


def as_pytorch(directory: Path, *, zipped: bool = True) -> Path:
    """The same checkpoint with its weights in a PyTorch file."""
    (directory / "model.safetensors").unlink()
    path = directory / "pytorch_model.bin"
    torch.save(random_tensors(config_of()), path, _use_new_zipfile_serialization=zipped)
    return directory


@pytest.mark.parametrize("zipped", [True, False])
def test_pytorch_files_of_both_formats_are_read(tmp_path: Path, zipped: bool) -> None:
    model = load(as_pytorch(write(tmp_path / "m"), zipped=zipped))
    assert torch.equal(model.tensors[QUERY], random_tensors(config_of())[QUERY])


def test_older_torch_reads_no_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = as_pytorch(write(tmp_path / "m"))
    monkeypatch.setattr(torch, "__version__", type(torch.__version__)("2.9.1"))
    assert "read with torch 2.10 or later, this is 2.9.1" in refusal(directory)


def sharded(directory: Path, names: tuple[str, str], end: str) -> Path:
    """The same checkpoint with its weights in two files and an index."""
    (directory / "model.safetensors").unlink()
    tensors = random_tensors(config_of())
    where = {name: names[number % 2] for number, name in enumerate(tensors)}
    for file in names:
        part = {name: tensor for name, tensor in tensors.items() if where[name] == file}
        (save_file if end == "safetensors" else torch.save)(part, directory / file)
    base = "model.safetensors" if end == "safetensors" else "pytorch_model.bin"
    (directory / f"{base}.index.json").write_text(json.dumps({"weight_map": where}))
    return directory


@pytest.mark.parametrize("end", ["safetensors", "bin"])
def test_shards_are_read_together(tmp_path: Path, end: str) -> None:
    directory = sharded(write(tmp_path / "m"), (f"one.{end}", f"two.{end}"), end)
    tensors = load(directory).tensors
    assert all(torch.equal(tensors[name], value) for name, value in random_tensors(config_of()).items())
    (directory / f"two.{end}").unlink()
    assert f"two.{end}: no such file" in refusal(directory)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not a JSON file"),
        ("[]", "weight_map is missing"),
        ('{"weight_map": {"a": "../elsewhere.safetensors"}}', "only .safetensors and .bin files beside it"),
        ('{"weight_map": {"a": "script.py"}}', "only .safetensors and .bin files beside it"),
    ],
)
def test_a_bad_index_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    directory = sharded(write(tmp_path / "m"), ("one.safetensors", "two.safetensors"), "safetensors")
    (directory / "model.safetensors.index.json").write_text(content)
    assert complaint in refusal(directory)


def test_weights_of_other_libraries_are_named(tmp_path: Path) -> None:
    directory = write(tmp_path / "m")
    (directory / "model.safetensors").rename(directory / "tf_model.h5")
    assert "found tf_model.h5, but read are: model.safetensors, " in refusal(directory)


def test_an_encoder_without_its_head_is_refused(tmp_path: Path) -> None:
    tensors = {n: t for n, t in random_tensors(config_of()).items() if not n.startswith("classifier")}
    assert "an encoder without its classification head" in refusal(write(tmp_path / "m", tensors))


def test_older_names_are_read_and_other_heads_ignored(tmp_path: Path) -> None:
    norm = "bert.embeddings.LayerNorm"
    tensors = random_tensors(config_of())
    old = {**tensors, f"{norm}.gamma": tensors[f"{norm}.weight"], "cls.predictions.bias": torch.ones(20)}
    del old[f"{norm}.weight"]
    model = load(write(tmp_path / "m", old))
    assert torch.equal(model.tensors[f"{norm}.weight"], tensors[f"{norm}.weight"])
    assert set(model.tensors) == set(tensors)
    both = {**old, f"{norm}.weight": tensors[f"{norm}.weight"].clone()}
    assert "are the same part of the network" in refusal(write(tmp_path / "both", both))


@pytest.mark.parametrize("size", [0, 5, 8, 200, -1])
def test_truncated_weights_are_refused(tmp_path: Path, size: int) -> None:
    weights = write(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    assert "not a complete safetensors file" in refusal(weights.parent)


def test_a_header_that_lies_is_refused(tmp_path: Path) -> None:
    weights = write(tmp_path / "m") / "model.safetensors"
    weights.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    assert "not a complete safetensors file" in refusal(weights.parent)
