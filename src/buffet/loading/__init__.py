"""Anyone's classifier → `Model`: configuration, weights, tokenizer, program."""

from buffet.loading.config import ModelConfig
from buffet.loading.images import ImageModel
from buffet.loading.model import Embeddings, Model
from buffet.loading.pytorch import EncoderClassifier
from buffet.loading.sources import DEFAULT, available, checked, load
from buffet.loading.tokenizer import Encoding, Tokenizer

__all__ = [
    "DEFAULT",
    "Embeddings",
    "EncoderClassifier",
    "Encoding",
    "ImageModel",
    "Model",
    "ModelConfig",
    "Tokenizer",
    "available",
    "checked",
    "load",
]
