"""The measurements of a loader as one value, which is the only input of a diagnosis. Pure.

Seconds are sums over all passes since the loader was made or `diagnose(reset=True)` was last called, without the time
between passes. A value that is None was not measured, and `Facts.unmeasured` gives the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.types import Decision
from dpex.diagnose.copies import HeldObjects
from dpex.measure.batch_times import COLLATE, WITHIN
from dpex.measure.pool_reading import CallSums, PoolReading
from dpex.measure.reading import Reading
from dpex.measure.record import counter
from dpex.measure.sampling import SAMPLE_S


@dataclass(frozen=True, kw_only=True)
class CallFacts(CallSums):
    """The calls of a function from one call site; "load > a > b" are the calls of b by a while samples are loaded.

    Calls and seconds are those of the timed batches. Seconds exclude nested calls that have `CallFacts` of their own.
    """

    name: str
    all_wall_s: float = counter("Wall seconds of all batches.", "seconds")
    all_cpu_s: float = counter("CPU seconds of all batches.", "seconds")

    @property
    def is_collating(self) -> bool:
        """True for the collate function and its calls."""
        return self.name.partition(WITHIN)[0] == COLLATE


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The facts of a loader that need no measurement.

    Attributes:
        name: The loader's name.
        rank: The rank of this process.
        dataset: The name of the dataset's class.
        batch_size: The batch size, as text.
        is_cachable: True if `dpex.cached` takes the dataset.
        is_tuned: True if the tuner sets workers and prefetch.
        config: The tuner's limits, else the defaults. Predictions respect them.
        keeps_workers: True if the number of workers determines the samples, so that it must not change.
        streams: Number of streams that read an iterable dataset; 0 for other datasets.
        shards: Number of shards that the dataset reports; 0: none, or unknown.
        why_streams: Sentences on the number of streams and its reason, or "".
        is_auto: True under ``num_workers="auto"``.
        has_cluster: True if a Ray cluster is available.
        decisions: The tuner's decisions, with their expected and actual effects.
        note: The reason why no batch was counted, or "".
        untimed: The reason why calls are never timed, or "".
        is_torchs: True if PyTorch's own iterators make the batches. dpex does not count these.
        held: The Python objects of the dataset.
        private_bytes: Median private memory of a local worker; 0: no worker runs, or unknown.
        is_asynchronous: True if an event loop loads samples.
        concurrency: Samples that an event loop may load at the same time; 0: the dataset is a stream.
    """

    name: str = ""
    rank: int = 0
    dataset: str = ""
    batch_size: str = ""
    is_cachable: bool = False
    is_tuned: bool = False
    config: AutotuneConfig = field(default_factory=AutotuneConfig)
    keeps_workers: bool = False
    streams: int = 0
    shards: int = 0
    why_streams: str = ""
    is_auto: bool = False
    has_cluster: bool = False
    decisions: tuple[Decision, ...] = ()
    note: str = ""
    untimed: str = ""
    is_torchs: bool = False
    held: HeldObjects = field(default_factory=HeldObjects)
    private_bytes: float = 0.0
    is_asynchronous: bool = False
    concurrency: int = 0


@dataclass(frozen=True, kw_only=True)
class Facts(Reading, Subject):
    """The measurements of a loader, and the facts of it that need no measurement."""

    @property
    def rate(self) -> float:
        """Batches per second, the starts of passes included."""
        return self.batches / max(1e-9, self.wall_s)

    @property
    def step_s(self) -> float:
        """Mean seconds of a training step, between two calls of ``next()``: ``rate * step_s + wait_ratio`` is 1."""
        return self.work_s / max(1, self.batches)

    @cached_property
    def calls(self) -> tuple[CallFacts, ...]:
        """Calls of the dataset and of the collate function, in the order in which they were first recorded."""
        found: dict[str, CallFacts] = {}
        for pool in self.pools.values():
            for one in _calls(pool):
                found[one.name] = found[one.name].plus(one) if one.name in found else one
        return tuple(found.values())

    @property
    def unmeasured(self) -> tuple[str, ...]:
        """The missing measurements, with reasons."""
        return tuple(_gaps(self))


def _calls(pool: PoolReading) -> Iterator[CallFacts]:
    """Yield a pool's calls. Each stage's wall and CPU times in timed batches are scaled to its times in all batches."""
    timed = [one.narrowed(CallFacts, name=name) for name, one in pool.calls.items() if one.calls > 0]
    ratios = {}
    for is_collating, wall_s, cpu_s in (
        (False, pool.load_s, pool.load_cpu_s),
        (True, pool.collate_s, pool.collate_cpu_s),
    ):
        stage = [one for one in timed if one.is_collating == is_collating]
        timed_s = sum(one.wall_s for one in stage), sum(one.cpu_s for one in stage)
        ratios[is_collating] = wall_s / max(1e-12, timed_s[0]), cpu_s / max(1e-12, timed_s[1])
    for one in timed:
        wall, cpu = ratios[one.is_collating]
        yield replace(one, all_wall_s=wall * one.wall_s, all_cpu_s=min(wall * one.wall_s, cpu * one.cpu_s))


def _gaps(facts: Facts) -> Iterator[str]:
    local, remote = facts.local, facts.remote
    if facts.note and not facts.batches:
        yield facts.note
    if facts.gpu_running_stall_s is None:
        yield "GPU stall: no CUDA stream was seen; the shares are of the training loop's time"
    if local.tickets and local.queueing_s is None:
        yield "waiting for a CPU on this machine: the kernel does not report it, or workers lived too briefly"
    if remote.tickets and remote.queueing_s is None:
        yield "waiting for a CPU on other machines: their kernels do not report it"
    if facts.others is None:
        yield "CPU time of other programs: a CPU quota applies, or the system does not report it"
    if not facts.calls:
        why = "no batch was timed yet; each worker times one now and then, but not its first"
        yield f"single calls: {facts.untimed or why}"
    if facts.tickets and not facts.slow_samples:
        none = f"never timed: samples under {1e6 * SAMPLE_S:.0f} µs, of streams, of __getitems__, with batch_size=None"
        yield f"slowest samples: none was timed alone ({none})"
