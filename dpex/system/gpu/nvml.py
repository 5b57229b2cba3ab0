"""Readings of NVML (by nvidia-ml-py) about the GPUs that this process uses: utilisation and memory.

A call is not free: some take a lock of the driver that kernel launches need as well. So a reading is kept for
`PERIOD_S`. Handles are kept until one fails. Without pynvml, a driver or a GPU there are no readings, and NVML is tried
anew after `RETRY_S`. Each reason is logged once, for debugging. No function here initialises CUDA or imports torch.

The tuner's thread and the threads that serve metrics ask for readings. While one of them asks NVML, the others get the
previous reading, so that a driver that hangs stops only one thread.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpex.system.clock import Clock, monotonic

logger: logging.Logger = logging.getLogger("dpex")

PERIOD_S = 1.0
"""Seconds for which a reading is kept. NVML's utilisation is a mean over a sixth of a second to a second."""
RETRY_S = 60.0
"""Seconds after a failure until NVML is initialised anew. Resetting a GPU or replacing a driver takes less time. While
pynvml is missing, each retry costs an import that fails."""
GONE = frozenset({1, 9, 15, 16, 28})
"""NVML's codes for a device that is lost: uninitialised, no driver, lost, reset required, not found."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """A reading of one GPU. Unsupported or missing values have the value None."""

    uuid: str
    ordinal: int
    """torch's number of the GPU."""
    index: int | None = None
    """The driver's number."""
    model: str = ""
    """Name of the product, "" if unknown."""
    kernel_active_ratio: float | None = None
    """Share of the driver's last sampling period (up to a second) in which a kernel ran."""
    memory_used_bytes: int | None = None
    """Memory in use by all processes."""
    memory_total_bytes: int | None = None


# -- which GPUs --------------------------------------------------------------------------------------------------------


def cuda_devices() -> dict[int, str]:
    """Return the GPUs on which this process has a CUDA context: CUDA's UUID by torch's number.

    A process forked from a process that uses CUDA gets an empty dict, because it cannot use CUDA.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    from dpex._torch import has_cuda_context  # imported only here, because `dpex top` needs no torch

    used = [ordinal for ordinal in range(torch.cuda.device_count()) if has_cuda_context(ordinal)]
    return {ordinal: str(torch.cuda.get_device_properties(ordinal).uuid) for ordinal in used}


def _handle(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of the GPU, or of the MIG part of a GPU, with CUDA's ``uuid``; None if NVML has none.

    CUDA may number devices in another order than NVML, and ``CUDA_VISIBLE_DEVICES`` hides some. UUIDs are the same.
    """
    for kind in ("GPU-", "MIG-"):
        with contextlib.suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(kind + uuid.removeprefix(kind))
    return None


# -- their readings ----------------------------------------------------------------------------------------------------


class _Gpu:
    """A device, and the facts of it that do not change."""

    def __init__(self, nvml: Any, ordinal: int, handle: Any) -> None:
        self._nvml = nvml
        self._ordinal = ordinal
        self._handle = handle
        self._uuid = str(nvml.nvmlDeviceGetUUID(handle))
        self._index: int | None = self._unless_refused(nvml.nvmlDeviceGetIndex)
        self._model = str(self._unless_refused(nvml.nvmlDeviceGetName) or "")

    def _unless_refused(self, ask: Callable[[Any], Any]) -> Any:
        """Return the result of ``ask``, or None if the device does not support it now. MIG parts support few."""
        try:
            return ask(self._handle)
        except self._nvml.NVMLError as error:
            if error.value in GONE:
                raise
            return None

    def sample(self) -> GpuSample:
        """Read all values. Raises NVML's error if the device is lost."""
        use = self._unless_refused(self._nvml.nvmlDeviceGetUtilizationRates)
        memory = self._unless_refused(self._nvml.nvmlDeviceGetMemoryInfo)
        return GpuSample(
            uuid=self._uuid,
            ordinal=self._ordinal,
            index=self._index,
            model=self._model,
            kernel_active_ratio=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
        )


class Gpus:
    """The GPUs that ``devices`` returns (see `cuda_devices`). Any thread may ask; nothing is raised.

    NVML is loaded once ``devices`` returns a device, and stays loaded. A forked process begins anew.
    """

    def __init__(self, devices: Callable[[], Mapping[int, str]] = cuda_devices, clock: Clock = monotonic) -> None:
        self._devices = devices
        self._clock = clock
        self._load_nvml()

    def _load_nvml(self) -> None:
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self._read_at = -math.inf
        self._latest: tuple[GpuSample, ...] = ()
        self._nvml: Any = None
        self._known: dict[int, _Gpu | None] = {}
        self._is_down = False
        self._retry_at = math.inf
        """Time of the next initialisation of NVML, after a failure or the loss of a GPU."""
        self._reasons: set[str] = set()
        """The reasons that were logged."""

    def latest(self) -> tuple[GpuSample, ...]:
        """Return the GPUs by torch's number, without GPUs that NVML does not know or has lost.

        They are read now unless the latest reading is younger than `PERIOD_S` or another thread is reading.
        """
        if self._pid != os.getpid():
            self._load_nvml()
        if self._reading.acquire(blocking=False):
            try:
                if (now := self._clock()) - self._read_at >= PERIOD_S:
                    self._refresh(now)
            finally:
                self._reading.release()
        return self._latest

    def busy_ratio(self) -> float | None:
        """Return the mean share of about the last second in which this process's GPUs ran kernels; None: unknown."""
        known = [gpu.kernel_active_ratio for gpu in self.latest() if gpu.kernel_active_ratio is not None]
        return sum(known) / len(known) if known else None

    def _refresh(self, now: float) -> None:
        if now >= self._retry_at:
            self._is_down, self._retry_at, self._nvml, self._known = False, math.inf, None, {}
        try:
            self._latest = () if self._is_down else self._samples(now)
        except Exception as error:
            self._is_down, self._latest = True, ()
            self._note_failure(f"there are no readings from NVML: {type(error).__name__}: {error}", now)
        self._read_at = now

    def _samples(self, now: float) -> tuple[GpuSample, ...]:
        used = self._devices()
        if used and self._nvml is None:
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            self._nvml = nvml
        return tuple(found for ordinal in sorted(used) if (found := self._sample_of(ordinal, used[ordinal], now)))

    def _sample_of(self, ordinal: int, uuid: str, now: float) -> GpuSample | None:
        try:
            if ordinal not in self._known:
                handle = _handle(self._nvml, uuid)
                self._known[ordinal] = None if handle is None else _Gpu(self._nvml, ordinal, handle)
                if handle is None:
                    self._note_failure(f"NVML does not know GPU {ordinal}, {uuid}", now)
            gpu = self._known[ordinal]
            return None if gpu is None else gpu.sample()
        except self._nvml.NVMLError as error:
            self._known[ordinal] = None
            self._note_failure(f"GPU {ordinal} is lost: {error}", now)
            return None

    def _note_failure(self, reason: str, now: float) -> None:
        self._retry_at = min(self._retry_at, now + RETRY_S)
        if reason not in self._reasons:
            self._reasons.add(reason)
            logger.debug(reason)


_gpus = Gpus()


def process_gpus() -> Gpus | None:
    """Return the GPUs that this process uses now or later; None if torch is not imported, or was built without CUDA."""
    torch: Any = sys.modules.get("torch")
    return _gpus if torch is not None and getattr(torch.version, "cuda", None) is not None else None
