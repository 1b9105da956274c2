"""Trains a sentence classifier and writes it as a checkpoint.

What is trained is the very `Program` the verifier reads: its weights are leaf tensors that require
gradients. Every regulariser (dropout, word dropout, noise) acts on the input rows, outside the program, so
nothing has to be switched off or folded in afterwards.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from buffet.card import model_card
from buffet.datasets import Example, Splits, read_splits
from buffet.errors import BuffetError
from buffet.loading.checkpoint import check_target, serialise, write_checkpoint
from buffet.loading.config import ModelConfig, explain
from buffet.loading.model import Embeddings
from buffet.loading.network import build_program
from buffet.loading.tokenizer import SPECIAL, Tokenizer, word_level

Row = tuple[list[int], int]  # token ids and label of a sentence
REPORT_EVERY = 50  # steps
GAIN = 0.3  # of Glorot's initial matrices: what training has no use for stays small, and bounds tight
PAD, UNKNOWN = SPECIAL.index("[PAD]"), SPECIAL.index("[UNK]")

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0, le=1e6)]


class TrainSettings(BaseModel):
    """Everything that decides the result. The defaults are the recipe of the embedded model."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: Path  # directory with train.tsv, dev.tsv, test.tsv
    out: Path  # checkpoint directory to write
    overwrite: bool = False  # replace a checkpoint that is already there
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    threads: Count = 1  # sums depend on the split over threads: one thread gives the same weights anywhere

    layers: Count = 3  # deep enough for bounds to be interesting, shallow enough to prove in seconds
    heads: Count = 4
    width: Count = 96  # with the vocabulary below, the weights stay under 5 MB
    inner: Count = 128  # the FFN of a small model gains nothing from the usual factor of four
    activation: Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "tanh"] = "relu"
    layer_norm: Literal["standard", "no_var"] = "no_var"  # without variance it is linear: tighter bounds
    norm_position: Literal["post", "pre"] = "post"
    pooling: Literal["cls", "mean"] = "cls"
    max_tokens: Annotated[int, Field(ge=3, le=100_000)] = 64  # the longest SST-2 sentence has 56 words

    vocabulary: Annotated[int, Field(ge=5, le=1_000_000)] = 10_000  # words, special tokens included
    min_count: Count = 2  # a word seen once teaches nothing that [UNK] does not

    epochs: Count = 5  # enough for dev accuracy to level off; early stopping may end before
    patience: Count = 3  # epochs without a better dev accuracy before stopping
    batch: Count = 64
    rate: Positive = 5e-4  # peak of the learning rate; half of Adam's usual value was steadier on dev
    warmup: Fraction = 0.05  # of all steps: post-norm blocks want a gentle start
    weight_decay: NonNegative = 2.0  # far above the usual 0.1: weights of no use vanish, bounds get tighter
    clip: Positive = 1.0  # norm of the gradient; keeps a rare bad batch from undoing an epoch
    embedding_scale: Positive = 0.1  # standard deviation at the start; without variance the scale stays
    embedding_dropout: Fraction = 0.4  # the embeddings hold most parameters, so they overfit first
    word_dropout: Fraction = 0.2  # words replaced by [UNK]: trains that row and spreads the evidence
    noise: NonNegative = 0.0  # standard deviation of Gaussian noise on every embedding coordinate

    @model_validator(mode="after")
    def _divisible(self) -> TrainSettings:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        return self

    @classmethod
    def of(cls, **values: object) -> TrainSettings:
        """Settings from loose values; what is wrong with them is said in one `BuffetError`."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise BuffetError(f"training settings: {explain(error)}") from None

    def command(self) -> str:
        """The command line of these settings: options that differ from the defaults, no machine's paths."""
        options = [f"--data DATA/{self.data.name}", f"--out {self.out.name}"]
        for name, value in self:
            if name not in ("data", "out", "overwrite") and value != type(self).model_fields[name].default:
                options.append(f"--{name.replace('_', '-')} {value}")
        return " ".join(["buffet train", *options])


@dataclass(frozen=True)
class Progress:
    """Where the training stands; `dev_accuracy` is given at the end of an epoch only."""

    epoch: int  # from 1
    epochs: int
    step: int  # of all epochs, from 1
    steps: int
    loss: float  # mean of this epoch so far
    rate: float
    dev_accuracy: float | None = None


@dataclass(frozen=True)
class TrainSummary:
    """What came out; accuracies are fractions."""

    out: Path
    dev_accuracy: float
    test_accuracy: float
    losses: tuple[float, ...]  # mean training loss of every epoch
    best_epoch: int
    parameters: int
    rows: int
    seconds: float
    sha256: str


@dataclass(frozen=True, eq=False)
class Batch:
    """Sentences padded to the longest of them."""

    ids: Int[Tensor, "sentences tokens"]
    mask: Bool[Tensor, "sentences tokens"]
    labels: Int[Tensor, " sentences"]


def train(settings: TrainSettings, progress: Callable[[Progress], None] | None = None) -> TrainSummary:
    """Train, keep the weights with the best dev accuracy, write the checkpoint directory, all or nothing.

    The test part is read once, at the end. The result depends on the settings and the data only.
    """
    start = time.perf_counter()
    check_target(settings.out, overwrite=settings.overwrite)
    data = read_splits(settings.data)
    tokenizer = word_level((e.sentence for e in data.train), settings.vocabulary, settings.min_count)
    config = _config(settings, data, tokenizer.get_vocab_size())
    network = Network(config, _initial(config, settings))
    ready = Tokenizer.of(tokenizer)
    parts = {name: _encode(getattr(data, name), ready, settings) for name in ("train", "dev", "test")}
    with _threads(settings.threads):
        trainer = _Trainer(network, len(data.train), settings, progress)
        dev_accuracy, best_epoch, losses = trainer.fit(parts["train"], parts["dev"])
        test_accuracy = network.accuracy(_batches(parts["test"], settings.batch))
    summary = TrainSummary(
        out=settings.out,
        dev_accuracy=dev_accuracy,
        test_accuracy=test_accuracy,
        losses=losses,
        best_epoch=best_epoch,
        parameters=sum(tensor.numel() for tensor in network.tensors.values()),
        rows=len(data.train),
        seconds=time.perf_counter() - start,
        sha256=hashlib.sha256(serialise(network.tensors)).hexdigest(),
    )
    texts = {
        "config.json": json.dumps(config.model_dump(), indent=2) + "\n",
        "tokenizer.json": tokenizer.to_str(pretty=False) + "\n",
        "README.md": model_card(settings, data, summary, config.vocab_size),
    }
    write_checkpoint(settings.out, texts, network.tensors, overwrite=settings.overwrite)
    return summary


class Network:
    """A program whose weights can still change."""

    def __init__(self, config: ModelConfig, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.embeddings = Embeddings.of(tensors)
        self.program = build_program(config, tensors)

    @torch.no_grad()
    def accuracy(self, batches: Sequence[Batch]) -> float:
        """The fraction of the sentences whose largest logit is that of their label."""
        right = sum(
            int((self.program.evaluate(self.embeddings.rows(b.ids), b.mask).argmax(-1) == b.labels).sum())
            for b in batches
        )
        return right / sum(len(b.labels) for b in batches)

    def loss(self, batch: Batch, settings: TrainSettings, generator: torch.Generator) -> Float[Tensor, ""]:
        """The cross-entropy of a batch whose input rows went through the regularisers."""
        ids = batch.ids
        if settings.word_dropout:
            words = ids >= len(SPECIAL)
            drop = torch.rand(ids.shape, generator=generator) < settings.word_dropout
            ids = torch.where(words & drop, UNKNOWN, ids)
        x = self.embeddings.rows(ids)
        if settings.embedding_dropout:
            keep = 1 - settings.embedding_dropout
            x = x * (torch.rand(x.shape, generator=generator) < keep) / keep
        if settings.noise:
            x = x + settings.noise * torch.randn(x.shape, generator=generator)
        return torch.nn.functional.cross_entropy(self.program.evaluate(x, batch.mask), batch.labels)


class _Trainer:
    """One run: the network, its optimiser and the source of all its random numbers."""

    def __init__(
        self,
        network: Network,
        rows: int,
        settings: TrainSettings,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.network, self.settings = network, settings
        self.progress = progress or (lambda _: None)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.step, self.steps = 0, settings.epochs * math.ceil(rows / settings.batch)
        self.optimiser = _optimiser(network, settings)

    def fit(self, train_part: Sequence[Row], dev_part: Sequence[Row]) -> tuple[float, int, tuple[float, ...]]:
        """Optimise and leave the best epoch's weights: (dev accuracy, epoch, loss of every epoch)."""
        dev = _batches(dev_part, self.settings.batch)
        best, best_epoch, losses = -1.0, 0, []
        kept: dict[str, Tensor] = {}
        for epoch in range(1, self.settings.epochs + 1):
            losses.append(self.epoch(epoch, _batches(train_part, self.settings.batch, self.generator)))
            accuracy = self.network.accuracy(dev)
            self.report(epoch, losses[-1], accuracy)
            if accuracy > best:
                best, best_epoch = accuracy, epoch
                kept = {name: tensor.detach().clone() for name, tensor in self.network.tensors.items()}
            elif epoch - best_epoch >= self.settings.patience:
                break
        for name, tensor in self.network.tensors.items():
            tensor.data.copy_(kept[name])
        return best, best_epoch, tuple(losses)

    def epoch(self, epoch: int, batches: Sequence[Batch]) -> float:
        """One pass over the batches; returns its mean loss."""
        total = 0.0
        for count, batch in enumerate(batches, 1):
            for group in self.optimiser.param_groups:
                group["lr"] = self.rate
            self.optimiser.zero_grad()
            loss = self.network.loss(batch, self.settings, self.generator)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.tensors.values(), self.settings.clip)
            self.optimiser.step()
            self.step += 1
            total += loss.item()
            if not math.isfinite(total):
                raise BuffetError(
                    f"training diverged in epoch {epoch}: lower the rate ({self.settings.rate})"
                )
            if count % REPORT_EVERY == 0:
                self.report(epoch, total / count)
        return total / len(batches)

    @property
    def rate(self) -> float:
        """The learning rate of the next step: up in a straight line, then down to 0 in a straight line."""
        rising = max(1, round(self.settings.warmup * self.steps))
        if self.step < rising:
            return self.settings.rate * (self.step + 1) / rising
        return self.settings.rate * max(0.0, (self.steps - self.step) / max(1, self.steps - rising))

    def report(self, epoch: int, loss: float, dev_accuracy: float | None = None) -> None:
        self.progress(
            Progress(epoch, self.settings.epochs, self.step, self.steps, loss, self.rate, dev_accuracy)
        )


def _optimiser(network: Network, settings: TrainSettings) -> torch.optim.Optimizer:
    """AdamW; only matrices decay: embeddings set the unit of radii, a LayerNorm at 0 blocks the rest."""
    decays = {
        name: tensor.ndim == 2 and not name.startswith("bert.embeddings")
        for name, tensor in network.tensors.items()
    }
    groups = [
        {
            "params": [tensor for name, tensor in network.tensors.items() if decays[name] == decay],
            "weight_decay": settings.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=settings.rate, fused=True)


def _config(settings: TrainSettings, data: Splits, vocab_size: int) -> ModelConfig:
    labels = ("negative", "positive") if data.classes == 2 else [f"LABEL_{i}" for i in range(data.classes)]
    values = {
        "vocab_size": vocab_size,
        "hidden_size": settings.width,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": settings.heads,
        "intermediate_size": settings.inner,
        "hidden_act": settings.activation,
        "max_position_embeddings": settings.max_tokens,
        "type_vocab_size": 1,
        "pad_token_id": PAD,
        "num_labels": data.classes,
        "id2label": dict(enumerate(labels)),
        "layer_norm": settings.layer_norm,
        "pooling": settings.pooling,
        "norm_position": settings.norm_position,
    }
    try:
        return ModelConfig.model_validate(values)
    except ValidationError as error:
        raise BuffetError(f"{settings.data}: {explain(error)}") from None


def _initial(config: ModelConfig, settings: TrainSettings) -> dict[str, Tensor]:
    """Random weights: Gaussian embeddings, Glorot-uniform matrices, LayerNorms that do nothing yet."""
    generator = torch.Generator().manual_seed(settings.seed)
    tensors = {}
    for name, shape in config.shapes().items():
        tensor = torch.empty(shape)
        if name.endswith("_embeddings.weight"):
            tensor.normal_(0, settings.embedding_scale, generator=generator)
        elif tensor.ndim == 2:
            torch.nn.init.xavier_uniform_(tensor, GAIN, generator=generator)
        else:
            tensor.fill_(1.0 if name.endswith("LayerNorm.weight") else 0.0)
        tensors[name] = tensor.requires_grad_()
    return tensors


def _encode(examples: Sequence[Example], tokenizer: Tokenizer, settings: TrainSettings) -> list[Row]:
    """Token ids and label of every example; a sentence longer than the model keeps its beginning."""
    encoded = tokenizer.inner.encode_batch([example.sentence for example in examples])
    limit = settings.max_tokens
    rows = (e.ids if len(e.ids) <= limit else [*e.ids[: limit - 1], e.ids[-1]] for e in encoded)
    return [(ids, example.label) for ids, example in zip(rows, examples, strict=True)]


def _batches(examples: Sequence[Row], size: int, generator: torch.Generator | None = None) -> list[Batch]:
    """Batches of sentences of similar length, in random order and composition when a generator is given."""

    def length(index: int) -> int:
        return len(examples[index][0])

    order = list(range(len(examples)))
    pool = max(1, len(order))
    if generator is not None:
        order = torch.randperm(len(order), generator=generator).tolist()
        pool = 50 * size  # sorted within a pool only, so that batches differ from epoch to epoch
    order = [i for k in range(0, len(order), pool) for i in sorted(order[k : k + pool], key=length)]
    batches = [order[k : k + size] for k in range(0, len(order), size)]
    if generator is not None:
        batches = [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]
    return [_batch([examples[i] for i in batch]) for batch in batches]


def _batch(examples: Sequence[Row]) -> Batch:
    rows = [torch.tensor(ids) for ids, _ in examples]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    lengths = torch.tensor([len(row) for row in rows])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return Batch(ids, mask, torch.tensor([label for _, label in examples]))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
