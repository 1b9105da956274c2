"""The arithmetic that bounds reckon with, whatever a process has asked PyTorch for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch

DEVICES = ("cpu", "cuda")
WHOLE = "ieee"
LESS = "bf16"
"""Leaves products to oneDNN. Only processors with units for such products (AMX) then lose digits."""
SIZES = (8, 64, 512)


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of matrices round every number as its type says, and never more.

    `torch.autocast` makes bfloat16 of float32, and PyTorch can be told to multiply float32 in TF32 or
    bfloat16. Errors are then thousands of times those that bounds allow for, so both are off in here, and as
    before afterwards. Also a decorator.
    """
    with ExitStack() as settings:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                settings.enter_context(torch.autocast(device, enabled=False))
        quick = _quick()
        for products in _products():
            settings.callback(setattr, products, "fp32_precision", products.fp32_precision)
            products.fp32_precision = LESS if quick and products is _processor() else WHOLE
        yield


def _processor() -> Any:
    """PyTorch's choice of how processors multiply; None before 2.9."""
    backend: Any = torch.backends.mkldnn
    return getattr(backend, "matmul", None)


def _products() -> tuple[Any, ...]:
    """What decides how matrices are multiplied; before PyTorch 2.9 it was one setting for all."""
    found: Any = torch.backends.cuda.matmul
    return (_OneSetting(),) if _processor() is None else (found, _processor())


class _OneSetting:
    """The older setting, under the newer name."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, asked: str) -> None:
        torch.set_float32_matmul_precision("highest" if asked == WHOLE else asked)


@cache
def _quick() -> bool:
    """Whether products of float32 are to be left to oneDNN, which loses nothing on this processor.

    The library that PyTorch multiplies with makes no use of the widest registers of some processors. oneDNN,
    which comes with PyTorch too, does, and takes half the time; but PyTorch hands products to it only where
    they may be taken in less than single precision. So it is asked for on x86 without such units, and a
    product is tried first.
    """
    found = _processor()
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if found is None or not torch.backends.cpu.get_cpu_capability().startswith("AVX") or amx():
        return False
    before = found.fp32_precision
    try:
        found.fp32_precision = LESS
        return _all_digits()
    finally:
        found.fp32_precision = before


def _all_digits() -> bool:
    """Whether products with 1 keep every digit of numbers in single precision, on either side."""
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        x, eye = torch.rand(2, 64, size, generator=generator), torch.eye(size)
        for product in (x @ eye, (eye @ x.mT).mT, torch.stack([x[0] @ eye, (eye @ x[1].mT).mT])):
            if not torch.equal(product, x):
                return False
    return True
