"""Counts of one loader for its diagnosis, read from its iterators when a caller asks and when they end.

A `Page` holds the counts of one iterator. When the iterator ends, its page keeps the counts and releases the engine.
Beginning and ending a page read a few small files in ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Protocol

from dpex.measure.ledger import LastReading, Ledger
from dpex.measure.sums import PoolStats, Sums
from dpex.schedule.names import INLINE, LOCAL
from dpex.system import run_queue
from dpex.system.clock import monotonic
from dpex.system.cpus import cgroup_cpus, local_ranks
from dpex.system.machine import cpu_used
from dpex.system.run_queue import RunQueueTimes

SHORT_S = 0.2
"""Seconds. The run queues of iterators that lived for less are not read, as that would take a share of this time."""


class CounterSource(Protocol):
    """An iterator's engine, as a page reads it."""

    def sums(self) -> Sums:
        """Return the counts so far. Any thread may call it."""


class Page(LastReading[Sums]):
    """The counts of one iterator, also after its end. The training thread makes it, and any thread may read it."""

    def __init__(self, source: CounterSource) -> None:
        super().__init__(partial(self._measured, source))
        self._base = Sums()
        self._began_at = monotonic()
        self._cpu_s = time.process_time()
        self._thread = threading.get_native_id()
        self._queued = run_queue.look((), self._thread)
        self._used = _used(())

    def read(self) -> Sums:
        """Return the counts since the page was made, or since `restart`."""
        return super().read().since(self._base)

    def restart(self) -> None:
        """Count from now on."""
        self._base = super().read()

    def _measured(self, source: CounterSource) -> Sums:
        """Return the counts, with the CPU time of this process and its workers.

        CPU time between two passes is subtracted in proportion.
        """
        found = source.sums()
        lived_s = max(1e-6, monotonic() - self._began_at)
        part = min(1.0, found.wall_s / lived_s)
        found = replace(found, trainer_cpu_s=(time.process_time() - self._cpu_s) * part)
        return found if lived_s < SHORT_S else self._with_queues(self._with_others(found, lived_s), part)

    def _with_others(self, found: Sums, lived_s: float) -> Sums:
        """Add the CPU time of other programs, if it is known."""
        used = _used(found.pids)
        if used is None or self._used is None:
            return found
        ranks = local_ranks(os.environ)
        others_s = max(0.0, used[0] - self._used[0] - (used[1] - self._used[1]) * ranks)
        return replace(found, others_s=others_s / ranks, others_over_s=lived_s)

    def _with_queues(self, found: Sums, part: float) -> Sums:
        """Add the time on run queues, of the training thread and of the processes that make batches."""
        queued = run_queue.look(found.pids, found.thread or self._thread)
        ran = queued.since(self._queued)
        makers = {INLINE: ran.here, LOCAL: queued.workers}
        return replace(
            found,
            trainer_queued_s=None if ran.trainer is None else ran.trainer.queued_s * part,
            pools={name: _with_queue(pool, makers.get(name)) for name, pool in found.pools.items()},
        )


def _with_queue(pool: PoolStats, ran: RunQueueTimes | None) -> PoolStats:
    """Add the time that a pool's batches were on run queues, by the delay of the processes that make them."""
    return pool if ran is None else replace(pool, queued_s=pool.cpu_s * ran.delay, queue_known_s=pool.load_s)


def _used(pids: tuple[int, ...]) -> tuple[float, float] | None:
    """Return CPU seconds so far: of all programs on this machine's CPUs, and of this process with ``pids``.

    None: they are unknown, or this container shares the CPUs with others.
    """
    if sys.platform == "linux" and cgroup_cpus() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return cpu_used(pids)
    return None


class LoaderCounters:
    """The pages of one loader's iterators."""

    def __init__(self) -> None:
        self._pages: Ledger[Page] = Ledger(_one_after_the_other)

    def open(self, source: CounterSource) -> Page:
        """Return a new page for an iterator's engine. Call `Page.end` when the iterator has ended."""
        page = Page(source)
        self._pages.add(page)
        return page

    def read(self) -> Sums:
        """Return the counts of all iterators so far."""
        return self._pages.read()

    def restart(self) -> None:
        """Count from now on."""
        for page in self._pages.clear():
            page.restart()


def _one_after_the_other(past: Sums, page: Sums) -> Sums:
    """Levels are those of the latest page that got a batch."""
    return past.then(page) if page.batches else page.then(past)
