"""Anyone's classifier → `Model`: configuration, weights, tokenizer, program."""

from buffet.loading.config import ModelConfig
from buffet.loading.images import ImageModel
from buffet.loading.model import Embeddings, Model
from buffet.loading.onnx import OnnxModel
from buffet.loading.pytorch import EncoderClassifier
from buffet.loading.sources import DEFAULT, available, checked, load, load_checkpoint
from buffet.loading.tokenizer import Encoding, Tokenizer
from buffet.loading.vnnlib import Query, read_vnnlib

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
