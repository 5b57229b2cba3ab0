"""Keeps one loader's counts for its diagnosis: reads iterators when asked and when they end, never in between.

A page is an iterator. What an ended one counted is kept; its engine is let go. `Page.end` takes no lock, as a garbage
collection may call it anywhere. Beginning and ending a page read a few small files in ``/proc``.
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
"""Run queues of iterators that lived less are not asked about: looking would take a share of that."""


class CounterSource(Protocol):
    """What of an iterator's engine is read."""

    def sums(self) -> Sums:
        """Its counts; from any thread."""


class Page:
    """One iterator in the book, or what is left of it. Begun by the training thread, read by any."""

    def __init__(self, source: CounterSource) -> None:
        self._whole = LastReading(partial(self._measured, source))
        self._base = Sums()
        self._began_at = monotonic()
        self._cpu_s = time.process_time()
        self._thread = threading.get_native_id()
        self._queued = run_queue.look((), self._thread)
        self._used = _used(())

    def end(self) -> None:
        """Keep the counts, let go of the engine."""
        self._whole.end()

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be added."""
        return self._whole.has_ended

    def read(self) -> Sums:
        """The counts since the page or the book was begun."""
        return self._whole.read().since(self._base)

    def restart(self) -> None:
        """Count from here on."""
        self._base = self._whole.read()

    def _measured(self, source: CounterSource) -> Sums:
        """Its counts, and what this process and the workers had of the CPUs; of that, what fell between two passes is
        taken off in proportion."""
        found = source.sums()
        lived_s = max(1e-6, monotonic() - self._began_at)
        part = min(1.0, found.wall_s / lived_s)
        found = replace(found, trainer_cpu_s=(time.process_time() - self._cpu_s) * part)
        return found if lived_s < SHORT_S else self._with_queues(self._with_others(found, lived_s), part)

    def _with_others(self, found: Sums, lived_s: float) -> Sums:
        """With the CPU time of other programs, if it can be told."""
        used = _used(found.pids)
        if used is None or self._used is None:
            return found
        ranks = local_ranks(os.environ)
        others_s = max(0.0, used[0] - self._used[0] - (used[1] - self._used[1]) * ranks)
        return replace(found, others_s=others_s / ranks, others_over_s=lived_s)

    def _with_queues(self, found: Sums, part: float) -> Sums:
        """With the time on run queues, of the training thread and of who makes batches."""
        queued = run_queue.look(found.pids, found.thread or self._thread)
        ran = queued.since(self._queued)
        makers = {INLINE: ran.here, LOCAL: queued.workers}
        return replace(
            found,
            trainer_queued_s=None if ran.trainer is None else ran.trainer.queued_s * part,
            pools={name: _with_queue(pool, makers.get(name)) for name, pool in found.pools.items()},
        )


def _with_queue(pool: PoolStats, ran: RunQueueTimes | None) -> PoolStats:
    """With how long its batches were on run queues, by what those who make them had to wait for a CPU."""
    return pool if ran is None else replace(pool, queued_s=pool.cpu_s * ran.delay, queue_known_s=pool.load_s)


def _used(pids: tuple[int, ...]) -> tuple[float, float] | None:
    """CPU seconds so far, of everybody on our CPUs and of this process with those; None: not to be had, or not ours."""
    if sys.platform == "linux" and cgroup_cpus() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return cpu_used(pids)
    return None


class LoaderCounters:
    """One loader's pages."""

    def __init__(self) -> None:
        self._pages: Ledger[Page] = Ledger(_one_after_the_other)

    def open(self, source: CounterSource) -> Page:
        """A page for this one; call `Page.end` when it has ended."""
        page = Page(source)
        self._pages.add(page)
        return page

    def read(self) -> Sums:
        """All of it now."""
        return self._pages.read()

    def restart(self) -> None:
        """Count from here on."""
        for page in self._pages.clear():
            page.restart()


def _one_after_the_other(past: Sums, page: Sums) -> Sums:
    """Levels are those of the latest page that got a batch."""
    return past.then(page) if page.batches else page.then(past)
