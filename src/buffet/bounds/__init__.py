"""What bounds are: boxes and interval arithmetic (`intervals`), and linear forms (`forms`).

`fused` and `medians` are operations on large tensors that PyTorch has no fast version of.
"""
