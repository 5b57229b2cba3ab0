"""The thread that copies batches into page-locked memory, and on to a device, so that copies overlap with the step.

Only the consumer's thread draws indices, sends them to workers, warns and raises. So draws, counts, errors and warnings
do not depend on the progress of the pinning thread. `Engine.next` queues the next batch for pinning if necessary, and
waits until it is pinned. The batch remains in the schedule meanwhile. During a training step, the pinning thread
receives results of workers (`Engine.listen`) and queues batches itself. It pins without a lock, and does all other work
under the engine's lock. It refers to the engine but not to the iterator, and ends with `Pinner.close`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from dpex._torch import ExceptionWrapper, pin_memory, set_thread_name
from dpex.device.devices import current_index, set_index
from dpex.device.feed import Ahead, Arrival, Feed
from dpex.errors import IteratorClosedError, SampleTimeoutError, WorkerDiedError
from dpex.schedule.schedule import MadeBatch, Schedule
from dpex.system.clock import monotonic
from dpex.system.wakeup import Wakeup
from dpex.worker.decoded_stream import FailedRead
from dpex.worker.fetch import Failure

_LOCKED_BYTES = 1 << 62
"""Practically no limit for page-locked memory, because `Ahead` allows few batches, or more if they are small."""
_CHECK_EVERY_S = 1.0
"""Seconds after which a wait for a copy checks that the thread is still alive."""


def _nothing() -> None:
    """Replace the payload of a job once it is decoded, so that its memory is freed."""


class _Job:
    """A batch's payload on its way through the thread. Like any payload, it returns the batch or its `Failure` when it
    is called."""

    def __init__(
        self, payload: Callable[[], Any], number: int = 0, epoch: int = 0, taken: Callable[[int], None] | None = None
    ) -> None:
        self.number = number
        self.epoch = epoch
        self._taken = taken
        self.finished: threading.Event = threading.Event()
        self._payload = payload
        self._value: Any = None
        self._error: Exception | None = None

    def __call__(self) -> Any:
        try:
            if self._error is not None:
                raise self._error
            return self._value() if type(self._value) is Arrival else self._value
        finally:
            if self._taken is not None:
                self._taken(self.number)

    def open(self) -> None:
        """Decode the payload, and keep the batch or the error."""
        try:
            self._value = self._payload()
        except Exception as error:
            self._error = error
        self._payload = _nothing

    def run(self, pin: Callable[[Any], Any], where: str) -> None:
        """Pin the batch or copy it to a device, in the pinning thread."""
        if self.finished.is_set():
            return
        if self._error is None and not isinstance(
            self._value, (Failure, FailedRead, WorkerDiedError, SampleTimeoutError)
        ):
            self._error = _died()
            try:
                self._value = pin(self._value)
            except Exception:
                self._value = Failure(ExceptionWrapper(where=where))
            except BaseException:
                self.finished.set()
                raise
            self._error = None
        self.finished.set()


class Pinner:
    """The pinning thread of one iterator, and the queue of its jobs.

    Args:
        device: The accelerator's type. Without a feed, its index is the current one of the thread that calls `Pinner`.
        feed: The feed that copies the batches to its device; None: batches are only pinned.

    Attributes:
        copied_bytes: Bytes of the batches that were delivered.
    """

    def __init__(self, device: str | None, feed: Feed | None = None) -> None:
        self._device = device
        self._feed = feed
        self._index = current_index(device) if feed is None else feed.device.target.index
        self._pid = os.getpid()
        self._closed = False
        self.copied_bytes = 0
        self._last_act: Callable[[], None] | None = None
        self._jobs: deque[_Job] = deque()
        self._ahead = Ahead(_LOCKED_BYTES)
        self._stock: set[int] = set()
        """Numbers of this pass's batches that were queued for the thread and not yet taken by the consumer."""
        self._is_short = self._is_watching = False
        self._wakeup = Wakeup()
        self._thread: threading.Thread | None = None

    @property
    def ahead(self) -> int:
        """The number of batches to copy before the consumer asks for them."""
        return self._ahead.batches if self._feed is None else self._feed.ahead

    @property
    def is_low(self) -> bool:
        """Return True if at most ``ahead // 2 + 1`` queued batches are left for the consumer."""
        return len(self._stock) <= self.ahead // 2 + 1

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, under the engine's lock. Batches handed over before are not taken any more."""
        self._stock = set()
        if self._feed is not None:
            self._feed.begin_epoch(epoch)

    def start(self, listen: Callable[[], list[int]]) -> None:
        """Start the thread, after the first workers were forked. When idle, it calls ``listen`` (see `Engine`)."""
        self._thread = threading.Thread(target=self._run, args=(listen,), name="dpex-pin", daemon=True)
        self._thread.start()

    def first(self, schedule: Schedule) -> _Job | None:
        """Return the job of the batch that is next in turn, under the engine's lock; None if it is not made yet.

        The thread queues all other batches itself. When its stock `is_low`, it is woken, but only after this batch was
        taken, because a thread that wakes now would compete with the consumer for the interpreter lock.
        """
        delivery = schedule.peek()
        if delivery is None:
            return None
        job = delivery.payload if isinstance(delivery.payload, _Job) else self._queue(schedule, delivery)
        self._is_short = self.is_low and (schedule.ready > len(self._stock) or not self._is_watching)
        return job

    def hand_over(self, schedule: Schedule, most: int) -> None:
        """Queue at most ``most`` batches that are next in turn, in the pinning thread under the engine's lock."""
        for delivery in schedule.upcoming(most):
            if not isinstance(delivery.payload, _Job):
                self._queue(schedule, delivery)

    def _queue(self, schedule: Schedule, delivery: MadeBatch) -> _Job:
        """Decode a batch, and hand it over to the thread."""
        epoch = -1 if self._feed is None else self._feed.epoch
        job = _Job(delivery.payload, delivery.number, epoch, partial(self._taken, self._stock))
        schedule.replace(delivery.number, job)
        self._ahead.saw(delivery.nbytes)
        job.open()
        self._jobs.append(job)
        self._stock.add(job.number)
        if threading.current_thread() is not self._thread:
            self._wakeup.ring()
        return job

    def _taken(self, stock: set[int], number: int) -> None:
        """Note that the consumer has taken a batch from ``stock``, and wake the thread if the stock was low."""
        stock.discard(number)
        if self._is_short:
            self._is_short = False
            self._wakeup.ring()

    def wait(self, job: _Job, deadline: float) -> bool:
        """Wait until the job is finished; return False if ``deadline`` (on `dpex.system.clock`) comes first."""
        while not job.finished.is_set():
            if not self._is_alive() and not job.finished.is_set():
                closed = IteratorClosedError("this iterator was closed: call iter(loader) for a new one")
                raise closed if self._closed else _died()
            left = deadline - monotonic()
            if left <= 0:
                return False
            job.finished.wait(min(left, _CHECK_EVERY_S))
        return True

    def _is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def close(self, last_act: Callable[[], None], grace_s: float = 5.0) -> None:
        """End the thread, then call ``last_act``. A second call, and a call in a forked process, have no effect.

        A garbage collection may call this in the pinning thread itself. The thread then ends after its present job.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        if self._thread is threading.current_thread():
            self._last_act = last_act
            return
        try:
            if self._thread is not None and self._is_alive():
                self._wakeup.ring()
                self._thread.join(grace_s)
            if not self._is_alive():
                self._wakeup.close()
        finally:
            last_act()

    def _run(self, listen: Callable[[], list[int]]) -> None:
        torch.set_num_threads(1)  # for this thread, because a copy must not take all processors
        set_thread_name("pt_data_pin")
        if self._feed is not None:
            self._feed.device.begin_thread()
        else:
            set_index(self._device, self._index)
        try:
            while not self._closed:
                self._turn(listen)
        finally:
            if self._last_act is not None:
                self._wakeup.close()
                self._last_act()

    def _turn(self, listen: Callable[[], list[int]]) -> None:
        """Do a job, or wait for one. No batch stays in a variable afterwards."""
        if self._jobs:
            job = self._jobs.popleft()
            work = self._pin if self._feed is None else partial(self._feed.launch, number=job.number, epoch=job.epoch)
            job.run(work, f"in pin memory thread for device {self._index}")
            return
        watched = listen()
        if not self._jobs and not self._closed:
            self._is_watching = bool(watched)
            self._wakeup.set_descriptors(watched)
            self._wakeup.sleep()
            self._wakeup.clear()

    def _pin(self, data: Any) -> Any:
        return pin_memory(data, self._device)


def _died() -> WorkerDiedError:
    return WorkerDiedError("Pin memory thread exited unexpectedly")
