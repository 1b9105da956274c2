"""Hostile input in small (`make fuzz` has as much as one likes), and what it has found."""

from __future__ import annotations

import io
import json
import pickle
import subprocess
import sys
from contextlib import suppress

import pytest
import torch
from PIL import Image
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from buffet.cli import main
from buffet.errors import BuffetError
from buffet.experiments import read_rows
from buffet.experiments.store import seal
from buffet.lab.bench import running
from buffet.lab.bench.cases import BenchCase
from buffet.lab.bench.measuring import Measurement
from buffet.lab.reproduce.stages import Workspace, _times
from buffet.loading import load
from buffet.training import TrainSettings, train
from buffet.training.pretrained import read_encoder
from buffet.training.state import resume_file
from checkpoints import refusal, write
from corruptions import Opened
from fuzz.certificates import hold
from fuzz.place import FoundError, Place
from fuzz.results import EXAMPLE, interrupted, small_training
from fuzz.targets import TARGETS, attempt
from tiny_checkpoint import SENTENCES, write_model


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place.make(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS)
def test_hostile_input_is_refused_in_one_line_or_taken(target, place):
    outcomes = [attempt(target, seed, place) for seed in range(12)]
    assert "refused" in outcomes


def test_a_false_claim_would_be_noticed(place):
    """Were a certificate of far too large a region accepted, the fuzzer would say so."""
    for content in place.certificates[:3]:
        hold(content, place.model)
        opened = Opened.of(content)
        opened.claim["region"]["eps"] *= 100
        with pytest.raises(FoundError, match="accepted, but a point has a margin"):
            hold(opened.close(), place.model)


def test_code_in_a_pickle_is_never_executed(tmp_path):
    """Neither as the whole file nor in place of a tensor, whatever the file is called."""
    mark = tmp_path / "executed"

    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return open, (str(mark), "w")

    directory = write(tmp_path / "model")
    (directory / "model.safetensors").unlink()
    for name, data in (
        ("pytorch_model.bin", pickle.dumps(Trap())),
        ("model.safetensors", pickle.dumps(Trap())),
    ):
        (directory / name).write_bytes(data)
        assert "refused, nothing was executed" in (told := refusal(directory)) or "it was not opened" in told
    (directory / "model.safetensors").unlink()
    torch.save({"bert.pooler.dense.weight": Trap()}, directory / "pytorch_model.bin")
    assert "refused, nothing was executed" in refusal(directory)
    assert not mark.exists()


def test_a_panic_of_the_tokenizer_library_is_one_line(tmp_path):
    """A template that adds a token nobody has defined, and many words of one id: the library panics, which is
    no `Exception`, and says so by itself.
    """
    directory = write_model(tmp_path / "model")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["post_processor"]["special_tokens"].pop("[CLS]")
    (directory / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(BuffetError, match="tokenizer"):
        load(directory).encode(SENTENCES[0])
    assert len(complaint(directory).splitlines()) == 1
    (directory / "tokenizer.json").unlink()
    names = ("<pad>", "<s>", "</s>", "<unk>", "g", "o", "d", "Ġ", "go", "od")
    words = {name: index for index, name in enumerate(names)} | {f"<more {i}>": 6 for i in range(1000)}
    (directory / "vocab.json").write_text(json.dumps(words))
    (directory / "merges.txt").write_text("#version: 0.2\ng o\no d\n")
    assert len(complaint(directory).splitlines()) == 1


def complaint(directory):
    """All that a process of its own says of a model on its standard error output."""
    program = "import sys; from buffet.cli import main; sys.exit(main())"
    given = ["certify", SENTENCES[0], "--model", str(directory), "--method", "interval"]
    done = subprocess.run(
        [sys.executable, "-c", program, *given], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    return done.stderr


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_row_that_is_nested_too_deeply_is_refused(end, tmp_path):
    rows = tmp_path / "rows.ndjson"
    first = seal(json.dumps(EXAMPLE, separators=(",", ":")).encode()) + b"\n"
    rows.write_bytes(first + b'{"key":"x","parts":' + b"[" * 200_000 + end)
    with pytest.raises(BuffetError, match="line 2 is not a row"):
        read_rows(rows)


def test_the_sizes_of_an_encoder_are_checked_before_anything_is_made(place):
    """A configuration that calls for tens of gigabytes: nothing of that size is allocated."""
    text = json.dumps({**json.loads(place.files["config.json"]), "hidden_size": 65_536})
    directory = place.checkpoint({"config.json": text.encode()})
    with pytest.raises(BuffetError, match="the configuration says"):
        read_encoder(directory, TrainSettings.of(data=place.corpus, out=place.root / "out"), 2)


@pytest.mark.parametrize("norm", ["bert", "nan", "0.5", ""])
def test_a_row_of_no_norm_is_refused(norm, tmp_path, capsys):
    line = seal(json.dumps({**EXAMPLE, "norm": norm}, separators=(",", ":")).encode())
    (tmp_path / "rows.ndjson").write_bytes(line + b"\n")
    assert main(["report", str(tmp_path / "rows.ndjson")]) == 2
    assert "norm is" in capsys.readouterr().err


def test_a_huge_token_id_allocates_nothing(tmp_path):
    directory = write_model(tmp_path / "model")
    content = json.loads((directory / "tokenizer.json").read_text())
    content["model"]["vocab"]["good"] = 2**32 - 1
    (directory / "tokenizer.json").write_text(json.dumps(content))
    assert "has the token id 4294967295" in refusal(directory)


def test_complaints_are_cut(tmp_path, capsys):
    directory = write_model(tmp_path / "model")
    (directory / "tokenizer.json").write_text(json.dumps({"version": "x" * 50_000}))
    assert len(refusal(directory)) < 600
    assert main(["certify", "good", *["y" * 5_000] * 3]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert len(told) < 1_100


def test_an_endless_name_is_not_repeated(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = {"weight_map": {"a": "x" * 20_000}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(names))
    with pytest.raises(BuffetError, match=r"only \.safetensors and \.bin files") as caught:
        load(tmp_path)
    assert len(str(caught.value)) <= 1000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"architectures": 1e-10}),
        ("config.json", {"num_channels": 10**12}),
        ("config.json", {"image_size": [[6], [6]]}),
        ("config.json", {"architecture": "vit_tiny", "pretrained_cfg": [], "model_args": 3}),
        ("preprocessor_config.json", [1, 2]),
    ],
)
def test_a_hostile_image_classifier_is_refused(file, content, place):
    valid = json.loads(place.vision[file])
    text = json.dumps({**valid, **content} if isinstance(content, dict) else content)
    assert refusal(place.checkpoint({file: text.encode()}, place.vision))


def test_a_picture_that_ends_in_the_middle_is_refused(place):
    """Of which Pillow says that it is a `SyntaxError`."""
    stream = io.BytesIO()
    Image.new("RGB", (6, 6), 7).save(stream, "PNG")
    data = stream.getvalue()
    path = place.root / "broken.png"
    for cut in range(1, len(data)):
        path.write_bytes(data[:cut] + data[cut + 1 :])
        with suppress(BuffetError):
            place.seeing.embed(path)
    path.write_bytes(b"P6 20000 20000 255\n" + data)
    with pytest.raises(BuffetError, match="not a picture that can be read"):
        place.seeing.embed(path)


def test_what_upsets_transformers_is_one_line(place, capsys):
    """A dropout that buffet does not read, and transformers refuses."""
    text = json.dumps({**json.loads(place.standard["config.json"]), "hidden_dropout_prob": 5.0})
    directory = place.checkpoint({"config.json": text.encode()}, place.standard)
    capsys.readouterr()
    assert main(["models", "--check", str(directory)]) == 2
    told = capsys.readouterr().err
    assert "transformers cannot run it" in told
    assert told.count("\n") == 1


def test_transformers_says_nothing_by_itself(place, capfd):
    """Neither of its progress nor of its doubts, when a model is refused after it was loaded."""
    tensors = load_tensors(place.standard["model.safetensors"])
    name = "bert.embeddings.LayerNorm.weight"
    tensors[name] = torch.full_like(tensors[name], 3e38)
    weights = save_tensors(tensors, {"format": "pt"})
    directory = place.checkpoint({"model.safetensors": weights}, place.standard)
    capfd.readouterr()
    assert main(["models", "--check", str(directory)]) == 2
    told = capfd.readouterr().err
    assert "computes other logits" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("wrong", [{"units": 0.0}, {"samples": []}, {"unit_seconds": "x"}])
def test_measurements_that_are_none_are_refused(wrong):
    numbers = Measurement(0.1, 0.1, 5.0, (4.9, 5.2), 0.02, 30.0, 10**9, 10**8, 0.5)
    document = running.document([running.BenchRow(BenchCase("baseline", 1), numbers)], "cpu")
    valid = json.loads(json.dumps(document))
    assert running.read_document(json.dumps(valid), "before.json")[0].measurement == numbers
    valid["rows"][0]["measurement"] |= wrong
    for text in (json.dumps(valid), "[" * 100_000, json.dumps({**valid, "rows": [{"case": 3}]})):
        with pytest.raises(BuffetError, match=r"before\.json: no measurements"):
            running.read_document(text, "before.json")


def test_times_that_are_none_are_refused(tmp_path):
    (tmp_path / "times.json").write_text('{"training": 3}')
    with pytest.raises(BuffetError, match="remove it and run again"):
        _times(Workspace(tmp_path, tmp_path))


@pytest.mark.parametrize("change", ["generator", "epoch_start", "shape", "missing", "epoch", "identity"])
def test_a_training_run_does_not_go_on_from_something_else(change, place):
    data = interrupted(place)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors, metadata = load_tensors(data), header["__metadata__"]
    name = next(name for name in tensors if name.startswith("exp_avg."))
    if change == "generator":
        tensors["generator.now"] = torch.zeros_like(tensors["generator.now"]) + 7
    elif change == "epoch_start":
        tensors["generator.epoch_start"] = torch.zeros_like(tensors["generator.now"]) + 7
    elif change == "shape":
        tensors[name] = torch.zeros(3, 3)
    elif change == "missing":
        del tensors[name]
    elif change == "epoch":
        metadata["at"] = json.dumps({**json.loads(metadata["at"]), "epoch": 99})
    else:
        metadata["identity"] = "null"
    settings = small_training(place, overwrite=True)
    resume_file(settings.out).write_bytes(save_tensors(tensors, metadata))
    with pytest.raises(BuffetError, match=r"cannot be continued .*--restart"):
        train(settings)
