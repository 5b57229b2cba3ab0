"""Readings of NVML (by nvidia-ml-py) about the GPUs that this process uses: utilisation, memory, bytes over PCIe.

A call is not free: some take a lock of the driver that kernel launches need as well. So one thread reads once a second
(see `GpuWatcher`), handles are kept, and a value that a device does not offer is asked for once. Without pynvml, a
driver or a GPU there are no readings, and the reason is logged once, for debugging. No function here initialises CUDA
or imports torch.

The thread ("dpex-nvml") starts once there is a user and this process uses CUDA, and ends with the last user. It does
not start if torch was built without CUDA, nor on a machine without a GPU. It owns the `Reader`. Users read the latest
samples without waiting, and leave by `GpuView.close` or with their garbage collection.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("dpex")

NEVER = frozenset({2, 3, 4, 13, 25, 26})
"""NVML's codes for a value that a device or driver does not offer: invalid argument, not supported, no permission,
function not found, argument version mismatch, deprecated."""
GONE = frozenset({1, 9, 15, 16, 28})
"""NVML's codes for a device that is lost: uninitialised, no driver, lost, reset required, not found."""
TRIES = 3
"""Other errors in a row after which a value is not asked for any more."""
PCIE_BYTES = {197: "pcie_tx_bytes", 198: "pcie_rx_bytes"}
"""NVML_FI_DEV_PCIE_COUNT_TX_BYTES and _RX_BYTES: bytes from and to the GPU. The counters can wrap, and stand still on
virtual machines."""
CLOCKS_HELD_BACK = {
    0x04: "the power limit",
    0x08: "a hardware slowdown",
    0x20: "the temperature, by the driver",
    0x40: "the temperature, by the hardware",
    0x80: "the power supply",
}
"""Values of nvmlClocksThrottleReason* that slow down the work: SwPowerCap, HwSlowdown, SwThermalSlowdown,
HwThermalSlowdown, HwPowerBrakeSlowdown. Idling and clocks set by the user are left out."""
GPM_RATIOS = {2: "sm_active_ratio", 3: "sm_occupancy_ratio", 10: "dram_active_ratio"}
"""NVML_GPM_METRIC_SM_UTIL, _SM_OCCUPANCY, _DRAM_BW_UTIL; Hopper and later."""
_VALUE_FIELDS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal"}
_UNSIGNED_INT = 1
"""NVML_VALUE_TYPE_UNSIGNED_INT."""


PERIOD_S = 1.0
"""Seconds between readings. NVML's utilisation is a mean over a sixth of a second to a second."""
JOIN_S = 2.0
"""The longest wait for the end of the thread, seconds: a driver may hang."""


@dataclass(frozen=True, kw_only=True)
class GpuSample:
    """A reading of one GPU. Values that are not offered, or not known yet, are None.

    Attributes:
        ordinal: torch's number of the GPU.
        index: The driver's number.
        model: Name of the product, "" if unknown.
        kernel_active_ratio: Share of the driver's last sampling period (up to a second) in which a kernel ran.
        sm_active_ratio: Share of the multiprocessors that had work, on average since the sample before.
        sm_occupancy_ratio: Share of the resident warps that they could hold, likewise.
        dram_active_ratio: Share of the memory's bandwidth in use, likewise.
        memory_used_bytes: Memory in use, that of other processes included.
        pcie_tx_bytes: Bytes from the GPU since sampling began; None while the driver's counter reads 0.
        pcie_rx_bytes: Bytes to the GPU, likewise.
        held_back: Reasons that limit its clocks now, in words.
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
    """Return True if this process uses that GPU. CUDA must be initialised; the call changes nothing."""
    from dpex._torch import has_cuda_context  # not when this module is loaded: `dpex top` needs no torch

    return has_cuda_context(ordinal)


def uses_cuda() -> bool:
    """Return True if this process has initialised CUDA. A process forked from one that did cannot use it."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def cuda_devices() -> dict[int, str]:
    """Return the GPUs on which this process has a CUDA context: CUDA's UUID, or "", by torch's number."""
    if not uses_cuda():
        return {}
    torch: Any = sys.modules["torch"]
    used = [ordinal for ordinal in range(torch.cuda.device_count()) if has_context(ordinal)]
    return {ordinal: str(getattr(torch.cuda.get_device_properties(ordinal), "uuid", "")) for ordinal in used}


def may_have_gpu() -> bool:
    """Return True if torch is imported and was built for NVIDIA's GPUs."""
    torch: Any = sys.modules.get("torch")
    return torch is not None and getattr(torch.version, "cuda", None) is not None


def parse_visible(visible_devices: str | None, ordinal: int) -> int | str | None:
    """Return the entry of ``CUDA_VISIBLE_DEVICES`` for torch's number: an index, a UUID or its beginning, or None.

    As in CUDA, the first entry that names no device ends the list.
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
    """Finds NVML's handle of a CUDA device by CUDA's UUID, or else by ``CUDA_VISIBLE_DEVICES``.

    The UUID comes first because CUDA can number devices in another order than NVML.
    """

    def __init__(self, nvml: Any, visible_devices: str | None) -> None:
        self._nvml = nvml
        self._visible = visible_devices

    def handle(self, ordinal: int, uuid: str) -> Any:
        """Return the handle; None if NVML has no such device."""
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


# -- their readings ---------------------------------------------------------------------------------------------------


class RunningCount:
    """The sum since the first reading of a counter that wraps."""

    def __init__(self) -> None:
        self.total = 0
        self._last: int | None = None

    def add(self, now: int, bits: int) -> int:
        """Return the sum after a reading. A step of more than half the range means that the counter was reset."""
        if self._last is not None:
            step = (now - self._last) % (1 << bits)
            if step < 1 << (bits - 1):
                self.total += step
        self._last = now
        return self.total


class _Gpm:
    """Two samples of the GPU's own counters (GPM), taken in turn. The driver computes the mean between them."""

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
        """Return the ratios since the call before; the first call returns none."""
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
    """A device and the values that it still offers."""

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
                if error.value in NEVER or self._failures[name] >= TRIES:
                    self._drop(name, error)
        return GpuSample(uuid=self.uuid, ordinal=self._ordinal, index=self._index, model=self._model, **found)

    def _drop(self, name: str, why: object) -> None:
        del self._questions[name]
        logger.debug("the %s of GPU %s are not read any more: %s", name, self.uuid, why)

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
    """Reads the devices that ``devices`` returns (see `cuda_devices`). Used by one thread; raises nothing.

    NVML is loaded when there is a device for the first time. ``is_hopeless`` means that there will never be readings.
    """

    def __init__(self, devices: Callable[[], Mapping[int, str]] = cuda_devices) -> None:
        self._devices = devices
        self._nvml: Any = None
        self._gpus: dict[int, _Gpu | None] = {}
        self.is_hopeless = False

    def sample(self) -> tuple[GpuSample, ...]:
        """Return all devices of this process by torch's number, without those that NVML does not know or has lost."""
        if self.is_hopeless:
            return ()
        try:
            used = self._devices()
            if used and self._nvml is None:
                self._nvml = _loaded()
            return tuple(sample for ordinal in sorted(used) if (sample := self._ask(ordinal, used[ordinal])))
        except Exception as error:
            self.is_hopeless = True
            logger.debug("there are no readings from NVML: %s: %s", type(error).__name__, error)
            return ()

    def _ask(self, ordinal: int, uuid: str) -> GpuSample | None:
        try:
            if ordinal not in self._gpus:
                self._gpus[ordinal] = self._open(ordinal, uuid)
            gpu = self._gpus[ordinal]
            return None if gpu is None else gpu.sample()
        except self._nvml.NVMLError as error:
            logger.debug("GPU %d is lost: %s", ordinal, error)
            self._gpus[ordinal] = None
            return None

    def _open(self, ordinal: int, uuid: str) -> _Gpu | None:
        handle = Devices(self._nvml, os.environ.get("CUDA_VISIBLE_DEVICES")).handle(ordinal, uuid)
        return None if handle is None else _Gpu(self._nvml, ordinal, handle)

    def close(self) -> None:
        """Release the driver's resources; the reader has no readings afterwards. Idempotent."""
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


# -- the thread --------------------------------------------------------------------------------------------------------


class _Run:
    """The state that the thread and its users share."""

    def __init__(self, reader: Reader, period_s: float) -> None:
        self.latest: tuple[GpuSample, ...] = ()
        self.is_hopeless = False
        self.stop = threading.Event()
        self.thread = threading.Thread(target=_watch, args=(self, reader, period_s), name="dpex-nvml", daemon=True)


def _watch(run: _Run, reader: Reader, period_s: float) -> None:
    try:
        while not run.stop.is_set() and not reader.is_hopeless:
            run.latest = reader.sample()
            run.stop.wait(0.0 if reader.is_hopeless else period_s)
        run.is_hopeless = reader.is_hopeless
    finally:
        run.latest = ()
        reader.close()


class GpuView:
    """The GPUs, for one user."""

    def __init__(self, watcher: GpuWatcher) -> None:
        self._watcher = watcher
        self._end = weakref.finalize(self, watcher._leave, id(self))
        self._end.atexit = False

    @property
    def gpus(self) -> tuple[GpuSample, ...]:
        """The GPUs of this process as they were up to a second ago; none where nothing is known, and after `close`."""
        return self._watcher._latest() if self._end.alive else ()

    def busy_ratio(self) -> float | None:
        """Share of about the last second in which the GPUs of this process ran kernels, on average; None: not known."""
        known = [gpu.kernel_active_ratio for gpu in self.gpus if gpu.kernel_active_ratio is not None]
        return sum(known) / len(known) if known else None

    def close(self) -> None:
        """End the use; the thread ends with the last user. Idempotent."""
        self._end()
        self._watcher._await_end()


class GpuWatcher:
    """Keeps the thread while there are users. There is one per process, `watcher`; tests make their own."""

    def __init__(
        self,
        make_reader: Callable[[], Reader] = Reader,
        period_s: float = PERIOD_S,
        is_used: Callable[[], bool] = uses_cuda,
    ) -> None:
        self._make_reader = make_reader
        self._is_used = is_used
        self._period_s = period_s
        self._forget()

    def _forget(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a garbage collection may end a user in the middle of anything
        self._users: set[int] = set()
        self._run: _Run | None = None
        self._ending: _Run | None = None
        self._is_hopeless = False

    def view(self) -> GpuView:
        """Return a view for a new user."""
        if self._pid != os.getpid():
            self._forget()
        view = GpuView(self)
        with self._lock:
            self._users.add(id(view))
        self._start_if_used()
        return view

    def _start_if_used(self) -> None:
        if self._run is not None or self._is_hopeless or not self._is_used():
            return
        with self._lock:
            if self._run is None and self._users:
                self._run = _Run(self._make_reader(), self._period_s)
                self._run.thread.start()

    def _latest(self) -> tuple[GpuSample, ...]:
        if self._pid != os.getpid():
            return ()
        self._start_if_used()
        run = self._run
        return run.latest if run is not None else ()

    def _leave(self, user: int) -> None:
        if self._pid != os.getpid():
            return
        with self._lock:
            self._users.discard(user)
            if not self._users and self._run is not None:
                self._run.stop.set()
                self._is_hopeless = self._run.is_hopeless
                self._run, self._ending = None, self._run

    def _await_end(self) -> None:
        ending, self._ending = self._ending, None
        if ending is not None and ending.thread is not threading.current_thread() and self._pid == os.getpid():
            ending.thread.join(JOIN_S)


watcher = GpuWatcher()


def view() -> GpuView | None:
    """Return a view of the GPUs of this process; None if torch was built without CUDA."""
    return watcher.view() if may_have_gpu() else None
