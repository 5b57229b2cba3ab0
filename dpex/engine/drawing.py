"""Makes tickets of the indices that a sampler draws, or of batches that another engine reads.

Both sources keep the indices of all batches that are not delivered, with their numbers. Of a stream that another engine
reads (`ReadBatches`), the batches that are there are drawn, without a wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpex.engine.draws import Draws
from dpex.errors import IteratorClosedError
from dpex.schedule.engine_state import EngineState
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import RETURNED_AT_MOST, Schedule
from dpex.system.interrupts import is_interrupt
from dpex.worker.decoded_stream import FailedRead, RawSamples

if TYPE_CHECKING:
    from dpex.engine.engine import Engine

_KEPT = 64
"""Indices of delivered batches that are kept, beside as many as there are of other batches: dropping some looks at all
batches that are not delivered."""


class Drawing:
    """Draws from the source of an epoch."""

    def __init__(self) -> None:
        self._source: Draws | ReadBatches | None = None
        self._kept_at_most = 0

    def begin(self, source: Draws | ReadBatches) -> None:
        """Draw from ``source`` in the epoch that begins."""
        self._source = source
        self._kept_at_most = 0

    def draw(self, state: EngineState, count: int) -> None:
        """Draw ``count`` tickets, or all that are left.

        Raises:
            InterruptedSamplerError: There would have been more.
        """
        source, schedule = self._source, state.schedule
        if source is None:
            return
        indices = self._indices(source, schedule, count)
        for index in indices:
            ticket = schedule.draw(index)
            state.placement.dirty.add(ticket.queue)
            if type(index) is FailedRead:  # it is the delivery of its ticket
                schedule.done(ticket.number, index)
        if isinstance(source, ReadBatches):
            state.rules.carried_bytes = source.largest_bytes
            if not source.is_over:
                return
        if len(indices) < count:
            source.check_end()
            schedule.end_of_sampler()

    @property
    def any_index(self) -> Any:
        """An index of the epoch. Those of a stream are all alike."""
        return self._source.drawn[0][0] if self._source is not None and self._source.drawn else None

    def pass_over(self, state: EngineState, ahead: frozenset[int]) -> None:
        """Draw up to the last of these tickets, which another run delivered ahead of others; the others are to be
        made."""
        schedule, last = state.schedule, max(ahead)
        prefetch = schedule.prefetch
        schedule.set_prefetch(prefetch + last - schedule.drawn + 1)
        assert self._source is not None
        for index in self._indices(self._source, schedule, last - schedule.drawn + 1):
            if schedule.drawn in ahead:
                schedule.pass_over(index)
            else:
                schedule.draw(index)
        schedule.set_prefetch(prefetch)
        state.all_queues_are_dirty()

    def _indices(self, source: Draws | ReadBatches, schedule: Schedule, count: int) -> list[Any]:
        """Return the indices of the next ``count`` tickets, or of all that are left."""
        drawn, first = source.drawn, schedule.drawn
        if len(drawn) > self._kept_at_most or isinstance(source, ReadBatches):  # the latter are as large as batches
            source.forget(schedule.position()[0] - RETURNED_AT_MOST)
            self._kept_at_most = 2 * len(drawn) + _KEPT
        source.draw(first + count)
        at = first - drawn[0][1] if drawn else 0
        return [drawn[place][0] for place in range(at, min(at + count, len(drawn)))]

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

    def awaits_reading(self, schedule: Schedule) -> bool:
        """Return True if the next batch in turn is not read yet."""
        return self._readings is not None and schedule.next_number >= schedule.drawn


class ReadBatches:
    """Batches that another engine reads. An engine that decodes draws from them in place of a sampler.

    Batches that are read already are taken without a wait, and `descriptors` turn readable when there are more. The
    thread that drives the decoding engine drives the reading engine by these calls. An exception of a signal handler
    loses nothing (see `dpex.system.interrupts`).

    A later run resumes the reading behind the batches that the decoding engine has delivered. Batches that were taken
    here and are not delivered yet are read again.

    Args:
        engine: The reading engine, which has begun an epoch.
        first: The number that the decoding engine gives the first batch.
        in_order: Batches are delivered in the order in which they were drawn here. Without it, `point` is unknown.

    Attributes:
        drawn: Batches that the decoding engine has not delivered, each with its number, and always the latest one.
        is_over: There are no more batches.
        largest_bytes: Bytes of the largest batch so far.
    """

    def __init__(self, engine: Engine, first: int, *, in_order: bool) -> None:
        self._engine = engine
        self._first = self._begun = first
        if in_order:
            engine.schedule.forward()
        self.drawn: deque[tuple[Any, int]] = deque()
        self._hand: list[Any] = []
        self.is_over = False
        self.largest_bytes = 0

    def draw(self, end: int) -> None:
        """Take batches before number ``end`` that are there already."""
        drawn = self.drawn
        while (number := drawn[-1][1] + 1 if drawn else self._begun) < end and self._has_next():
            drawn += ((self._hand[0], number),)  # from here on without a call: see `dpex.system.interrupts`
            del self._hand[0]

    def check_end(self) -> None:
        """See `Draws.check_end`: an exception of a signal handler ends no reading."""

    def forget(self, number: int) -> None:
        """Drop batches before ``number``, which were delivered and are not needed again."""
        while len(self.drawn) > 1 and self.drawn[0][1] < number:
            self.drawn.popleft()
        self.delivered(number)

    def _has_next(self) -> bool:
        hand = self._hand
        if hand or self.is_over:
            return bool(hand)
        read: list[Any] = []
        try:
            if not self._engine.next_if_ready(read):
                return False
        except StopIteration:
            self.is_over = True
            return False
        except IteratorClosedError:
            raise
        except Exception as error:
            if is_interrupt(error):
                raise
            hand += (FailedRead(error),)
            return True
        except BaseException:  # without a call: see `dpex.system.interrupts`
            self._engine.returned += read
            raise
        count, pickle = read[0]
        hand += (RawSamples(count, pickle),)
        self.largest_bytes = max(self.largest_bytes, len(pickle))
        return True

    def delivered(self, first: int) -> None:
        """Note that batches before number ``first`` were delivered, and are not needed again."""
        forwarded = self._engine.schedule.forwarded
        while forwarded and self._first < first:
            self._first += 1  # without a call until both have changed: see `dpex.system.interrupts`
            del forwarded[0]

    def point(self, first: int) -> ResumePoint | None:
        """Return where the reading is once the batches before number ``first`` were delivered.

        None: see `dpex.engine.engine.Engine.point`.
        """
        self.delivered(first)
        return self._engine.point()

    def descriptors(self) -> list[int]:
        """Return descriptors that turn readable when there may be more; none once it is over."""
        return [] if self.is_over else self._engine.descriptors()
