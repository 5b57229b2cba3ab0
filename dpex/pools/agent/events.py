"""What happened to an agent's workers, as plain values that can travel."""

from __future__ import annotations

from typing import Any

from dpex.core.events import Notice, PoolEvent, Snapshot, SplittingKnown, WorkerGone, WorkerUp


def plain(event: PoolEvent) -> tuple[Any, ...]:
    """Return an event of an agent's pool as plain values, the first of which says what it is."""
    match event:
        case WorkerUp():
            return ("up", event.worker)
        case WorkerGone():
            lost, why = (event.lost, event.guilty), (event.expected, event.why, event.pid, event.hung)
            return ("gone", event.worker, event.epoch, *lost, *why)
        case Snapshot():
            return ("snapshot", event.logical, event.epoch, event.number, event.state)
        case SplittingKnown():
            return ("splitting", event.is_split)
        case Notice():
            return ("notice", event.text, event.warning, event.once)
    raise TypeError(f"an agent's pool told {event!r}")
