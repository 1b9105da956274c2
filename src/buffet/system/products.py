"""Products of matrices in single precision by the quicker of two kernels.

On some processors the library that PyTorch multiplies with makes no use of the widest registers, and oneDNN,
which comes with PyTorch too, takes half the time. PyTorch hands products to it where products may be taken in
less than single precision, which is faster still where the processor has units for that. Bounds need single
precision: so a product is tried first, and only where nothing of it is lost, all are left to oneDNN.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

LESS = "bf16"
"""The precision that is allowed; processors without units for it take all digits."""
SIZES = (8, 64, 512)


@cache
def quick_products() -> bool:
    """Leave products on processors to oneDNN, once, in this process; whether that is done.

    Nothing is changed where PyTorch does not have the choice, or someone has made it already.
    """
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)
    if getattr(matmul, "fp32_precision", None) != "none" or torch.cpu._is_amx_tile_supported():
        return False
    matmul.fp32_precision = LESS
    if _all_digits():
        return True
    matmul.fp32_precision = "none"
    return False


def _all_digits() -> bool:
    """Whether products with 1 keep every digit of numbers in single precision, on either side."""
    generator = torch.Generator().manual_seed(0)
    for size in SIZES:
        x, eye = torch.rand(2, 64, size, generator=generator), torch.eye(size)
        for product in (x @ eye, (eye @ x.mT).mT, torch.stack([x[0] @ eye, (eye @ x[1].mT).mT])):
            if not torch.equal(product, x):
                return False
    return True
