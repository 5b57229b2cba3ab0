"""Counts what torch's own in-process iterator does, for a loader without workers whose metrics are exported.

Used by the consumer's thread; `InlineMeter.sums` may be called from any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from time import thread_time
from typing import TYPE_CHECKING, Any

from dpex.engine.sample_errors import NOBODY
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
from dpex.system.cpu_clocks import CPU_CLOCK_EVERY, TINY_S, HelperThreads
from dpex.system.gpu.stall import GpuStall
from dpex.system.run_queue import OwnQueue
from dpex.worker.fetch import SampleClock

if TYPE_CHECKING:
    from dpex.device.feed import Feed


class InlineMeter:
    """Told of each call of ``next()`` what came when: `enter`, `drawn`, the collate function, `leave`.

    dataset: whose transforms are timed now and then, if there is a ``timer``.
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
        """What brings the batches to a device; set before the first call."""
        self._dataset = dataset
        self._timer = timer or TicketTimer(is_on=False)
        self._is_timed = False
        self._mark: Any = None
        self._entered = 0.0
        self._auto_collation = auto_collation
        self._tally = Tally(detailed=True, queue=OwnQueue().seconds)
        self._times = PoolTimes()
        self._errors: Counter[str] = Counter(batch=0)
        self.sample_errors = NOBODY
        """Set by whoever makes batches although some samples cannot be had."""
        self._opened = self._drawn_at = self._cpu_drawn_at = 0.0
        self._unclocked = 0
        self._ratios = (1.0, 1.0)
        self._helpers = HelperThreads()
        self._clock = SampleClock()
        self._slow_samples = SlowestSamples()
        self._index: Any = None

    def enter(self) -> None:
        """The consumer asks for a batch."""
        now = monotonic()
        self._opened, self._entered = 0.0, now
        self._tally.enter(now)
        if self._gpu is not None:
            self._mark = self._gpu.enter()

    def drawn(self) -> None:
        """The sampler said which one."""
        now = monotonic()
        self._tally.busy(SAMPLER, self._entered, now)
        if now >= self._timer.due:
            self._is_timed = self._timer.begin(now, self._dataset)
            now, self._unclocked = monotonic(), 0
        if self._helpers.is_looking:
            self._helpers.begin()
            now = monotonic()
        self._drawn_at = now
        self._cpu_drawn_at = thread_time() if self._unclocked == 0 else 0.0

    @property
    def times_samples(self) -> bool:
        """Whether `samples` is to be asked for the samples of the next batch."""
        return self._clock.is_on

    def samples(self, dataset: Any, index: Any) -> list[Any]:
        """``[dataset[i] for i in index]``, timed one by one."""
        self._index = index
        return self._clock.samples(dataset, index)

    def timed(self, collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The collate function, which ends the making of a batch.

        The CPU clock is a system call: of tiny batches it is read for each `CPU_CLOCK_EVERY`-th, which stands for all.
        """

        tally, count = self._tally, self._times.count

        def collate(data: Any) -> Any:
            clocked = self._unclocked == 0
            began = monotonic()
            cpu_began = thread_time() if clocked else 0.0
            batch = self._timer.collating(collate_fn, data) if self._is_timed else collate_fn(data)
            self._opened = monotonic()
            load_s, collate_s = began - self._drawn_at, self._opened - began
            if clocked:
                cpu_s = thread_time() - cpu_began
                self._ratios = (
                    (cpu_began - self._cpu_drawn_at) / load_s if load_s > 0 else 1.0,
                    cpu_s / collate_s if collate_s > 0 else 1.0,
                )
            self._unclocked = 0 if load_s + collate_s > TINY_S else (self._unclocked + 1) % CPU_CLOCK_EVERY
            samples = len(data) if self._auto_collation and isinstance(data, list) else 1
            if self._helpers.is_looking or self._opened >= self._helpers.due:
                self._helpers.end(self._opened, load_s + collate_s)
            helped = self._helpers.ratio(load_s + collate_s) if self._helpers.each_s else 0.0
            load_cpu_s, collate_cpu_s = load_s * (self._ratios[0] + helped), collate_s * (self._ratios[1] + helped)
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
        """It has got one, or that error."""
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
        """The counts so far."""
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
        """The counts so far; see `LoaderStats`."""
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
