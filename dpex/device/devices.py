"""Devices that batches are copied to: the host, torch's accelerators, and page-locked memory for them.

A *mark* is a position in a device's queue of work, such as a recorded CUDA event (see `dpex.system.gpu.stall.Events`).
`Device.await_mark` is the only method here that waits for the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from dpex._torch import pin_memory
from dpex.errors import OptionError
from dpex.system.clock import monotonic
from dpex.transport.arena import memory_behind

logger: logging.Logger = logging.getLogger("dpex")
_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is page-locked for all devices of the process."""

Mark = Any
"""An opaque value, for use with the `Device` that returned it."""


class Device:
    """The host, or a device without streams in torch. Copies are synchronous, and marks are times."""

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def begin_thread(self) -> None:
        """Make this the current device of the calling thread."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the calling thread's work goes to the queue for copies."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """Mark the queue that the calling thread feeds: its training queue, or within `copying` the queue for
        copies."""
        return monotonic()

    def is_passed(self, mark: Mark) -> bool:
        """Return True if the device has come to this mark."""
        return True

    def apart_s(self, first: Mark, second: Mark) -> float:
        """Return the seconds of the device between two marks that are passed."""
        return float(second - first)

    def wait(self, mark: Mark) -> None:
        """Have the queue that the calling thread feeds wait for this mark. The thread does not wait."""

    def await_mark(self, mark: Mark) -> None:
        """Have the calling thread wait for this mark."""

    def record_use(self, tensor: torch.Tensor) -> None:
        """Keep a dropped tensor's memory until the device has done the work that this thread queued before the drop.

        Without this, memory that was allocated in the queue for copies is reused as soon as the tensor is dropped.
        """

    def records_own_use(self, value: Any) -> bool:
        """Let an object with tensors of its own record their use, as `record_use` does. Return False if it cannot."""
        return True

    def is_capturing(self) -> bool:
        """Return True if the calling thread records a graph instead of feeding the device."""
        return False

    def catch_up(self) -> None:
        """Have the queue for copies wait for the work that the calling thread has queued so far."""

    def seeded(self, seed: int) -> contextlib.AbstractContextManager[Any]:
        """Return a context that seeds the device's random generator, and restores its former state at the end.

        The device must be the current device, as within `copying`. The host's generators stay unchanged.
        """
        return contextlib.nullcontext() if self.target.type == "cpu" else _seeded(device_module(self.target.type), seed)


class QueueDevice(Device):
    """An accelerator of torch's with streams and events, such as CUDA, ROCm and XPU. `Device` describes the methods."""

    _refuses_locks = False
    """True once the platform has refused to lock memory. It is not asked again."""

    def __init__(self, target: torch.device, module: Any) -> None:
        super().__init__(target)
        self._module = module
        self._copies = module.Stream(device=target)

    def begin_thread(self) -> None:
        set_index(self.target.type, int(self.target.index))

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        stream: contextlib.AbstractContextManager[Any] = self._module.stream(self._copies)
        return stream

    def _fed(self) -> Any:
        """Return the stream that the calling thread feeds on this device."""
        return self._module.current_stream(self.target)

    def mark(self) -> Mark:
        event = self._module.Event(enable_timing=True)
        event.record(self._fed())
        return event

    def is_passed(self, mark: Mark) -> bool:
        return bool(mark.query())

    def apart_s(self, first: Mark, second: Mark) -> float:
        return float(first.elapsed_time(second)) / 1e3

    def wait(self, mark: Mark) -> None:
        self._fed().wait_event(mark)

    def await_mark(self, mark: Mark) -> None:
        mark.synchronize()

    def record_use(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == self.target.type:
            tensor.record_stream(self._fed())

    def records_own_use(self, value: Any) -> bool:
        """See `Device`: graphs of PyTorch Geometric and of DGL, for instance, have a ``record_stream``."""
        record = getattr(value, "record_stream", None)
        if not callable(record):
            return False
        record(self._fed())
        return True

    def is_capturing(self) -> bool:
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def catch_up(self) -> None:
        self._copies.wait_event(self.mark())

    def lock_pages(self, address: int, nbytes: int) -> bool:
        """Page-lock host memory in place, so that the device copies directly from it. Return False if that fails."""
        open_runtime = getattr(self._module, "cudart", None)
        if open_runtime is None or QueueDevice._refuses_locks:
            return False
        answer = int(open_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
        if answer:
            QueueDevice._refuses_locks = True
            logger.info("shared memory cannot be page-locked here (error %d): batches are copied once more", answer)
            with contextlib.suppress(Exception):  # CUDA reports the error once more, at this launch
                torch.zeros(1, device=self.target)
        return answer == 0

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages`."""
        with contextlib.suppress(Exception):  # the device may be gone
            self._module.cudart().cudaHostUnregister(address)


@contextlib.contextmanager
def _seeded(module: Any, seed: int) -> Iterator[None]:
    before = module.get_rng_state()
    module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(before)


def opened(device: torch.device) -> Device:
    """Return a `Device` for use in this process. ``device`` without an index means the calling thread's current one.

    Raises:
        OptionError: This process cannot use the device.
    """
    if device.type == "cpu":
        return Device(device)
    kind = available_kind()
    if kind != device.type:
        found = f"the accelerator that torch finds here is {kind!r}" if kind else "torch finds no accelerator here"
        raise OptionError(f"device={str(device)!r}: {found}; give device='cpu', or None: batches stay on the host")
    count = device_count(kind)
    index = current_index(kind) if device.index is None else device.index
    if index >= count:
        raise OptionError(f"device={str(device)!r}: this process sees {count} of them, with indices from 0 on")
    module, target = device_module(kind), torch.device(kind, index)
    return QueueDevice(target, module) if hasattr(module, "Stream") else Device(target)


# -- page-locked host memory, from which a device copies directly ------------------------------------------------------

_locked: dict[int, bool] = {}
"""True for each address of a page-locked memory map, False if locking failed. All feeds of a process share them."""


class Staging:
    """Returns the tensors of a batch in page-locked memory, from which ``device`` copies directly.

    A shared-memory map that contains slots is page-locked in place when the first batch from it is copied, and unlocked
    before it is unmapped. Other tensors, and all tensors if the platform cannot lock such maps, are first copied into
    page-locked memory of torch. ``staged_bytes`` is the number of bytes of these copies.
    """

    def __init__(self, device: QueueDevice) -> None:
        self._device = device
        self.staged_bytes: int = 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor itself, or a copy in page-locked memory."""
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
            # finalizers of an object are called newest first, so this one is called before the map is unmapped
            weakref.finalize(memory, _unlock, self._device, address, os.getpid()).atexit = False
        return known


def _unlock(device: QueueDevice, address: int, pid: int) -> None:
    is_locked = _locked.pop(address, False)
    if is_locked and os.getpid() == pid:
        device.unlock_pages(address)


# -- torch's accelerators by common names, for releases of torch that lack them ----------------------------------------


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
    """Make accelerator ``index`` the calling thread's current one."""
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
    """Return the number of devices of type ``kind`` that this process can use."""
    accelerator: Any = getattr(torch, "accelerator", None)
    if hasattr(accelerator, "device_count"):
        return int(accelerator.device_count())
    return int(device_module(kind).device_count())
