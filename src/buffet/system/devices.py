"""Where tensors live: the devices that can be asked for by name."""

from __future__ import annotations

import torch

from buffet.errors import BuffetError


def device_named(name: str) -> torch.device:
    """The device called `name`: ``cpu``, ``cuda``, ``cuda:1``, …; ``auto`` is the first GPU, or the CPU.

    Boxes and lines are float64, so a device without them (``mps``) is refused.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BuffetError(f"unknown device '{name}'; choose one of: {_choices()}") from None
    try:
        torch.zeros(1, dtype=torch.float64, device=device).add_(1).item()
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        reason = "it has no float64, which bounds need" if "float64" in str(error) else "there is none here"
        raise BuffetError(f"device '{name}' cannot be used: {reason}; choose one of: {_choices()}") from None
    return device


def synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _choices() -> str:
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return ", ".join(["auto", "cpu", *gpus])
