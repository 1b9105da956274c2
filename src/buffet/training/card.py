"""The model card written beside the weights: what the model is, how well it does, how to make it again."""

from __future__ import annotations

import hashlib
import math
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from buffet.data import HUB, Splits
from buffet.loading.checkpoint import WEIGHTS
from buffet.loading.config import ModelConfig
from buffet.loading.vision import ImageConfig
from buffet.printing import plural
from buffet.training.results import TrainSummary
from buffet.training.settings import TrainSettings

CARD = """\
# {name}

{kind} classifier trained by this repository's `buffet train`.

| | |
| --- | --- |
{rows}

Made by

    {command}

{repeat}

{terms}
"""


@dataclass(frozen=True)
class DataFacts:
    """What a card says of the data."""

    rows: Mapping[str, str]
    where: str  # it comes from
    terms: str


def sentence_facts(settings: TrainSettings, data: Splits) -> DataFacts:
    title = f"`{settings.data_name}`" + (f" ({data.dataset.title})" if data.dataset else "")
    test = f"{len(data.test):,} test" if data.test else "no labelled test part"
    rows = {
        "data": f"{title}: {len(data.train):,} training sentences, {len(data.dev):,} dev, {test}",
        "dropped from training": f"sentences that are in dev or test: {data.leaked}; "
        f"repeated rows: {data.duplicates}",
        "sha256 of the data": f"`{data.sha256}`",
    }
    files = "`train.tsv`, `dev.tsv` and `test.tsv` (`sentence<TAB>label`)"
    if settings.synonyms is not None:
        count = "all" if settings.most_synonyms is None else f"the first {settings.most_synonyms}"
        rows["synonyms"] = (
            f"`{settings.synonyms.name}`, {count} of each word, sha256 `{sha256_of(settings.synonyms)}`"
        )
    where = f"where `DATA/{settings.data_name}` holds {files}"
    if settings.data.startswith(HUB):
        where = "with the data of the Hugging Face hub"
    note = f" {data.dataset.note}" if data.dataset else ""
    return DataFacts(rows, where, f" The sentences stay under the terms of their source.{note}")


def sha256_of(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def image_facts(counts: Mapping[str, int]) -> DataFacts:
    count = "{train} training images, {dev} dev, {test} test".format(**counts)
    where = "with the digits that come with scikit-learn"
    return DataFacts({"data": f"scikit-learn's digits, 8 × 8 pixels: {count}"}, where, "")


def model_card(settings: TrainSettings, config: ModelConfig, data: DataFacts, summary: TrainSummary) -> str:
    """The README.md of a checkpoint."""
    rows = {**_model(settings, config, summary), **data.rows, **_outcome(settings, summary)}
    repeat = (
        f"{data.where}. The same command gives the same weights on the same version of PyTorch"
        f" ({torch.__version__}); another version or processor may round differently."
    )
    weights = "The weights and this card are under the licence of the repository."
    if settings.pretrained is not None:
        weights = "The weights descend from the pretrained encoder and stay under its licence."
    return CARD.format(
        name=settings.out.name,
        kind="An image" if isinstance(config, ImageConfig) else "A sentence",
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        command=settings.command(),
        repeat=textwrap.fill(repeat, 110),
        terms=textwrap.fill(weights + data.terms, 110),
    )


def _model(settings: TrainSettings, config: ModelConfig, summary: TrainSummary) -> dict[str, str]:
    c = config
    if isinstance(c, ImageConfig):
        kind, reads = "vision transformer, ", f"patches of {c.patch_size} × {c.patch_size} pixels"
        words = {}
    else:
        kind, reads = "", f"`{c.pooling}` pooling, at most {c.max_position_embeddings} tokens"
        words = _vocabulary(settings, config)
    layers = f"{c.num_hidden_layers} {plural(c.num_hidden_layers, 'layer')}"
    return {
        "architecture": f"{kind}{layers}, width {c.hidden_size}, {c.num_attention_heads} heads, "
        f"FFN {c.intermediate_size}, {c.hidden_act}, LayerNorm `{c.layer_norm}` ({c.norm_position}-norm),"
        f" {reads}",
        "parameters": f"{summary.parameters:,} (float32)",
        **words,
    }


def _vocabulary(settings: TrainSettings, config: ModelConfig) -> dict[str, str]:
    tokens = {"word": "lower-case words", "wordpiece": "lower-case WordPieces"}[settings.tokenizer]
    vocabulary, start = f"{tokens}, made from the training sentences", "random weights"
    if settings.synonyms is not None:
        vocabulary += " and the synonyms"
    if settings.pretrained is not None:
        vocabulary = "tokens, those of the pretrained encoder"
        digest = sha256_of(settings.pretrained / WEIGHTS)
        start = (
            f"the pretrained encoder `{settings.pretrained.resolve().name}` (sha256 of its weights"
            f" `{digest}`), with a fresh head"
        )
    return {"vocabulary": f"{config.vocab_size:,} {vocabulary}", "started from": start}


def _outcome(settings: TrainSettings, summary: TrainSummary) -> dict[str, str]:
    test = "not measured: the data has no labelled test part"
    if summary.test_accuracy is not None:
        test = f"{summary.test_accuracy:.2%} (the chosen epoch; took no part in any choice)"
    certified = {
        f"certified accuracy ({name})": f"{_down(value)}: right, whatever words are exchanged at once; by the"
        " bound of training"
        for name, value in (("dev", summary.dev_certified), ("test", summary.test_certified))
        if value is not None
    }
    return {
        "dev accuracy": f"{summary.dev_accuracy:.2%} (epoch {summary.best_epoch} of {len(summary.losses)}, "
        "chosen on dev, so slightly flattering)",
        "test accuracy": test,
        **certified,
        "time": f"{summary.seconds / 60:.1f} minutes, threads: {settings.threads}",
        "seed": str(settings.seed),
        "sha256 of `model.safetensors`": f"`{summary.sha256}`",
    }


def trained_minutes(model: Path) -> float | None:
    """How long the training of a model took, as its card says; None: it has no such card."""
    try:
        found = re.search(r"^\| time \| ([0-9.]+) minutes", (model / "README.md").read_text("utf-8"), re.M)
    except (OSError, UnicodeDecodeError):
        return None
    return float(found[1]) if found else None


def _down(share: float) -> str:
    """A share that is claimed, rounded down."""
    return f"{math.floor(share * 1e4) / 100:.2f}%"
