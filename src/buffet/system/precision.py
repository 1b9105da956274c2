"""The arithmetic that bounds reckon with, whatever a process has asked PyTorch for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

DEVICES = ("cpu", "cuda")
WHOLE = "ieee"


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
        for products in _products():
            settings.callback(setattr, products, "fp32_precision", products.fp32_precision)
            products.fp32_precision = WHOLE
        yield


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
