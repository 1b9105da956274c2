"""A whole training run, from the data to the checkpoint directory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from buffet.data import Splits, read_data
from buffet.loading.checkpoint import check_target, serialise, write_checkpoint
from buffet.synonyms import read_synonyms
from buffet.system.parallel import threads
from buffet.training.card import DataFacts, image_facts, model_card, sentence_facts, sha256_of
from buffet.training.corpus import Sample, count_tokens, encode, make_batches, make_tokenizer
from buffet.training.images import read_images
from buffet.training.network import Network, Trainable, first_weights, new_config
from buffet.training.presets import DIGITS
from buffet.training.pretrained import read_encoder
from buffet.training.results import TrainProgress, TrainSummary
from buffet.training.settings import TrainSettings
from buffet.training.state import Position, Store
from buffet.training.substitution import SubstitutionNetwork, with_substitutes
from buffet.training.trainer import Trainer


@dataclass(frozen=True, eq=False)
class Lesson:
    """A network before its first step, and what it is to learn."""

    network: Trainable
    parts: Mapping[str, Sequence[Sample]]  # train, dev and test
    data: str  # a hash or a name: other data is another run
    facts: DataFacts
    files: Mapping[str, str] = field(default_factory=dict)  # besides the configuration and the card


def train(settings: TrainSettings, progress: Callable[[TrainProgress], None] | None = None) -> TrainSummary:
    """Train, keep the weights with the best dev accuracy, write the checkpoint directory, all or nothing.

    The test part is read once, at the end. The result depends on the settings and the data only: a run that
    was interrupted and started again with the same settings ends with the same weights.
    """
    check_target(settings.out, overwrite=settings.overwrite)
    lesson = _images(settings) if settings.data == DIGITS else _sentences(settings)
    network, parts = lesson.network, lesson.parts
    identity = {**settings.recipe(), "data": lesson.data, "initial weights": _sha256(network)}
    store = Store.beside(settings.out, identity)
    if settings.restart:
        store.discard()
    with threads(settings.threads):
        trainer = Trainer(network, len(parts["train"]), settings, store, progress)
        if (snapshot := store.load()) is not None:
            trainer.restore(snapshot)
        end = trainer.fit(parts["train"], parts["dev"])
        batches = {
            name: make_batches(parts[name], settings.batch, network.pad)
            for name in ("dev", "test")
            if parts[name]
        }
        right = {name: network.accuracy(some) for name, some in batches.items()}
        bounded = isinstance(network, SubstitutionNetwork)
        certified = {name: network.score(some) for name, some in batches.items()} if bounded else {}
    summary = _summary(settings, lesson, end, right, certified)
    texts = {
        "config.json": json.dumps(network.config.model_dump(), indent=2) + "\n",
        **lesson.files,
        "README.md": model_card(settings, network.config, lesson.facts, summary),
    }
    write_checkpoint(settings.out, texts, network.tensors, overwrite=settings.overwrite)
    store.discard()
    return summary


def _images(settings: TrainSettings) -> Lesson:
    network, parts = read_images(settings)
    return Lesson(network, parts, DIGITS, image_facts({name: len(part) for name, part in parts.items()}))


def _sentences(settings: TrainSettings) -> Lesson:
    data = read_data(settings.data)
    network = start_network(settings, data)
    limit = min(settings.max_tokens, network.config.max_position_embeddings)
    parts = {name: encode(getattr(data, name), network.tokenizer, limit) for name in ("train", "dev", "test")}
    files = {"tokenizer.json": network.tokenizer.inner.to_str(pretty=False) + "\n"}
    words = "" if settings.synonyms is None else f" {sha256_of(settings.synonyms)}"
    return Lesson(network, parts, data.sha256 + words, sentence_facts(settings, data), files)


def start_network(settings: TrainSettings, data: Splits) -> Network:
    """The network before its first step: random, or a pretrained encoder with a fresh head."""
    sentences = [example.sentence for example in data.train]
    if settings.pretrained is not None:
        network = read_encoder(settings.pretrained, settings, data.classes)
        network.counts = count_tokens(sentences, network.tokenizer)
        return network
    synonyms = None
    if settings.synonyms is not None:
        synonyms = read_synonyms(settings.synonyms, settings.most_synonyms)
    tokenizer = make_tokenizer(sentences, settings, partial(with_substitutes, synonyms=synonyms or {}))
    config = new_config(settings, data.classes, tokenizer.size)
    weights, counts = first_weights(config, settings), count_tokens(sentences, tokenizer)
    if synonyms is None:
        return Network(config, weights, tokenizer, counts)
    labels = torch.tensor([example.label for example in data.train])
    shares = torch.bincount(labels, minlength=data.classes).clamp_min(1) / len(labels)
    return SubstitutionNetwork(config, weights, tokenizer, counts, synonyms, shares)


def _summary(
    settings: TrainSettings,
    lesson: Lesson,
    end: Position,
    right: Mapping[str, float],
    certified: Mapping[str, float],
) -> TrainSummary:
    return TrainSummary(
        dev_accuracy=right["dev"],
        test_accuracy=right.get("test"),
        dev_certified=certified.get("dev"),
        test_certified=certified.get("test"),
        out=settings.out,
        preset=settings.preset,
        losses=end.losses,
        dev_accuracies=end.accuracies,
        best_epoch=end.best_epoch,
        parameters=sum(tensor.numel() for tensor in lesson.network.tensors.values()),
        rows=len(lesson.parts["train"]),
        seconds=end.seconds,
        sha256=_sha256(lesson.network),
    )


def _sha256(network: Trainable) -> str:
    return hashlib.sha256(serialise(network.tensors)).hexdigest()
