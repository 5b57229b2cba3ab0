"""The counts of the machine grow only while a pass runs."""

import pytest
from waiting import ManualClock

from dpex.engine import snapshots
from dpex.engine.snapshots import LoaderCounters
from dpex.measure.reading import Reading
from dpex.system import meter
from dpex.system.meter import CpuUse, QueueTimes, RunQueueTimes


class Training:
    """A training loop on a clock turned by hand, which always computes, and waits for a CPU for a tenth of its time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.cpu_s, self.in_passes_s = ManualClock(100.0), 7.0, 0.0
        monkeypatch.setattr(snapshots, "monotonic", self.clock)
        monkeypatch.setattr(meter, "monotonic", self.clock)
        monkeypatch.setattr(meter.time, "process_time", lambda: self.cpu_s)
        monkeypatch.setattr(meter, "read_queue_times", self._look)
        monkeypatch.setattr(meter, "cpu_used", lambda pids: CpuUse(2 * self.cpu_s, self.cpu_s))

    def _look(self, pids: tuple[int, ...], thread: int) -> QueueTimes:
        return QueueTimes(trainer=RunQueueTimes(self.cpu_s, 0.1 * self.cpu_s))

    def reading(self) -> Reading:
        return Reading(batches=1, work_s=self.in_passes_s)

    def train(self, seconds: float) -> None:
        self.clock.advance(seconds)
        self.cpu_s += seconds
        self.in_passes_s += seconds


def test_machine_counters_rest_between_persistent_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    training, counters = Training(monkeypatch), LoaderCounters()
    counters.add_iterator(training)

    def counted() -> tuple[float, ...]:
        found = counters.read()
        values = found.trainer_cpu_s, found.trainer_queued_s or 0.0, found.others_s, found.others_over_s
        return tuple(round(value, 6) for value in values)

    training.train(10.0)
    counters.rest()
    assert counted() == (10.0, 1.0, 10.0, 10.0)
    training.clock.advance(1000.0)
    assert counted() == (10.0, 1.0, 10.0, 10.0)
    counters.wake()
    training.train(5.0)
    assert counted() == (15.0, 1.5, 15.0, 15.0)
    counters.restart()
    training.train(5.0)
    assert counted() == (5.0, 0.5, 5.0, 5.0)
    counters.rest()
    training.clock.advance(1000.0)
    assert counted() == (5.0, 0.5, 5.0, 5.0)


def test_a_short_pass_is_not_worth_a_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    training, counters = Training(monkeypatch), LoaderCounters()
    counters.add_iterator(training)
    training.train(0.5)
    monkeypatch.setattr(meter, "read_queue_times", None)
    counters.rest()
    counters.wake()
