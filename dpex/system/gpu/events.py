"""CUDA events as marks for `stall`, on the current stream of the calling thread. Initialises nothing.

The device is the current one; if nothing in this process has used that, the only one that was used, if there is one (a
script that says ``"cuda:1"`` everywhere). An event on an unused device would cost hundreds of megabytes there.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from dpex._torch import has_cuda_context
from dpex.system.gpu.stall import GpuStall


class CudaMark(NamedTuple):
    """An event, and the stream it was recorded on."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream


class CudaEvents:
    """`dpex.system.gpu.stall.Events`, for torch. Events are kept and recorded anew, each on its own device."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)
        self._used: set[int] = set()
        self._device: int | None = None

    def is_open(self) -> bool:
        """Not before others have used a device, and not while this thread captures a graph."""
        if not torch.cuda.is_initialized() or torch.cuda.is_current_stream_capturing():
            return False
        self._device = self._device_in_use()
        return self._device is not None

    def _device_in_use(self) -> int | None:
        current = torch.cuda.current_device()
        if self._is_used(current):
            return current
        used = [device for device in range(torch.cuda.device_count()) if self._is_used(device)]
        return used[0] if len(used) == 1 else None

    def _is_used(self, device: int) -> bool:
        if device not in self._used and has_cuda_context(device):
            self._used.add(device)
        return device in self._used

    def record(self, like: CudaMark | None = None) -> CudaMark:
        stream = torch.cuda.current_stream(self._device) if like is None else like.stream
        idle = self._idle[stream.device_index]
        event = idle.pop() if idle else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaMark(event, stream)

    def is_passed(self, mark: CudaMark) -> bool:
        return bool(mark.event.query())

    def apart_s(self, first: CudaMark, second: CudaMark) -> float:
        return float(first.event.elapsed_time(second.event)) / 1e3

    def share_stream(self, first: CudaMark, second: CudaMark) -> bool:
        return bool(first.stream == second.stream)

    def reuse(self, mark: CudaMark) -> None:
        self._idle[mark.stream.device_index].append(mark.event)


def cuda_stall(share: float | None = None) -> GpuStall[Any] | None:
    """For one iterator; None where torch was built without CUDA. A GPU may be used from any moment on, or never.

    ``share``: part of the loop's time that marks may take, see `GpuStall`; None: every visit is marked.
    """
    return GpuStall(CudaEvents(), share) if torch.backends.cuda.is_built() else None
