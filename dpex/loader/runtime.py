"""The state of a loader in use, beside its attributes: iterators, a tuner, counts, the connection to a cluster.

The state is neither copied nor pickled with the loader: a copy gets a new `LoaderRuntime`. Loaders that frameworks make
from a loader's attributes share its `LoaderRuntime`, which keeps no loader alive.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import get_worker_info

from dpex.engine.snapshots import LoaderCounters
from dpex.errors import ClusterError, OptionError
from dpex.measure.ledger import LastReading
from dpex.measure.readable import percent
from dpex.measure.timeline import Timeline
from dpex.profile.live_timer import TicketTimer, is_switched_on
from dpex.stats import LoaderStats
from dpex.system.clock import monotonic
from dpex.system.ray_package import is_ray_connected
from dpex.system.user_warnings import warn
from dpex.transport.arena import ArenaCache
from dpex.worker.draws import GeneratorDraws

if TYPE_CHECKING:
    from dpex.autotune.runtime.tuner import Tuner
    from dpex.autotune.types import Decision
    from dpex.engine.in_process import InProcessIterator
    from dpex.engine.pass_state import PassState
    from dpex.engine.with_workers import _DpexDataLoaderIter
    from dpex.options import LoaderOptions
    from dpex.telemetry.exporter import Registration
    from dpex.telemetry.loader_metrics import LoaderMetrics


class DecisionList(list["Decision"]):
    """A list of decisions. Its ``repr`` has one line for each decision."""

    def __repr__(self) -> str:
        from dpex.autotune.law.wording import described

        lines = [f"{number}. {described(one)}" for number, one in enumerate(self, 1)]
        return "\n".join(lines) or "no decisions"


Counting = TypeVar("Counting", "_DpexDataLoaderIter", "InProcessIterator")


class LoaderRuntime:
    """See the module."""

    def __init__(self) -> None:
        self.iterators: weakref.WeakSet[_DpexDataLoaderIter] = weakref.WeakSet()
        """Iterators with workers."""
        self.arenas: ArenaCache = ArenaCache()
        self.last_stats: LastReading[LoaderStats] = LastReading(LoaderStats)
        self.tuner: Tuner | None = None
        self._past: list[Decision] = []
        self.counters: LoaderCounters = LoaderCounters()
        """Counts of all iterators, for diagnoses."""
        self.timer: TicketTimer = TicketTimer(is_on=is_switched_on(os.environ), draws_of=GeneratorDraws)
        self.last_state: LastReading[PassState | None] | None = None
        """The state of the latest iterator, whose statistics are in ``last_stats``."""
        self.resume: PassState | None = None
        """The state in ``loaded``, parsed."""
        self.loaded: dict[str, Any] | None = None
        """The state for the next iterator."""
        self.asks_states: bool = False
        """True after a call of ``state_dict`` or ``load_state_dict``: workers then report states."""
        self.is_diagnosed = False
        """True after a request for a diagnosis."""
        self.timeline: Timeline | None = None
        """The timeline that is being recorded, or None."""
        self.passes = 0
        """Count of passes with workers."""
        self._share: weakref.finalize | None = None  # type: ignore[type-arg]
        self._has_no_cluster = False
        self._registration: Registration | None = None

    def set_latest(self, iterator: Counting) -> Counting:
        """Have ``stats()`` and ``state_dict()`` read this iterator from now on."""
        self.last_stats, self.last_state = iterator.last_stats, iterator.last_state
        self.counters.epochs += 1
        return iterator

    def stats(self) -> LoaderStats:
        """Return the statistics of the latest iterator. ``epoch`` is 0 in the first epoch of the loader."""
        return replace(self.last_stats.read(), epoch=max(0, self.counters.epochs - 1))

    @contextmanager
    def record_timeline(self, path: Path) -> Iterator[None]:
        """Record a timeline of all iterators with workers, and write it at the end.

        Raises:
            OptionError: This loader already records a timeline.
        """
        if self.timeline is not None:
            raise OptionError(f"timeline({str(path)!r}): this loader already records a timeline: end that one first")
        self.timeline = timeline = Timeline(monotonic())
        for iterator in list(self.iterators):
            iterator._engine.record(timeline)
        try:
            yield
        finally:
            self.timeline = None
            for iterator in list(self.iterators):
                iterator._engine.record(None)
            path.write_text(json.dumps(timeline.trace(os.getpid()), separators=(",", ":")), encoding="utf-8")

    def ask_states(self) -> None:
        """Have workers ask datasets for their states from now on. Idempotent."""
        if not self.asks_states:
            self.asks_states = True
            for iterator in list(self.iterators):
                iterator.ask_states()

    def await_first_states(self, *, has_init_fn: bool) -> None:
        """Wait until the workers of all iterators have reported the first states of generators in the dataset."""
        for iterator in list(self.iterators):
            iterator.await_first_states(has_init_fn=has_init_fn)

    def pop_resume_state(self) -> PassState | None:
        """Return and clear the state from which the next pass resumes; None: the pass begins with the first batch."""
        resume, self.resume, self.loaded = self.resume, None, None
        return resume

    @property
    def decisions(self) -> list[Decision]:
        """Return the decisions of the present tuner and of earlier tuners; the oldest comes first."""
        return DecisionList([*self._past, *(self.tuner.decisions if self.tuner is not None else ())])

    def progress(self) -> str:
        """Return a sentence about the batches of the latest iterator and the running workers."""
        stats = self.stats()
        if not stats.batches:
            return "No batch was delivered yet."
        wait = f", wait {percent(stats.wait_ratio)}" if stats.wait_s + stats.work_s else ""
        # the last statistics of an iterator that has ended still show its workers as running
        pools = {} if self.last_stats.has_ended else stats.pools
        running = " + ".join(f"{pool.running} {name}" for name, pool in pools.items() if pool.running)
        workers = f"workers that run: {running}." if running else "no worker runs now."
        return f"Epoch {stats.epoch + 1}: {stats.batches:,} batches{wait}; {workers}"

    def dismiss_tuner(self) -> None:
        """End tuning from the next iterator on; `decisions` keeps the earlier decisions."""
        self._past, self.tuner = self.decisions, None

    @property
    def metrics_url(self) -> str | None:
        """Return the address of the live page, if there is one."""
        if self._registration is None:
            return None
        from dpex.telemetry.exporter import exporter

        return exporter.url

    def metrics(self, options: LoaderOptions, info: tuple[str, str, str]) -> LoaderMetrics | None:
        """Return the metrics of a loader with these options; None if the endpoint does not export them.

        Args:
            options: The loader's options.
            info: The class of its dataset, its batch size, and its seeding, as labels.
        """
        port, config = options.metrics_port, options.metrics_config
        asked = not (port is None and config is None) or "DPEX_METRICS_PORT" in os.environ
        if not asked or get_worker_info() is not None:
            return None
        if self._registration is None:
            from dpex.telemetry.exporter import exporter

            self._registration = exporter.register(self, port, config, options.name, info)
        return None if self._registration is None else self._registration.ledger

    def hold_cluster(self, head_address: str) -> None:
        """Hold a reference to the connection to Ray, so that agents wait between epochs instead of ending."""
        from dpex.pools.ray.cluster import connect, release

        if self._share is None or not self._share.alive:
            self._share = weakref.finalize(self, release, connect(head_address))

    def join_cluster(self, head_address: str) -> None:
        """Connect this process to a cluster unless it is connected. If that fails, warn, and do not try again."""
        if is_ray_connected() or self._has_no_cluster:
            return
        try:
            self.hold_cluster(head_address)
        except ClusterError as error:
            self._has_no_cluster = True
            warn(f"distribute_mode='auto': {error}. Local workers make the batches of this loader")

    def close(self) -> None:
        """End all iterators and the export of metrics, and release the cluster, until the next pass. Idempotent."""
        for iterator in list(self.iterators):
            iterator._shutdown_workers()
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.end()
        share = self._share.detach() if self._share is not None else None
        if share is not None:
            if self.tuner is not None:
                self.tuner.await_room_request()
            _, give_back, arguments, _ = share
            give_back(*arguments, shut_down=True)
