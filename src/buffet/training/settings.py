"""Everything that decides the result of a training run."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from buffet.data import HUB
from buffet.errors import validated
from buffet.training.presets import DEFAULT, DIGITS, FINETUNE, preset_values

Count = Annotated[int, Field(ge=1, le=1_000_000)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Positive = Annotated[float, Field(gt=0, le=1e6)]
NonNegative = Annotated[float, Field(ge=0, le=1e6)]

# Where things are and what happens to files: the result does not depend on these.
HOUSEKEEPING = frozenset({"data", "synonyms", "out", "overwrite", "restart", "save_minutes"})
# What certified training for substitutions is able to bound.
SUBSTITUTION = {
    "layers": 1,
    "activation": "relu",
    "layer_norm": "no_var",
    "norm_position": "post",
    "pooling": "cls",
    "head": "none",
    "tokenizer": "word",
    "pretrained": None,
    "adversarial": 0.0,
}
# What a pretrained encoder brings with it.
ARCHITECTURE = frozenset(
    {"layers", "heads", "width", "inner", "activation", "layer_norm", "norm_position"}
    | {"tokenizer", "vocabulary", "min_count", "embedding_scale", "gain"}
)


def _text(path: object) -> object:
    return os.fspath(path) if isinstance(path, os.PathLike) else path


class TrainSettings(BaseModel):
    """A preset and what differs from it. The defaults are the recipe of the embedded model.

    Values that are not given come from `preset`, and what the preset leaves open from the defaults here.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    preset: str = DEFAULT  # a name of `presets`; FINETUNE unless given when there is a pretrained encoder
    data: Annotated[str, BeforeValidator(_text)]  # directory with train, dev and test.tsv, or hf:NAME
    out: Path  # checkpoint directory to write; unless given, named after the preset
    overwrite: bool = False  # replace a checkpoint that is already there
    restart: bool = False  # begin again where an interrupted run of this output would be continued
    save_minutes: NonNegative = 5.0  # an interruption costs no more than this
    pretrained: Path | None = None  # directory of an encoder to start from
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    threads: Count = 1  # sums depend on the split over threads: one thread gives the same weights anywhere

    layers: Count = 3  # deep enough for bounds to be interesting, shallow enough to prove in seconds
    heads: Count = 4
    width: Count = 96  # with the vocabulary below, the weights stay under 5 MB
    inner: Count = 128  # the FFN of a small model gains nothing from the usual factor of four
    activation: Literal["relu", "gelu", "gelu_new", "gelu_pytorch_tanh", "tanh"] = "relu"
    layer_norm: Literal["standard", "no_var"] = "no_var"  # without variance it is linear: tighter bounds
    norm_position: Literal["post", "pre"] = "post"
    pooling: Literal["cls", "mean"] = "cls"
    head: Literal["dense", "none"] = "dense"  # the tanh layer of BERT between pooling and classifier
    max_tokens: Annotated[int, Field(ge=3, le=100_000)] = 64  # the longest SST-2 sentence has 56 words
    patch: Count = 2  # side of the patches that an image is cut into

    tokenizer: Literal["word", "wordpiece"] = "word"  # whole words: a moved row is a moved word
    vocabulary: Annotated[int, Field(ge=5, le=1_000_000)] = 10_000  # entries, special tokens included
    min_count: Count = 2  # a word seen once teaches nothing that [UNK] does not

    epochs: Count = 5  # enough for dev accuracy to level off; early stopping may end before
    patience: Count = 3  # epochs without a better dev accuracy before stopping
    batch: Count = 64
    rate: Positive = 5e-4  # peak of the learning rate; half of Adam's usual value was steadier on dev
    warmup: Fraction = 0.05  # of all steps: post-norm blocks want a gentle start
    weight_decay: NonNegative = 2.0  # far above the usual 0.1: weights of no use vanish, bounds get tighter
    # Of Glorot's first matrices: what training has no use for stays small. LayerNorm without variance never
    # shrinks a row: at 1 rows grow by 1.7 in every block, and a dozen blocks saturate the pooler for good.
    gain: Positive = 0.3
    clip: Positive = 1.0  # norm of the gradient; keeps a rare bad batch from undoing an epoch
    embedding_scale: Positive = 0.1  # standard deviation at the start; without variance the scale stays
    embedding_dropout: Fraction = 0.4  # the embeddings hold most parameters, so they overfit first
    word_dropout: Fraction = 0.2  # words replaced by [UNK]: trains that row and spreads the evidence
    rare_dropout: NonNegative = 0.0  # a word seen n times is replaced with probability r / (r + n), too
    adversarial: NonNegative = 0.0  # L2 size of a move of the most sensitive word, along the gradient

    synonyms: Path | None = None  # of words that may be exchanged: train for that
    most_synonyms: Count | None = None  # only the first so many of each word
    worst_case: Fraction = 0.0  # share of the loss that is that of the worst substitutes
    ramp: Annotated[float, Field(gt=0, le=1)] = 0.4  # of the steps, in which that loss grows to its share
    exchanged: Fraction = 0.0  # words replaced by substitutes at random: rows that no sentence has learn too
    closeness: NonNegative = 0.0  # weight in the loss of the squared distances between a word's choices

    @model_validator(mode="before")
    @classmethod
    def _from_preset(cls, given: dict[str, Any]) -> dict[str, Any]:
        preset = given.get("preset") or (FINETUNE if given.get("pretrained") else DEFAULT)
        values = {"out": preset, **preset_values(preset), **given, "preset": preset}
        if "data" not in values:
            raise ValueError("there is no data: give --data DIRECTORY or hf:NAME")
        if (values["data"] == DIGITS) != (preset_values(preset).get("data") == DIGITS):
            raise ValueError(
                f"data {values['data']!r} with preset {preset}: images and image presets go together"
            )
        if values.get("pretrained") is None:
            if preset == FINETUNE:
                raise ValueError(f"preset {FINETUNE} needs a pretrained encoder: give --from DIRECTORY")
        elif fixed := sorted(ARCHITECTURE & values.keys()):
            raise ValueError(f"the pretrained encoder decides {', '.join(fixed)}: leave out what sets them")
        return values

    @model_validator(mode="after")
    def _divisible(self) -> TrainSettings:
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by heads {self.heads}")
        return self

    @model_validator(mode="after")
    def _bounded(self) -> TrainSettings:
        if self.synonyms is None:
            if self.worst_case or self.exchanged or self.closeness or self.most_synonyms:
                raise ValueError("training for substitutions needs the words: give --synonyms FILE")
            return self
        for name, wanted in SUBSTITUTION.items():
            if (found := getattr(self, name)) != wanted:
                raise ValueError(
                    f"{name} is {found}: training for substitutions is for encoders of one layer that it can"
                    f" bound, with {name} {wanted}: see the variant substitutions"
                )
        return self

    @classmethod
    def of(cls, **values: object) -> TrainSettings:
        """Settings from loose values, None meaning not given; what is wrong is said in one `BuffetError`."""
        given = {name: value for name, value in values.items() if value is not None}
        return validated(cls, given, "training settings")

    def recipe(self) -> dict[str, Any]:
        """What decides the result besides the data, in plain JSON values."""
        return self.model_dump(mode="json", exclude=set(HOUSEKEEPING))

    @property
    def data_name(self) -> str:
        """What the data is called, without the path of any machine."""
        hub = self.data.startswith(HUB)
        return self.data.removeprefix(HUB) if hub else Path(self.data).resolve().name

    def command(self) -> str:
        """The command line of these settings: what differs from the preset, and no machine's paths."""
        data = self.data if self.data.startswith(HUB) else f"DATA/{self.data_name}"
        words = ["buffet", "train", *([] if self.preset == DEFAULT else [self.preset])]
        words += [] if self.data == DIGITS else ["--data", data]
        words += ["--out", self.out.name]
        words += [] if self.synonyms is None else ["--synonyms", self.synonyms.name]
        if self.pretrained is not None:
            words += ["--from", self.pretrained.resolve().name]
        usual = {name: field.default for name, field in type(self).model_fields.items()}
        usual |= preset_values(self.preset)
        for name, value in self:
            if name not in HOUSEKEEPING | {"preset", "pretrained"} and value != usual[name]:
                words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        return shlex.join(words)
