"""Checks of a loader's device arguments; apart from `feed`, as this is imported with the loader's class."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dpex.errors import OptionError

Transform = Callable[[Any], Any]


def parse(device: Any) -> torch.device | None:
    """Return a loader's ``device``. `dpex.device.devices.opened` finds out if this process can use it.

    Raises:
        OptionError: It names no device that batches can be copied to.
    """
    if device is None:
        return None
    parsed = _parsed(device)
    if parsed is None:
        raise OptionError(
            f"device={device!r}: give a torch.device or its name, such as 'cuda', 'cuda:1' or 'cpu', or None"
        )
    if parsed.type == "meta" or not (parsed.type == "cpu" or hasattr(torch, parsed.type)):
        raise OptionError(f"device={device!r}: no batch can be copied there; give an accelerator, 'cpu' or None")
    return parsed


def _parsed(device: Any) -> torch.device | None:
    if not isinstance(device, (str, torch.device)):
        return None
    try:
        return torch.device(device)
    except RuntimeError:
        return None
