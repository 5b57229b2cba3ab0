"""What NVML tells about the GPUs that this process uses: how busy, how full, how many bytes over PCIe.

Asking is not free: some calls take a lock of the driver that also kernel launches need. So it is for one thread, once a
second or less often (see `dpex.system.gpu.watch`), with handles that are kept, and what a device does not offer is
asked once. Without pynvml, a driver or a GPU there is simply nothing; each such finding is logged once, for debugging.
Nothing here initialises CUDA or imports torch.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("dpex")

NEVER = frozenset({2, 3, 4, 13, 25, 26})
"""NVML's codes for what this device or driver does not offer: invalid argument, not supported, no permission, function
not found, argument version mismatch, deprecated."""
GONE = frozenset({1, 9, 15, 16, 28})
"""For a device that cannot be asked any more: uninitialised, no driver, lost, reset required, not found."""
TRIES = 3
"""Other errors in a row until a question is not asked any more."""
PCIE_BYTES = {197: "pcie_tx_bytes", 198: "pcie_rx_bytes"}
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES: from the GPU, to the GPU; running counts that may wrap."""
CLOCKS_HELD_BACK = {
    0x04: "the power limit",
    0x08: "a hardware slowdown",
    0x20: "the temperature, by the driver",
    0x40: "the temperature, by the hardware",
    0x80: "the power supply",
}
"""What nvmlClocksThrottleReason* says that keeps clocks below what the work would have: SwPowerCap, HwSlowdown,
SwThermalSlowdown, HwThermalSlowdown, HwPowerBrakeSlowdown. Idling, and clocks that somebody set, are none of these."""
GPM_RATIOS = {2: "sm_active_ratio", 3: "sm_occupancy_ratio", 10: "dram_active_ratio"}
"""NVML_GPM_METRIC_SM_UTIL, _SM_OCCUPANCY, _DRAM_BW_UTIL; Hopper and later."""
_VALUE_FIELDS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}
_UNSIGNED_INT = 1
"""NVML_VALUE_TYPE_UNSIGNED_INT."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """One GPU at one moment; None: not offered, or not known yet.

    ordinal: torch's number of it, index: the driver's. model: as sold, "" if unknown. kernel_active_ratio: share of the
    driver's last sampling period (up to a second) in which at least one kernel ran, however small. Over the time since
    the sample before: sm_active_ratio: of the multiprocessors, on average, that had work; sm_occupancy_ratio: of the
    warps they could hold; dram_active_ratio: of the memory's bandwidth. memory_used_bytes: by everybody. pcie_tx_bytes,
    pcie_rx_bytes: from and to the GPU since sampling began; None while the driver's counter reads 0. held_back: by what
    its clocks are held back at this moment, in words.
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
    held_back: tuple[str, ...] | None = None


# -- which GPUs --------------------------------------------------------------------------------------------------------


def has_context(ordinal: int) -> bool:
    """Whether this process uses that GPU; CUDA is initialised. Asking changes nothing."""
    from dpex._torch import has_cuda_context  # not when this module is loaded: `dpex top` needs no torch

    return has_cuda_context(ordinal)


def uses_cuda() -> bool:
    """Whether this process has initialised CUDA; a process forked from one that did cannot use it."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def cuda_devices() -> dict[int, str]:
    """The GPUs on which this process has a CUDA context, by torch's number: their UUID as CUDA says it, or ""."""
    if not uses_cuda():
        return {}
    torch: Any = sys.modules["torch"]
    used = [ordinal for ordinal in range(torch.cuda.device_count()) if has_context(ordinal)]
    return {ordinal: str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", "")) for ordinal in used}


def may_have_gpu() -> bool:
    """Whether torch is there and was built for NVIDIA's GPUs."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and getattr(torch.version, "cuda", None) is not None


def parse_visible(visible_devices: str | None, ordinal: int) -> int | str | None:
    """What ``CUDA_VISIBLE_DEVICES`` makes of torch's number: an index, (the beginning of) a UUID, or None: nothing.

    As CUDA reads it: the first entry that names no device ends the list.
    """
    if visible_devices is None:
        return ordinal
    entries = [entry.strip() for entry in visible_devices.split(",")][: ordinal + 1]
    valid = [entry.isdecimal() or entry.startswith(("GPU-", "MIG-")) for entry in entries]
    if len(entries) <= ordinal or not all(valid):
        return None
    entry = entries[ordinal]
    return int(entry) if entry.isdecimal() else entry


class Devices:
    """Finds NVML's handle of a CUDA device: by the UUID that CUDA says, else as ``CUDA_VISIBLE_DEVICES`` has it.

    The UUID comes first because CUDA may number devices in another order than NVML.
    """

    def __init__(self, nvml: Any, visible_devices: str | None) -> None:
        self._nvml = nvml
        self._visible = visible_devices

    def handle(self, ordinal: int, uuid: str) -> Any:
        """None: there is no such device for NVML."""
        for kind in ("GPU-", "MIG-") if uuid else ():
            found = self._by_uuid(kind + uuid.removeprefix(kind))
            if found is not None:
                return found
        entry = parse_visible(self._visible, ordinal)
        if isinstance(entry, str):
            return self._by_uuid(entry) or self._by_beginning(entry)
        return None if entry is None else self._by_index(entry)

    def _by_uuid(self, uuid: str) -> Any:
        return self._unless_missing(lambda: self._nvml.nvmlDeviceGetHandleByUUID(uuid))

    def _by_index(self, index: int) -> Any:
        return self._unless_missing(lambda: self._nvml.nvmlDeviceGetHandleByIndex(index))

    def _by_beginning(self, beginning: str) -> Any:
        handles = (self._by_index(index) for index in range(self._nvml.nvmlDeviceGetCount()))
        matching = [h for h in handles if h is not None and self._nvml.nvmlDeviceGetUUID(h).startswith(beginning)]
        return matching[0] if len(matching) == 1 else None

    def _unless_missing(self, ask: Callable[[], Any]) -> Any:
        try:
            return ask()
        except self._nvml.NVMLError as error:
            logger.debug("NVML does not know a GPU of this process: %s", error)
            return None


# -- what they say -----------------------------------------------------------------------------------------------------


class RunningCount:
    """A total since the first reading, from a counter that wraps."""

    def __init__(self) -> None:
        self.total = 0
        self._last: int | None = None

    def add(self, now: int, bits: int) -> int:
        """The total after this reading. A step of more than half the counter's range is no wrap: it was set back."""
        if self._last is not None:
            step = (now - self._last) % (1 << bits)
            if step < 1 << (bits - 1):
                self.total += step
        self._last = now
        return self.total


class _Gpm:
    """Two samples of the GPU's own counters, taken in turn; the driver computes the mean between them."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
        self._nvml = nvml
        self._handle = handle
        self._names = dict(GPM_RATIOS)
        self._request = nvml.c_nvmlGpmMetricsGet_t()
        self._samples = [nvml.nvmlGpmSampleAlloc(), nvml.nvmlGpmSampleAlloc()]
        self._taken = 0

    def ratios(self) -> dict[str, float]:
        """Those since the call before; nothing at first."""
        older, newer = self._samples
        self._nvml.nvmlGpmSampleGet(self._handle, newer)
        self._taken += 1
        found = self._between(older, newer) if self._taken > 1 and self._names else {}
        self._samples = [newer, older]
        return found

    def _between(self, older: Any, newer: Any) -> dict[str, float]:
        request = self._request
        request.version = self._nvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(self._names)
        request.sample1, request.sample2 = older, newer
        for place, number in enumerate(self._names):
            request.metrics[place].metricId = number
        self._nvml.nvmlGpmMetricsGet(request)
        found = {}
        for place, (number, name) in enumerate(list(self._names.items())):
            metric = request.metrics[place]
            if metric.nvmlReturn in NEVER:
                del self._names[number]
            elif metric.nvmlReturn == 0 and metric.value == metric.value:  # the driver may answer "not a number"
                found[name] = min(1.0, max(0.0, metric.value / 100))
        return found

    def close(self) -> None:
        for sample in self._samples:
            self._nvml.nvmlGpmSampleFree(sample)


class _Gpu:
    """One device: the questions that are still worth asking."""

    def __init__(self, nvml: Any, ordinal: int, handle: Any) -> None:
        self._nvml = nvml
        self._ordinal = ordinal
        self._handle = handle
        self.uuid = str(nvml.nvmlDeviceGetUUID(handle))
        self._index: int | None = self._unless_refused(nvml.nvmlDeviceGetIndex)
        self._model = str(self._unless_refused(nvml.nvmlDeviceGetName) or "")
        self._gpm: _Gpm | None = None
        self._pcie = {number: RunningCount() for number in PCIE_BYTES}
        self._questions: dict[str, Callable[[], Mapping[str, Any]]] = {
            "utilisation": self._ask_utilisation,
            "memory": self._ask_memory,
            "GPM": self._ask_gpm,
            "PCIe counts": self._ask_pcie,
            "clocks": self._ask_clocks,
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
        """Raises NVML's error if the device is gone."""
        found: dict[str, Any] = {}
        for name, ask in list(self._questions.items()):
            try:
                found.update(ask())
                self._failures[name] = 0
            except self._nvml.NVMLError as error:
                if error.value in GONE:
                    raise
                self._failures[name] += 1
                if error.value in NEVER or self._failures[name] >= TRIES:
                    self._drop(name, error)
        return GpuSample(uuid=self.uuid, ordinal=self._ordinal, index=self._index, model=self._model, **found)

    def _drop(self, name: str, why: object) -> None:
        del self._questions[name]
        logger.debug("GPU %s is not asked for its %s any more: %s", self.uuid, name, why)

    def _ask_utilisation(self) -> Mapping[str, Any]:
        return {"kernel_active_ratio": self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100}

    def _ask_clocks(self) -> Mapping[str, Any]:
        reasons = int(self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))
        return {"held_back": tuple(name for bit, name in CLOCKS_HELD_BACK.items() if reasons & bit)}

    def _ask_memory(self) -> Mapping[str, Any]:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        return {"memory_used_bytes": int(memory.used), "memory_total_bytes": int(memory.total)}

    def _ask_gpm(self) -> Mapping[str, Any]:
        if self._gpm is None:
            self._gpm = _Gpm(self._nvml, self._handle)
        return self._gpm.ratios()

    def _ask_pcie(self) -> Mapping[str, Any]:
        found = {}
        for value in self._nvml.nvmlDeviceGetFieldValues(self._handle, list(self._pcie)):
            if value.nvmlReturn == 0 and value.valueType in _VALUE_FIELDS:
                bits = 32 if value.valueType == _UNSIGNED_INT else 64
                count = int(getattr(value.value, _VALUE_FIELDS[value.valueType]))
                total = self._pcie[value.fieldId].add(count, bits)
                if count or total:  # on some virtual machines they stay 0, which says nothing of what was copied
                    found[PCIE_BYTES[value.fieldId]] = total
            elif value.nvmlReturn in NEVER:
                del self._pcie[value.fieldId]
        if not self._pcie:
            raise self._nvml.NVMLError(self._nvml.NVML_ERROR_NOT_SUPPORTED)
        return found

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()


class Reader:
    """Asks NVML about the devices that ``devices`` names (see `cuda_devices`); used by one thread, and never fails.

    NVML is loaded when there is a device for the first time. ``is_hopeless``: there will never be anything.
    """

    def __init__(self, devices: Callable[[], Mapping[int, str]] = cuda_devices) -> None:
        self._devices = devices
        self._nvml: Any = None
        self._gpus: dict[int, _Gpu | None] = {}
        self.is_hopeless = False

    def sample(self) -> tuple[GpuSample, ...]:
        """All devices of this process, by torch's number; without those that NVML does not know or has lost."""
        if self.is_hopeless:
            return ()
        try:
            used = self._devices()
            if used and self._nvml is None:
                self._nvml = _loaded()
            return tuple(sample for ordinal in sorted(used) if (sample := self._ask(ordinal, used[ordinal])))
        except Exception as error:
            self.is_hopeless = True
            logger.debug("nothing is known from NVML: %s: %s", type(error).__name__, error)
            return ()

    def _ask(self, ordinal: int, uuid: str) -> GpuSample | None:
        try:
            if ordinal not in self._gpus:
                self._gpus[ordinal] = self._open(ordinal, uuid)
            gpu = self._gpus[ordinal]
            return None if gpu is None else gpu.sample()
        except self._nvml.NVMLError as error:
            logger.debug("GPU %d cannot be asked any more: %s", ordinal, error)
            self._gpus[ordinal] = None
            return None

    def _open(self, ordinal: int, uuid: str) -> _Gpu | None:
        handle = Devices(self._nvml, os.environ.get("CUDA_VISIBLE_DEVICES")).handle(ordinal, uuid)
        return None if handle is None else _Gpu(self._nvml, ordinal, handle)

    def close(self) -> None:
        """Give back what the driver lent; the reader knows nothing afterwards. Idempotent."""
        nvml, self._nvml = self._nvml, None
        gpus, self._gpus = self._gpus, {}
        self.is_hopeless = True
        if nvml is None:
            return
        try:
            for gpu in gpus.values():
                if gpu is not None:
                    gpu.close()
            nvml.nvmlShutdown()
        except nvml.NVMLError as error:
            logger.debug("NVML could not be closed: %s", error)


def _loaded() -> Any:
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    return nvml
