"""torch's accelerators by common names, for releases of torch that lack them; goes with the last such release."""

from __future__ import annotations

from typing import Any

import torch


def device_module(kind: str | None) -> Any:
    """Return `torch.cuda` or its like, for a type such as ``"cuda"`` or ``"cuda:1"``; None or "" means CUDA."""
    return getattr(torch, (kind or "cuda").split(":")[0])


def current_index(kind: str | None) -> int:
    """Return the index of the calling thread's current accelerator."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if hasattr(accelerator, "current_device_index"):
        return int(accelerator.current_device_index())
    return int(device_module(kind).current_device())


def set_index(kind: str | None, index: int) -> None:
    """Make that accelerator the calling thread's current one."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if hasattr(accelerator, "set_device_index"):
        accelerator.set_device_index(index)
    else:
        device_module(kind).set_device(index)


def available_kind() -> str | None:
    """Return the type of the accelerator that this process can use, or None.

    Asking may load the driver, after which processes that are forked cannot use the accelerator.
    """
    accelerator: Any = getattr(torch, "accelerator", None)
    if hasattr(accelerator, "current_accelerator"):
        found = accelerator.current_accelerator()
        return found.type if found is not None and accelerator.is_available() else None
    return "cuda" if torch.cuda.is_available() else None


def device_count(kind: str) -> int:
    """Return the number of devices of that type that this process can use."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if hasattr(accelerator, "device_count"):
        return int(accelerator.device_count())
    return int(device_module(kind).device_count())
