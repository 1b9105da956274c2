"""Checkpoint directory (or embedded name) → `Model`: configuration, weights, tokenizer, program."""

from buffet.loading.config import ModelConfig
from buffet.loading.model import DEFAULT, Embeddings, Model, available, load
from buffet.loading.tokenizer import Encoding, Tokenizer

__all__ = ["DEFAULT", "Embeddings", "Encoding", "Model", "ModelConfig", "Tokenizer", "available", "load"]
