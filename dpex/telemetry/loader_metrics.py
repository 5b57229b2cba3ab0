"""One loader's counts over all its iterators, under the names of the catalogue.

Iterators come and go; what an ended one counted stays in the ledger. Reading takes no lock that `watch`, an iterator's
end or a batch could wait for, and no counter ever shrinks, whatever moment the reader happens upon.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Protocol

from dpex.autotune.types import Decision
from dpex.core.names import KNOBS
from dpex.diagnose.source import DiagnosisSource, HasTuner
from dpex.measure.ledger import LastReading, Ledger
from dpex.measure.record import Record
from dpex.measure.sums import NodeSums, Sums
from dpex.system.clock import monotonic
from dpex.telemetry.catalog import BY_NAME
from dpex.telemetry.labels import ERROR, MACHINE, OTHERS

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


class IteratorCounts(LastReading[Sums]):
    """An iterator in the ledger, or what is left of it."""

    def end(self, last: Sums | None = None) -> None:
        """Keep the counts, let go of the iterator. Takes no lock: a garbage collection may call this anywhere."""
        if not self.has_ended:
            super().end((last or self.read()).at_rest())


class LoaderMetrics:
    """See the module. ``info`` are the labels of ``dpex_loader_info`` beside the name.

    tuner, case: of the loader of that name that was iterated last; None: it is not tuned, not to be diagnosed.
    """

    def __init__(self, name: str, info: Sequence[str] = ()) -> None:
        self.name = name
        self.info = tuple(info)
        self.tuner: HasTuner | None = None
        self.case: DiagnosisSource | None = None
        self._ledger: Ledger[IteratorCounts] = Ledger(Sums.plus)
        self._reading = threading.Lock()
        self._seen: dict[Key, float] = {}

    def watch(self, source: Countable) -> IteratorCounts:
        """Count this one too; call `IteratorCounts.end` when it has ended."""
        entry = IteratorCounts(source.sums)
        self._ledger.add(entry)
        return entry

    def sums(self) -> Sums:
        """All of it now, as it was counted."""
        return self._ledger.read()

    def read(self) -> Readings:
        """The same under the catalogue's names, and what the tuner did; readers take turns."""
        with self._reading:
            return self._read()

    def _read(self) -> Readings:
        found = readings_of(self.sums()) if self._ledger.entries else Readings()
        if self.tuner is not None:
            found.add(_of_tuner(self.tuner.decisions))
        for key, value in found.counters.items():
            found.counters[key] = self._seen[key] = max(value, self._seen.get(key, 0.0))
        return found


def readings_of(sums: Sums) -> Readings:
    """Sums under the catalogue's names."""
    found = Readings()
    pools = {name: replace(pool, nodes=_few(pool.nodes)) for name, pool in sums.pools.items()}
    _add(found, replace(sums, pools=pools), ())
    found.counters["dpex_consumer_seconds_total", "wait"] = sums.wait_s
    for kind in ERROR.values:
        found.counters.setdefault(("dpex_errors_total", kind), 0)
    if sums.delivered_at:
        ago_s = monotonic() - sums.delivered_at
        found.gauges["dpex_last_batch_timestamp_seconds",] = time.time() - ago_s
    return found


def _few(machines: Mapping[str, NodeSums]) -> Mapping[str, NodeSums]:
    """The first of those whose way is measured, and the others together. Who is first stays first."""
    kept = MACHINE.most - 1
    rest = [one for one in list(machines.values())[kept:] if one.sent_bytes]
    few = {place: one for place, one in list(machines.items())[:kept] if one.sent_bytes}
    return {**few, OTHERS: reduce(NodeSums.plus, rest)} if rest else few


def _add(found: Readings, record: Record, labels: Key) -> None:
    """Each field of a record that is exported, and of the records in it; ``labels``: those of all of them."""
    for name, declared in record.declared().items():
        value, key = getattr(record, name), (declared.metric, *labels)
        if isinstance(value, Mapping):
            for inner, one in value.items():
                if isinstance(one, Record):
                    _add(found, one, (*labels, inner))
                elif declared.metric:
                    _put(found, (*key, inner), one)
        elif not declared.metric or value is None or value == ():
            continue
        elif declared.total:
            found.histograms[key] = (list(value), getattr(record, declared.total))
        else:
            label = declared.label or declared.stage
            _put(found, (*key, label) if label else key, value)


def _put(found: Readings, key: Key, value: float) -> None:
    """A count or a level, if its metric is there for these labels: the training process, say, has no restarts, and what
    is told of each machine is not told of all together."""
    metric = BY_NAME[key[0]]
    if len(metric.labels) != len(key):
        return
    if all(not label.values or text in label.values for label, text in zip(metric.labels[1:], key[1:], strict=True)):
        (found.counters if metric.kind == "counter" else found.gauges)[key] = value


def _of_tuner(decisions: Sequence[Decision]) -> Readings:
    found = Readings()
    for knob in KNOBS:
        for direction, sign in (("up", 1), ("down", -1)):
            changes = (sign * (getattr(d.new, knob) - getattr(d.old, knob)) for d in decisions)
            found.counters["dpex_tuner_decisions_total", knob, direction] = sum(change > 0 for change in changes)
    judged = [(decision, outcome) for decision in decisions if (outcome := decision.outcome) is not None]
    found.counters["dpex_tuner_undone_total",] = sum(not outcome.kept for _, outcome in judged)
    if judged:
        decision, outcome = judged[-1]
        errors = [abs(d.predicted_wait - o.wait) for d, o in judged]
        found.gauges |= {
            ("dpex_tuner_predicted_wait_ratio",): decision.predicted_wait,
            ("dpex_tuner_measured_wait_ratio",): outcome.wait,
            ("dpex_tuner_prediction_error_ratio",): sum(errors) / len(errors),
            ("dpex_tuner_predicted_batches_per_second",): decision.predicted_rate,
            ("dpex_tuner_measured_batches_per_second",): outcome.rate,
        }
    return found
