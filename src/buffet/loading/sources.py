"""From whatever names a model to the model: embedded, a directory, the Hub, a module in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from buffet.errors import BuffetError, one_line
from buffet.loading.agreement import as_float32, largest_difference, random_inputs
from buffet.loading.config import ModelConfig
from buffet.loading.directories import locate
from buffet.loading.families import Architecture, read_architecture, read_json
from buffet.loading.images import ImageModel, check_images
from buffet.loading.model import Model
from buffet.loading.network import build_program
from buffet.loading.onnx import OnnxModel, read_onnx
from buffet.loading.pytorch import EncoderClassifier, translate
from buffet.loading.vision import (
    ImageConfig,
    image_architecture,
    is_image_classifier,
    read_image_architecture,
)
from buffet.loading.vocabulary import tokenizer_of
from buffet.loading.weights import Stored, in_memory, open_weights, read_tensors


def load(
    source: str | Path | nn.Module | None = None, *, tokenizer: object = None, check: bool | None = None
) -> Model | OnnxModel:
    """The model of `source`, the embedded default when nothing is given. `source` is one of

    * the name of an embedded model (for a directory of the same name write ``./name``);
    * a directory with config.json, weights (model.safetensors or pytorch_model.bin, or their shards) and
      tokenizer (tokenizer.json, vocab.txt, or vocab.json and merges.txt);
    * ``owner/model``, an id of the Hugging Face Hub (extra ``hf``);
    * a sequence or image classifier of `transformers` in memory, or an `EncoderClassifier` around PyTorch's
      own `nn.TransformerEncoder`;
    * a file ``*.onnx`` (extra ``onnx``): a transformer that was exported as a function of its pixels or
      embedding rows, for one sequence length. It becomes an `OnnxModel`, compared with what onnxruntime
      computes where that is installed.

    A vision transformer (in Hugging Face's words or in timm's) becomes an `ImageModel`, whose `embed` takes
    an image instead of a text.

    `tokenizer`, a directory or an object of `tokenizers` or `transformers`, replaces the one in the
    directory; a module without one takes embedding rows but no texts. A module in memory is run beside the
    program made of it, and refused if their logits differ by more than 1e-4. So is a directory, where
    `transformers` is installed and can run it; with ``check=True`` it has to, with ``check=False`` it is not
    asked. Nothing in a checkpoint is ever executed, and whatever is wrong with it is said in one
    `BuffetError`.
    """
    if isinstance(source, str | Path) and is_onnx(source):
        return read_onnx(source, check=check)
    return load_checkpoint(source, tokenizer=tokenizer, check=check)


def is_onnx(source: str | Path) -> bool:
    """Whether a model is named by an ONNX file."""
    return Path(source).suffix.lower() == ".onnx" and not Path(source).is_dir()


def load_checkpoint(
    source: str | Path | nn.Module | None = None, *, tokenizer: object = None, check: bool | None = None
) -> Model:
    """As `load`, for models that read texts or images: all but ONNX files."""
    if isinstance(source, nn.Module):
        return _from_module(source, tokenizer)
    name, directory = locate(source)
    model = _read(name, directory, tokenizer)
    if check or (check is None and find_spec("transformers") and _is_known(model.config)):
        try:
            _difference(model, directory)
        except _CannotRunError:  # transformers is choosier about files, and about what it computes
            if check:
                raise
    return model


class _CannotRunError(BuffetError):
    """`transformers` cannot run a model that we can."""


def checked(source: str | Path) -> tuple[Model, float]:
    """The model of `source`, and how far its logits are from those that `transformers` computes.

    The difference is relative to logits above 1, and a model that differs by more than 1e-4 is refused.
    """
    name, directory = locate(source)
    model = _read(name, directory, None)
    return model, _difference(model, directory)


def _difference(model: Model, directory: Path) -> float:
    try:
        return _compare(model, _transformers(directory, model.config), str(directory))
    except BuffetError:
        raise
    except Exception as error:  # whatever goes wrong in there
        raise _CannotRunError(f"{directory}: transformers cannot run it: {one_line(error)}") from None


def _read(name: str, directory: Path, tokenizer: object) -> Model:
    if is_image_classifier(_configuration(directory)):
        stored = open_weights(directory)
        images = read_image_architecture(directory, _shapes(stored))
        model = _assemble(name, images, stored, str(directory), None)
    else:
        architecture = read_architecture(directory / "config.json")
        model = _assemble(name, architecture, open_weights(directory), str(directory), tokenizer or directory)
    return replace(model, directory=directory)


def _configuration(directory: Path) -> object:
    path = directory / "config.json"
    return read_json(path) if path.is_file() else None


def _shapes(stored: Mapping[str, Stored]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.shape for name, tensor in stored.items()}


def _assemble(
    name: str, architecture: Architecture, stored: Mapping[str, Stored], where: str, tokenizer: object
) -> Model:
    config, tensors = architecture.config, read_tensors(stored, architecture, where)
    program = build_program(config, tensors)
    if isinstance(config, ImageConfig):
        return ImageModel(name, config, program, None, tensors, family=architecture.model_type)
    words = None if tokenizer is None else tokenizer_of(tokenizer, config.vocab_size)
    return Model(name, config, program, words, tensors, family=architecture.model_type)


def _from_module(module: nn.Module, tokenizer: object) -> Model:
    name = type(module).__name__
    config = getattr(module, "config", None)
    if isinstance(module, EncoderClassifier):
        raw, tensors = translate(module, name)
    elif config is not None and hasattr(config, "to_dict"):
        bases = (base.__name__ for base in type(module).__mro__)
        tasks = ("ForSequenceClassification", "ForImageClassification")
        task = next((base for base in bases if base.endswith(tasks)), name)
        raw, tensors = {**config.to_dict(), "architectures": [task]}, module.state_dict()
    else:
        raise BuffetError(
            f"{name}: supported modules are sequence and image classifiers of transformers, and "
            "buffet.loading.EncoderClassifier around an nn.TransformerEncoder"
        )
    stored = in_memory(tensors)
    images = is_image_classifier(raw)
    architecture = image_architecture(raw, _shapes(stored), name) if images else Architecture.of(raw, name)
    model = _assemble(name, architecture, stored, name, tokenizer)
    _compare(model, module, name)
    return model


def _compare(model: Model, module: nn.Module, where: str) -> float:
    """How far the logits of `model` are from those of `module`; too far is refused."""
    if isinstance(model, ImageModel):
        return check_images(model, module, where)

    with as_float32(module) as ready:
        return max(
            largest_difference(
                model.logits(model.embeddings.rows(ids, types), mask), _logits(ready, ids, types, mask), where
            )
            for ids, types, mask in random_inputs(model.config)
        )


def _logits(module: nn.Module, ids: Tensor, types: Tensor | None, mask: Tensor | None) -> Tensor:
    """What a classifier in memory computes."""
    if isinstance(module, EncoderClassifier):
        return module(ids, mask)
    given = {"attention_mask": mask, "token_type_ids": types}
    return module(ids, **{key: value for key, value in given.items() if value is not None}).logits


def _is_known(config: ModelConfig) -> bool:
    """Whether `transformers` has such networks."""
    position = "pre" if isinstance(config, ImageConfig) else "post"
    return (config.layer_norm, config.norm_position, config.pooling) == ("standard", position, "cls")


def _transformers(directory: Path, config: ModelConfig) -> nn.Module:
    """The classifier of a directory as `transformers` runs it."""
    if not _is_known(config):
        raise BuffetError(
            f"{directory}: check=True runs the model in transformers, which has no layer_norm "
            f"{config.layer_norm}, norm_position {config.norm_position}, pooling {config.pooling}"
        )
    try:
        from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification
    except ImportError:
        raise _CannotRunError("check=True runs the model in transformers: pip install 'buffet[hf]'") from None
    images = isinstance(config, ImageConfig)
    kind = AutoModelForImageClassification if images else AutoModelForSequenceClassification
    with _quiet_transformers():
        return kind.from_pretrained(directory, local_files_only=True, trust_remote_code=False)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """No progress bars and no remarks: whatever is wrong with a model is said in one line of ours."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
