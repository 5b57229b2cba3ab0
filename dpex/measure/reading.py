"""Counts of batches, of the workers that make them and of the training loop that gets them, each declared once.

`dpex.measure.batch_times.PoolTimes` and `dpex.measure.consumer_time.Tally` count. These records are their counts at one
moment. ``stats()``, the exported metrics, the windows of the tuner and the facts of a diagnosis derive from them.
Seconds are sums since the iterator was made. PURE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpex.measure.readable import duration
from dpex.measure.record import Record, by_name, counter, few_of_many, histogram, latest, level, log, state
from dpex.measure.sampling import FailedSample, SlowIndex, Waits, merged

SERVICES_KEPT = 1024
"""Maximum times of single batches in the sum of several iterators; the latest are kept."""
FAILED_KEPT = 20
"""Samples that could not be loaded of which index and error are kept."""
WAIT_BUCKETS = (0.00005, 0.0002, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
"""Upper bounds of the histogram of waits, seconds."""
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Upper bounds of the histograms of steps, and of batches in workers, seconds."""
STAGES = ("load", "collate", "encode")
"""Stages of a batch in which a worker is busy, in their order."""
LINK: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    **dict.fromkeys(("links", "sent_bytes", "resent_bytes", "sending_s"), sum),
    "round_trip_s": max,
}
"""Fields about the way from machines of the cluster, and how those of several machines become one."""
_LOOP = "dpex_consumer_seconds_total"
_FEED = "dpex_device_feed_seconds_total"
_WALL, _CPU = "dpex_worker_seconds_total", "dpex_worker_cpu_seconds_total"


def latest_services(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Return the latest values of both, `SERVICES_KEPT` at most."""
    return (*one, *other)[-SERVICES_KEPT:]


@dataclass(frozen=True, kw_only=True)
class CallSums(Record):
    """The calls of a function from one place, in the batches in which calls were timed."""

    calls: int = counter("Calls.")
    wall_s: float = counter("Wall seconds in these calls, without the calls within.", "seconds")
    cpu_s: float = counter("Seconds of that in which the thread had a CPU.", "seconds")
    drawing: int = counter("Batches in which the function itself drew random numbers.")


@dataclass(frozen=True, kw_only=True)
class PoolReading(Record):
    """A worker pool, the training process ("inline"), or a machine of the cluster: the values of `LoaderStats.pools`.

    Counts and times are sums over the batches that it has made. Those of the link are counted by TCP at its far end.
    `declared()` says what each field means.
    """

    links: int = level("Machines with a connection of their own, which measure it.")
    sent_bytes: int = counter(
        "Bytes that machines of the cluster sent and that arrived here.",
        "bytes",
        metric="dpex_network_sent_bytes_total",
        how_to_read="Over dpex_network_sending_seconds_total: the bandwidth while sending.",
    )
    resent_bytes: int = counter(
        "Bytes that they sent again, because they were lost.",
        "bytes",
        metric="dpex_network_resent_bytes_total",
        how_to_read="Over dpex_network_sent_bytes_total: loss. From a thousandth on it slows long ways down.",
    )
    sending_s: float = counter(
        "Seconds in which something of a machine's was on its way, added up over machines.",
        "seconds",
        metric="dpex_network_sending_seconds_total",
        how_to_read="Near one second per second and machine, the network is the limit of remote workers.",
    )
    round_trip_s: float = state(
        "The time there and back when nothing queues; of several machines the longest.",
        "seconds",
        default=0.0,
        metric="dpex_network_round_trip_seconds",
        how_to_read="Under a millisecond in a rack. Prefetch hides it.",
    )
    tickets: int = counter("The number of batches that were made.")
    load_s: float = counter(
        "Wall seconds in which workers got the samples, ``dataset[i]``, transforms included.",
        "seconds",
        stage="load",
        metric=_WALL,
    )
    load_cpu_s: float = counter(
        "CPU seconds of that, those of libraries' threads included.", "seconds", stage="load", metric=_CPU
    )
    collate_s: float = counter("Wall seconds in the collate function.", "seconds", stage="collate", metric=_WALL)
    collate_cpu_s: float = counter("CPU seconds in the collate function.", "seconds", stage="collate", metric=_CPU)
    encode_s: float = counter(
        "Wall seconds in which batches were written into shared memory.",
        "seconds",
        stage="encode",
        metric=_WALL,
    )
    encode_cpu_s: float = counter("CPU seconds of that writing.", "seconds", stage="encode", metric=_CPU)
    transit_s: float = counter(
        "Seconds on the way from a remote worker, while it had nothing else to do.", "seconds", stage="transit"
    )
    cache_hits: int = counter(
        "Samples that came from a cache (`dpex.cached`).",
        metric="dpex_cache_hits_total",
        how_to_read="Over hits and dpex_cache_misses_total: the part of the samples that cost nearly nothing.",
    )
    cache_misses: int = counter(
        "Samples that a cache did not have, so that they were prepared.",
        metric="dpex_cache_misses_total",
        how_to_read="All of the first epoch. If it rises after that, the cache is full: the log says how much fits.",
    )
    cache_saved_s: float = counter(
        "Seconds that preparing the samples of all hits would have taken, less those that reading them took.",
        "seconds",
        metric="dpex_cache_saved_seconds_total",
        how_to_read="Its rate is the number of workers that the cache replaces.",
    )
    wanted: int = level(
        "Workers that the user or the tuner wants.",
        metric="dpex_workers_wanted",
        how_to_read="Above dpex_workers_running for long: the machine or the cluster does not give them.",
    )
    requested: int = level(
        "Workers asked of the system, those running included.",
        metric="dpex_workers_requested",
        how_to_read="Above dpex_workers_running: they are starting, or wait for a place on the cluster.",
    )
    running: int = level(
        "Workers that take batches to be made.",
        metric="dpex_workers_running",
        how_to_read="What there really is; it follows dpex_workers_wanted.",
    )
    in_flight: int = level(
        "Batches that are with workers, being made or waiting for their turn there.",
        metric="dpex_in_flight_batches",
        how_to_read="Below dpex_workers_running some workers have nothing to do: look further ahead, or have fewer.",
    )
    nodes_excluded: int = level(
        "Nodes of the cluster that get no workers for a while, as they failed repeatedly.",
        metric="dpex_nodes_excluded",
        how_to_read="Their work is done by others, and they get another chance; the log says why.",
    )
    shared: int = counter(
        "Batches that were made for another training with the same ``share``; their times count for both.",
        metric="dpex_batches_shared_total",
        how_to_read="Over dpex_worker_batch_seconds_count: the part that cost this training nothing.",
    )
    services: tuple[int, ...] = histogram(
        "How long a worker was busy with one batch.",
        STEP_BUCKETS,
        metric="dpex_worker_batch_seconds",
        how_to_read="A long tail makes stragglers, which prefetch hides. Its count is the batches made by that pool.",
        total="busy_s",
    )
    services_s: tuple[float, ...] = few_of_many("How long the latest batches took.", latest_services, "seconds")
    deaths: int = counter(
        "Workers that ended unexpectedly; each is replaced.",
        metric="dpex_worker_restarts_total",
        how_to_read="A slow rise is a leak, the out-of-memory killer or preempted nodes; the log says why each died.",
    )
    queued_s: float = counter("Seconds in which workers could have run and had no CPU.", "seconds")
    queue_known_s: float = counter(
        "Busy seconds for which the kernel reports run queues; all of them on most kernels.", "seconds"
    )
    calls: Mapping[str, CallSums] = by_name("Calls by path, of the batches in which calls were timed.")
    nodes: Mapping[str, PoolReading] = by_name("Machines of the cluster: what was made there, and their link.")
    failed_nodes: Sequence[str] = few_of_many(
        "The reasons why nodes of the cluster were excluded.", lambda one, other: tuple(dict.fromkeys([*one, *other]))
    )
    sharing_ranks: int = state("Ranks of this job that share the batches.", default=1)
    why_excluded: Mapping[str, str] = by_name(
        "Why nodes of the cluster get no workers for a while, by node.", is_text=True
    )
    room: int | None = state("Further workers there would be place for, None if unknown.", default=None)
    unplaced: int = state("How many of those requested the cluster has no place for.")
    granted: int | None = state(
        "Workers that this loader may have beside the others on the cluster, None if the cluster is not divided.",
        default=None,
    )

    def since(self, earlier: PoolReading) -> PoolReading:
        """See `Record.since`. The times of single batches are those of the batches since then, as far as kept."""
        found = super().since(earlier)
        new = self.services_s[-found.tickets :] if found.tickets else ()
        return replace(found, services_s=new)

    @property
    def busy_s(self) -> float:
        """Wall seconds for which workers were busy."""
        return self.load_s + self.collate_s + self.encode_s

    @property
    def cpu_s(self) -> float:
        """CPU time of all stages."""
        return self.load_cpu_s + self.collate_cpu_s + self.encode_cpu_s

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second while something was on its way, None if nothing was."""
        return self.sent_bytes / self.sending_s if self.sending_s > 0 else None

    @property
    def loss(self) -> float:
        """Share of the bytes that were sent again, 0 to 1."""
        return self.resent_bytes / max(1, self.sent_bytes + self.resent_bytes)

    def __repr__(self) -> str:
        each = f" of {duration(self.busy_s / self.tickets)} each" if self.tickets else ""
        ended = f"; {self.deaths:,} ended unexpectedly" if self.deaths else ""
        return f"PoolReading({self.running} of {self.wanted} workers run{ended}; {self.tickets:,} batches{each})"


@dataclass(frozen=True, kw_only=True)
class Sums(Record):
    """The sums of one or several iterators: the training loop, the queue, the pools, and the machine."""

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
    transfer_s: float = counter("Seconds in which it took batches in.", "seconds", metric=_LOOP, label="transfer")
    work_s: float = counter("Seconds between two calls of ``next()``.", "seconds", metric=_LOOP, label="work")
    head_idle_s: float = counter(
        "Waits with later batches ready, times the share of the workers that were idle.", "seconds"
    )
    other_idle_s: float = counter("All other waits, times the share of the workers that were idle.", "seconds")
    loop_queued_s: float = counter(
        "Seconds inside ``next()`` in which the training thread could have run and had no CPU.", "seconds"
    )
    read_s: float = counter("Wall seconds in which readers were busy for workers that only decode.", "seconds")
    read_cpu_s: float = counter("CPU seconds of that.", "seconds")
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
        "Batches that may be drawn and not yet delivered, at most.",
        metric="dpex_prefetch_batches",
        how_to_read="The capacity to compare dpex_ready_batches and dpex_in_flight_batches with.",
    )
    is_capped: bool = state("Whether ``memory_budget`` keeps the prefetch smaller than it would be.", default=False)
    batch_bytes: float = state("The mean size of a batch, 0 if unknown.", "bytes", default=0.0)
    trainer_cpu_s: float = counter("CPU seconds of the training process.", "seconds")
    trainer_queued_s: float | None = counter(
        "Seconds in which its training thread could have run and had no CPU.", "seconds", default=None
    )
    waits: tuple[int, ...] = histogram(
        "Waiting time of one batch, the first of each epoch left out.",
        WAIT_BUCKETS,
        metric="dpex_batch_wait_seconds",
        how_to_read="A median near 0 with a long tail means stragglers; everything shifted up, too little throughput.",
        total="waited_s",
    )
    waited_s: float = counter("Seconds in these waits.", "seconds")
    steps: tuple[int, ...] = histogram(
        "Time of the training loop between two batches, by the CPU's clock.",
        STEP_BUCKETS,
        metric="dpex_step_seconds",
        how_to_read="A batch that takes no longer causes no wait. With a GPU the loop may run ahead of it.",
        total="stepped_s",
    )
    stepped_s: float = counter("Seconds in the steps that have ended.", "seconds")
    delivered_at: float = latest("When the latest batch was delivered.")
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
        "Batches that are made, were taken in and wait for the training loop.",
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
        "The same without the first batch of each epoch.", "seconds", default=None
    )
    pools: Mapping[str, PoolReading] = by_name("Worker pools.")
    cache_memory_bytes: int | None = state(
        "Bytes of shared memory of this machine in which `dpex.cached` keeps samples.",
        "bytes",
        default=None,
        metric="dpex_cache_memory_bytes",
        how_to_read="It grows in the first epoch and then stays. All loaders and trainings with this cache share it.",
    )
    cache_disk_bytes: int | None = state(
        "Bytes of the disk in which it keeps samples.",
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
    others_over_s: float = counter("The wall seconds in which these were counted.", "seconds")
    pids: tuple[int, ...] = level("Processes that are local workers.", default=())
    thread: int = state("The native id of the training thread, 0 if unknown.")

    @property
    def sharing_ranks(self) -> int:
        """Ranks of this job that share the batches of the local workers."""
        return max((pool.sharing_ranks for pool in self.pools.values()), default=1)

    @property
    def wait_s(self) -> float:
        """Seconds of wait for any cause."""
        return sum(self.causes.values())

    @property
    def wall_s(self) -> float:
        """Time in passes: waiting, taking in and working."""
        return self.wait_s + self.transfer_s + self.work_s
