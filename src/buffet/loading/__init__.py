"""Anyone's classifier → `Model`: configuration, weights, tokenizer, program."""

from typing import TYPE_CHECKING

from buffet.lazy import lazy

if TYPE_CHECKING:
    from buffet.loading.config import ModelConfig
    from buffet.loading.directories import DEFAULT, available
    from buffet.loading.images import ImageModel
    from buffet.loading.model import Embeddings, Model
    from buffet.loading.onnx import OnnxModel
    from buffet.loading.pytorch import EncoderClassifier
    from buffet.loading.sources import checked, load, load_checkpoint
    from buffet.loading.tokenizer import Encoding, Tokenizer
    from buffet.loading.vnnlib import Query, read_vnnlib

__getattr__, __dir__ = lazy(
    __name__,
    {
        "DEFAULT": "buffet.loading.directories",
        "Embeddings": "buffet.loading.model",
        "EncoderClassifier": "buffet.loading.pytorch",
        "Encoding": "buffet.loading.tokenizer",
        "ImageModel": "buffet.loading.images",
        "Model": "buffet.loading.model",
        "ModelConfig": "buffet.loading.config",
        "OnnxModel": "buffet.loading.onnx",
        "Query": "buffet.loading.vnnlib",
        "Tokenizer": "buffet.loading.tokenizer",
        "available": "buffet.loading.directories",
        "checked": "buffet.loading.sources",
        "load": "buffet.loading.sources",
        "load_checkpoint": "buffet.loading.sources",
        "read_vnnlib": "buffet.loading.vnnlib",
    },
)

__all__ = [
    "DEFAULT",
    "Embeddings",
    "EncoderClassifier",
    "Encoding",
    "ImageModel",
    "Model",
    "ModelConfig",
    "OnnxModel",
    "Query",
    "Tokenizer",
    "available",
    "checked",
    "load",
    "load_checkpoint",
    "read_vnnlib",
]
