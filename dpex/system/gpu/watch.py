"""A thread per process that reads NVML once a second, for all users of its samples.

The thread ("dpex-nvml") starts once there is a user and this process uses CUDA, and ends with the last user. It does
not start if torch was built without CUDA, nor on a machine without a GPU. It owns the `Reader`. Users read the latest
samples without waiting, and leave by `GpuView.close` or with their garbage collection.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable

from dpex.system.gpu.nvml import GpuSample, Reader, may_have_gpu, uses_cuda

PERIOD_S = 1.0
"""Seconds between readings. NVML's utilisation is a mean over a sixth of a second to a second."""
JOIN_S = 2.0
"""The longest wait for the end of the thread, seconds: a driver may hang."""


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
