"""What a pretrained encoder knows of words: vectors, alike for words that are alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from buffet.data import Example
from buffet.errors import BuffetError
from buffet.loading.families import read_architecture
from buffet.training.corpus import encode, make_batches
from buffet.training.pretrained import read_encoder
from buffet.training.settings import TrainSettings

RANK = 128
"""Principal components that are kept: the others tell single words apart, which rows of their own do."""
EVENNESS = 0.3
"""0: components keep their sizes, 1: all are of one size."""
BATCH = 256


@torch.no_grad()
def word_vectors(
    directory: Path, words: Sequence[str | None], settings: TrainSettings
) -> Float[Tensor, "words width"]:
    """The mean last state of the encoder in `directory` for every word read alone, centred; 0 for None."""
    if not directory.is_dir():
        raise BuffetError(f"{directory}: no such directory; --words-from takes the directory of an encoder")
    width = read_architecture(directory / "config.json").config.hidden_size
    network = read_encoder(directory, settings.model_copy(update={"pooling": "mean"}), width)
    network.tensors["classifier.weight"].copy_(torch.eye(width))  # the logits are what is pooled
    known = [Example(word, place) for place, word in enumerate(words) if word is not None]
    limit = network.config.max_position_embeddings
    found = torch.zeros(len(words), width)
    for batch in make_batches(encode(known, network.tokenizer, limit), BATCH, network.pad):
        found[batch.labels] = network.program.evaluate(network.rows(batch), batch.mask)
    places = torch.tensor([example.label for example in known])
    found[places] -= found[places].mean(0)
    return found


def components(
    vectors: Float[Tensor, "words width"], words: Sequence[str | None]
) -> Float[Tensor, "words components"]:
    """The largest principal components of vectors, of norm 1 in the mean; one more for each that is None."""
    left, sizes, _ = torch.linalg.svd(vectors.double(), full_matrices=False)
    found = left[:, :RANK] * sizes[:RANK] ** (1 - EVENNESS)
    scale = found.square().sum(-1).mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    special = torch.tensor([place for place, word in enumerate(words) if word is None], dtype=torch.long)
    alone = torch.zeros(len(words), len(special))
    alone[special, torch.arange(len(special))] = 1.0
    return torch.cat([(found / scale).float(), alone], 1)
