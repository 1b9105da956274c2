"""From sentences to batches: making a vocabulary, encoding, padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import tokenizers
import torch
from jaxtyping import Bool, Float, Int
from tokenizers import models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from buffet.data import Example
from buffet.loading.tokenizer import SPECIAL, Tokenizer, framed, guarded, word_level
from buffet.training.settings import TrainSettings

Sample = tuple[list[int] | Tensor, int]  # token ids of a sentence, or rows of an image; and the label
POOL = 50  # batches whose sentences are sorted by length together


@dataclass(frozen=True, eq=False)
class Batch:
    """Samples padded to the longest of them: token ids, or rows of pixels."""

    inputs: Int[Tensor, "samples tokens"] | Float[Tensor, "samples tokens pixels"]
    mask: Bool[Tensor, "samples tokens"]
    labels: Int[Tensor, " samples"]


def make_tokenizer(
    sentences: Iterable[str],
    settings: TrainSettings,
    more: Callable[[Sequence[str]], Iterable[str]] = lambda words: (),
) -> Tokenizer:
    """A tokenizer for these sentences; the same sentences give the same one.

    Whole words are joined by what `more` says goes with them.
    """
    if settings.tokenizer == "word":
        return Tokenizer.of(word_level(sentences, settings.vocabulary, settings.min_count, more))
    return Tokenizer.of(word_pieces(sentences, settings.vocabulary, settings.min_count))


def word_pieces(sentences: Iterable[str], size: int, min_count: int) -> tokenizers.Tokenizer:
    """A lower-case WordPiece tokenizer of at most `size` pieces, special tokens included.

    A piece has to occur `min_count` times to be made; a word with a letter that was never seen is [UNK].
    """
    normalizer, splitter = normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    texts = [normalizer.normalize_str(sentence) for sentence in sentences]
    learner = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    learner.pre_tokenizer = splitter
    # The trainer numbers letters inside words in no fixed order and breaks ties by number. Given as special
    # tokens they are numbered as listed; the tokenizer that is returned is built without these.
    letters = sorted(set().union(*texts) - {" "})
    alphabet = [*letters, *(f"##{letter}" for letter in letters)]
    learner.train_from_iterator(
        texts,
        trainers.WordPieceTrainer(
            vocab_size=size,
            min_frequency=min_count,
            special_tokens=[*SPECIAL, *alphabet],
            show_progress=False,
        ),
    )
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece(learner.get_vocab(with_added_tokens=False), unk_token="[UNK]")
    )
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    return framed(tokenizer, SPECIAL)


def encode(examples: Sequence[Example], tokenizer: Tokenizer, limit: int) -> list[Sample]:
    """Token ids and label of every example; a sentence of more than `limit` tokens keeps its beginning."""
    sentences = [example.sentence for example in examples]
    encoded = guarded(
        lambda: tokenizer.inner.encode_batch(sentences), "the tokenizer cannot take the sentences of the data"
    )
    rows = (e.ids if len(e.ids) <= limit else [*e.ids[: limit - 1], e.ids[-1]] for e in encoded)
    return [(ids, example.label) for ids, example in zip(rows, examples, strict=True)]


def count_tokens(sentences: Sequence[str], tokenizer: Tokenizer) -> Int[Tensor, " vocabulary"]:
    """How often every token occurs."""
    raws = guarded(
        lambda: tokenizer.inner.encode_batch(sentences), "the tokenizer cannot take the sentences of the data"
    )
    ids = torch.tensor([index for raw in raws for index in raw.ids], dtype=torch.long)
    return torch.bincount(ids, minlength=tokenizer.size)


def make_batches(
    examples: Sequence[Sample], size: int, pad: int, generator: torch.Generator | None = None
) -> list[Batch]:
    """Batches of samples of similar length, in random order and composition when a generator is given."""

    def length(index: int) -> int:
        return len(examples[index][0])

    order = list(range(len(examples)))
    pool = max(1, len(order))
    if generator is not None:
        order = torch.randperm(len(order), generator=generator).tolist()
        pool = POOL * size  # sorted within a pool only, so that batches differ from epoch to epoch
    order = [i for k in range(0, len(order), pool) for i in sorted(order[k : k + pool], key=length)]
    batches = [order[k : k + size] for k in range(0, len(order), size)]
    if generator is not None:
        batches = [batches[k] for k in torch.randperm(len(batches), generator=generator).tolist()]
    return [_padded([examples[i] for i in batch], pad) for batch in batches]


def _padded(examples: Sequence[Sample], pad: int) -> Batch:
    samples = [torch.as_tensor(sample) for sample, _ in examples]
    inputs = torch.nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(sample) for sample in samples])
    mask = torch.arange(inputs.shape[1]) < lengths[:, None]
    return Batch(inputs, mask, torch.tensor([label for _, label in examples]))
