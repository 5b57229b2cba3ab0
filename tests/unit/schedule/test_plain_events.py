"""Events of a pool travel between machines as plain values."""

import marshal

import pytest

from dpex.schedule.events import Notice, PoolEvent, Snapshot, WorkerGone, WorkerUp, event_of, plain


@pytest.mark.parametrize(
    "event",
    [
        WorkerUp("local", 3),
        WorkerGone("local", 3, 1, (7, 8), 7, False, "killed", 4711, 2),
        Snapshot(1, 0, 12, b"state"),
        Notice("text", False, "subject"),
    ],
)
def test_events_travel(event: PoolEvent) -> None:
    assert event_of(*marshal.loads(marshal.dumps(plain(event)))) == event
