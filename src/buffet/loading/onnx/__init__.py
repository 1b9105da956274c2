"""ONNX files → our network: parsed (`file`), read node by node (`reader`), held to onnxruntime (`model`)."""

from buffet.loading.onnx.model import OnnxModel, compare, read_onnx, run_onnx

__all__ = ["OnnxModel", "compare", "read_onnx", "run_onnx"]
