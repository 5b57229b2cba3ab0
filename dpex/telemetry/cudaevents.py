"""CUDA events as marks for `gpustall`, on the stream and device that are the calling thread's. Initialises nothing."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import torch

from dpex.telemetry.gpustall import GpuStall


class CudaMark(NamedTuple):
    """An event, and the stream it was recorded on."""

    event: torch.cuda.Event
    stream: torch.cuda.Stream


class CudaEvents:
    """`dpex.telemetry.gpustall.Events`, for torch. Events are kept and recorded anew, each on its own device."""

    def __init__(self) -> None:
        self._idle: defaultdict[int, list[torch.cuda.Event]] = defaultdict(list)

    def is_open(self) -> bool:
        """Not before CUDA is initialised by others, and not while this thread captures a graph."""
        return torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()

    def record(self, like: CudaMark | None = None) -> CudaMark:
        """See `Events`."""
        stream = torch.cuda.current_stream() if like is None else like.stream
        idle = self._idle[stream.device_index]
        event = idle.pop() if idle else torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return CudaMark(event, stream)

    def is_passed(self, mark: CudaMark) -> bool:
        """See `Events`."""
        return bool(mark.event.query())

    def apart_s(self, first: CudaMark, second: CudaMark) -> float:
        """See `Events`."""
        return float(first.event.elapsed_time(second.event)) / 1e3

    def reuse(self, mark: CudaMark) -> None:
        """See `Events`."""
        self._idle[mark.stream.device_index].append(mark.event)


def cuda_stall() -> GpuStall[Any] | None:
    """For one iterator; None where torch was built without CUDA. A GPU may be used from any moment on, or never."""
    return GpuStall(CudaEvents()) if torch.backends.cuda.is_built() else None
