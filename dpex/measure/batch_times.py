"""The times of a batch, which its worker records, and their sums over the batches of a pool. PURE.

A worker fills in a `BatchTimes` and sends it with the batch. `PoolTimes` adds up the records of a pool, and
`dpex.measure.pool_reading` declares the sums. To count something else per batch, add a field to `BatchTimes` and a
counter of the same name to `PoolReading`, and set the field in the worker (`dpex.worker.fetch`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from dpex.measure.pool_reading import LINK, STEP_BUCKETS, CallSums, PoolReading

CallRow = tuple[str, int, float, float, int]
"""The path of a call, and the values of the fields of `CallSums` in their order."""
WITHIN = " > "
"""Joins the names of a path: "a > b" is the call of b in a. The first name is `LOAD` or `COLLATE`."""
LOAD, COLLATE = "load", "collate"
OWN_CODE = "own code"
"""The name of a function's time outside its calls: operators, loops, and C functions hidden from profile functions."""


class BatchTimes(NamedTuple):
    """The times of one batch. CPU seconds include threads of libraries, so they may exceed the wall seconds.

    `PoolReading` declares the fields that add up. ``transit_s`` is the time on the network while the worker was idle.

    Attributes:
        samples: Samples in the batch.
        calls: Calls of the dataset and of the collate function, if dpex timed them in this batch; 64 at most.
        slowest: Seconds and position of the slowest sample, or empty.
        failed: Index and error text of each sample that failed to load.
        encode_cpu_s: CPU seconds outside of loading and collating. Clock errors may make it negative. Before encoding,
            it is the negated CPU seconds that recording calls took, or 0.
        nbytes: Bytes of the batch's buffers.
        ended_at: Monotonic time of the end of encoding, or of the arrival of a remote batch in this process.
    """

    samples: int = 0
    load_s: float = 0.0
    load_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    calls: tuple[CallRow, ...] = ()
    slowest: tuple[()] | tuple[float, int] = ()
    failed: tuple[tuple[str, str], ...] = ()
    cache_hits: int = 0
    cache_misses: int = 0
    cache_saved_s: float = 0.0
    encode_s: float = 0.0
    encode_cpu_s: float = 0.0
    nbytes: int = 0
    transit_s: float = 0.0
    ended_at: float = 0.0

    @property
    def busy_s(self) -> float:
        return self.load_s + self.collate_s + self.encode_s

    @property
    def cpu_s(self) -> float:
        return self.load_cpu_s + self.collate_cpu_s + self.encode_cpu_s


batch_times: Callable[[tuple[Any, ...]], BatchTimes] = partial(tuple.__new__, BatchTimes)
"""Return a `BatchTimes` with the values of a plain tuple. Calling the class takes three times as long."""
NO_TIMES = BatchTimes()


class CacheUse:
    """Counts cache hits, misses and saved seconds of the batch in progress. A process makes one batch at a time."""

    __slots__ = ("hits", "misses", "saved_s")

    def __init__(self) -> None:
        self.hits: int = 0
        self.misses: int = 0
        self.saved_s: float = 0.0

    def take(self) -> tuple[int, int, float]:
        """Return the hits, the misses and the saved seconds since the last call, in the order of `BatchTimes`."""
        if not self.hits and not self.misses:
            return _NO_USE
        found = self.hits, self.misses, self.saved_s
        self.__init__()  # type: ignore[misc]
        return found


_NO_USE = (0, 0, 0.0)
CACHE_USE = CacheUse()


# -- packing -----------------------------------------------------------------------------------------------------------

_AT = BatchTimes._fields.index
_LOADED, _CACHED = BatchTimes._fields[: _AT("cache_hits")], BatchTimes._fields[_AT("cache_hits") : _AT("encode_s")]
_ENCODED = BatchTimes._fields[_AT("encode_s") :]
"""The fields of a loaded batch, of `CacheUse.take`, and of encoding, in their declared order."""
_PACKING = f"""
def loaded_times(*, {", ".join(_LOADED)}):
    {", ".join(_CACHED)} = CACHE_USE.take()
    return new(BatchTimes, ({", ".join((*_LOADED, *_CACHED, *map(repr, NO_TIMES[_AT("encode_s") :])))}))

def encoded_times(times, *, encode_s, cpu_s, nbytes, ended_at, transit_s=0.0):
    encode_cpu_s = cpu_s - times[{_AT("load_cpu_s")}] - times[{_AT("collate_cpu_s")}]
    recorded_s = -times[{_AT("encode_cpu_s")}]
    if recorded_s:
        encode_cpu_s = max(0.0, encode_cpu_s - recorded_s)
    return (*times[:{len(_LOADED + _CACHED)}], {", ".join(_ENCODED)})
"""
_packing: dict[str, Any] = {"BatchTimes": BatchTimes, "CACHE_USE": CACHE_USE, "new": tuple.__new__}
exec(_PACKING, _packing)
loaded_times: Callable[..., BatchTimes] = _packing["loaded_times"]
"""Return the times of a loaded batch, from its `_LOADED` fields by name.

This function is generated from the declared order of the fields, so that no two stages can be swapped. It takes a third
of the time of calling the class with names.
"""
encoded_times: Callable[..., tuple[Any, ...]] = _packing["encoded_times"]
"""Return the times of an encoded batch, as a plain tuple, because `marshal` refuses a `BatchTimes`.

Arguments by name: wall seconds for encoding, CPU seconds for the whole batch, bytes of its buffers, and the time at
which encoding ended. This function is generated like `loaded_times`.
"""


# -- sums over a pool --------------------------------------------------------------------------------------------------

RECENT = 64
"""Maximum number of single batch times that the tuner uses from a window. `PoolTimes` also adds up this many records at
a time, because adding them one by one costs more."""
KEPT = 256
"""Number of the latest batches whose wall seconds are kept one by one. Their median is accurate to 3 percentiles."""
SUMMED = tuple(name for name in BatchTimes._fields if name in PoolReading.declared() and name != "calls")
"""Fields of `BatchTimes` that add up to fields of `PoolReading`."""
_ADDED = (*SUMMED, "nbytes")
_PLACES = tuple(map(BatchTimes._fields.index, _ADDED))
_NOTHING = (*(NO_TIMES[at] for at in _PLACES), 0)
MOST_PATHS = 256
"""The maximum number of paths in a pool. Beyond it, a call with a new path counts for its caller."""
_NO_CALLS = CallSums()


class PoolTimes:
    """Sums over the batches that a worker pool, or the training process, has made.

    The thread that receives batches counts them, and any thread may read. All fields of `SUMMED` in a reading cover the
    same batches. All other counts may lack the batch that is being counted.

    Attributes:
        shared: Those of the counted batches that were made for another training.
        services_s: Wall seconds of the latest `KEPT` batches.
        services: Histogram of wall seconds (`STEP_BUCKETS`).
        calls: Timed calls by path.
        queued_s, queue_known_s, nodes: See `PoolReading`.
    """

    __slots__ = ("_latest", "calls", "nodes", "queue_known_s", "queued_s", "services", "services_s", "shared")

    def __init__(self) -> None:
        self.shared: int = 0
        self.queued_s: float = 0.0
        self.queue_known_s: float = 0.0
        self.services_s: deque[float] = deque(maxlen=KEPT)
        self.services: list[int] = [0] * (len(STEP_BUCKETS) + 1)
        self.calls: dict[str, CallSums] = {}
        self.nodes: dict[str, PoolReading] = {}
        self._latest: tuple[tuple[Any, ...], list[BatchTimes]] = _NOTHING, []
        """The sums, and the records that the sums do not contain yet. One assignment replaces both."""

    def count(self, times: BatchTimes) -> None:
        latest = self._latest[1]
        latest.append(times)
        if len(latest) >= RECENT:
            self._latest = self._added(), []
        service_s = times.busy_s
        self.services_s.append(service_s)
        self.services[bisect_left(STEP_BUCKETS, service_s)] += 1
        if times.calls:
            self._add_calls(times.calls)

    def _add_calls(self, calls: Sequence[CallRow]) -> None:
        for path, *values in calls:
            while path not in self.calls and len(self.calls) >= MOST_PATHS and WITHIN in path:
                path = path.rpartition(WITHIN)[0]
            fields: dict[str, Any] = dict(zip(CallSums.declared(), values, strict=True))
            self.calls[path] = self.calls.get(path, _NO_CALLS).plus(CallSums(**fields))

    def _added(self) -> tuple[Any, ...]:
        """Return the sums over all batches, by `_ADDED`, and their number."""
        (*sums, tickets), latest = self._latest
        columns = list(zip(*latest, strict=False)) or [()] * len(NO_TIMES)
        added = (total + sum(columns[at]) for total, at in zip(sums, _PLACES, strict=True))
        return (*added, tickets + len(columns[0]))

    @property
    def nbytes(self) -> int:
        return int(self._added()[-2])

    def reading(self, **others: Any) -> PoolReading:
        """Return the sums, completed by ``others``, the fields that the pool itself counts."""
        sums: dict[str, Any] = dict(zip((*_ADDED, "tickets"), self._added(), strict=True))
        del sums["nbytes"]
        sums["encode_cpu_s"] = max(0.0, sums["encode_cpu_s"])
        nodes = dict(self.nodes)
        links = {name: join(getattr(node, name) for node in nodes.values()) for name, join in LINK.items() if nodes}
        return PoolReading(
            **sums,
            **links,
            shared=self.shared,
            services=tuple(self.services),
            services_s=tuple(self.services_s),
            queued_s=self.queued_s,
            queue_known_s=self.queue_known_s,
            calls=dict(self.calls),
            nodes=nodes,
            **others,
        )


def made_on_node(batches: Sequence[BatchTimes], delay: float | None) -> PoolReading:
    """Return the counts that ``batches`` add to the reading of the machine that made them.

    ``delay``: seconds on run queues for each second on a CPU; None if unknown.
    """
    columns = [sum(getattr(times, name) for times in batches) for name in SUMMED]
    made = PoolReading(tickets=len(batches), **dict(zip(SUMMED, columns, strict=True)))
    return made if delay is None else replace(made, queued_s=made.cpu_s * delay, queue_known_s=made.busy_s)
