"""A loaded model: tokenizer, embeddings and program, behind the few methods the rest needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buffet.errors import BuffetError
from buffet.loading.checkpoint import read_tensors
from buffet.loading.config import ModelConfig, read_config
from buffet.loading.network import build_program
from buffet.loading.tokenizer import Encoding, Tokenizer, read_tokenizer
from buffet.program import Program

MODELS = Path(__file__).parent.parent / "models"
DEFAULT = "sst2-small"


@dataclass(frozen=True, eq=False)
class Embeddings:
    """The tables whose rows add up to the input of the program."""

    words: Float[Tensor, "vocabulary width"]
    positions: Float[Tensor, "positions width"]
    types: Float[Tensor, "types width"]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Embeddings:
        """The tables among the tensors of a checkpoint."""
        return cls(
            *(
                tensors[f"bert.embeddings.{table}_embeddings.weight"]
                for table in ("word", "position", "token_type")
            )
        )

    def rows(
        self, ids: Int[Tensor, "*batch tokens"], types: Int[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "*batch tokens width"]:
        """``word[id] + position[i] + type[t]``, before the LayerNorm; token types are 0 unless given."""
        kinds = self.types[0] if types is None else self.types[types]
        return torch.nn.functional.embedding(ids, self.words) + self.positions[: ids.shape[-1]] + kinds


@dataclass(frozen=True, eq=False)
class Model:
    """A classifier ready to be verified. The weights are float32, as they are in the checkpoint."""

    name: str
    config: ModelConfig
    program: Program
    tokenizer: Tokenizer
    embeddings: Embeddings
    tensors: Mapping[str, Tensor]

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of every class, in the order of the logits."""
        return self.config.labels

    @cached_property
    def program64(self) -> Program:
        """The program in float64: the same weights, with constants such as 1/width exact to float64.

        Casting `program` instead would keep those constants as float32 rounded them.
        """
        return build_program(self.config, {name: tensor.double() for name, tensor in self.tensors.items()})

    def encode(self, text: str) -> Encoding:
        """Tokens and ids of `text`, checked to fit the model; every method that takes a text starts here."""
        encoding = self.tokenizer.encode(text)
        limit = self.config.max_position_embeddings
        if len(encoding.ids) > limit:
            raise BuffetError(
                f"the text has {len(encoding.ids)} tokens (special ones included), "
                f"{self.name} takes at most {limit}: shorten it"
            )
        if max(encoding.types) >= self.config.type_vocab_size:
            raise BuffetError(
                f"the tokenizer gives token type {max(encoding.types)}, "
                f"config.json says type_vocab_size {self.config.type_vocab_size}"
            )
        return encoding

    def tokens(self, text: str) -> list[str]:
        """The tokens of `text`, special ones included: one per row of `embed(text)`."""
        return list(self.encode(text).tokens)

    def special(self, text: str) -> list[bool]:
        """For every token, whether it is special ([CLS], [SEP], …) and no word of the text."""
        return list(self.encode(text).special)

    def unknown(self, text: str) -> list[bool]:
        """For every token, whether it stands for a word outside the vocabulary."""
        return list(self.encode(text).unknown)

    def embed(self, text: str) -> Float[Tensor, "tokens width"]:
        """The embedding rows of `text` (word + position + token type, before the LayerNorm), float32."""
        encoding = self.encode(text)
        return self.embeddings.rows(torch.tensor(encoding.ids), torch.tensor(encoding.types))

    def logits(
        self, x: Float[Tensor, "*batch tokens width"], mask: Bool[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "*batch classes"]:
        """The logits for embedding rows, in the precision of `x`; padding rows are False in `mask`."""
        if x.shape[-1] != self.config.hidden_size:
            raise BuffetError(
                f"the embedding rows are {x.shape[-1]} wide, {self.name} expects {self.config.hidden_size}"
            )
        if x.dtype not in (torch.float32, torch.float64):
            raise BuffetError(f"the embedding rows must be float32 or float64, got {x.dtype}")
        program = self.program if x.dtype == torch.float32 else self.program64
        return program.evaluate(x, mask)


def available() -> tuple[str, ...]:
    """The names of the models shipped inside the package."""
    return tuple(sorted(entry.parent.name for entry in MODELS.glob("*/config.json")))


def load(path_or_name: str | Path | None = None) -> Model:
    """The model of a checkpoint directory or an embedded name; the embedded default when nothing is given.

    An embedded name goes before a directory of the same name; write ``./name`` for the directory. Nothing
    in a checkpoint is ever executed, and whatever is wrong with it is said in one `BuffetError`.
    """
    name = DEFAULT if path_or_name is None else path_or_name
    embedded = name in available()
    directory = MODELS / name if embedded else Path(name)
    # os.path answers False where Path raises: names too long, forbidden folders
    if not os.path.isdir(directory):
        listed = ", ".join(available()) or "none"
        what = "a file, not a checkpoint directory" if os.path.isfile(directory) else "no such directory"
        raise BuffetError(
            f"{str(name)!r}: {what}; give a checkpoint directory or an embedded model ({listed})"
        )
    config = read_config(directory / "config.json")
    tensors = read_tensors(directory, config.shapes())
    return Model(
        name=str(name) if embedded else directory.resolve().name,
        config=config,
        program=build_program(config, tensors),
        tokenizer=read_tokenizer(directory / "tokenizer.json", config.vocab_size),
        embeddings=Embeddings.of(tensors),
        tensors=tensors,
    )
