"""Brings the batches of one iterator to a device, ahead of need.

`Feed.launch` starts the copy of a batch, in the pinning thread or the consumer's thread, and returns an `Arrival`. The
consumer calls the `Arrival` to get the batch. The training stream then waits for the copy, but the consumer's thread
does not. The feed keeps the host's memory until the copy has ended (``_in_flight``). `Device.record_use` reserves the
device's memory until the training stream has used it.

The feed queues a transform behind the copy, in the same stream, when the consumer takes the previous batch. Transforms
are called in the consumer's thread, and use that thread's random generators (`SeededTransform`).

Only the consumer's thread queries CUDA events, within ``next()``. A query from another thread would invalidate a CUDA
graph that the consumer captures.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import count
from typing import Any, NamedTuple

import torch

from dpex._torch import BaseDataLoaderIter, SingleProcessDataLoaderIter
from dpex.device import tree
from dpex.device.devices import Device, Mark, QueueDevice, Staging, opened
from dpex.errors import UsageError
from dpex.schedule.seeding import mix64
from dpex.system.compiler import untraced
from dpex.worker.batch_seeding import TicketSeeds, call_seeded, one_at_a_time
from dpex.worker.decoded_stream import FailedRead

Transform = Callable[[Any], Any]
Pin = Callable[[torch.Tensor], torch.Tensor]
"""Returns a host tensor in page-locked memory: the tensor itself if it is page-locked, else a copy."""
_OTHER_WORDS = 0x6465762D74667273
"""Mixed into the base seed, because a transform that draws as the dataset did must not get the same numbers again."""
USUAL = 2
"""Initial number of batches: one to copy during the present step, and one in case a step is shorter than a copy."""
MOST = 8
"""Maximum number of batches, because each takes device memory. A slow loader causes longer bursts of late batches."""
JUDGED = 32
"""Number of batches in a share of late batches: few, so that `Ahead` reacts within seconds, but a meaningful number."""
IS_LATE = 0.125
"""Share of late batches above which `Ahead` tries one batch more. Chance and the start of a pass cause smaller ones."""
SMALL_BYTES = 1 << 20
"""Small batches may take this much together, up to `MOST` of them. The thread that copies is then woken once for
several batches instead of once for each. A wakeup takes the interpreter lock from the training loop, which costs more
than the copy of a small batch."""
HELPED = 0.5
"""`Ahead` keeps the batch that it tried if the share of late batches is at most this part of the share before."""


class Ahead:
    """The number of batches that wait on the device: few, but enough that copies are not late, within a budget.

    More batches help if copies are only sometimes late, because the times of steps or copies vary. They do not help if
    copies take longer than steps on average. So one batch more is kept only if it makes fewer batches late (`HELPED`).

    ``batches`` is the present number. Any thread may read it.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._largest_bytes = 0
        self._wanted = USUAL
        self._most = MOST
        self._seen = self._late = 0
        self._share_before: float | None = None
        self.batches: int = USUAL

    def saw(self, nbytes: int) -> None:
        """Note that a batch takes ``nbytes`` on the device."""
        if nbytes > self._largest_bytes:
            self._largest_bytes = nbytes
            self._set()

    def taken(self, *, is_late: bool) -> None:
        """Note that the consumer has taken a batch. ``is_late``: The device had not finished its copy or transform."""
        self._seen += 1
        self._late += is_late
        if self._seen == JUDGED:
            share, self._seen, self._late = self._late / JUDGED, 0, 0
            self._judge(share)
            self._set()

    def _judge(self, share: float) -> None:
        before, self._share_before = self._share_before, None
        if before is not None and share > HELPED * before:
            self._wanted -= 1
            self._most = self._wanted
        elif share > IS_LATE and self._wanted < self._most:
            self._wanted += 1
            self._share_before = share

    def _set(self) -> None:
        if self._largest_bytes:
            small = min(MOST, SMALL_BYTES // self._largest_bytes)
            self.batches = min(max(self._wanted, small), self._budget_bytes // self._largest_bytes)
        else:
            self.batches = self._wanted


class _Flight(NamedTuple):
    """A copy that has begun: the marks before and after it on its stream, and the host memory that it reads."""

    begun: Mark
    ended: Mark
    host: Any


class Arrival:
    """A batch on its way to the device. The consumer calls this object to get the batch.

    Attributes:
        is_done: True if all work for the batch has been queued.
    """

    __slots__ = ("_feed", "batch", "epoch", "error", "is_done", "number", "ready")

    def __init__(self, feed: Feed, batch: Any, ready: Mark, number: int, epoch: int) -> None:
        self._feed = feed
        self.batch: Any = batch
        self.ready: Mark = ready
        self.number: int = number
        self.epoch: int = epoch
        self.error: Exception | None = None
        self.is_done: bool = True

    def __call__(self) -> Any:
        return self._feed.take(self)


class Feed:
    """Copies the batches of one iterator to a device. ``pin`` puts a tensor into page-locked memory, if given.

    Attributes:
        epoch: The epoch of the batches that are launched from now on.
        transform: A function of each batch on the device, or None.
        copied_bytes: Bytes copied to the device. Only the launching thread writes it.
        copy_s: Device seconds of copies.
        late: Batches taken before the end of their copy and transform.
        transform_s: Device seconds of transforms.
        wait_s: Device seconds in which the training stream waited for late batches.
    """

    def __init__(self, device: Device, *, budget_bytes: int, pin: Pin | None = None) -> None:
        self.device = device
        self.copied_bytes: int = 0
        self.late: int = 0
        self.copy_s: float = 0.0
        self.transform_s: float = 0.0
        self.wait_s: float = 0.0
        self.epoch: int = -1
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
        """The number of batches to copy to the device before the consumer asks for them."""
        return self._ahead.batches

    @property
    def staged_bytes(self) -> int:
        """Bytes that were first copied into page-locked memory."""
        return int(getattr(self._pin, "staged_bytes", 0))

    def have_transformed(self, transform: Transform | None, base_seed: int) -> None:
        """Call ``transform`` with each batch, with seeds made from the base seed of the iterator."""
        if transform is not None:
            self.transform = SeededTransform(transform, self.device, base_seed)

    def begin_epoch(self, epoch: int) -> None:
        """Begin this epoch of the iterator. Batches that were launched before are not taken any more."""
        self.epoch = epoch
        self._has_caught_up = False
        self._to_transform.clear()

    def launch(self, batch: Any, number: int, epoch: int) -> Arrival:
        """Begin the copy of batch ``number`` of ``epoch``. It raises errors of the copy."""
        host = batch if self._pin is None else tree.pinned(batch, self._pin)
        moved, ended = self._copied(host)
        arrival = Arrival(self, moved, ended, number, epoch)
        if self.transform is not None:
            arrival.is_done = False
            if epoch == self.epoch:
                self._to_transform.append(arrival)
        return arrival

    def _copied(self, host: Any) -> tuple[Any, Mark]:
        """Return the batch on the device, and the mark after which its copy is complete."""
        device = self.device
        with device.copying():
            begun = device.mark()
            try:
                moved = host if device.target.type == "cpu" else tree.on_device(host, device.target)
            finally:  # even after an error, copies that were begun read `host`
                ended = device.mark()
                self._in_flight.append(_Flight(begun, ended, host))
        nbytes = tree.nbytes(moved)
        self.copied_bytes += 0 if moved is host else nbytes
        self._ahead.saw(nbytes)
        return moved, ended

    def check_open(self) -> None:
        """Raise unless batches can be taken now.

        Raises:
            UsageError: The calling thread captures a graph.
        """
        if self.device.is_capturing():
            raise UsageError(
                "next() was called during the capture of a graph, which would read the memory of one batch on "
                f"{self.device.target} for ever. Take a batch before the capture, and copy each batch into the tensor "
                "that the graph reads"
            )

    def take(self, arrival: Arrival) -> Any:
        """Return the batch, or the error of its transform. Work that this thread queues later may use the batch."""
        device = self.device
        self._finish(arrival)
        if arrival.error is not None:
            return FailedRead(arrival.error)
        is_late = not device.is_passed(arrival.ready)
        if is_late:
            before = device.mark()
            device.wait(arrival.ready)
            self._waits.append((before, device.mark()))
            self.late += 1
        for tensor in tree.tensors(arrival.batch, device.records_own_use):
            device.record_use(tensor)
        self._ahead.taken(is_late=is_late)
        for later in self._to_transform.copy():
            self._finish(later)
        self.look()
        return arrival.batch

    def _finish(self, arrival: Arrival) -> None:
        """Queue the transform of a batch behind its copy. An error of the transform is kept for `take`."""
        if not arrival.is_done:
            try:
                self._transformed(arrival)
            except Exception as error:
                arrival.error, arrival.is_done = error, True
        if arrival in self._to_transform:
            self._to_transform.remove(arrival)

    def _transformed(self, arrival: Arrival) -> None:
        """Call the transform."""
        assert self.transform is not None
        device = self.device
        if not self._has_caught_up:
            device.catch_up()  # other tensors that the transform reads may have been made just before the pass
            self._has_caught_up = True
        with device.copying():
            begun = device.mark()
            batch = self.transform(arrival.batch, arrival.number, arrival.epoch)
            ready = device.mark()
        self._transforms.append((begun, ready))
        self._ahead.saw(tree.nbytes(batch))
        arrival.batch, arrival.ready, arrival.is_done = batch, ready, True

    def bring(self, batch: Any, number: int) -> Any:
        """Copy batch ``number`` of this epoch to the device, and return it at once."""
        self.check_open()
        arrived = self.launch(batch, number, self.epoch)()
        if type(arrived) is FailedRead:
            raise arrived.error
        return arrived

    def look(self) -> None:
        """Release the host memory of copies that have ended, and add up the device's seconds."""
        device, flights = self.device, self._in_flight
        while flights and device.is_passed(flights[0].ended):
            begun, ended, _ = flights.popleft()
            self.copy_s += device.apart_s(begun, ended)
        self.transform_s += self._passed_s(self._transforms)
        self.wait_s += self._passed_s(self._waits)

    def _passed_s(self, spans: deque[tuple[Mark, Mark]]) -> float:
        """Remove the spans that the device has passed, and return its seconds in them."""
        seconds = 0.0
        while spans and self.device.is_passed(spans[0][1]):
            seconds += self.device.apart_s(*spans.popleft())
        return seconds

    def counts(self) -> dict[str, Any]:
        """Return the fields of `Reading` that a feed counts, by name."""
        return {"feed_copy_s": self.copy_s, "feed_transform_s": self.transform_s, "feed_wait_s": self.wait_s}

    def settle(self) -> None:
        """Wait until all copies have ended, and release all host memory. It does nothing in a forked process."""
        if os.getpid() != self._pid:
            return
        with contextlib.suppress(Exception):  # the training loop's next call of the device raises the error again
            for flight in self._in_flight.copy():
                self.device.await_mark(flight.ended)
            self.look()


class SeededTransform:
    """Calls the user's transform with each batch on the device, after seeding the random generators for the batch.

    The transform runs in the consumer's thread, within ``next()``, because it may draw from the training loop's random
    generators, on the host and on the device, and reseeding them in another thread would disturb a training step. The
    generators get their former state back after the call. The seed is a function of the base seed, the epoch and the
    number of the batch, and differs from the seed that the batch was made with.
    """

    def __init__(self, function: Transform, device: Device, base_seed: int) -> None:
        self._function = function
        self._device = device
        self._seeds = TicketSeeds(mix64(base_seed ^ _OTHER_WORDS))

    def __call__(self, batch: Any, number: int, epoch: int) -> Any:
        """Return the result of the transform for batch ``number`` of ``epoch``. It raises the transform's errors."""
        seed = self._seeds.of(number, epoch)
        with one_at_a_time(), self._device.seeded(seed):
            return call_seeded(seed, self._function, batch)


def open_feed(target: torch.device | None, budget_bytes: int, transform: Transform | None) -> Feed | None:
    """Return a feed to the device ``target``; None if batches stay on the host as they are.

    Raises:
        OptionError: This process cannot use the device.
    """
    if target is None or (target.type == "cpu" and transform is None):
        return None
    device = opened(target)
    pin = Staging(device) if isinstance(device, QueueDevice) else None
    return Feed(device, budget_bytes=budget_bytes, pin=pin)


# -- torch's own iterators ---------------------------------------------------------------------------------------------


class _FedFetcher:
    """Fetches batches from the dataset of an in-process iterator, and copies them to the device."""

    def __init__(self, fetcher: Any, feed: Feed, first: int) -> None:
        self._fetcher = fetcher
        self._feed = feed
        self._numbers = count(first)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fetcher, name)  # such as `dataset` and, for a stream, `dataset_iter`

    def fetch(self, index: Any) -> Any:
        """Return the batch, on the device."""
        number = next(self._numbers)
        return self._feed.bring(self._fetcher.fetch(index), number)


class _Refusing:
    """Raises the error of `Feed.check_open` before an index is drawn, so that no batch is lost."""

    _feed: Feed

    def _next_data(self) -> Any:
        self._feed.check_open()
        return super()._next_data()  # type: ignore[misc]


class _Fed(_Refusing):
    """Brings batches to the device, in an iterator with torch's workers."""

    _feed_numbers: Iterator[int]

    def _next_data(self) -> Any:
        batch = super()._next_data()
        return self._feed.bring(batch, next(self._feed_numbers))

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)  # type: ignore[misc]
        self._feed.begin_epoch(self._feed.epoch + 1)
        self._feed_numbers = count()


@cache
def _fed_kind(base: type[Any], kind: Any) -> type[Any]:
    return type(kind.__name__, (base, kind), {"__module__": kind.__module__})


def have_fed(iterator: BaseDataLoaderIter, feed: Feed, transform: Transform | None) -> BaseDataLoaderIter:
    """Change an iterator without dpex's workers so that it copies each batch to the device when it is asked for one."""
    inner: Any = iterator
    feed.have_transformed(transform, int(inner._base_seed))
    resumed = getattr(inner, "_first", None)  # only dpex's own iterator resumes
    feed.begin_epoch(0 if resumed is None else resumed.epoch)
    is_in_process = isinstance(iterator, SingleProcessDataLoaderIter)
    kind: Any = type(iterator)
    inner.__class__ = _fed_kind(_Refusing if is_in_process else _Fed, kind)
    inner._feed = feed
    if is_in_process:
        inner._pin_memory = False  # the feed has batches pinned before they are copied
        inner._dataset_fetcher = _FedFetcher(inner._dataset_fetcher, feed, inner._num_yielded)
        meter = getattr(iterator, "meter", None)  # only a measured iterator has one
        if meter is not None:
            meter.feed = feed
    else:
        inner._feed_numbers = count()
    weakref.finalize(iterator, untraced(feed.settle)).atexit = False
    return iterator
