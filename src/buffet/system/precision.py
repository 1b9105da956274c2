"""The arithmetic that bounds reckon with, whatever a process has asked PyTorch for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from buffet.errors import BuffetError

DEVICES = ("cpu", "cuda")
WHOLE = "ieee"
ALLOW_LESS = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")
"""What oneDNN reads as it begins, and cannot be told otherwise afterwards."""


@contextmanager
def full_precision() -> Iterator[None]:
    """Products of matrices round every number as its type says, and never more.

    `torch.autocast` makes bfloat16 of float32, and PyTorch can be told to multiply float32 in TF32 or
    bfloat16. Errors are then thousands of times those that bounds allow for, so both are off in here, and as
    before afterwards. Also a decorator.
    """
    if asked := [f"{name}={os.environ[name]}" for name in ALLOW_LESS if _less(os.environ.get(name, ""))]:
        raise BuffetError(f"{asked[0]}: products would lose digits that bounds count on; unset it first")
    with ExitStack() as settings:
        for device in DEVICES:
            if torch.is_autocast_enabled(device):
                settings.enter_context(torch.autocast(device, enabled=False))
        settings.enter_context(_WHOLE_PRODUCTS)
        yield


def _less(mode: str) -> bool:
    return mode.lower() not in ("", "strict")


class _WholeProducts:
    """A context, of any number of threads at the same time, as they share one setting.

    The last one to leave puts it back.
    """

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0
        self.before: list[tuple[Any, str]] = []

    def __enter__(self) -> None:
        with self.lock:
            if not self.inside:
                self.before = [(products, products.fp32_precision) for products in _products()]
            self.inside += 1
            for products, _ in self.before:
                products.fp32_precision = WHOLE

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                for products, asked in reversed(self.before):
                    products.fp32_precision = asked


_WHOLE_PRODUCTS = _WholeProducts()


def _products() -> tuple[Any, ...]:
    """What decides how matrices are multiplied; before PyTorch 2.9 it was one setting for all."""
    processor: Any = getattr(torch.backends.mkldnn, "matmul", None)
    return (_OneSetting(),) if processor is None else (torch.backends.cuda.matmul, processor)


class _OneSetting:
    """The older setting, under the newer name."""

    @property
    def fp32_precision(self) -> str:
        return torch.get_float32_matmul_precision()

    @fp32_precision.setter
    def fp32_precision(self, asked: str) -> None:
        torch.set_float32_matmul_precision("highest" if asked == WHOLE else asked)
