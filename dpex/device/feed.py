"""Brings the batches of one iterator to a device, ahead of need.

`Feed.launch` begins the copy of a batch, in the thread that pins or in the consumer's, and returns an `Arrival`. The
consumer calls that for the batch: its training queue waits on the device until the copy is done, its thread does not.
So no batch can be read before it is there. Two more things must not come too early:

* The memory of the host is not given back before the copy out of it is done (``_in_flight``).
* The memory of the device is not used anew before the consumer's queue is done with it (`Device.lend`).

A transform is queued behind the copy, in the same queue, when the batch before is taken: ahead of need as well, and in
the consumer's thread, whose random generators it borrows.

Marks are asked about in the consumer's thread alone, within ``next()``: a question from another thread would spoil a
CUDA graph that the consumer captures.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from dpex.device import tree
from dpex.device.ahead import Ahead
from dpex.device.placing import Device, Mark
from dpex.errors import CapturedGraphError
from dpex.system.interrupts import is_interrupt

if TYPE_CHECKING:
    from dpex.device.transform import SeededTransform

Pin = Callable[[torch.Tensor], torch.Tensor]
"""A tensor of the host in page-locked memory: itself where it lies in such memory, else a copy."""


class FeedCounts:
    """What was counted so far. Written by the consumer, but ``copied_bytes`` by whoever launches copies.

    copy_s: seconds of the device from the beginning of each copy to its end. transform_s: the same of transforms.
    wait_s: seconds that the training queue had to wait for batches that were not there yet. late: these batches.
    """

    __slots__ = ("copied_bytes", "copy_s", "late", "transform_s", "wait_s")

    def __init__(self) -> None:
        self.copied_bytes = self.late = 0
        self.copy_s = self.transform_s = self.wait_s = 0.0


class _Flight(NamedTuple):
    """A copy that has begun: its marks, and the memory of the host that it reads."""

    begun: Mark
    ended: Mark
    host: Any


class Arrival:
    """A batch on its way to the device; the consumer calls it for the batch, repeatedly if it is interrupted.

    host: what it is copied from, while that may have to be done again. is_begun: its transform was called.
    is_done: nothing is left to be queued for it.
    """

    __slots__ = ("_feed", "batch", "epoch", "error", "host", "is_begun", "is_done", "number", "ready")

    def __init__(self, feed: Feed, batch: Any, ready: Mark, number: int, epoch: int) -> None:
        self._feed = feed
        self.batch = batch
        self.ready = ready
        self.number = number
        self.epoch = epoch
        self.error: Exception | None = None
        self.host: Any = None
        self.is_begun = False
        self.is_done = True

    def __call__(self) -> Any:
        return self._feed.take(self)


class Feed:
    """See the module. ``pin`` puts a tensor into page-locked memory; None: it stays where it is.

    ``epoch``: of the batches that are launched from now on. ``transform``: what is done with each batch on the device.
    """

    def __init__(self, device: Device, *, budget_bytes: int, pin: Pin | None = None) -> None:
        self.device = device
        self.counts = FeedCounts()
        self.epoch = -1
        self.transform: SeededTransform | None = None
        self._pin = pin
        self._ahead = Ahead(budget_bytes)
        self._pid = os.getpid()
        self._in_flight: deque[_Flight] = deque()
        self._to_transform: deque[Arrival] = deque()
        self._transforms: deque[tuple[Mark, Mark]] = deque()
        self._waits: deque[tuple[Mark, Mark]] = deque()
        self._has_caught_up = False

    @property
    def ahead(self) -> int:
        """How many batches are to be on the device before they are asked for."""
        return self._ahead.batches

    @property
    def staged_bytes(self) -> int:
        """What was copied into page-locked memory first."""
        return int(getattr(self._pin, "staged_bytes", 0))

    def begin_epoch(self) -> None:
        """Batches launched before are not going to be taken."""
        self.epoch += 1
        self._has_caught_up = False
        self._to_transform.clear()

    def launch(self, batch: Any, number: int, epoch: int) -> Arrival:
        """Begin the copy of the batch of that number; its errors come as they are."""
        host = batch if self._pin is None else tree.pinned(batch, self._pin)
        moved, ended = self._copied(host)
        arrival = Arrival(self, moved, ended, number, epoch)
        if self.transform is not None:
            arrival.host, arrival.is_done = host, False
            if epoch == self.epoch:
                self._to_transform.append(arrival)
        return arrival

    def _copied(self, host: Any) -> tuple[Any, Mark]:
        """The batch on the device, and the mark from which on it is there."""
        device = self.device
        with device.copying():
            begun = device.mark()
            try:
                moved = host if device.target.type == "cpu" else tree.on_device(host, device.target)
            finally:  # also after an error, what was begun until then reads that memory
                ended = device.mark()
                self._in_flight.append(_Flight(begun, ended, host))
        nbytes = tree.nbytes(moved)
        self.counts.copied_bytes += 0 if moved is host else nbytes
        self._ahead.saw(nbytes)
        return moved, ended

    def check_open(self) -> None:
        """Raise unless batches can be taken now.

        Raises:
            CapturedGraphError: The calling thread captures a graph.
        """
        if self.device.is_capturing():
            raise CapturedGraphError(
                f"next() was called while a graph is captured, and its batch is to be on {self.device.target}: the "
                "graph would hold that one batch's memory. Take a batch before the capture, and copy each batch "
                "into the tensor that the graph reads"
            )

    def take(self, arrival: Arrival) -> Any:
        """The batch, for work that the calling thread queues from now on."""
        device = self.device
        self._finish(arrival)
        if arrival.error is not None:
            raise arrival.error
        is_late = not device.is_passed(arrival.ready)
        if is_late:
            before = device.mark()
            device.wait(arrival.ready)
            self._waits.append((before, device.mark()))
            self.counts.late += 1
        tree.lend(arrival.batch, device.lend, device.lend_own)
        self._ahead.taken(is_late=is_late)
        for later in self._to_transform.copy():
            self._finish(later)
        self.look()
        return arrival.batch

    def _finish(self, arrival: Arrival) -> None:
        """Queue what is to be done with a batch behind its copy; an error of that waits for the batch's turn."""
        if not arrival.is_done:
            try:
                self._transformed(arrival)
            except Exception as error:
                if is_interrupt(error):
                    raise
                arrival.error, arrival.is_done = error, True
        if arrival in self._to_transform:
            self._to_transform.remove(arrival)

    def _transformed(self, arrival: Arrival) -> None:
        """Call the transform; one that was interrupted may have left the batch half done, so it is copied again."""
        assert self.transform is not None
        device = self.device
        if arrival.is_begun:
            arrival.batch, _ = self._copied(arrival.host)
        if not self._has_caught_up:
            device.catch_up()  # what the transform reads beside the batch may have been made just before the pass
            self._has_caught_up = True
        arrival.is_begun = True
        with device.copying():
            begun = device.mark()
            batch = self.transform(arrival.batch, arrival.number, arrival.epoch)
            ready = device.mark()
        self._transforms.append((begun, ready))
        self._ahead.saw(tree.nbytes(batch))
        arrival.batch, arrival.ready, arrival.is_done, arrival.host = batch, ready, True, None

    def bring(self, batch: Any, number: int) -> Any:
        """Copy the batch of that number of this epoch, and take it at once."""
        self.check_open()
        return self.launch(batch, number, self.epoch)()

    def look(self) -> None:
        """Give back memory of the host that was copied from, and count what the device is done with."""
        device, flights = self.device, self._in_flight
        while flights and device.is_passed(flights[0].ended):
            begun, ended, _ = flights.popleft()
            self.counts.copy_s += device.apart_s(begun, ended)
        self.counts.transform_s += self._passed_s(self._transforms)
        self.counts.wait_s += self._passed_s(self._waits)

    def _passed_s(self, spans: deque[tuple[Mark, Mark]]) -> float:
        """Seconds of the device in the spans that are passed, which are taken out."""
        seconds = 0.0
        while spans and self.device.is_passed(spans[0][1]):
            seconds += self.device.apart_s(*spans.popleft())
        return seconds

    def sums(self) -> dict[str, float]:
        """Return the fields of `dpex.measure.sums.Sums` that a feed counts, by name."""
        counts = self.counts
        return {"feed_copy_s": counts.copy_s, "feed_transform_s": counts.transform_s, "feed_wait_s": counts.wait_s}

    def settle(self) -> None:
        """Wait until no copy is under way, and give back all memory of the host. Harmless in a forked process."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # of the device, which says so at the next call of the training loop
            for flight in self._in_flight.copy():
                self.device.await_mark(flight.ended)
            self.look()
