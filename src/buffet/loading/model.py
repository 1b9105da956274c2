"""A loaded model: tokenizer, embeddings and program, behind the few methods the rest needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from buffet.errors import BuffetError
from buffet.loading.agreement import as_float32, check_agreement
from buffet.loading.config import ModelConfig
from buffet.loading.families import Architecture, read_architecture
from buffet.loading.hub import fetch, is_hub_id
from buffet.loading.network import build_program
from buffet.loading.pytorch import EncoderClassifier, translate
from buffet.loading.tokenizer import Encoding, Tokenizer
from buffet.loading.vocabulary import tokenizer_of
from buffet.loading.weights import Stored, in_memory, open_weights, read_tensors
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
    tokenizer: Tokenizer | None
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

    def to(self, device: torch.device) -> Model:
        """The same model on another device; rows of `embed`, and so regions and proofs, live there too."""
        tensors = {name: tensor.to(device) for name, tensor in self.tensors.items()}
        embeddings = Embeddings.of(tensors)
        return replace(self, program=self.program.to(device), embeddings=embeddings, tensors=tensors)

    def encode(self, text: str) -> Encoding:
        """Tokens and ids of `text`, checked to fit the model; every method that takes a text starts here."""
        if self.tokenizer is None:
            raise BuffetError(
                f"{self.name} was loaded without a tokenizer: give load(..., tokenizer=...) one"
            )
        encoding = self.tokenizer.encode(text)
        if any(
            i == self.config.pad_token_id and s for i, s in zip(encoding.ids, encoding.special, strict=True)
        ):
            raise BuffetError("the text has the padding token in it: leave it out")
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


def available() -> tuple[str, ...]:
    """The names of the models shipped inside the package."""
    return tuple(sorted(entry.parent.name for entry in MODELS.glob("*/config.json")))


def load(
    source: str | Path | nn.Module | None = None, *, tokenizer: object = None, check: bool = False
) -> Model:
    """The model of `source`, the embedded default when nothing is given. `source` is one of

    * the name of an embedded model (it goes before a directory of the same name: write ``./name`` for that);
    * a directory with config.json, weights (model.safetensors or pytorch_model.bin, or their shards) and
      tokenizer (tokenizer.json, vocab.txt, or vocab.json and merges.txt);
    * ``owner/model``, an id of the Hugging Face Hub (extra ``hf``);
    * a sequence classifier of `transformers` in memory, or an `EncoderClassifier` around PyTorch's own
      `nn.TransformerEncoder`.

    `tokenizer`, a directory or an object of `tokenizers` or `transformers`, goes before the one in the
    directory; a module without one takes embedding rows but no texts. A module in memory is run beside the
    program made of it, and refused if their logits differ by more than 1e-4; with `check` this is done for
    directories too, by `transformers`. Nothing in a checkpoint is ever executed, and whatever is wrong with
    it is said in one `BuffetError`.
    """
    if isinstance(source, nn.Module):
        return _from_module(source, tokenizer)
    name, directory = _locate(source)
    architecture = read_architecture(directory / "config.json")
    model = _assemble(name, architecture, open_weights(directory), str(directory), tokenizer or directory)
    if check:
        _compare(model, _transformers(directory, model.config), str(directory))
    return model


def _locate(source: str | Path | None) -> tuple[str, Path]:
    """The name of a model, and the directory it is read from."""
    name = DEFAULT if source is None else source
    if name in available():
        return str(name), MODELS / name
    directory = Path(name)
    # os.path answers False where Path raises: names too long, forbidden folders
    if os.path.isdir(directory):
        return directory.resolve().name, directory
    if isinstance(name, str) and is_hub_id(name) and not os.path.isfile(directory):
        return name, fetch(name)
    listed = ", ".join(available()) or "none"
    what = "a file, not a checkpoint directory" if os.path.isfile(directory) else "no such directory"
    raise BuffetError(f"{str(name)!r}: {what}; give a checkpoint directory or an embedded model ({listed})")


def _assemble(
    name: str, architecture: Architecture, stored: Mapping[str, Stored], where: str, tokenizer: object
) -> Model:
    config = architecture.config
    tensors = read_tensors(stored, architecture, where)
    return Model(
        name=name,
        config=config,
        program=build_program(config, tensors),
        tokenizer=None if tokenizer is None else tokenizer_of(tokenizer, config.vocab_size),
        embeddings=Embeddings.of(tensors),
        tensors=tensors,
    )


def _from_module(module: nn.Module, tokenizer: object) -> Model:
    name = type(module).__name__
    config = getattr(module, "config", None)
    if isinstance(module, EncoderClassifier):
        raw, tensors = translate(module, name)
    elif config is not None and hasattr(config, "to_dict"):
        bases = (base.__name__ for base in type(module).__mro__)
        task = next((base for base in bases if base.endswith("ForSequenceClassification")), name)
        raw, tensors = {**config.to_dict(), "architectures": [task]}, module.state_dict()
    else:
        raise BuffetError(
            f"{name}: supported modules are sequence classifiers of transformers, and "
            "buffet.loading.EncoderClassifier around an nn.TransformerEncoder"
        )
    model = _assemble(name, Architecture.of(raw, name), in_memory(tensors), name, tokenizer)
    _compare(model, module, name)
    return model


def _compare(model: Model, module: nn.Module, where: str) -> None:
    """Refuse `model` unless it computes the logits of `module`."""

    def program(ids: Tensor, types: Tensor | None, mask: Tensor | None) -> Tensor:
        return model.logits(model.embeddings.rows(ids, types), mask)

    def source(ids: Tensor, types: Tensor | None, mask: Tensor | None) -> Tensor:
        if isinstance(ready, EncoderClassifier):
            return ready(ids, mask)
        given = {"attention_mask": mask, "token_type_ids": types}
        return ready(ids, **{key: value for key, value in given.items() if value is not None}).logits

    with as_float32(module) as ready:
        check_agreement(model.config, program, source, where)


def _transformers(directory: Path, config: ModelConfig) -> nn.Module:
    """The classifier of a directory as `transformers` runs it."""
    if (config.layer_norm, config.norm_position, config.pooling) != ("standard", "post", "cls"):
        raise BuffetError(
            f"{directory}: check=True runs the model in transformers, which has no layer_norm "
            f"{config.layer_norm}, norm_position {config.norm_position}, pooling {config.pooling}"
        )
    try:
        from transformers import AutoModelForSequenceClassification
    except ImportError:
        raise BuffetError("check=True runs the model in transformers: pip install 'buffet[hf]'") from None
    return AutoModelForSequenceClassification.from_pretrained(
        directory, local_files_only=True, trust_remote_code=False
    )
