"""Measures the batches of an in-process iterator, for a loader without workers whose metrics are exported.

Used by the consumer's thread; `InlineMeter.sums` and `InlineMeter.stats` may be called from any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import process_time
from typing import TYPE_CHECKING, Any

from dpex.engine.sample_errors import NO_ERRORS
from dpex.measure.batch_times import BatchTimes
from dpex.measure.consumer_time import Tally
from dpex.measure.pool_times import PoolTimes
from dpex.measure.sampling import SlowestSamples
from dpex.measure.sums import Sums
from dpex.measure.wait_causes import SAMPLER
from dpex.profile.live_timer import TicketTimer
from dpex.schedule.names import INLINE
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.gpu.stall import GpuStall
from dpex.system.run_queue import OwnQueue
from dpex.worker.fetch import SampleClock

if TYPE_CHECKING:
    from dpex.device.feed import Feed


class InlineMeter:
    """Times the parts of each call of ``next()``: `enter`, `drawn`, the collate function, `leave`, in this order.

    Args:
        auto_collation: An index is a list of samples.
        dataset: The dataset whose transforms are timed now and then, if there is a ``timer``.
        timer: Times the transforms of a batch.
    """

    def __init__(
        self,
        *,
        auto_collation: bool,
        gpu: GpuStall[Any] | None = None,
        dataset: Any = None,
        timer: TicketTimer | None = None,
    ) -> None:
        self._gpu = gpu
        self.feed: Feed | None = None
        """The feed that copies the batches to a device; set before the first call."""
        self._dataset = dataset
        self._timer = timer or TicketTimer(is_on=False)
        self._is_timed = False
        self._mark: Any = None
        self._entered = 0.0
        self._auto_collation = auto_collation
        self._tally = Tally(detailed=True, queue=OwnQueue().seconds)
        self._times = PoolTimes()
        self._errors: Counter[str] = Counter(batch=0)
        self.sample_errors = NO_ERRORS
        """Samples that failed in an iterator that makes batches without them."""
        self._opened = self._drawn_at = self._cpu_drawn_at = 0.0
        self._clock = SampleClock()
        self._slow_samples = SlowestSamples()
        self._index: Any = None

    def enter(self) -> None:
        """Note that the consumer asks for a batch."""
        now = monotonic()
        self._opened, self._entered = 0.0, now
        self._tally.enter(now)
        if self._gpu is not None:
            self._mark = self._gpu.enter()

    def drawn(self) -> None:
        """Note that the sampler has given the index of the batch."""
        now = monotonic()
        self._tally.busy(SAMPLER, self._entered, now)
        if now >= self._timer.due:
            self._is_timed = self._timer.begin(now, self._dataset)
            now = monotonic()
        self._drawn_at = now
        self._cpu_drawn_at = process_time()

    @property
    def times_samples(self) -> bool:
        """Return True if the samples of the next batch are to be loaded by `samples`."""
        return self._clock.is_on

    def samples(self, dataset: Any, index: Any) -> list[Any]:
        """Return ``[dataset[i] for i in index]``, timed one by one."""
        self._index = index
        return self._clock.samples(dataset, index)

    def timed(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a collate function that calls ``collate_fn`` and counts the batch."""
        tally, count = self._tally, self._times.count

        def collate(data: Any) -> Any:
            began, cpu_began = monotonic(), process_time()
            batch = self._timer.collating(collate_fn, data) if self._is_timed else collate_fn(data)
            self._opened, cpu_ended = monotonic(), process_time()
            load_s, collate_s = began - self._drawn_at, self._opened - began
            samples = len(data) if self._auto_collation and isinstance(data, list) else 1
            load_cpu_s, collate_cpu_s = cpu_began - self._cpu_drawn_at, cpu_ended - cpu_began
            slowest = self._clock.slowest(load_s, samples)
            if slowest and slowest[0] > self._slow_samples.least_s:
                self._slow_samples.add(slowest[0], self._index, slowest[1])
            times = BatchTimes(samples, load_s, load_cpu_s, collate_s, collate_cpu_s, slowest=slowest)
            if self._is_timed:
                self._end_timing()
                times = self._timer.finished(self._dataset, times)
            count(times)
            tally.made_here(load_s, load_cpu_s, collate_s)
            tally.batches += 1
            tally.samples += samples
            return batch

        return collate

    def _end_timing(self) -> None:
        self._is_timed = False
        self._timer.end()

    def leave(self, error: BaseException | None = None) -> None:
        """Note that the consumer has its batch, or that this error comes out of ``next()``."""
        if self._is_timed:
            self._end_timing()
        over = False
        if error is not None:
            over = isinstance(error, StopIteration)
            self._errors["batch"] += isinstance(error, Exception) and not over
        now = monotonic()
        if self._gpu is not None:
            self._gpu.leave(self._mark, now - self._entered, starting=self._tally.starting, over=over)
        self._tally.leave(self._opened, now, over=over)

    # -- reading -------------------------------------------------------------------------------------------------

    def sums(self) -> Sums:
        """Return the counts so far."""
        gpu, feed = self._gpu, self.feed
        return self._tally.sums(
            monotonic(),
            passes=1,
            errors=dict(self._errors),
            pools={INLINE: self._times.sums()},
            moved_bytes={"h2d": 0} if feed is None else {"h2d": feed.staged_bytes, "device": feed.counts.copied_bytes},
            **({} if feed is None else feed.sums()),
            slow_samples=self._slow_samples.found(),
            failed_samples=self.sample_errors.count,
            latest_failed=tuple(self.sample_errors.latest),
            gpu_stall_s=gpu.total_s if gpu is not None else None,
            gpu_running_stall_s=gpu.stall_s if gpu is not None else None,
        )

    def stats(self) -> LoaderStats:
        """Return the counts so far; see `LoaderStats`."""
        sums = self.sums()
        inside_s = sums.wait_s + sums.transfer_s
        return LoaderStats(
            batches=sums.batches,
            wait_s=inside_s,
            own_s=inside_s,
            work_s=sums.work_s,
            first_batch_s=self._tally.first_batch_s,
            gpu_stall_s=sums.gpu_stall_s,
            failed_samples=sums.failed_samples,
            pools=sums.pools,
        )
