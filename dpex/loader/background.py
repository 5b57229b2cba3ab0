"""A thread that draws from any iterator before its batches are asked for, and brings them to a device.

`Background` belongs to one pass. Its thread owns the source; the queue between the two is guarded by ``_changed``. The
thread keeps only this object alive, which has no reference to the iterator that owns it. The thread ends with `stop`,
once the running call of the source's ``next()`` returns.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from time import thread_time
from typing import TYPE_CHECKING, Any, NamedTuple

from dpex.errors import IteratorClosedError
from dpex.measure.batch_times import BatchTimes
from dpex.measure.consumer_time import Tally
from dpex.measure.pool_times import PoolTimes
from dpex.measure.sums import Sums
from dpex.measure.wait_causes import NONE_YET
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuStall
from dpex.system.interrupts import is_interrupt, keep_result
from dpex.system.run_queue import OwnQueue

if TYPE_CHECKING:
    from dpex.device.feed import Feed

_CHECK_EVERY_S = 1.0
"""Seconds between two looks of the consumer at the state of the thread, which notifies it of everything else."""


class Drawn(NamedTuple):
    """A result of the thread: a call that returns the batch, or the error in its place; and the time it took."""

    batch: Callable[[], Any] | None
    error: BaseException | None
    times: BatchTimes

    def open(self) -> Any:
        """Return the batch, or raise the error with the thread's part of its traceback."""
        if self.error is not None:
            raise self.error
        assert self.batch is not None
        return self.batch()


class Background:
    """See the module. most: the maximum number of batches in the queue."""

    def __init__(self, source: Iterator[Any], most: int, feed: Feed | None, gpu: GpuStall[Any] | None) -> None:
        self._source: Iterator[Any] | None = source
        self._most = most
        self._feed = feed
        self._gpu = gpu
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[Drawn] = deque()
        self._is_asked = self._is_over = self._is_stopped = False
        self._tally = Tally(detailed=True, queue=OwnQueue().seconds)
        self._times = PoolTimes()
        self._errors: Counter[str] = Counter()
        self._thread = threading.Thread(target=self._run, name="dpex-prefetch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        if self._feed is not None:
            self._feed.begin_epoch()
        self._thread.start()

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        if self._feed is not None:
            self._feed.device.begin_thread()
        number = 0
        try:
            while self._may_draw():
                drawn = self._draw(number)
                with self._changed:
                    self._is_over = drawn is None or not isinstance(drawn.error, (Exception, type(None)))
                    if drawn is not None and not self._is_stopped:
                        self._queue.append(drawn)
                    self._changed.notify_all()
                del drawn
                number += 1
        finally:
            self._source = None  # a generator ends in the thread that runs it
            with self._changed:
                self._is_over = True
                self._changed.notify_all()

    def _may_draw(self) -> bool:
        """Wait for room in the queue; return False if no more batches are wanted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_stopped or self._is_over or len(self._queue) < self._room())
            return not (self._is_stopped or self._is_over)

    def _room(self) -> int:
        """Return the maximum number of batches in the queue; at least one while the consumer waits."""
        room = self._most if self._feed is None else min(self._most, self._feed.ahead)
        return max(room, int(self._is_asked))

    def _draw(self, number: int) -> Drawn | None:
        """Return the next batch of the source, on its way to the device; None at the end."""
        began, cpu_began = monotonic(), thread_time()
        batch: Callable[[], Any] | None = None
        error: BaseException | None = None
        try:
            value = next(self._source)  # type: ignore[arg-type]
            times = BatchTimes(samples=1, load_s=monotonic() - began, load_cpu_s=thread_time() - cpu_began)
            self._times.count(times)
            feed = self._feed
            batch = (lambda: value) if feed is None else feed.launch(value, number, feed.epoch)
        except StopIteration:
            return None
        except BaseException as failure:
            times, error = BatchTimes(load_s=monotonic() - began, load_cpu_s=thread_time() - cpu_began), failure
        return Drawn(batch, error, times)

    # -- the consumer ----------------------------------------------------------------------------------------------

    def next(self, hand: list[Any]) -> None:
        """Put the next batch into ``hand``, which is empty; if this is interrupted, it is there or comes next time.

        Raises:
            StopIteration: At the end.
            Exception: What the source raised in place of this batch.
            IteratorClosedError: It was stopped.
        """
        tally, entered, mark = self._tally, monotonic(), None
        opened, is_over = 0.0, False
        if self._feed is not None:
            self._feed.check_open()
        tally.enter(entered)
        try:
            if self._gpu is not None:
                mark = self._gpu.enter()
            drawn = self._awaited()
            opened = monotonic()
            keep_result(hand, drawn.open)
            if self._queue:  # without a call until the batch is out: see `dpex.system.interrupts`
                del self._queue[0]
            tally.batches += 1
            self._tell()
        except StopIteration:
            is_over, opened = True, 0.0
            raise
        except Exception as error:
            opened = 0.0
            if not is_interrupt(error) and not isinstance(error, IteratorClosedError):
                self._errors["batch"] += 1
                if self._queue:
                    del self._queue[0]
                self._tell()
            raise
        finally:
            now = monotonic()
            if tally.blocked_at:
                tally.unblock(now)
            if self._gpu is not None:
                self._gpu.leave(mark, now - entered, starting=tally.starting, over=is_over)
            tally.leave(opened, now, over=is_over)

    def _awaited(self) -> Drawn:
        """Return the first of the queue and leave it there, so that an interrupted consumer finds it again."""
        tally = self._tally
        with self._changed:
            if not self._queue and not self._is_over and not self._is_stopped:
                self._is_asked = True
                tally.block(monotonic(), NONE_YET)
                self._changed.notify_all()
                while not (self._queue or self._is_over or self._is_stopped):
                    self._changed.wait(_CHECK_EVERY_S)
                tally.unblock(monotonic())
            self._is_asked = False
            if self._is_stopped:
                raise IteratorClosedError("this iterator was closed")
            if not self._queue:
                raise StopIteration
            drawn = self._queue[0]
            if tally.pending_s:
                tally.explain(drawn.times)
            return drawn

    def _tell(self) -> None:
        """Notify the thread that there is room."""
        with self._changed:
            self._changed.notify_all()

    def stop(self, grace_s: float = 5.0) -> None:
        """End the thread and drop what waits; from any thread, repeatedly, and out of a garbage collection."""
        with self._changed:
            self._is_stopped = True
            self._queue.clear()
            self._changed.notify_all()
        if self._thread is not threading.current_thread() and self._thread.ident is not None:
            self._thread.join(grace_s)
        if self._feed is not None:
            self._feed.settle()

    # -- reading ---------------------------------------------------------------------------------------------------

    def sums(self) -> Sums:
        """Return all counts. Any thread may call this."""
        feed, gpu = self._feed, self._gpu
        moved = {"h2d": 0} if feed is None else {"h2d": feed.staged_bytes, "device": feed.counts.copied_bytes}
        return self._tally.sums(
            monotonic(),
            passes=1,
            errors=dict(self._errors),
            pools={"inline": self._times.sums()},
            moved_bytes=moved,
            ready=len(self._queue),
            prefetch=self._most,
            gpu_stall_s=None if gpu is None else gpu.total_s,
            gpu_running_stall_s=None if gpu is None else gpu.stall_s,
            **({} if feed is None else feed.sums()),
        )

    def stats(self) -> LoaderStats:
        """Return the figures of this pass."""
        sums, tally = self.sums(), self._tally
        return LoaderStats(
            batches=sums.batches,
            prefetch=self._most,
            ready=sums.ready,
            wait_s=tally.inside_s,
            own_s=max(0.0, tally.inside_s - tally.blocked_s - tally.first_blocked_s),
            work_s=sums.work_s,
            first_batch_s=tally.first_batch_s,
            gpu_stall_s=sums.gpu_running_stall_s,
            pools=sums.pools,
        )
