"""The source of a pass's indices, as `Drawing` uses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpex.measure.reading import Reading

if TYPE_CHECKING:
    from dpex.schedule.progress import ResumePoint
    from dpex.schedule.schedule import Schedule
    from dpex.stats import StreamStats


class IndexSource:
    """A source without indices, and the base class of `Draws` and `ReadBatches`.

    Attributes:
        is_over: True once a call of `next_indices` has found the end.
        largest_bytes: The size of the largest batch that a ticket carried in place of an index.
    """

    is_over: bool = False
    largest_bytes: int = 0

    def next_indices(self, schedule: Schedule, count: int) -> list[Any]:
        """Return the indices of the next ``count`` tickets of ``schedule``, or of all that are left.

        A `FailedRead` in place of an index is the error of its ticket.
        """
        return []

    def descriptors(self) -> list[int]:
        """Return descriptors that turn readable when more indices are available."""
        return []

    def with_reading(self, point: ResumePoint) -> ResumePoint | None:
        """Return ``point`` with the position of the engine that reads the stream; None if it has no known position."""
        return point

    def reading(self) -> Reading:
        """Return the counts of the engine that reads the stream. Any thread may call it."""
        return Reading()

    def streams(self) -> tuple[StreamStats, ...]:
        """Return the streams of the engine that reads. Any thread may call it."""
        return ()

    def awaits_reading(self, schedule: Schedule) -> bool:
        """Return True if the next batch in turn is not read yet."""
        return False
