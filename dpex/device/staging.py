"""Memory of the host that a device can read by itself: from a worker to the device a batch is copied once.

The maps in which slots lie are locked in place, each once, when the first batch out of it is on its way. What lies
elsewhere, or where the platform locks no such maps, is copied into page-locked memory of torch's first. A map is
unlocked before it is unmapped.
"""

from __future__ import annotations

import ctypes
import os
import weakref

import torch

from dpex._torch import pin_memory
from dpex.device.placing import QueueDevice
from dpex.transport.arena import memory_behind

_locked: dict[int, bool] = {}
"""By address: whether a map is locked. The maps of a process are shared by all its feeds."""


class Staging:
    """Gives the tensors of a batch, as memory that ``device`` can read by itself. ``staged_bytes``: copied for it."""

    def __init__(self, device: QueueDevice) -> None:
        self._device = device
        self.staged_bytes = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself, or a copy."""
        if self._is_locked(tensor):
            return tensor
        self.staged_bytes += tensor.nbytes if tensor.layout is torch.strided else 0
        staged: torch.Tensor = pin_memory(tensor, self._device.target.type)
        return staged

    def _is_locked(self, tensor: torch.Tensor) -> bool:
        memory = memory_behind(tensor)
        if memory is None:
            return False
        address = ctypes.addressof(memory)
        known = _locked.get(address)
        if known is None:
            known = _locked[address] = self._device.lock_pages(address, ctypes.sizeof(memory))
            # finalizers of an object are called newest first: this one before the map is unmapped
            weakref.finalize(memory, _unlock, self._device, address, os.getpid()).atexit = False
        return known


def _unlock(device: QueueDevice, address: int, pid: int) -> None:
    is_locked = _locked.pop(address, False)
    if is_locked and os.getpid() == pid:
        device.unlock_pages(address)
