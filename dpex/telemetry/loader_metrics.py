"""One loader's counts over all its iterators, under the names of the catalogue.

Iterators come and go; what an ended one counted stays in the ledger. Reading takes no lock that `watch`, an iterator's
end or a batch could wait for, and no counter ever shrinks, whatever moment the reader happens upon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dpex.autotune.types import Decision
from dpex.diagnose.source import Case, Tunes
from dpex.measure.consumer_time import LaneSums, Sums
from dpex.measure.stall_causes import CAUSES
from dpex.system.clock import monotonic

Key = tuple[str, ...]
"""A metric's name, and the values of its labels but for the loader's."""


@dataclass(kw_only=True)
class Readings:
    """Values by key: what accumulates, what does not, and histograms (counts by bucket, and the sum)."""

    counters: dict[Key, float] = field(default_factory=dict)
    gauges: dict[Key, float] = field(default_factory=dict)
    histograms: dict[Key, tuple[list[int], float]] = field(default_factory=dict)

    def add(self, other: Readings, *, gauges: bool = True) -> None:
        """Take in what another one has; of its gauges only time stamps are not added up but compared."""
        for key, value in other.counters.items():
            self.counters[key] = self.counters.get(key, 0.0) + value
        for key, value in other.gauges.items() if gauges else ():
            known = self.gauges.get(key, 0.0)
            self.gauges[key] = max(known, value) if "_timestamp_" in key[0] else known + value
        for key, (counts, total) in other.histograms.items():
            mine, mine_total = self.histograms.get(key, ([0] * len(counts), 0.0))
            self.histograms[key] = ([a + b for a, b in zip(mine, counts, strict=True)], mine_total + total)


class Countable(Protocol):
    """What of an iterator or its engine is read."""

    def sums(self) -> Sums:
        """Its counts; from any thread."""


class Entry:
    """An iterator in the ledger, or what is left of it."""

    def __init__(self, source: Countable) -> None:
        self._source: Countable | None = source
        self._last: Readings | None = None

    def end(self) -> None:
        """Keep the counts, let go of the iterator. Takes no lock: a garbage collection may call this anywhere."""
        source = self._source
        if source is not None:
            self._last = readings_of(source.sums(), live=False)
            self._source = None

    @property
    def ended(self) -> bool:
        """Whether nothing will be added."""
        return self._last is not None

    def read(self) -> Readings:
        """The counts so far."""
        source = self._source
        if source is None or self._last is not None:
            return self._last or Readings()
        return readings_of(source.sums(), live=True)


class Ledger:
    """See the module. ``info`` are the labels of ``dpex_loader_info`` beside the name.

    tuner, case: of the loader of that name that was iterated last; None: it is not tuned, not to be diagnosed.
    """

    def __init__(self, name: str, info: Sequence[str] = ()) -> None:
        self.name = name
        self.info = tuple(info)
        self.tuner: Tunes | None = None
        self.case: Case | None = None
        self._lock = threading.Lock()
        self._state: tuple[Readings, tuple[Entry, ...]] = (Readings(), ())
        self._reading = threading.Lock()
        self._seen: dict[Key, float] = {}

    def watch(self, source: Countable) -> Entry:
        """Count this one too; call `Entry.end` when it has ended."""
        entry = Entry(source)
        with self._lock:
            past, entries = self._state
            ended = [other for other in entries if other.ended]
            if ended:
                past, before = Readings(), past
                past.add(before)
                for other in ended:
                    past.add(other.read(), gauges=False)
            self._state = (past, (*(other for other in entries if other not in ended), entry))
        return entry

    def read(self) -> Readings:
        """All of it now; readers take turns."""
        with self._reading:
            return self._read()

    def _read(self) -> Readings:
        past, entries = self._state
        found = Readings()
        found.add(past)
        for entry in entries:
            found.add(entry.read())
        if self.tuner is not None:
            found.add(_of_tuner(self.tuner.decisions))
        for key, value in found.counters.items():
            found.counters[key] = self._seen[key] = max(value, self._seen.get(key, 0.0))
        return found


def readings_of(sums: Sums, *, live: bool) -> Readings:
    """An engine's sums under the catalogue's names; gauges only while it lives."""
    found = Readings()
    count = found.counters
    for state, seconds in (
        ("wait", sums.spent.wait_s),
        ("transfer", sums.spent.transfer_s),
        ("work", sums.spent.work_s),
    ):
        count["dpex_consumer_seconds_total", state] = seconds
    for cause, seconds in zip(CAUSES, sums.spent.causes, strict=True):
        count["dpex_stall_seconds_total", cause] = seconds
    if sums.gpu_stall_s is not None:
        count["dpex_gpu_stall_seconds_total",] = sums.gpu_stall_s
    count["dpex_batches_total",] = sums.batches
    count["dpex_samples_total",] = sums.samples
    count["dpex_batches_remade_total",] = sums.remade
    for kind in ("batch", "worker", "timeout"):
        count["dpex_errors_total", kind] = sums.errors.get(kind, 0)
    for path, nbytes in sums.moved_bytes.items():
        count["dpex_transfer_bytes_total", path] = nbytes
    found.histograms["dpex_batch_wait_seconds",] = (list(sums.waits), sums.waited_s)
    found.histograms["dpex_step_seconds",] = (list(sums.steps), sums.stepped_s)
    for name, lane in sums.lanes.items():
        _add_lane(found, name, lane, live)
    if sums.delivered_at:
        ago_s = monotonic() - sums.delivered_at
        found.gauges["dpex_last_batch_timestamp_seconds",] = time.time() - ago_s
    found.gauges["dpex_ready_batches",] = sums.ready if live else 0
    found.gauges["dpex_prefetch_limit_batches",] = sums.window if live else 0
    return found


def _add_lane(found: Readings, name: str, lane: LaneSums, live: bool) -> None:
    stages = (
        ("load", lane.load_s, lane.load_cpu_s),
        ("collate", lane.collate_s, lane.collate_cpu_s),
        ("serialize", lane.encode_s, lane.encode_cpu_s),
    )
    for stage, wall_s, cpu_s in stages:
        found.counters["dpex_worker_seconds_total", name, stage] = wall_s
        found.counters["dpex_worker_cpu_seconds_total", name, stage] = cpu_s
    total_s = lane.load_s + lane.collate_s + lane.encode_s
    found.histograms["dpex_worker_batch_seconds", name] = (list(lane.services), total_s)
    if name == "inline":
        return
    found.counters["dpex_worker_restarts_total", name] = lane.deaths
    levels: Mapping[str, int] = {
        "dpex_workers_wanted": lane.wanted,
        "dpex_workers_requested": lane.requested,
        "dpex_workers_running": lane.running,
        "dpex_in_flight_batches": lane.in_flight,
    }
    for metric, value in levels.items():
        found.gauges[metric, name] = value if live else 0


def _of_tuner(decisions: Sequence[Decision]) -> Readings:
    found = Readings()
    for knob in ("local", "remote", "depth"):
        for direction, sign in (("up", 1), ("down", -1)):
            changes = (sign * (getattr(d.new, knob) - getattr(d.old, knob)) for d in decisions)
            found.counters["dpex_tuner_decisions_total", knob, direction] = sum(change > 0 for change in changes)
    judged = [(decision, outcome) for decision in decisions if (outcome := decision.outcome) is not None]
    found.counters["dpex_tuner_undone_total",] = sum(not outcome.kept for _, outcome in judged)
    if judged:
        decision, outcome = judged[-1]
        errors = [abs(d.predicted_stall - o.stall) for d, o in judged]
        found.gauges |= {
            ("dpex_tuner_predicted_stall_ratio",): decision.predicted_stall,
            ("dpex_tuner_measured_stall_ratio",): outcome.stall,
            ("dpex_tuner_prediction_error_ratio",): sum(errors) / len(errors),
            ("dpex_tuner_predicted_batches_per_second",): decision.predicted_rate,
            ("dpex_tuner_measured_batches_per_second",): outcome.rate,
        }
    return found
