"""Values that one thread changes together are read together, even by a reader that comes in the middle of a change."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from dpex.measure import consumer_time
from dpex.measure.consumer_time import MOST_TRIES, PAUSE_S, Seqlock, Tally


class Reader:
    """Reads in a thread of its own; ``begin`` returns when it has the values, or waits for the end of a change."""

    def __init__(self, read: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self._looked = threading.Event()
        self._pauses = consumer_time.sleep
        self.found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._read(read), name="reader")
        monkeypatch.setattr(consumer_time, "sleep", self._pause)

    def _read(self, read: Callable[[], Any]) -> None:
        self.found.append(read())
        self._looked.set()

    def _pause(self, seconds: float) -> None:
        self._looked.set()
        self._pauses(seconds)

    def begin(self) -> None:
        self._thread.start()
        assert self._looked.wait(60.0)

    def end(self) -> Any:
        self._thread.join(30.0)
        return self.found[0]


def test_what_changes_while_it_is_read_is_read_again() -> None:
    lock, values = Seqlock(), [0]

    def look() -> int:
        found = values[0]
        if found < 2:
            lock.begin_change()
            values[0] += 1
            lock.end_change()
        return found

    assert lock.read(look) == 2


def test_a_change_that_was_given_up_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(consumer_time, "sleep", pauses.append)
    lock = Seqlock()
    lock.begin_change()
    assert lock.read(lambda: "half") == "half"
    assert pauses == [PAUSE_S] * MOST_TRIES
    assert lock.read(lambda: "half") == "half"
    assert len(pauses) == MOST_TRIES
    lock.begin_change()  # the next change
    assert lock.changes % 2 == 1
    lock.end_change()
    assert lock.changes % 2 == 0
    assert lock.read(lambda: "whole") == "whole"


@pytest.mark.parametrize(("part", "seconds"), [("stepping_s", 9.0 + 88.0), ("next_busy_s", 1.0)])
def test_no_second_is_counted_twice_by_who_reads_as_a_call_ends(
    monkeypatch: pytest.MonkeyPatch, part: str, seconds: float
) -> None:
    monkeypatch.setattr(consumer_time, "MOST_TRIES", 10**6)
    reader = Reader(lambda: tally.counts(100.0)[part], monkeypatch)
    asked = []

    def queued() -> float:
        asked.append(True)
        if len(asked) == 2:  # first as the call begins, now as it ends
            reader.begin()
        return 0.0

    tally = Tally(queue=queued)
    for began in (1.0, 11.0):
        tally.enter(began)
        tally.leave(0.5, began + 1.0, over=False)
    assert reader.end() == pytest.approx(seconds)
