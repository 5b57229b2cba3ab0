"""Batches of a stream that one engine reads and another decodes, in place of a sampler's indices."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpex.engine.engine import POINT_S, Engine
from dpex.engine.index_source import IndexSource
from dpex.measure.reading import Reading
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import MadeBatch, Schedule
from dpex.system.clock import monotonic
from dpex.worker.decoded_stream import FailedRead, RawSamples

if TYPE_CHECKING:
    from dpex.stats import StreamStats


class ReadBatches(IndexSource):
    """Batches that one engine reads. Another engine, which decodes them, draws them in place of a sampler's indices.

    `next_indices` never waits for a batch, and `descriptors` turn readable when more batches have been read. By these
    calls, the thread that drives the decoding engine also drives the reading engine. The batches stay with the reading
    engine (`Schedule.held`) until the decoding engine has delivered them. So a later run resumes the reading after the
    delivered batches.

    ``engine`` has begun an epoch, whose first batch has the number ``first`` in the decoding engine.
    ``largest_bytes``: the size of the largest batch so far.
    """

    def __init__(self, engine: Engine, first: int) -> None:
        self._engine = engine
        self._first = first
        """The number of the first batch that the reading engine keeps."""
        self.is_over: bool = False
        self.largest_bytes: int = 0

    @property
    def _read(self) -> list[tuple[Any, MadeBatch]]:
        return self._engine.schedule.held

    @property
    def length(self) -> int:
        return len(self._read)

    def next_indices(self, schedule: Schedule, count: int) -> list[Any]:
        """Return the next ``count`` batches that have been read, without a wait."""
        self._forget(schedule.position()[0])
        end = schedule.drawn + count
        self._read_to(end)
        return [self._raw(value) for value, _ in self._read[schedule.drawn - self._first : end - self._first]]

    def awaits_reading(self, schedule: Schedule) -> bool:
        """See `IndexSource`."""
        return schedule.next_number >= schedule.drawn

    def _read_to(self, end: int, limit_s: float = 0.0) -> None:
        """Take the batches before number ``end`` that have been read, or are read within ``limit_s`` seconds."""
        deadline = monotonic() + limit_s if limit_s else 0.0
        try:
            while self._first + self.length < end and not self.is_over:
                wait = self._engine.read_ahead()
                if wait is not None:
                    if not limit_s or monotonic() > deadline:
                        return
                    wait()
        except StopIteration:
            self.is_over = True

    def _raw(self, value: Any) -> RawSamples | FailedRead:
        if isinstance(value, FailedRead):
            return value
        if isinstance(value, Exception):
            return FailedRead(value)
        count, pickle = value
        self.largest_bytes = max(self.largest_bytes, len(pickle))
        return RawSamples(count, pickle)

    def _forget(self, number: int) -> None:
        """Drop batches before ``number``, which the decoding engine has delivered."""
        read = self._read
        while read and self._first < number:
            self._first += 1
            del read[0]

    def with_reading(self, point: ResumePoint) -> ResumePoint | None:
        """See `IndexSource`. The reading position follows the batches that ``point`` counts as delivered.

        None in the cases of `Engine.point`, and if restarted reading has not reached that position within `POINT_S`.
        """
        self._read_to(point.first, POINT_S)
        self._forget(point.first)
        read = self._engine.point() if self._first == point.first else None
        return None if read is None else replace(point, read=read)

    def reading(self) -> Reading:
        """See `IndexSource`."""
        return self._engine.reading()

    def streams(self) -> tuple[StreamStats, ...]:
        """See `IndexSource`."""
        return self._engine.stats().streams

    def descriptors(self) -> list[int]:
        """See `IndexSource`. Once the reading is over, there are no descriptors."""
        return [] if self.is_over else self._engine.descriptors()
