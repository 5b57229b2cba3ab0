"""The record of all counts up to a moment, each declared once.

`dpex.measure.batch_times.PoolTimes` and `dpex.measure.consumer_time.Tally` count. These records are their counts at one
moment. ``stats()``, the exported metrics, the windows of the tuner and the facts of a diagnosis derive from them.
Seconds are sums since the iterator was made. PURE.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from dpex.measure.pool_reading import MOST_QUEUED, STEP_BUCKETS, PoolReading
from dpex.measure.record import Record, by_name, counter, few_of_many, histogram, latest, level, log, state
from dpex.measure.sampling import FailedSample, SlowIndex, Waits, merged
from dpex.measure.settings import INLINE, LOCAL, REMOTE, Settings

Signal = Literal["wait", "events", "nvml"]
"""The clock by which loading is judged: the training loop's in ``next()``, the GPU stream's CUDA events, or NVML."""
FAILED_KEPT = 20
"""Maximum number of failed samples whose index and error are kept: the latest."""
WAIT_BUCKETS = (0.00005, 0.0002, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the histogram of waits, seconds."""
_LOOP = "dpex_consumer_seconds_total"
_FEED = "dpex_device_feed_seconds_total"


def wait_ratio(next_s: float, work_s: float) -> float:
    """Return the wait: the share of its wall time that the training loop spends in ``next()``, 0 to 1.

    ``next_s``: Seconds in ``next()``, including the starts of passes. ``work_s``: Seconds between calls of ``next()``.
    """
    return next_s / (next_s + work_s) if next_s + work_s > 0 else 0.0


_NO_POOL = PoolReading()


@dataclass(frozen=True, kw_only=True)
class Reading(Record):
    """All counts up to a moment, for one or several iterators. ``after.since(before)`` is a window.

    The training loop's seconds are counted in two ways. By cause: a wait counts once its cause is known. A long
    unfinished step counts only in part, because it may never end and metrics must not shrink. By the clock: all seconds
    count at once, without causes and without the first call of each pass, so that windows miss none.
    """

    at: float = latest("Time of the reading on the monotonic clock. In a window: seconds since the tuner's start.")
    seconds: float = counter("Wall seconds in passes by the clock, without the first call of each pass.", "seconds")
    epoch: int = state("The number of the pass, from 0.")
    settings: Settings = state("Workers and prefetch that are wanted.", default=Settings())  # noqa: RUF009
    later_batches: int = counter("Batches delivered, without the first of each pass.")
    blocked_s: float = counter(
        "Seconds in which the training loop was blocked in ``next()``, without the first call of each pass.", "seconds"
    )
    next_busy_s: float = counter(
        "Seconds in which the training loop was busy in ``next()``, without the first call of each pass.", "seconds"
    )
    stepping_s: float = counter("Seconds between calls of ``next()``, including all of the present step.", "seconds")
    step_count: int | None = counter("Steps that have ended, by the next call of ``next()``.", default=None)
    straggler_s: float = counter(
        "Blocked seconds in which later batches were ready and the next one was not.", "seconds"
    )
    away_s: float = level(
        "Seconds of the present step so far; 0 in ``next()`` and between passes.", "seconds", default=0.0
    )
    in_flight: int = level("Batches that are being made, or wait for a worker.")
    signal: Signal = state("The clock of a window's seconds: with a known GPU they are the GPU's.", default="wait")  # noqa: RUF009
    cpus: float = state("CPUs that this job may use: affinity, quota, and its part of the machine.", default=1.0)
    memory_free: int | None = state(
        "Bytes that batches and workers may take in addition; negative if they exceed the limit.",
        "bytes",
        default=None,
    )
    worker_bytes: float = state("Median private memory of a local worker, 0 if unknown.", "bytes", default=0.0)
    kernel_s: float = counter(
        "Seconds in which a GPU ran some kernel, by NVML; only while the loader is tuned.", "seconds"
    )
    kernel_seen_s: float = counter("Seconds for which NVML reported whether a kernel ran.", "seconds")
    supplied_s: float = counter(
        "Seconds between two readings of NVML, if batches were ready at the second reading.", "seconds"
    )
    kernel_supplied_s: float = counter("Supplied seconds in which a GPU ran some kernel.", "seconds")
    gpu_steps: int = counter("Steps of the GPU's stream, from a return of ``next()`` to the next entry.")
    gpu_steps_s: float = counter("Seconds of these steps.", "seconds")
    pass_batches: int = state("Batches of a whole pass; 0 if unknown.")
    start_s: float = state("Seconds from the beginning of the latest pass to its first batch.", "seconds", default=0.0)
    starts_anew: bool = state("Whether each pass starts new workers.", default=False)
    lanes: int = state("Batches that a worker makes at the same time.", default=1)
    passes: int = counter("Epochs that have begun.")
    batches: int = counter(
        "Batches delivered to the training loop.",
        metric="dpex_batches_total",
        how_to_read="Its rate is the training loop's speed; a rate of 0 between epochs is normal.",
    )
    samples: int = counter(
        "Samples in the batches delivered.",
        metric="dpex_samples_total",
        how_to_read="Its rate is comparable between runs of different batch sizes.",
    )
    causes: Mapping[str, float] = by_name(
        'Waiting time of the training loop, by cause; adds up to dpex_consumer_seconds_total{state="wait"}.',
        "seconds",
        metric="dpex_wait_seconds_total",
        how_to_read="Reduce the cause with the largest rate. The rate is its share of the wall time.",
    )
    transfer_s: float = counter(
        "Seconds in which the training loop took finished batches in.", "seconds", metric=_LOOP, label="transfer"
    )
    work_s: float = counter("Seconds between two calls of ``next()``.", "seconds", metric=_LOOP, label="work")
    head_idle_s: float = counter(
        "Seconds of wait while later batches were ready, times the idle share of the workers.", "seconds"
    )
    other_idle_s: float = counter("Seconds of all other waits, times the idle share of the workers.", "seconds")
    loop_queued_s: float = counter(
        "Seconds inside ``next()`` in which the training thread could have run and had no CPU.", "seconds"
    )
    read_s: float = counter("Wall seconds in which readers were busy for workers that only decode.", "seconds")
    read_cpu_s: float = counter("CPU seconds of these readers.", "seconds")
    feed_copy_s: float | None = counter(
        "Seconds of the device in which batches were copied to it.", "seconds", default=None, metric=_FEED, label="copy"
    )
    feed_transform_s: float | None = counter(
        "Seconds of the device in ``DeviceConfig(transform=...)``.",
        "seconds",
        default=None,
        metric=_FEED,
        label="transform",
    )
    feed_wait_s: float | None = counter(
        "Seconds in which the training stream waited for batches whose copy or transform was not done.",
        "seconds",
        default=None,
        metric=_FEED,
        label="wait",
    )
    moved_bytes: Mapping[str, int] = by_name(
        "Bytes of batches moved to the training process, to page-locked memory (h2d) and to a device.",
        "bytes",
        metric="dpex_transfer_bytes_total",
        how_to_read="A `network` rate near the link's speed is the limit of remote workers.",
    )
    failed_samples: int = counter(
        "Samples that could not be loaded and were skipped or replaced, as SamplePolicy(on_error=...) says.",
        metric="dpex_failed_samples_total",
        how_to_read="Over dpex_samples_total: the share that SamplePolicy(max_errors=...) limits. The log names each.",
    )
    prefetch: int = level(
        "Maximum number of batches that are drawn and not yet delivered.",
        metric="dpex_prefetch_batches",
        how_to_read="Compare dpex_ready_batches and dpex_in_flight_batches with this maximum.",
    )
    is_capped: bool = state("Whether ``memory_budget`` reduces the prefetch.", default=False)
    batch_bytes: float = state("The mean size of a batch, 0 if unknown.", "bytes", default=0.0)
    trainer_cpu_s: float = counter("CPU seconds of the training process.", "seconds")
    trainer_queued_s: float | None = counter(
        "Seconds in which the training thread could have run and had no CPU.", "seconds", default=None
    )
    waits: tuple[int, ...] = histogram(
        "Wait of the training loop for one batch, without the first batch of each epoch.",
        WAIT_BUCKETS,
        metric="dpex_batch_wait_seconds",
        how_to_read="A median near 0 with a long tail means stragglers. If all waits are long, throughput is too low.",
        total="waited_s",
    )
    waited_s: float = counter("Sum of the waits in ``waits``.", "seconds")
    steps: tuple[int, ...] = histogram(
        "Time of the training loop between two batches, by the CPU's clock.",
        STEP_BUCKETS,
        metric="dpex_step_seconds",
        how_to_read="A batch that takes no longer than a step causes no wait. The loop may run ahead of a GPU.",
        total="stepped_s",
    )
    stepped_s: float = counter("Seconds in the steps that have ended.", "seconds")
    delivered_at: float = latest("Time at which the latest batch was delivered.")
    errors: Mapping[str, int] = by_name(
        "Errors raised in the training loop, by kind.",
        metric="dpex_errors_total",
        how_to_read="Each error reached the training loop, whether it continued or not.",
    )
    remade: int = counter(
        "Batches made again because the worker that held them died.",
        metric="dpex_batches_remade_total",
        how_to_read="Work lost to dpex_worker_restarts_total; no batch is lost or delivered twice.",
    )
    late: int = counter(
        "Late batches of other machines that this machine made again.",
        metric="dpex_late_batches_total",
        how_to_read="Rises where a machine or its link is slower than the others. The live page names the machine.",
    )
    ready: int = level(
        "Finished batches that were received and wait for the training loop.",
        metric="dpex_ready_batches",
        how_to_read="Near 0: workers are behind. Near dpex_prefetch_batches: the training loop is slower.",
    )
    gpu_stall_s: float | None = counter(
        "Time in which the GPU's training stream was idle because the loop waited for a batch, by CUDA events. "
        "It counts from the first use of CUDA on.",
        "seconds",
        default=None,
        metric="dpex_gpu_stall_seconds_total",
        how_to_read="The cost of waiting: less than the loop's wait where queued kernels cover it.",
    )
    gpu_running_stall_s: float | None = counter(
        "``gpu_stall_s`` without the first batch of each epoch.", "seconds", default=None
    )
    pools: Mapping[str, PoolReading] = by_name("Worker pools.", is_traced=True)
    cache_memory_bytes: int | None = state(
        "Bytes of shared memory of this machine in which `dpex.cached` keeps samples.",
        "bytes",
        default=None,
        metric="dpex_cache_memory_bytes",
        how_to_read="It grows in the first epoch and then stays. All loaders and trainings with this cache share it.",
    )
    cache_disk_bytes: int | None = state(
        "Bytes of the disk in which `dpex.cached` keeps samples.",
        "bytes",
        default=None,
        metric="dpex_cache_disk_bytes",
        how_to_read="It is kept for later runs. Remove the folder in `disk=` to free it.",
    )
    slow_samples: Sequence[SlowIndex] = few_of_many(
        "The samples that took longest.", lambda one, other: merged([*one, *other])
    )
    latest_failed: Sequence[FailedSample] = few_of_many(
        "The latest samples that could not be loaded.", lambda one, other: (*one, *other)[-FAILED_KEPT:]
    )
    batch_waits: Waits = log("The wait for each of the latest batches.", Waits, Waits.then, Waits.since)  # noqa: RUF009
    others_s: float = counter("CPU seconds of other programs on the CPUs of this one.", "seconds")
    others_over_s: float = counter("Wall seconds over which ``others_s`` was counted.", "seconds")
    pids: tuple[int, ...] = level("Processes that are local workers.", default=(), is_traced=False)
    thread: int = state("The native id of the training thread, 0 if unknown.", is_traced=False)

    @property
    def sharing_ranks(self) -> int:
        """Ranks of this job that share the batches of the local workers."""
        return max((pool.sharing_ranks for pool in self.pools.values()), default=1)

    @property
    def local(self) -> PoolReading:
        """The pool of this machine."""
        return self.pools.get(LOCAL, _NO_POOL)

    @property
    def remote(self) -> PoolReading:
        """The pool of the cluster."""
        return self.pools.get(REMOTE, _NO_POOL)

    @property
    def local_workers(self) -> int:
        """Workers on this machine, running or starting."""
        return max(self.local.running, self.local.requested)  # a pass may end before its workers have started

    @property
    def remote_workers(self) -> int:
        """Running workers on the cluster."""
        return self.remote.running

    @property
    def workers(self) -> int:
        """Workers of both pools."""
        return self.local_workers + self.remote_workers

    @property
    def at_once(self) -> int:
        """Batches that all workers can make at the same time."""
        return self.lanes * self.workers

    @property
    def tickets(self) -> int:
        """Batches made in all pools."""
        return sum(pool.tickets for pool in self.pools.values())

    @property
    def busy_s(self) -> float:
        """Wall seconds in which workers made batches."""
        return sum(pool.busy_s for pool in self.pools.values())

    @property
    def services_s(self) -> tuple[float, ...]:
        """Wall seconds of the latest batches, one by one."""
        return tuple(seconds for pool in self.pools.values() for seconds in pool.services_s)

    @property
    def queueing_parts(self) -> tuple[float, float]:
        """Shares of the time beyond CPU time, of loading and of collating, that were spent on run queues; 0 to 1."""
        load_s = collate_s = load_wait_s = collate_wait_s = 0.0
        for name, pool in self.pools.items():
            load_wait_s += max(0.0, pool.load_s - pool.load_cpu_s)
            collate_wait_s += max(0.0, pool.collate_s - pool.collate_cpu_s)
            delay = self._queued_s(name, pool) / max(1e-9, pool.cpu_s)
            load_s += delay * pool.load_cpu_s
            collate_s += delay * pool.collate_cpu_s
        parts = ((load_s, load_wait_s), (collate_s, collate_wait_s))
        load, collate = (min(1.0, queued_s / wait_s) if wait_s > 0 else 0.0 for queued_s, wait_s in parts)
        return load, collate

    def _queued_s(self, name: str, pool: PoolReading) -> float:
        """Return a pool's seconds on run queues, 0 if unknown.

        The training process makes its batches in the training thread, so they get a share of that thread's seconds.
        """
        queued_s = pool.queueing_s
        if queued_s is not None or name != INLINE or self.trainer_queued_s is None:
            return queued_s or 0.0
        total_s = pool.busy_s + self.work_s
        return self.trainer_queued_s * pool.busy_s / total_s if total_s > 0 else 0.0

    def with_pools(self, **pools: PoolReading) -> Reading:
        """Return the reading with these pools in place of pools of the same names."""
        return replace(self, pools={**self.pools, **pools})

    @property
    def rate(self) -> float:
        """Batches per second of a window, without the starts of passes."""
        return self.later_batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait(self) -> float:
        """Share of a window lost to loading by the clock of ``signal``, without the starts of passes; 0 to 1."""
        lost_s = self.blocked_s + self.next_busy_s
        return lost_s / (lost_s + self.stepping_s) if lost_s + self.stepping_s > 0 else 0.0

    @property
    def others(self) -> float | None:
        """CPUs that were busy with other programs; None where a quota hides other programs."""
        return self.others_s / self.others_over_s if self.others_over_s else None

    @property
    def kernel_ratio(self) -> float | None:
        """Share of the time in which a GPU ran some kernel, 0 to 1; None without NVML."""
        return self.kernel_s / self.kernel_seen_s if self.kernel_seen_s > 0 else None

    @property
    def supplied_kernel_ratio(self) -> float | None:
        """Share of the time with batches ready in which a GPU ran some kernel; None without such a time."""
        return self.kernel_supplied_s / self.supplied_s if self.supplied_s > 0 else None

    @property
    def supplied_idle_ratio(self) -> float:
        """Share of all the time in which batches were ready and no kernel ran, 0 to 1."""
        return (self.supplied_s - self.kernel_supplied_s) / self.kernel_seen_s if self.kernel_seen_s > 0 else 0.0

    @property
    def wait_s(self) -> float:
        """Seconds of wait for any cause."""
        return sum(self.causes.values())

    @property
    def next_s(self) -> float:
        """Seconds in ``next()``: waiting for batches and taking them in."""
        return self.wait_s + self.transfer_s

    @property
    def wall_s(self) -> float:
        """Seconds in passes: waiting for batches, taking them in, and the loop's own work."""
        return self.next_s + self.work_s

    @property
    def wait_ratio(self) -> float:
        """The wait, as all of dpex reports it: see `wait_ratio`."""
        return wait_ratio(self.next_s, self.work_s)

    @property
    def running_s(self) -> float:
        """Wall time without the start of each pass."""
        return self.wall_s - self.causes.get("startup", 0.0)

    @property
    def running_wait_ratio(self) -> float:
        """The wait without the starts of passes, because their share of the time falls as a run goes on."""
        return (self.running_s - self.work_s) / self.running_s if self.running_s > 0 else 0.0

    @property
    def held_s(self) -> float:
        """Seconds of the training step in which the training thread could have run and had no CPU.

        Queueing that was not seen in ``next()`` is divided between ``next()`` and the step by their wall times, because
        a wait in ``next()`` ends on a run queue, too.
        """
        if self.trainer_queued_s is None or self.wall_s <= 0:
            return 0.0
        queued_s = max(0.0, self.trainer_queued_s - self.loop_queued_s) * self.work_s / self.wall_s
        return min(MOST_QUEUED * self.work_s, queued_s)

    @property
    def held_ratio(self) -> float:
        """Share of wall time that the training step waited for a CPU, 0 to 1. It is no part of the wait."""
        return self.held_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def gpu_stall_ratio(self) -> float | None:
        """Share of wall time in which the GPU's stream waited for data, without starts; None if it was not timed."""
        stall_s = self.gpu_running_stall_s
        return None if stall_s is None or self.wall_s <= 0 else stall_s / self.wall_s

    @property
    def copies_ratio(self) -> float:
        """Share of wall time in which the training stream waited for finished batches to reach the device.

        At most 1, because a loop that does not synchronise may end before the device has finished.
        """
        return min(1.0, (self.feed_wait_s or 0.0) / self.wall_s) if self.wall_s > 0 else 0.0

    @property
    def cpu_s(self) -> float:
        """CPU seconds in which workers made batches."""
        return sum(pool.cpu_s for pool in self.pools.values())

    @property
    def sample_s(self) -> float:
        """Wall seconds of the mean sample, 0 if none was made."""
        made = self.tickets * self.samples / max(1, self.batches)
        return sum(pool.load_s for pool in self.pools.values()) / made if made else 0.0

    @property
    def nodes(self) -> dict[str, PoolReading]:
        """The cluster's machines, and this machine if it makes batches, too."""
        found = {place: one for pool in self.pools.values() for place, one in pool.nodes.items() if one.tickets > 0}
        if found and self.local.tickets:
            found["this machine"] = self.local
        return found

    @property
    def failed_nodes(self) -> tuple[str, ...]:
        """The reasons why dpex excluded nodes of the cluster for a while."""
        return tuple(why for pool in self.pools.values() for why in pool.failed_nodes)


class EngineReport(NamedTuple):
    """A reading of an engine, and other facts for the tuner.

    Attributes:
        reading: The counts.
        resizing: True while a request for other settings is pending.
        refused: The reason why no remote worker can start, or None.
        most_local: The number of local workers that the system allows, and the reason; None until it refuses a worker.
    """

    reading: Reading
    resizing: bool = False
    refused: str | None = None
    most_local: tuple[int, str] | None = None
