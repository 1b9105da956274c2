"""The model card written beside the weights: what the model is, how well it does, how to make it again."""

from __future__ import annotations

import hashlib
import textwrap

import torch

from buffet.data import HUB, Splits
from buffet.loading.checkpoint import WEIGHTS
from buffet.loading.config import ModelConfig
from buffet.training.results import TrainSummary
from buffet.training.settings import TrainSettings

CARD = """\
# {name}

A sentence classifier trained by this repository's `buffet train`.

| | |
| --- | --- |
{rows}

Made by

    {command}

{repeat}

{terms}
"""


def model_card(settings: TrainSettings, config: ModelConfig, data: Splits, summary: TrainSummary) -> str:
    """The README.md of a checkpoint."""
    rows = {**_model(settings, config, summary), **_data(settings, data), **_outcome(settings, summary)}
    return CARD.format(
        name=settings.out.name,
        rows="\n".join(f"| {key} | {value} |" for key, value in rows.items()),
        command=settings.command(),
        repeat=textwrap.fill(_repeat(settings), 110),
        terms=textwrap.fill(_terms(settings, data), 110),
    )


def _model(settings: TrainSettings, config: ModelConfig, summary: TrainSummary) -> dict[str, str]:
    c = config
    tokens = {"word": "lower-case words", "wordpiece": "lower-case WordPieces"}[settings.tokenizer]
    vocabulary = f"{tokens}, made from the training sentences"
    start = "random weights"
    if settings.pretrained is not None:
        vocabulary = "tokens, those of the pretrained encoder"
        weights = settings.pretrained / WEIGHTS
        start = (
            f"the pretrained encoder `{settings.pretrained.resolve().name}` (sha256 of its weights"
            f" `{hashlib.sha256(weights.read_bytes()).hexdigest()}`), with a fresh head"
        )
    return {
        "architecture": f"{c.num_hidden_layers} layers, width {c.hidden_size}, "
        f"{c.num_attention_heads} heads, FFN {c.intermediate_size}, {c.hidden_act}, "
        f"LayerNorm `{c.layer_norm}` ({c.norm_position}-norm), `{c.pooling}` pooling, "
        f"at most {c.max_position_embeddings} tokens",
        "parameters": f"{summary.parameters:,} (float32)",
        "vocabulary": f"{c.vocab_size:,} {vocabulary}",
        "started from": start,
    }


def _data(settings: TrainSettings, data: Splits) -> dict[str, str]:
    title = f"`{settings.data_name}`" + (f" ({data.dataset.title})" if data.dataset else "")
    test = f"{len(data.test):,} test" if data.test else "no labelled test part"
    return {
        "data": f"{title}: {len(data.train):,} training sentences, {len(data.dev):,} dev, {test}",
        "dropped from training": f"sentences that are in dev or test: {data.leaked}; "
        f"repeated rows: {data.duplicates}",
        "sha256 of the data": f"`{data.sha256}`",
    }


def _outcome(settings: TrainSettings, summary: TrainSummary) -> dict[str, str]:
    test = "not measured: the data has no labelled test part"
    if summary.test_accuracy is not None:
        test = f"{summary.test_accuracy:.2%} (the chosen epoch; took no part in any choice)"
    return {
        "dev accuracy": f"{summary.dev_accuracy:.2%} (epoch {summary.best_epoch} of {len(summary.losses)}, "
        "chosen on dev, so slightly flattering)",
        "test accuracy": test,
        "time": f"{summary.seconds / 60:.1f} minutes, threads: {settings.threads}",
        "seed": str(settings.seed),
        "sha256 of `model.safetensors`": f"`{summary.sha256}`",
    }


def _repeat(settings: TrainSettings) -> str:
    files = "`train.tsv`, `dev.tsv` and `test.tsv` (`sentence<TAB>label`)"
    where = f"where `DATA/{settings.data_name}` holds {files}"
    if settings.data.startswith(HUB):
        where = "with the data of the Hugging Face hub"
    return (
        f"{where}. The same command gives the same weights on the same version of PyTorch"
        f" ({torch.__version__}); another version or processor may round differently."
    )


def _terms(settings: TrainSettings, data: Splits) -> str:
    weights = "The weights and this card are under the licence of the repository."
    if settings.pretrained is not None:
        weights = "The weights descend from the pretrained encoder and stay under its licence."
    note = f" {data.dataset.note}" if data.dataset else ""
    return f"{weights} The sentences stay under the terms of their source.{note}"
