"""A whole training run, from the data to the checkpoint directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from buffet.data import Splits, read_data
from buffet.loading.checkpoint import check_target, serialise, write_checkpoint
from buffet.system.parallel import threads
from buffet.training.card import model_card
from buffet.training.corpus import encode, make_batches, make_tokenizer
from buffet.training.images import train_images
from buffet.training.network import Network, first_weights, new_config
from buffet.training.presets import DIGITS
from buffet.training.pretrained import read_encoder
from buffet.training.results import Progress, TrainSummary
from buffet.training.settings import TrainSettings
from buffet.training.state import Position, Store
from buffet.training.trainer import Trainer


def train(settings: TrainSettings, progress: Callable[[Progress], None] | None = None) -> TrainSummary:
    """Train, keep the weights with the best dev accuracy, write the checkpoint directory, all or nothing.

    The test part is read once, at the end. The result depends on the settings and the data only: a run that
    was interrupted and started again with the same settings ends with the same weights.
    """
    check_target(settings.out, overwrite=settings.overwrite)
    if settings.data == DIGITS:
        return train_images(settings, progress)
    data = read_data(settings.data)
    network = start_network(settings, data)
    limit = min(settings.max_tokens, network.config.max_position_embeddings)
    parts = {name: encode(getattr(data, name), network.tokenizer, limit) for name in ("train", "dev", "test")}
    start = hashlib.sha256(serialise(network.tensors)).hexdigest()
    store = Store.beside(settings.out, {**settings.recipe(), "data": data.sha256, "initial weights": start})
    if settings.restart:
        store.discard()
    with threads(settings.threads):
        trainer = Trainer(network, len(data.train), settings, store, progress)
        if (snapshot := store.load()) is not None:
            trainer.restore(snapshot)
        end = trainer.fit(parts["train"], parts["dev"])
        test = make_batches(parts["test"], settings.batch, network.pad)
        test_accuracy = network.accuracy(test) if test else None
    summary = _summary(settings, network, data, end, test_accuracy)
    texts = {
        "config.json": json.dumps(network.config.model_dump(), indent=2) + "\n",
        "tokenizer.json": network.tokenizer.inner.to_str(pretty=False) + "\n",
        "README.md": model_card(settings, network.config, data, summary),
    }
    write_checkpoint(settings.out, texts, network.tensors, overwrite=settings.overwrite)
    store.discard()
    return summary


def start_network(settings: TrainSettings, data: Splits) -> Network:
    """The network before its first step: random, or a pretrained encoder with a fresh head."""
    if settings.pretrained is not None:
        encoder = read_encoder(settings.pretrained, settings, data.classes)
        return Network(encoder.config, encoder.tensors, encoder.tokenizer)
    tokenizer = make_tokenizer((e.sentence for e in data.train), settings)
    config = new_config(settings, data.classes, tokenizer.size)
    return Network(config, first_weights(config, settings), tokenizer)


def _summary(
    settings: TrainSettings, network: Network, data: Splits, end: Position, test_accuracy: float | None
) -> TrainSummary:
    return TrainSummary(
        out=settings.out,
        preset=settings.preset,
        dev_accuracy=max(end.accuracies),
        test_accuracy=test_accuracy,
        losses=end.losses,
        dev_accuracies=end.accuracies,
        best_epoch=end.best_epoch,
        parameters=sum(tensor.numel() for tensor in network.tensors.values()),
        rows=len(data.train),
        seconds=end.seconds,
        sha256=hashlib.sha256(serialise(network.tensors)).hexdigest(),
    )
