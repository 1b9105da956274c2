"""Floating point operations and bytes of a computation, counted while it runs.

Counted are the operations that reach PyTorch's kernels: matrix products with 2 operations per multiplication
(its own formulas), and for every kernel the bytes of the tensors it reads and writes, as if nothing stayed
in a cache. Everything that is no matrix product counts by its bytes only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


@dataclass(frozen=True)
class Count:
    """What a computation did."""

    flops: int  # of matrix products
    moved_bytes: int


def count(run: Callable[[], object]) -> Count:
    """Run something and count; many times slower than running it, where its tensors are small."""
    counter = _Counter()
    with counter:
        run()
    return Count(counter.flops, counter.moved_bytes)


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.flops = self.moved_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        formula = flop_registry.get(func.overloadpacket)
        if formula is None and _made_of_others(func):
            with self:
                return func.decompose(*args, **kwargs)
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        tensors = [v for v in tree_leaves((args, kwargs, result)) if isinstance(v, Tensor)]
        self.moved_bytes += sum(_size(tensor) for tensor in tensors)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=result)
        return result


@cache
def _made_of_others(func: Any) -> bool:
    """Whether an operation has no kernel of its own; without gradients, such operations arrive whole."""
    return bool(func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def _size(tensor: Tensor) -> int:
    """The bytes behind a tensor; what is repeated along an axis counts once."""
    entries = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        entries *= size if stride else min(size, 1)
    return entries * tensor.element_size()
