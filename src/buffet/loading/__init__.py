"""Anyone's classifier → `Model`: configuration, weights, tokenizer, program."""

from buffet.loading.config import ModelConfig
from buffet.loading.model import DEFAULT, Embeddings, Model, available, load
from buffet.loading.pytorch import EncoderClassifier
from buffet.loading.tokenizer import Encoding, Tokenizer

__all__ = [
    "DEFAULT",
    "Embeddings",
    "EncoderClassifier",
    "Encoding",
    "Model",
    "ModelConfig",
    "Tokenizer",
    "available",
    "load",
]
