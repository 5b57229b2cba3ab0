"""A device that takes copies beside its other work, as a feed needs it, and torch's accelerators behind it.

A *mark* is a place in a queue of work of the device, as in `dpex.system.gpu.stall.Events`. Nothing here waits for the
device but `Device.await_mark`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Protocol

import torch

from dpex.device.accelerators import available_kind, current_index, device_count, device_module, set_index
from dpex.errors import OptionError
from dpex.system.clock import monotonic

logger = logging.getLogger("dpex")
_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices of the process."""

Mark = Any
"""Opaque to all but the device that made it."""


class Device(Protocol):
    """Where batches go. The calling thread feeds one queue of the device, its training queue; copies have another."""

    target: torch.device
    has_queues: bool
    """Whether copies run beside other work. If not, they are done when they return, and marks are times."""

    def begin_thread(self) -> None:
        """Make this the current device of the calling thread."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """What the calling thread asks of the device within goes to the queue for copies."""

    def mark(self) -> Mark:
        """Mark the queue that the calling thread feeds."""

    def is_passed(self, mark: Mark) -> bool:
        """Whether the device has come to this mark."""

    def apart_s(self, first: Mark, second: Mark) -> float:
        """Seconds of the device between two marks that are passed."""

    def wait(self, mark: Mark) -> None:
        """Have the queue that the calling thread feeds wait for this mark; the thread does not."""

    def await_mark(self, mark: Mark) -> None:
        """Have the calling thread wait for this mark."""

    def lend(self, tensor: torch.Tensor) -> None:
        """Keep the memory of this tensor from being used anew before work is done that was queued while it lived.

        That is work in the queue that the calling thread feeds.
        """

    def lend_own(self, value: Any) -> bool:
        """The same for a value that knows how, if it does."""

    def is_capturing(self) -> bool:
        """Whether the calling thread records a graph instead of feeding the device."""

    def catch_up(self) -> None:
        """Have the queue for copies wait for what the calling thread has queued so far."""

    def seeded(self, seed: int) -> contextlib.AbstractContextManager[Any]:
        """The device's random generator begins with that seed within, and goes on afterwards as if nothing was."""


class PlainDevice:
    """Host memory, or a device of which torch knows no queues: copies are done when they return."""

    has_queues = False

    def __init__(self, target: torch.device) -> None:
        self.target = target

    def begin_thread(self) -> None:
        """See `Device`; there is one device of this type."""

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """See `Device`."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """See `Device`."""
        return monotonic()

    def is_passed(self, mark: Mark) -> bool:
        """See `Device`."""
        return True

    def apart_s(self, first: Mark, second: Mark) -> float:
        """See `Device`."""
        return float(second - first)

    def wait(self, mark: Mark) -> None:
        """See `Device`."""

    def await_mark(self, mark: Mark) -> None:
        """See `Device`."""

    def lend(self, tensor: torch.Tensor) -> None:
        """See `Device`."""

    def lend_own(self, value: Any) -> bool:
        """See `Device`."""
        return True

    def is_capturing(self) -> bool:
        """See `Device`."""
        return False

    def catch_up(self) -> None:
        """See `Device`."""

    def seeded(self, seed: int) -> contextlib.AbstractContextManager[Any]:
        """See `Device`; the generators of the host are not its concern."""
        return contextlib.nullcontext() if self.target.type == "cpu" else _seeded(device_module(self.target.type), seed)


class QueueDevice:
    """An accelerator of torch's with streams and events: CUDA, ROCm, XPU and their like."""

    has_queues = True
    _refuses_locks = False
    """Of the platform: what it refused once, it is not asked for again."""

    def __init__(self, target: torch.device, module: Any) -> None:
        self.target = target
        self._module = module
        self._copies = module.Stream(device=target)

    def begin_thread(self) -> None:
        """See `Device`."""
        set_index(self.target.type, int(self.target.index))

    def copying(self) -> contextlib.AbstractContextManager[Any]:
        """See `Device`."""
        stream: contextlib.AbstractContextManager[Any] = self._module.stream(self._copies)
        return stream

    def _fed(self) -> Any:
        """The stream that the calling thread feeds on this device."""
        return self._module.current_stream(self.target)

    def mark(self) -> Mark:
        """See `Device`."""
        event = self._module.Event(enable_timing=True)
        event.record(self._fed())
        return event

    def is_passed(self, mark: Mark) -> bool:
        """See `Device`."""
        return bool(mark.query())

    def apart_s(self, first: Mark, second: Mark) -> float:
        """See `Device`."""
        return float(first.elapsed_time(second)) / 1e3

    def wait(self, mark: Mark) -> None:
        """See `Device`."""
        self._fed().wait_event(mark)

    def await_mark(self, mark: Mark) -> None:
        """See `Device`."""
        mark.synchronize()

    def lend(self, tensor: torch.Tensor) -> None:
        """See `Device`."""
        if tensor.device.type == self.target.type:
            tensor.record_stream(self._fed())

    def lend_own(self, value: Any) -> bool:
        """See `Device`: graphs of PyTorch Geometric and of DGL, for instance, have a ``record_stream``."""
        record = getattr(value, "record_stream", None)
        if not callable(record):
            return False
        record(self._fed())
        return True

    def lock_pages(self, address: int, nbytes: int) -> bool:
        """Lock memory of the host in place, so that the device can read it by itself; False: it cannot be locked."""
        open_runtime = getattr(self._module, "cudart", None)
        if open_runtime is None or QueueDevice._refuses_locks:
            return False
        answer = int(open_runtime().cudaHostRegister(address, nbytes, _PORTABLE))
        if answer:
            QueueDevice._refuses_locks = True
            logger.info("shared memory cannot be page-locked here (error %d): batches are copied once more", answer)
            with contextlib.suppress(Exception):  # the error is kept for the next launch in this thread: this one
                torch.zeros(1, device=self.target)
        return answer == 0

    def unlock_pages(self, address: int) -> None:
        """Undo `lock_pages`."""
        with contextlib.suppress(Exception):  # of a device that is gone
            self._module.cudart().cudaHostUnregister(address)

    def is_capturing(self) -> bool:
        """See `Device`."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def catch_up(self) -> None:
        """See `Device`."""
        self._copies.wait_event(self.mark())

    def seeded(self, seed: int) -> contextlib.AbstractContextManager[Any]:
        """See `Device`. The device is the current one, as it is within `copying`."""
        return _seeded(self._module, seed)


@contextlib.contextmanager
def _seeded(module: Any, seed: int) -> Iterator[None]:
    before = module.get_rng_state()
    module.manual_seed(seed)
    try:
        yield
    finally:
        module.set_rng_state(before)


def opened(device: torch.device) -> Device:
    """That device, for the calling thread's process; without an index: the thread's current one of that type.

    Raises:
        OptionError: This process cannot use it.
    """
    if device.type == "cpu":
        return PlainDevice(device)
    kind = available_kind()
    if kind != device.type:
        found = f"the accelerator that torch finds here is {kind!r}" if kind else "torch finds no accelerator here"
        raise OptionError(f"device={str(device)!r}: {found}; give device='cpu', or None: batches stay on the host")
    count = device_count(kind)
    index = current_index(kind) if device.index is None else device.index
    if index >= count:
        raise OptionError(f"device={str(device)!r}: this process sees {count} of them, with indices from 0 on")
    module, target = device_module(kind), torch.device(kind, index)
    return QueueDevice(target, module) if hasattr(module, "Stream") else PlainDevice(target)
