"""A second device on a machine that has only one.

Tensors `Elsewhere` say that their device is `DEVICE`, but their numbers are in ordinary memory, so everything
computes as usual: branches that depend on numbers, gradients, in-place changes. `watch` sees every operation,
and raises what a real device would: tensors of both places in one operation, numbers from a generator of the
other place. So a function that runs under `watch` creates no tensor where it should not and mixes none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("lazy", 0)  # known to PyTorch and its autograd, and used by nothing here
aten = torch.ops.aten
CROSSING = (aten.copy_.default, aten._to_copy.default)
"""What moves numbers from one place to the other."""
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
"""What takes indices from ordinary memory too."""
Numbers = (
    int
    | float
    | str
    | torch.dtype
    | torch.device
    | torch.layout
    | torch.memory_format
    | torch.Generator
    | None
)


class MixedDevicesError(AssertionError):
    """An operation that a real device refuses."""


class Elsewhere(Tensor):
    """A tensor of the other device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"Elsewhere({self.inner!r})"


@contextmanager
def watch() -> Iterator[None]:
    """Inside, tensors made with ``device=DEVICE`` are `Elsewhere`, and mixing is refused."""
    with _FromNumbers(), _Operations():
        yield


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _FromNumbers(TorchFunctionMode):
    """Tensors made of Python's numbers go to a device below what `_Operations` sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and asked is not None and not isinstance(args[0], Tensor):
            made = func(*args, **{**kwargs, "device": "cpu"})
            return Elsewhere(made) if torch.device(asked).type == DEVICE.type else made
        if func is Tensor.new_tensor and isinstance(args[0], Elsewhere) and asked is None:
            return Elsewhere(args[0].inner.new_tensor(*args[1:], **kwargs))
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            where = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(_index(part) for part in where), *args[2:])
        return func(*args, **kwargs)


def _index(index: Any) -> Any:
    return torch.tensor(index) if isinstance(index, list) else index


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    if func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd):
        with _Operations():  # made of other operations
            return func.decompose(*args, **kwargs)
    asked = kwargs.get("device")
    checked = args
    if func in CROSSING:
        checked = ()
    elif func in INDEXING and isinstance(args[0], Elsewhere):
        checked = args[:1] + args[2:]
    away = any(isinstance(v, Elsewhere) for v in _leaves((args, kwargs.values())))
    if away and any(v.ndim for v in _leaves((checked, kwargs.values())) if type(v) is Tensor):
        raise MixedDevicesError(f"{func}: a tensor in ordinary memory meets one on {DEVICE}")
    to_elsewhere = away if asked is None else torch.device(asked).type == DEVICE.type
    if to_elsewhere and kwargs.get("generator") is not None:
        raise MixedDevicesError(f"{func}: a generator in ordinary memory for a tensor on {DEVICE}")
    inner = {name: _inner(value) for name, value in kwargs.items()}
    if asked is not None:
        inner["device"] = torch.device("cpu")
    result = func(*(_inner(value) for value in args), **inner)
    if func._schema.is_mutable and isinstance(result, Tensor):
        return kwargs.get("out", args[0])  # changed in place
    if not to_elsewhere:
        return result
    if func.is_view:  # the view of an ordinary tensor is one too, also without gradients
        with torch.inference_mode(args[0].is_inference()):
            return _outer(result)
    return _outer(result)


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif not isinstance(value, Numbers):
        for part in value:
            yield from _leaves(part)


def _inner(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_inner(part) for part in value)
    return value.inner if isinstance(value, Elsewhere) else value


def _outer(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_outer(part) for part in value)
    return Elsewhere(value) if type(value) is Tensor else value
