"""The verification competition VNN-COMP: its instances, its answers and its files.

`instance` answers one: a network in ONNX, a property in VNN-LIB and a time limit. `listing` answers a list of
them, side by side.
"""
