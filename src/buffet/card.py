"""The model card written beside the weights: what the model is, how well it does, how to make it again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from buffet.datasets import Splits

if TYPE_CHECKING:
    from buffet.train import TrainSettings, TrainSummary

CARD = """\
# {name}

A sentence classifier trained by this repository's `buffet train`.

| | |
| --- | --- |
| architecture | {layers} layers, width {width}, {heads} heads, FFN {inner}, {activation}, \
LayerNorm `{layer_norm}` ({norm_position}-norm), `{pooling}` pooling, at most {max_tokens} tokens |
| parameters | {parameters:,} (float32) |
| vocabulary | {vocabulary} lower-case words, made from the training sentences |
| data | `{data}`: {rows:,} training sentences, {dev:,} dev, {test:,} test |
| dropped from training | sentences that are in dev or test: {leaked}; repeated rows: {duplicates} |
| dev accuracy | {dev_accuracy:.2%} (epoch {best_epoch} of {epochs}, chosen on dev, so slightly flattering) |
| test accuracy | {test_accuracy:.2%} (the chosen epoch; took no part in any choice) |
| seed | {seed} |
| sha256 of `model.safetensors` | `{sha256}` |

Made by

    {command}

where `DATA/{data}` holds `train.tsv`, `dev.tsv` and `test.tsv` (`sentence<TAB>label`). The same command gives
the same weights on the same version of PyTorch; another version or processor may round differently.

The weights and this card are under the licence of the repository. The sentences are not part of it: they
stay under the terms of their source.{note}
"""

SST2_NOTE = """ For SST-2 these are the files of the GLUE benchmark (training phrases and
dev) and the labelled test sentences of the Stanford Sentiment Treebank; the text has no explicit licence."""


def model_card(settings: TrainSettings, data: Splits, summary: TrainSummary, vocabulary: int) -> str:
    """The README.md of a checkpoint."""
    return CARD.format(
        **settings.model_dump(exclude={"data", "vocabulary", "epochs"}),
        name=settings.out.name,
        data=settings.data.name,
        vocabulary=f"{vocabulary:,}",
        parameters=summary.parameters,
        rows=len(data.train),
        dev=len(data.dev),
        test=len(data.test),
        leaked=data.leaked,
        duplicates=data.duplicates,
        dev_accuracy=summary.dev_accuracy,
        test_accuracy=summary.test_accuracy,
        best_epoch=summary.best_epoch,
        epochs=len(summary.losses),
        sha256=summary.sha256,
        command=settings.command(),
        note=SST2_NOTE if settings.data.name == "sst2" else "",
    )
