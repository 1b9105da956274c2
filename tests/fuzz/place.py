"""Where hostile input is made and fed to the program, and what must hold whatever it was."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

import buffet
from buffet.certificates.certificate import Question, certify
from buffet.cli import main
from buffet.errors import BuffetError
from buffet.loading import Model, load
from buffet.regions import Box, CandidateSet, LpBall, Region
from buffet.verification.verify import verify
from tiny_checkpoint import SENTENCES, write_model, write_sentences

PRINTS_JSON = ("certify", "check", "models", "summary", "sweep", "vnncomp")
"""Commands that were asked for JSON print JSON, and nothing else."""


class FoundError(Exception):
    """Something that must not happen."""


@dataclass(frozen=True)
class Place:
    """A directory with a valid model, valid data, and a mark that code in a file would leave.

    Whatever else is valid, and takes a moment to make, is made when a target first asks for it.
    """

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
        return _contents(self.model)

    @cached_property
    def corpus(self) -> Path:
        """Sentences to train on: those of the other parts, read backwards."""
        directory = self.root / "corpus"
        directory.mkdir()
        for part in ("train", "dev", "test"):
            write_sentences(directory / f"{part}.tsv")
        lines = (directory / "train.tsv").read_text().splitlines()[1:]
        turned = [f"{' '.join(line[:-2].split()[::-1])}\t{line[-1]}" for line in lines]
        (directory / "train.tsv").write_text("\n".join(["sentence\tlabel", *turned, ""]))
        return directory

    @cached_property
    def vision(self) -> dict[str, bytes]:
        """The files of a valid image classifier, as `transformers` writes them."""
        import transformers

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        config = transformers.ViTConfig(**sizes, image_size=6, patch_size=3, num_channels=3, num_labels=2)
        transformers.ViTForImageClassification(config).save_pretrained(self.root / "vision")
        scales = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "do_normalize": True}
        (self.root / "vision" / "preprocessor_config.json").write_text(json.dumps(scales))
        return _contents(self.root / "vision")

    @cached_property
    def seeing(self) -> Model:
        """That image classifier."""
        return load(self.root / "vision") if self.vision else load()

    @cached_property
    def standard(self) -> dict[str, bytes]:
        """The files of a valid sentence classifier that `transformers` can run too."""
        import transformers

        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
        words = json.loads(self.files["config.json"])["vocab_size"]
        config = transformers.BertConfig(**sizes, vocab_size=words, max_position_embeddings=12, num_labels=2)
        transformers.BertForSequenceClassification(config).save_pretrained(self.root / "standard")
        return {**_contents(self.root / "standard"), "tokenizer.json": self.files["tokenizer.json"]}

    @cached_property
    def networks(self) -> tuple[bytes, ...]:
        """Valid networks in ONNX: a controller of 12 inputs and 2 outputs, and an image classifier."""
        from onnx_networks import PLAIN, export, shaken

        made = [(shaken(make()), shape) for make, shape in (PLAIN["controller"], PLAIN["pixels"])]
        path = self.root / "exported.onnx"
        return tuple(export(module, torch.zeros(shape), path).read_bytes() for module, shape in made)

    @cached_property
    def certificates(self) -> tuple[bytes, ...]:
        """Valid certificates of the model: every kind of region, and every way to write softmax."""
        model = load(self.model)
        x = model.embed(SENTENCES[0])
        rows, other = x[[1, 3]].double(), model.embed(SENTENCES[0].replace("good", "great"))
        ball = LpBall(x, [[1], [3]], 2)
        proven = [0.9 * task.certified for task in buffet.radius(model, ball, "lse").tasks]
        made: tuple[tuple[Region, str], ...] = (
            (ball.with_eps(proven), "lse"),
            (LpBall(x, [1, 2], "inf", 0.2 * min(proven)), "baseline"),
            (LpBall(x, [2], 3, 0.5 * min(proven)), "buffet"),
            (Box(x, rows - 0.01, rows + 0.01, [1, 3]), "backward"),
            (CandidateSet(x, [1, 3], [rows[:1] + 0.02, rows[1:] - 0.02], 1), "r-buffet"),
            (CandidateSet(x, [1], [other[1:2]]), "lse"),
        )
        texts = (SENTENCES[0], None, SENTENCES[0], SENTENCES[0], SENTENCES[0], SENTENCES[0])
        return tuple(
            certify(model, [Question.of(model, region)], buffet.METHODS[method], text=text)[1]
            for (region, method), text in zip(made, texts, strict=True)
        )

    def checkpoint(
        self, changed: Mapping[str, bytes | None], base: Mapping[str, bytes] | None = None
    ) -> Path:
        """The model (or that of other files) with some files changed, or left out."""
        directory = self.root / "hostile"
        directory.mkdir(exist_ok=True)
        for path in directory.iterdir():
            path.unlink()
        for name, data in {**(self.files if base is None else base), **changed}.items():
            if data is not None:
                (directory / name).write_bytes(data)
        return directory

    @classmethod
    def make(cls, root: Path) -> Place:
        write_model(root / "model")
        for part in ("train", "dev", "test"):
            write_sentences(root / f"{part}.tsv")
        return cls(root)


Target = Callable[[random.Random, Place], object]
"""Makes one hostile input and feeds it to the program: returns quietly or raises `BuffetError`."""


def _contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def use(directory: Path) -> None:
    """Load a checkpoint and, if it is taken, ask something of it: only finite logits may be proven."""
    model = load(directory)
    x = model.embed(SENTENCES[0])
    answer = verify(model, LpBall(x, [1], 2), eps=0.01, method="interval", falsify=False)
    if answer.verdict == "certified" and not bool(model.logits(x.double()).isfinite().all()):
        raise FoundError("certified a network that has no finite logits")


def command(arguments: list[str], run: Callable[[list[str]], int] = main) -> int:
    """Run the command line: a known exit code, one line of complaint, JSON where it was asked for."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = run(arguments)
    told = err.getvalue()
    if code not in (0, 1, 2) or "Traceback" in told + out.getvalue():
        raise FoundError(f"exit code {code}: {told[-300:]}")
    if code == 2 and (told.count("\n") != 1 or not told.startswith("error: ")):
        raise FoundError(f"not one line of complaint: {told[:300]!r}")
    if code != 2 and "--json" in arguments and (run is not main or arguments[0] in PRINTS_JSON):
        json.loads(out.getvalue(), parse_constant=_no_constant)
    if code == 2:
        raise BuffetError(told.strip())
    return code


def _no_constant(name: str) -> None:
    raise FoundError(f"{name} in JSON")
