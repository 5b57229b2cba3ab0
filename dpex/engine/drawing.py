"""Make tickets of the indices that a sampler draws, or of batches that another engine reads.

If another engine reads a stream (`ReadBatches`), the batches that it has read so far are drawn, without a wait.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpex.engine.draws import Draws
from dpex.measure.reading import Reading
from dpex.schedule.engine_state import EngineState
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import MadeBatch, Schedule
from dpex.system.clock import monotonic
from dpex.worker.decoded_stream import FailedRead, RawSamples

if TYPE_CHECKING:
    from dpex.engine.engine import Engine
    from dpex.stats import StreamStats

POINT_S = 1.0
"""Seconds that `Engine.point` waits for the thread that is in ``next()``, or for a reading that began anew."""


class Drawing:
    def __init__(self) -> None:
        self._source: Draws | ReadBatches | None = None

    def begin(self, source: Draws | ReadBatches) -> None:
        self._source = source

    def draw(self, state: EngineState, count: int) -> None:
        """Draw ``count`` tickets, or all that are left."""
        source, schedule = self._source, state.schedule
        if source is None:
            return
        indices, has_failed = self._indices(source, schedule, count), False
        for index in indices:
            ticket = schedule.draw(index)
            state.placement.dirty.add(ticket.queue)
            if type(index) is FailedRead:  # it is the delivery of its ticket
                schedule.done(ticket.number, index)
                has_failed = isinstance(source, Draws)
        if isinstance(source, ReadBatches):
            state.rules.carried_bytes = source.largest_bytes
            if not source.is_over:
                return
        if len(indices) < count and not has_failed:
            schedule.end_of_sampler()

    def pass_over(self, state: EngineState, ahead: frozenset[int]) -> None:
        """Draw up to the last of these tickets, which another run delivered ahead of others; the others are to be
        made."""
        schedule, last = state.schedule, max(ahead)
        prefetch = schedule.prefetch
        schedule.set_prefetch(prefetch + last - schedule.drawn + 1)
        assert self._source is not None
        for index in self._indices(self._source, schedule, last - schedule.drawn + 1):
            if type(index) is FailedRead:
                raise index.error
            if schedule.drawn in ahead:
                schedule.pass_over(index)
            else:
                schedule.draw(index)
        schedule.set_prefetch(prefetch)
        state.all_queues_are_dirty()

    def _indices(self, source: Draws | ReadBatches, schedule: Schedule, count: int) -> list[Any]:
        """Return the indices of the next ``count`` tickets, or of all that are left."""
        if isinstance(source, Draws):
            return source.draw(count)
        source.forget(schedule.position()[0])
        source.draw(schedule.drawn + count)
        return source.indices(schedule.drawn, schedule.drawn + count)

    @property
    def _readings(self) -> ReadBatches | None:
        return self._source if isinstance(self._source, ReadBatches) else None

    def descriptors(self) -> list[int]:
        """Return descriptors that turn readable when there is more to draw, if that can be known."""
        return [] if self._readings is None else self._readings.descriptors()

    def with_reading(self, point: ResumePoint) -> ResumePoint | None:
        """``point`` with that of the stream that others read, if they do; None: that cannot be known now."""
        if self._readings is None:
            return point
        read = self._readings.point(point.first)
        return None if read is None else replace(point, read=read)

    def reading(self) -> Reading:
        """Return the counts of the engine that reads the stream; without one, of no batches."""
        return Reading() if self._readings is None else self._readings.reading()

    def streams(self) -> tuple[StreamStats, ...]:
        """Return the streams of the engine that reads; without one, none."""
        return () if self._readings is None else self._readings.streams()

    def awaits_reading(self, schedule: Schedule) -> bool:
        """Return True if the next batch in turn is not read yet."""
        return self._readings is not None and schedule.next_number >= schedule.drawn


class ReadBatches:
    """Batches that another engine reads. An engine that decodes draws from them in place of a sampler.

    Batches that are read already are taken without a wait, and `descriptors` turn readable when there are more. The
    thread that drives the decoding engine drives the reading engine by these calls. The batches stay with the reading
    engine (`Schedule.held`) until the decoding engine has delivered them. So a later run resumes the reading after the
    delivered batches.

    ``engine`` has begun an epoch, of which the decoding engine gives batch number ``first`` to the first batch.
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

    def draw(self, end: int, limit_s: float = 0.0) -> None:
        """Take batches before number ``end`` that are there already, or come within ``limit_s`` seconds."""
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

    def indices(self, first: int, end: int) -> list[Any]:
        """Return the batches from number ``first`` to ``end`` that have been read, in place of indices."""
        return [self._raw(value) for value, _ in self._read[first - self._first : end - self._first]]

    def _raw(self, value: Any) -> RawSamples | FailedRead:
        if isinstance(value, FailedRead):
            return value
        if isinstance(value, Exception):
            return FailedRead(value)
        count, pickle = value
        self.largest_bytes = max(self.largest_bytes, len(pickle))
        return RawSamples(count, pickle)

    def forget(self, number: int) -> None:
        """Drop batches before ``number``, which the decoding engine has delivered."""
        read = self._read
        while read and self._first < number:
            self._first += 1
            del read[0]

    def point(self, first: int) -> ResumePoint | None:
        """Return where the reading is once the batches before number ``first`` were delivered.

        None: see `dpex.engine.engine.Engine.point`, or the reading began anew and has not come so far within `POINT_S`.
        """
        self.draw(first, POINT_S)
        self.forget(first)
        return self._engine.point() if self._first == first else None

    def reading(self) -> Reading:
        """Return the counts of the reading engine. Any thread may call it."""
        return self._engine.reading()

    def streams(self) -> tuple[StreamStats, ...]:
        """Return the streams of the reading engine. Any thread may call it."""
        return self._engine.stats().streams

    def descriptors(self) -> list[int]:
        """Return descriptors that turn readable when there may be more; none once it is over."""
        return [] if self.is_over else self._engine.descriptors()
