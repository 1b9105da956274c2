"""ONNX files → our network: parsed (`file`), read as views of tokens × features (`reader`), checked (`model`)."""

from buffet.loading.onnx.model import OnnxModel, compare, read_onnx, run_onnx

__all__ = ["OnnxModel", "compare", "read_onnx", "run_onnx"]
