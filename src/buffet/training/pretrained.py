"""Starting from a pretrained encoder: its weights, its tokenizer, a fresh head."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from buffet.errors import BuffetError, validated
from buffet.loading.config import ModelConfig
from buffet.loading.families import read_architecture
from buffet.loading.vocabulary import read_tokenizer
from buffet.loading.weights import Stored, open_weights, read_tensors
from buffet.training.network import Network, first_weights, labels_of
from buffet.training.settings import TrainSettings

POOLER, CLASSIFIER = "bert.pooler.", "classifier."


def read_encoder(directory: Path, settings: TrainSettings, classes: int) -> Network:
    """The encoder in `directory`, of any family that loads, with a fresh head.

    Everything of the encoder must be there, with the shapes of config.json and finite. A classifier in the
    file is left where it is; a pooler is kept if the network has one.
    """
    if not directory.is_dir():
        raise BuffetError(f"{directory}: no such directory; --from takes the directory of an encoder")
    found = read_architecture(directory / "config.json")
    head = {
        "num_labels": classes,
        "id2label": labels_of(classes),
        "pooling": settings.pooling,
        "head_act": None,
    }
    config = validated(ModelConfig, {**found.config.model_dump(), **head}, str(directory))
    architecture, shapes = replace(found, config=config), config.shapes()
    stored = {
        name: tensor
        for key, tensor in open_weights(directory).items()
        if (name := architecture.name(key)) in shapes and not name.startswith(CLASSIFIER)
    }
    # Made when they are read, after the encoder: by then its tensors have turned out to be of these sizes.
    weights = cache(partial(first_weights, config, settings))

    def made(name: str) -> Tensor:
        return weights()[name]

    fresh = {
        name: Stored("F32", shape, partial(made, name))
        for name, shape in shapes.items()
        if name.startswith((POOLER, CLASSIFIER))
    }
    tensors = read_tensors({**fresh, **stored}, architecture, str(directory))
    return Network(config, tensors, read_tokenizer(directory, config.vocab_size))
