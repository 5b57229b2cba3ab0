"""The counts of a worker pool, each declared once. PURE.

`dpex.measure.batch_times.PoolTimes` counts. Seconds are sums since the iterator was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dpex.measure.readable import duration
from dpex.measure.record import Record, by_name, counter, few_of_many, histogram, level, state

SERVICES_KEPT = 1024
"""Maximum number of single batch times in the sum of several iterators, which keeps the latest ones."""
STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
"""Upper bounds of the histograms of steps, and of batches in workers, seconds."""
STAGES = ("load", "collate", "encode")
"""Stages of a batch in which a worker is busy, in their order."""
LINK: Mapping[str, Callable[[Iterable[Any]], Any]] = {
    **dict.fromkeys(("links", "sent_bytes", "resent_bytes", "sending_s"), sum),
    "round_trip_s": max,
}
"""Fields about the network between the cluster's machines and this one, and the functions that join the values of
several machines."""
MOST_QUEUED = 0.9
"""The largest share of a time that can be queueing for a CPU, because both are measured with errors. Without this limit
the law's mean regret in 60 simulated worlds was 2.4 % instead of 2.1 %."""
_KNOWN = 0.5
"""The queueing of more than this share of the busy time must be known before it is scaled to all of the busy time."""
_WALL, _CPU = "dpex_worker_seconds_total", "dpex_worker_cpu_seconds_total"


def latest_services(one: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    """Return the values of ``one`` followed by those of ``other``: the last `SERVICES_KEPT` of them."""
    return (*one, *other)[-SERVICES_KEPT:]


@dataclass(frozen=True, kw_only=True)
class CallSums(Record):
    """The calls of a function from one place, in the batches in which calls were timed."""

    calls: int = counter("Calls.")
    wall_s: float = counter("Wall seconds in these calls, without the calls within.", "seconds")
    cpu_s: float = counter("Seconds of ``wall_s`` in which the thread had a CPU.", "seconds")
    drawing: int = counter("Batches in which the function itself drew random numbers.")


@dataclass(frozen=True, kw_only=True)
class PoolReading(Record):
    """A worker pool, the training process ("inline"), or a machine of the cluster: the values of `LoaderStats.pools`.

    Counts and times are sums over the batches made there. The TCP of a remote machine counts the traffic of its link.
    `declared()` gives the meaning of each field.
    """

    links: int = level("Machines that have a connection of their own and measure it.")
    sent_bytes: int = counter(
        "Bytes that machines of the cluster sent and that arrived here.",
        "bytes",
        metric="dpex_network_sent_bytes_total",
        how_to_read="Over dpex_network_sending_seconds_total: the bandwidth while sending.",
    )
    resent_bytes: int = counter(
        "Bytes that machines of the cluster sent again because packets were lost.",
        "bytes",
        metric="dpex_network_resent_bytes_total",
        how_to_read="Over dpex_network_sent_bytes_total: the share lost. Above 0.001 it slows long connections.",
    )
    sending_s: float = counter(
        "Seconds in which a machine had data on its way to this one; of several machines, their sum.",
        "seconds",
        metric="dpex_network_sending_seconds_total",
        how_to_read="Near one second per second and machine, the network is the limit of remote workers.",
    )
    round_trip_s: float = state(
        "Round trip to a machine while no data is queued; of several machines, the longest.",
        "seconds",
        default=0.0,
        metric="dpex_network_round_trip_seconds",
        how_to_read="Under a millisecond in a rack. Prefetch hides it.",
    )
    tickets: int = counter("Batches that were made.")
    load_s: float = counter(
        "Wall seconds in which workers got the samples, ``dataset[i]``, transforms included.",
        "seconds",
        stage="load",
        metric=_WALL,
    )
    load_cpu_s: float = counter(
        "CPU seconds of loading samples, threads of libraries included.", "seconds", stage="load", metric=_CPU
    )
    collate_s: float = counter("Wall seconds in the collate function.", "seconds", stage="collate", metric=_WALL)
    collate_cpu_s: float = counter("CPU seconds in the collate function.", "seconds", stage="collate", metric=_CPU)
    encode_s: float = counter(
        "Wall seconds in which batches were written into shared memory.",
        "seconds",
        stage="encode",
        metric=_WALL,
    )
    encode_cpu_s: float = counter(
        "CPU seconds of writing batches into shared memory.", "seconds", stage="encode", metric=_CPU
    )
    transit_s: float = counter(
        "Seconds in which batches travelled from a remote worker that had nothing else to do.",
        "seconds",
        stage="transit",
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
        "Seconds to prepare the samples of all hits, less the seconds to read them from the cache.",
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
        "Workers requested from the system, including running ones.",
        metric="dpex_workers_requested",
        how_to_read="Above dpex_workers_running: they are starting, or wait for a place on the cluster.",
    )
    running: int = level(
        "Workers that take batches to be made.",
        metric="dpex_workers_running",
        how_to_read="Workers that exist now. It follows dpex_workers_wanted.",
    )
    in_flight: int = level(
        "Batches that were sent to workers and are not finished.",
        metric="dpex_in_flight_batches",
        how_to_read="Below dpex_workers_running some workers have nothing to do: raise the prefetch, or use fewer.",
    )
    nodes_excluded: int = level(
        "Nodes of the cluster that get no workers for a while, because they failed repeatedly.",
        metric="dpex_nodes_excluded",
        how_to_read="Other nodes make their batches. Each is tried again later; the log says why it failed.",
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
    services_s: tuple[float, ...] = few_of_many(
        "How long the latest batches took.", latest_services, "seconds", is_traced=True
    )
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
    nodes: Mapping[str, PoolReading] = by_name("Machines of the cluster: the batches made there, and their link.")
    failed_nodes: Sequence[str] = few_of_many(
        "The reasons why nodes of the cluster were excluded.", lambda one, other: tuple(dict.fromkeys([*one, *other]))
    )
    sharing_ranks: int = state("Ranks of this job that share the batches.", default=1)
    why_excluded: Mapping[str, str] = by_name(
        "Why nodes of the cluster get no workers for a while, by node.", is_text=True
    )
    room: int | None = state("Further workers that the cluster could place; None if unknown.", default=None)
    unplaced: int = state("Requested workers that the cluster cannot place.")
    granted: int | None = state(
        "This loader's share of the cluster's workers; None if the cluster is not divided.",
        default=None,
    )

    def since(self, earlier: PoolReading) -> PoolReading:
        """See `Record.since`. ``services_s`` keeps only the batches made since ``earlier``."""
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
    def queueing_s(self) -> float | None:
        """Seconds on run queues, in which the workers could have run and had no CPU.

        The kernel's report is scaled to all of the work. None: The report covers at most half of the work.
        """
        is_known = self.queue_known_s > _KNOWN * self.busy_s
        return self.queued_s * self.busy_s / self.queue_known_s if is_known else None

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second while data was on its way; None if no data was."""
        return self.sent_bytes / self.sending_s if self.sending_s > 0 else None

    @property
    def loss(self) -> float:
        """Share of the bytes that were sent again, 0 to 1."""
        return self.resent_bytes / max(1, self.sent_bytes + self.resent_bytes)

    def __repr__(self) -> str:
        each = f" of {duration(self.busy_s / self.tickets)} each" if self.tickets else ""
        ended = f"; {self.deaths:,} ended unexpectedly" if self.deaths else ""
        return f"PoolReading({self.running} of {self.wanted} workers run{ended}; {self.tickets:,} batches{each})"
