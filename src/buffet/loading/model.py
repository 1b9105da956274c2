"""A loaded model: tokenizer, embeddings and program, behind the few methods the rest needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from buffet.errors import BuffetError
from buffet.loading.config import ModelConfig
from buffet.loading.network import build_program
from buffet.loading.tokenizer import Encoding, Tokenizer
from buffet.network import Program
from buffet.printing import counted, listed


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
        """``(word[id] + type[t]) + position[i]``, before the LayerNorm; token types are 0 unless given.

        Added in the order of `transformers`, so that the rows are those it computes, to the last bit.
        """
        kinds = self.types[0] if types is None else self.types[types]
        return torch.nn.functional.embedding(ids, self.words) + kinds + self.positions[: ids.shape[-1]]


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """A classifier ready to be verified. The weights are float32, as they are in the checkpoint."""

    name: str
    config: ModelConfig
    program: Program
    tokenizer: Tokenizer | None
    tensors: Mapping[str, Tensor]
    directory: Path | None = None  # where it was read from; None: from memory
    family: str = "bert"  # the model_type of its configuration; `config` itself is in BERT's words

    def __repr__(self) -> str:
        config = self.config
        layers = counted(config.num_hidden_layers, "layer")
        heads = counted(config.num_attention_heads, "head")
        size = sum(tensor.numel() for tensor in self.tensors.values())
        return (
            f"{type(self).__name__}({self.name!r}, {self.family}, {layers}, width {config.hidden_size},"
            f" {heads}, classes {', '.join(listed(self.labels))}, {size:,} parameters)"
        )

    @cached_property
    def embeddings(self) -> Embeddings:
        """The tables that the rows of a text come from."""
        return Embeddings.of(self.tensors)

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

    def to(self, device: torch.device) -> Model:
        """The same model on another device; rows of `embed`, and so regions and proofs, live there too."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        return replace(self, program=self.program.to(device), tensors=tensors)

    def encode(self, text: str, pair: str | None = None) -> Encoding:
        """Tokens and ids of `text`, checked to fit the model; every method that takes a text starts here.

        With a `pair`, a second text, of both as the model's tokenizer puts them together.
        """
        if self.tokenizer is None:
            raise BuffetError(
                f"{self.name} was loaded without a tokenizer: give load(..., tokenizer=...) one"
            )
        encoding = self.tokenizer.encode(text, pair)
        if pair is not None and not (self.config.type_vocab_size > 1 and encoding.apart):
            raise BuffetError(
                f"{self.name} does not tell two sentences apart: it needs token types for them, and a"
                " tokenizer that puts a separator between; give one text, without a pair"
            )
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

    def spelling(self, number: int) -> str | None:
        """The token of an id; rows of the table may be left that no token has."""
        return None if self.tokenizer is None else self.tokenizer.inner.id_to_token(number)

    def read(self, x: Float[Tensor, "tokens width"], rows: Sequence[int]) -> list[str | None]:
        """The tokens that `embed` gives these rows of `x`, to the last bit; None: no token, or several."""
        return [self._token(x[row], row) for row in rows]

    def _token(self, row: Float[Tensor, "width"], position: int) -> str | None:
        tables = self.embeddings
        short = row.to(tables.words)
        exact = torch.equal(short.double(), row.to(short.device, torch.float64))
        if not exact or position >= len(tables.positions) or len(row) != tables.words.shape[1]:
            return None
        found = set[int]()
        for kind in tables.types:
            # In the order of `Embeddings.rows`; one column tells almost all of them apart.
            first = tables.words[:, 0] + kind[0] + tables.positions[position, 0]
            likely = (first == short[0]).nonzero()[:, 0]
            same = (tables.words[likely] + kind + tables.positions[position] == short).all(-1)
            found.update(likely[same].tolist())
        return self.spelling(found.pop()) if len(found) == 1 else None

    def embed(self, text: str, pair: str | None = None) -> Float[Tensor, "tokens width"]:
        """The embedding rows of `text` (word + token type + position, before the LayerNorm), float32.

        With a `pair`, the rows of both texts, with a separator between them.
        """
        encoding = self.encode(text, pair)
        ids, types = (
            torch.tensor(v, device=self.embeddings.words.device) for v in (encoding.ids, encoding.types)
        )
        return self.embeddings.rows(ids, types)

    def logits(
        self, x: Float[Tensor, "*batch tokens width"], mask: Bool[Tensor, "*batch tokens"] | None = None
    ) -> Float[Tensor, "*batch classes"]:
        """The logits for embedding rows, in the precision of `x`; padding rows are False in `mask`."""
        if x.shape[-1] != self.config.row_width:
            raise BuffetError(
                f"the embedding rows are {x.shape[-1]} wide, {self.name} expects {self.config.row_width}"
            )
        if x.dtype not in (torch.float32, torch.float64):
            raise BuffetError(f"the embedding rows must be float32 or float64, got {x.dtype}")
        program = self.program if x.dtype == torch.float32 else self.program64
        return program.evaluate(x, mask)
