"""Readings of NVML (by nvidia-ml-py) about the GPUs that this process uses: utilisation, memory, bytes over PCIe.

A call is not free: some take a lock of the driver that kernel launches need as well. So a reading is kept for
`PERIOD_S`, and so are handles. A value that a device does not offer is asked for a few times only. Without pynvml, a
driver or a GPU there are no readings, and the reason is logged once, for debugging. No function here initialises CUDA
or imports torch.

The tuner's thread and those that serve metrics read. While one of them reads, the others get the reading before, so
that a driver that hangs stops one of them.
"""

from __future__ import annotations

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
GONE = frozenset({1, 9, 15, 16, 28})
"""NVML's codes for a device that is lost: uninitialised, no driver, lost, reset required, not found."""
TRIES = 3
"""Other errors in a row after which a value is not asked for any more."""
PCIE_BYTES = {197: "pcie_tx_bytes", 198: "pcie_rx_bytes"}
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES: bytes from and to the GPU. The counters can wrap, and stand still on
virtual machines."""
GPM_RATIOS = {2: "sm_active_ratio", 3: "sm_occupancy_ratio", 10: "dram_active_ratio"}
"""NVML_GPM_METRIC_SM_UTIL, _SM_OCCUPANCY, _DRAM_BW_UTIL; Hopper and later."""
_VALUE_FIELDS = {1: "uiVal", 2: "ulVal", 3: "ullVal"}
"""The field of a value by its type (nvmlValueType_t)."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """A reading of one GPU. Unsupported or missing values have the value None.

    Ratios of multiprocessors (``sm``) and memory (``dram``) are means since the previous reading.

    Attributes:
        ordinal: torch's number of the GPU.
        index: The driver's number.
        model: Name of the product, "" if unknown.
        kernel_active_ratio: Share of the driver's last sampling period (up to a second) in which a kernel ran.
        sm_active_ratio: Share of busy multiprocessors.
        sm_occupancy_ratio: Resident warps over the maximum.
        dram_active_ratio: Share of the memory bandwidth in use.
        memory_used_bytes: Memory in use by all processes.
        pcie_tx_bytes: Bytes sent by the GPU since the driver's first count; None while the counter reads 0.
        pcie_rx_bytes: Bytes received by the GPU, as ``pcie_tx_bytes``.
    """

    uuid: str
    ordinal: int
    index: int | None = None
    model: str = ""
    kernel_active_ratio: float | None = None
    sm_active_ratio: float | None = None
    sm_occupancy_ratio: float | None = None
    dram_active_ratio: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    pcie_tx_bytes: int | None = None
    pcie_rx_bytes: int | None = None


# -- which GPUs --------------------------------------------------------------------------------------------------------


def cuda_devices() -> dict[int, str]:
    """Return the GPUs on which this process has a CUDA context: CUDA's UUID by torch's number.

    A process forked from one that uses CUDA has none: it cannot use it.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    from dpex._torch import has_cuda_context  # not when this module is loaded: `dpex top` needs no torch

    used = [ordinal for ordinal in range(torch.cuda.device_count()) if has_cuda_context(ordinal)]
    return {ordinal: str(torch.cuda.get_device_properties(ordinal).uuid) for ordinal in used}


def _handle(nvml: Any, uuid: str) -> Any:
    """Return NVML's handle of the GPU, or of the part of one (MIG), with CUDA's ``uuid``; None if it has none.

    CUDA may number devices in another order than NVML, and ``CUDA_VISIBLE_DEVICES`` hides some. UUIDs are the same.
    """
    for kind in ("GPU-", "MIG-"):
        try:
            return nvml.nvmlDeviceGetHandleByUUID(kind + uuid.removeprefix(kind))
        except nvml.NVMLError as error:
            logger.debug("NVML does not know a GPU of this process: %s", error)
    return None


# -- their readings ----------------------------------------------------------------------------------------------------


class _Gpm:
    """Two samples of the GPU's own counters (GPM), taken in turn. The driver computes the mean between them."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._nvml = nvml
        self._handle = handle
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._taken = 0

    def ratios(self) -> dict[str, float]:
        """Return the ratios since the call before; the first call returns none."""
        older, newer = self._samples
        self._nvml.nvmlGpmSampleGet(self._handle, newer)
        self._taken += 1
        found = self._between(older, newer) if self._taken > 1 else {}
        self._samples = [newer, older]
        return found

    def _between(self, older: Any, newer: Any) -> dict[str, float]:
        request = self._request
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(GPM_RATIOS)
        request.sample1, request.sample2 = older, newer
        for place, number in enumerate(GPM_RATIOS):
            request.metrics[place].metricId = number
        self._nvml.nvmlGpmMetricsGet(request)
        found = {}
        for metric, name in zip(request.metrics, GPM_RATIOS.values(), strict=False):
            if metric.nvmlReturn == 0 and metric.value == metric.value:  # the driver may answer "not a number"
                found[name] = min(1.0, max(0.0, metric.value / 100))
        return found


class _Gpu:
    """A device and the values that it still offers."""

    def __init__(self, nvml: Any, ordinal: int, handle: Any) -> None:
        self._nvml = nvml
        self._ordinal = ordinal
        self._handle = handle
        self.uuid = str(nvml.nvmlDeviceGetUUID(handle))
        self._index: int | None = self._unless_refused(nvml.nvmlDeviceGetIndex)
        self._model = str(self._unless_refused(nvml.nvmlDeviceGetName) or "")
        self._gpm: _Gpm | None = None
        self._questions: dict[str, Callable[[], Mapping[str, Any]]] = {
            "utilisation": self._ask_utilisation,
            "memory": self._ask_memory,
            "GPM": self._ask_gpm,
            "PCIe counts": self._ask_pcie,
        }
        self._failures = dict.fromkeys(self._questions, 0)

    def _unless_refused(self, ask: Callable[[Any], Any]) -> Any:
        try:
            return ask(self._handle)
        except self._nvml.NVMLError as error:
            if error.value in GONE:
                raise
            return None

    def sample(self) -> GpuSample:
        """Read all values. Raises NVML's error if the device is lost."""
        found: dict[str, Any] = {}
        for name, ask in list(self._questions.items()):
            try:
                found.update(ask())
                self._failures[name] = 0
            except self._nvml.NVMLError as error:
                if error.value in GONE:
                    raise
                self._failures[name] += 1
                if self._failures[name] >= TRIES:
                    del self._questions[name]
                    logger.debug("the %s of GPU %s are not read any more: %s", name, self.uuid, error)
        return GpuSample(uuid=self.uuid, ordinal=self._ordinal, index=self._index, model=self._model, **found)

    def _ask_utilisation(self) -> Mapping[str, Any]:
        return {"kernel_active_ratio": self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100}

    def _ask_memory(self) -> Mapping[str, Any]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}

    def _ask_gpm(self) -> Mapping[str, Any]:
        if self._gpm is None:
            self._gpm = _Gpm(self._nvml, self._handle)
        return self._gpm.ratios()

    def _ask_pcie(self) -> Mapping[str, Any]:
        values = self._nvml.nvmlDeviceGetFieldValues(self._handle, list(PCIE_BYTES))
        known = [one for one in values if one.nvmlReturn == 0 and one.valueType in _VALUE_FIELDS]
        counts = {PCIE_BYTES[one.fieldId]: int(getattr(one.value, _VALUE_FIELDS[one.valueType])) for one in known}
        # on some virtual machines they stay 0, which says nothing of what was copied
        return {name: count for name, count in counts.items() if count}


class Gpus:
    """The GPUs that ``devices`` returns (see `cuda_devices`). Any thread may ask; nothing is raised.

    NVML is loaded when there is a device for the first time, and stays loaded. A forked process begins anew.
    """

    def __init__(self, devices: Callable[[], Mapping[int, str]] = cuda_devices, clock: Clock = monotonic) -> None:
        self._devices = devices
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._reading = threading.Lock()
        self._read_at = -math.inf
        self._latest: tuple[GpuSample, ...] = ()
        self._nvml: Any = None
        self._known: dict[int, _Gpu | None] = {}
        self._is_hopeless = False

    def latest(self) -> tuple[GpuSample, ...]:
        """Return the GPUs by torch's number, without those that NVML does not know or has lost.

        They are read now unless that was done less than `PERIOD_S` ago, or another thread is about to.
        """
        if self._pid != os.getpid():
            self._begin()
        if self._reading.acquire(blocking=False):
            try:
                if not self._is_hopeless and self._clock() - self._read_at >= PERIOD_S:
                    self._read()
            finally:
                self._reading.release()
        return self._latest

    def busy_ratio(self) -> float | None:
        """Share of about the last second in which the GPUs of this process ran kernels, on average; None: not known."""
        known = [gpu.kernel_active_ratio for gpu in self.latest() if gpu.kernel_active_ratio is not None]
        return sum(known) / len(known) if known else None

    def _read(self) -> None:
        try:
            used = self._devices()
            if used and self._nvml is None:
                self._nvml = importlib.import_module("pynvml")
                self._nvml.nvmlInit()
            self._latest = tuple(found for ordinal in sorted(used) if (found := self._ask(ordinal, used[ordinal])))
        except Exception as error:
            self._is_hopeless, self._latest = True, ()
            logger.debug("there are no readings from NVML: %s: %s", type(error).__name__, error)
        self._read_at = self._clock()

    def _ask(self, ordinal: int, uuid: str) -> GpuSample | None:
        try:
            if ordinal not in self._known:
                handle = _handle(self._nvml, uuid)
                self._known[ordinal] = None if handle is None else _Gpu(self._nvml, ordinal, handle)
            gpu = self._known[ordinal]
            return None if gpu is None else gpu.sample()
        except self._nvml.NVMLError as error:
            logger.debug("GPU %d is lost: %s", ordinal, error)
            self._known[ordinal] = None
            return None


_gpus = Gpus()


def process_gpus() -> Gpus | None:
    """Return the GPUs that this process uses now or later; None if torch is not there, or was built without CUDA."""
    torch: Any = sys.modules.get("torch")
    return _gpus if torch is not None and getattr(torch.version, "cuda", None) is not None else None
