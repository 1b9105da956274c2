"""What is fuzzed. A target makes one hostile input and feeds it to the program; it returns quietly or raises
`BuffetError`; anything else is a finding. What would run code leaves a mark, which must never appear."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from buffet.cli import main
from buffet.datasets import read_splits
from buffet.errors import BuffetError
from buffet.loading import load
from buffet.regions import LpBall
from buffet.verify import verify
from fuzz.mutate import LINES, NUMBERS, hostile_bytes, hostile_json, hostile_text
from tiny_checkpoint import SENTENCES, write_model, write_sentences

LONGEST = 2_000
"""Characters of a complaint; more is no message for people."""


@dataclass(frozen=True)
class Place:
    """A directory with a valid model, valid data, and a mark that code in a file would leave."""

    root: Path

    @property
    def model(self) -> Path:
        return self.root / "model"

    @property
    def mark(self) -> Path:
        return self.root / "executed"

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The files of the valid model."""
        return {path.name: path.read_bytes() for path in self.model.iterdir()}

    def checkpoint(self, changed: Mapping[str, bytes | None]) -> Path:
        """The model with some files changed, or left out."""
        directory = self.root / "hostile"
        directory.mkdir(exist_ok=True)
        for path in directory.iterdir():
            path.unlink()
        for name, data in {**self.files, **changed}.items():
            if data is not None:
                (directory / name).write_bytes(data)
        return directory

    @classmethod
    def make(cls, root: Path) -> Place:
        write_model(root / "model")
        for part in ("train", "dev", "test"):
            write_sentences(root / f"{part}.tsv")
        return cls(root)


class FoundError(Exception):
    """Something that must not happen."""


def use(directory: Path) -> None:
    """Load a checkpoint and, if it is taken, ask something of it: only finite logits may be proven."""
    model = load(directory)
    x = model.embed(SENTENCES[0])
    answer = verify(model, LpBall(x, [1], 2), eps=0.01, method="interval", falsify=False)
    if answer.verdict == "certified" and not bool(model.logits(x.double()).isfinite().all()):
        raise FoundError("certified a network that has no finite logits")


def command(arguments: list[str]) -> None:
    """Run the command line: a known exit code, one line of complaint, JSON where it was asked for."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = main(arguments)
    told = err.getvalue()
    if code not in (0, 1, 2) or "Traceback" in told + out.getvalue():
        raise FoundError(f"exit code {code}: {told[-300:]}")
    if code == 2 and (told.count("\n") != 1 or not told.startswith("error: ")):
        raise FoundError(f"not one line of complaint: {told[:300]!r}")
    if code != 2 and "--json" in arguments and arguments[0] in ("certify", "summary", "sweep"):
        json.loads(out.getvalue(), parse_constant=_no_constant)
    if code == 2:
        raise BuffetError(told.strip())


def _no_constant(name: str) -> None:
    raise FoundError(f"{name} in JSON")


# --- checkpoints --------------------------------------------------------------------------------------------


def config(rng: random.Random, place: Place) -> None:
    use(place.checkpoint({"config.json": hostile_json(rng, json.loads(place.files["config.json"]))}))


def safetensors(rng: random.Random, place: Place) -> None:
    data = place.files["model.safetensors"]
    if rng.random() < 0.4:
        return use(place.checkpoint({"model.safetensors": hostile_bytes(rng, data)}))
    size = struct.unpack("<Q", data[:8])[0]
    header = hostile_json(rng, json.loads(data[8 : 8 + size]))
    length = rng.choice((len(header), len(header), len(header), size, 2**63, 2**64 - 1, 0))
    body = data[8 + size :]
    if rng.random() < 0.3:
        numbers = torch.frombuffer(bytearray(body), dtype=torch.float32).clone()
        wild = rng.choice((float("nan"), float("inf"), 1e38, 1e30, -1e38, 1e-45, 0.0))
        numbers[rng.randrange(len(numbers)) :: rng.choice((1, 7, 10_000))] = wild
        header, length, body = data[8 : 8 + size], size, numbers.numpy().tobytes()
    use(place.checkpoint({"model.safetensors": struct.pack("<Q", length) + header + body}))
    return None


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


# --- tokenizers ---------------------------------------------------------------------------------------------


def tokenizer(rng: random.Random, place: Place) -> None:
    use(place.checkpoint({"tokenizer.json": hostile_json(rng, json.loads(place.files["tokenizer.json"]))}))


VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "good", "film", ",", "bad", "plot", "##s"]
SETTINGS = {
    "do_lower_case": True,
    "cls_token": "[CLS]",
    "unk_token": {"content": "[UNK]"},
    "strip_accents": None,
}
EXTRA = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def vocabulary(rng: random.Random, place: Place) -> None:
    text = "\n".join(VOCABULARY)
    files: dict[str, bytes | None] = {"tokenizer.json": None}
    files["vocab.txt"] = text.encode() if rng.random() < 0.5 else hostile_text(rng, text)
    for name in rng.sample(EXTRA, rng.randrange(3)):
        files[name] = hostile_json(rng, {"[CLS]": 2} if name.startswith("added") else SETTINGS)
    use(place.checkpoint(files))


def byte_pairs(rng: random.Random, place: Place) -> None:
    words = {
        token: i for i, token in enumerate(("<s>", "</s>", "<unk>", "<pad>", "g", "o", "d", "Ġ", "go", "od"))
    }
    merges = "#version: 0.2\ng o\no d\n"
    files: dict[str, bytes | None] = {"tokenizer.json": None}
    files["vocab.json"] = hostile_json(rng, words) if rng.random() < 0.6 else json.dumps(words).encode()
    files["merges.txt"] = hostile_text(rng, merges) if rng.random() < 0.6 else merges.encode()
    use(place.checkpoint(files))


# --- experiments and data -----------------------------------------------------------------------------------

SWEEP = """
models = ["{model}"]
methods = ["baseline", {{ name = "backward", window = 2 }}]
norms = [1, 2, "inf"]
seed = 3
what = "radius"
[sentences]
file = "{data}"
count = 2
max_words = 20
[words]
count = 2
together = 1
[radius]
search = "secant"
tolerance = 0.01
[run]
workers = 1
limit = 60.5
"""


def sweep(rng: random.Random, place: Place) -> None:
    text = SWEEP.format(model=place.model, data=place.root / "dev.tsv")
    if rng.random() < 0.5:
        lines = [line for line in text.split("\n") if line]
        at = rng.randrange(len(lines))
        value = rng.choice(
            (*map(str, NUMBERS), "nan", "inf", "[]", "{}", '""', "true", "1979-05-27", "[[1]]", "-1")
        )
        lines[at] = f"{lines[at].split('=')[0]} = {value}"
        data = "\n".join(lines).encode()
    else:
        data = hostile_text(rng, text)
    path = place.root / "sweep.toml"
    path.write_bytes(data)
    command(["sweep", str(path), "--dry-run", "--json"])


@dataclass(frozen=True)
class _Row:
    """A row of a sweep as it is written."""

    content: dict[str, object]

    @classmethod
    def example(cls) -> _Row:
        texts = dict.fromkeys(
            ("key", "model", "model_digest", "sentence", "label_name", "config", "finished"), "x"
        )
        numbers = dict.fromkeys(
            ("clean_margin", "certified", "attacked", "margin", "seconds", "task_seconds"), 0.5
        )
        nothing = dict.fromkeys(("reason", "eps", "share", "reference", "verdict", "attack_seconds"))
        counts = {"gold": 1, "label": 1, "evaluations": 3, "batch": 1, "seed": 0, "threads": 1}
        lists = {"sentence_tokens": ["a"], "words": [1], "tokens": ["a"], "parts": {"steps": 1}}
        versions = {"buffet": "0", "torch": "2", "python": "3"}
        chosen = {"status": "ok", "norm": "2", "method": "baseline", "what": "radius", "versions": versions}
        return cls({**texts, **numbers, **nothing, **counts, **lists, **chosen})


def rows(rng: random.Random, place: Place) -> None:
    """What `buffet summary`, and a sweep that goes on, read back."""
    base = _Row.example().content
    lines = [json.dumps({**base, "key": f"k{i}"}, separators=(",", ":")).encode() for i in range(3)]
    lines[rng.randrange(3)] = hostile_json(rng, base).replace(b'": ', b'":')
    data = b"\n".join(lines) + b"\n" * rng.randrange(2)
    path = place.root / "rows.ndjson"
    path.write_bytes(hostile_bytes(rng, data) if rng.random() < 0.3 else data)
    command(["summary", str(path), rng.choice(("--json", "--markdown", "--reference=baseline"))])


def table(rng: random.Random, place: Place) -> None:
    """Training data."""
    directory = place.root / "data"
    directory.mkdir(exist_ok=True)
    text = (place.root / "dev.tsv").read_text()
    for part in ("train", "dev", "test"):
        (directory / f"{part}.tsv").write_bytes(
            hostile_text(rng, text) if rng.random() < 0.5 else text.encode()
        )
    read_splits(directory)


# --- arguments ----------------------------------------------------------------------------------------------

VALUES = (
    *map(str, NUMBERS),
    *LINES,
    *("nan", "inf", "-inf", "1e400", "all", "1", "1,2", "1+2", "1+1", "0", "2GB", "1TB", "9" * 400, "none"),
    *(
        "baseline",
        "interval",
        "backward",
        "buffet",
        "forward",
        "lse",
        "rule",
        "decomposed",
        "final",
        "positive",
    ),
    *("--json", "--help", "-h", "--", "-", "..", "/", "/etc/passwd", "/dev/null", "\ud800"),
)
OPTIONS = (
    *(
        "--words",
        "--norm",
        "--eps",
        "--method",
        "--propagation",
        "--product",
        "--softmax",
        "--optimise",
        "--steps",
    ),
    *("--rate", "--start", "--window", "--search", "--label", "--seed", "--threads", "--memory", "--special"),
    *("--no-attack", "--json", "--model", "--trace", "--unknown", "--help"),
)


def arguments(rng: random.Random, place: Place) -> None:
    """`buffet certify` with options nobody would give; quick where they are taken."""
    text = rng.choice((*SENTENCES[:3], *LINES, "[CLS] [SEP] [PAD]", "good " * 40, "\ud800"))
    given = [
        "certify",
        text,
        "--model",
        str(place.model),
        "--method",
        "interval",
        "--budget",
        "0.2",
        "--json",
    ]
    given += ["--words", "1", "--no-attack"]
    for _ in range(rng.randrange(4)):
        given += [rng.choice(OPTIONS), rng.choice(VALUES)]
    if rng.random() < 0.1:
        given[0] = rng.choice(("summary", "methods", "models", "nothing", "", "--version", "-x"))
    if "--help" in given or "-h" in given:
        given = [word for word in given if word not in ("--help", "-h")]
    if "--method" in given[6:] or "--optimise" in given:
        given += ["--steps", "1"]
    # Nothing outside of the place is written.
    command([word if word not in ("--trace", "--html") else "--label" for word in given])


Target = Callable[[random.Random, Place], object]
TARGETS: dict[str, Target] = {
    target.__name__: target
    for target in (
        config,
        safetensors,
        torch_file,
        index,
        tokenizer,
        vocabulary,
        byte_pairs,
        sweep,
        rows,
        table,
        arguments,
    )
}


def attempt(name: str, seed: int, place: Place) -> str:
    """Feed one input to a target: "taken" or "refused"; whatever else happens is raised as a `FoundError`."""
    rng = random.Random(f"{name} {seed}")
    try:
        TARGETS[name](rng, place)
        outcome = "taken"
    except BuffetError as error:
        if "\n" in str(error) or len(str(error)) > LONGEST:
            raise FoundError(
                f"{name} {seed}: a complaint of {len(str(error))} characters: {str(error)[:200]!r}"
            ) from None
        outcome = "refused"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of a Rust library is no Exception
        raise FoundError(f"{name} {seed}: {type(error).__name__}: {str(error)[:300]}") from error
    if place.mark.exists():
        place.mark.unlink()
        raise FoundError(f"{name} {seed}: code from a file was executed")
    return outcome
