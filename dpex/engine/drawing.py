"""Draws from the sampler, or from batches that another engine reads.

An exception of a signal handler that comes out of the sampler loses no index. A sampler that is a generator of Python
ends with such an exception. That is an error behind the last index, as the epoch would look complete otherwise. Of a
stream that another engine reads (`ReadBatches`), the batches that are there are drawn, without a wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex.errors import InterruptedSamplerError, IteratorClosedError
from dpex.schedule.engine_state import EngineState
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import Schedule
from dpex.system.interrupts import has_ended, is_interrupt, taken
from dpex.worker.decoded_stream import FailedRead, RawSamples

if TYPE_CHECKING:
    from dpex.engine.engine import Engine

RETURNED_AT_MOST = 4
"""Delivered batches whose places are kept: an exception of a signal handler may keep one or two from the training loop,
and then they are not delivered yet."""
_INTERRUPTED = (
    "{kind}, raised by a signal handler, came out of the sampler, a generator that ended with it: this epoch has "
    "{drawn} batches and no more. Those not yet returned come with the next calls of next(). Begin a new epoch for all "
    "batches; to go on after such an exception, use a sampler whose iterator is no generator"
)


def _as_drawn(index: Any) -> Any:
    """An index that stays as it was when it was drawn, though the sampler may fill the same list again for the next.

    A ticket keeps its index until its batch is delivered, as it may have to be made again.
    """
    if isinstance(index, torch.Tensor):
        return index.clone()
    return index.copy() if type(index) in (list, np.ndarray) else index


class AsDrawn:
    """The indices of a sampler, each as it was when it was drawn; none is lost to an exception of a signal handler."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._drawn: list[Any] = []

    def __iter__(self) -> AsDrawn:
        return self

    def __next__(self) -> Any:
        if not self._drawn:
            self._drawn.extend(taken(self._sampler, 1))
        if not self._drawn:
            raise StopIteration
        index = _as_drawn(self._drawn[0])
        del self._drawn[0]  # without a call until it is returned: see `dpex.system.interrupts`
        return index


class Drawing:
    """The sampler of an epoch. ``drawn``: indices that are not yet tickets."""

    def __init__(self) -> None:
        self.drawn: deque[Any] = deque()
        self._sampler: Iterator[Any] = iter(())
        self._readings: ReadBatches | None = None
        self._lost_to: BaseException | None = None

    def begin(self, sampler: Iterator[Any] | ReadBatches) -> None:
        """Draw from ``sampler`` in the epoch that begins."""
        if isinstance(sampler, ReadBatches):
            self._sampler, self._readings = iter(()), sampler
        else:
            self._readings = None
            self._sampler = sampler
        self.drawn.clear()
        self._lost_to = None

    def draw(self, state: EngineState, count: int) -> None:
        """Draw ``count`` tickets, or all that are left. Indices that an exception left over come first.

        Raises:
            InterruptedSamplerError: there would have been more.
        """
        drawn, schedule = self.drawn, state.schedule
        if self._readings is not None:
            self._draw_read(self._readings, state, count)
            return
        self._draw_indices(max(0, count - len(drawn)))
        over = len(drawn) < count
        try:
            for _ in range(min(count, len(drawn))):
                state.placement.dirty.add(schedule.draw_first(drawn).queue)
        except BaseException:
            state.all_queues_are_dirty()
            raise
        if over:
            self._end(schedule)

    def pass_over(self, state: EngineState, ahead: frozenset[int]) -> None:
        """Draw up to the last of these tickets, which another run delivered ahead of others; the others are to be
        made."""
        schedule, last = state.schedule, max(ahead)
        prefetch = schedule.prefetch
        schedule.set_prefetch(prefetch + last - schedule.drawn + 1)
        while schedule.drawn <= last:
            self._draw_indices(1)
            if not self.drawn:
                break
            if schedule.drawn in ahead:
                schedule.pass_over(self.drawn.popleft())
            else:
                schedule.draw_first(self.drawn)
        schedule.set_prefetch(prefetch)
        state.all_queues_are_dirty()

    def _draw_read(self, readings: ReadBatches, state: EngineState, count: int) -> None:
        """Draw batches that were read by now. A read that failed is the delivery of its ticket."""
        drawn, schedule = self.drawn, state.schedule
        readings.delivered(schedule.next_number - RETURNED_AT_MOST)  # an exception may have kept the latest ones back
        readings.take(count - len(drawn), drawn)
        state.rules.carried_bytes = readings.largest_bytes
        state.all_queues_are_dirty()
        while drawn and count > 0:
            ticket = schedule.draw_first(drawn)
            count -= 1
            if type(ticket.index) is FailedRead:
                schedule.done(ticket.number, ticket.index)
        if readings.is_over and not drawn:
            self._end(schedule)

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

    def _draw_indices(self, count: int) -> None:
        """Take that many indices out of the sampler, or as many as it still has."""
        try:
            self.drawn.extend(taken(self._sampler, count))
        except BaseException as error:
            if is_interrupt(error) and has_ended(self._sampler):
                self._lost_to = error
            raise

    def _end(self, schedule: Schedule) -> None:
        schedule.end_of_sampler()
        error, self._lost_to = self._lost_to, None
        if error is not None:
            text = _INTERRUPTED.format(kind=type(error).__name__, drawn=schedule.drawn)
            raise InterruptedSamplerError(text) from error


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
        is_over: There are no more batches.
        largest_bytes: Bytes of the largest batch so far.
    """

    def __init__(self, engine: Engine, first: int, *, in_order: bool) -> None:
        self._engine = engine
        self._schedule = engine.schedule
        self._first = first
        if in_order:
            self._schedule.forward()
        self._hand: list[Any] = []
        self.is_over = False
        self.largest_bytes = 0

    def take(self, most: int, into: deque[Any]) -> None:
        """Append at most ``most`` batches that are there already to ``into``."""
        while most > 0 and self._has_next():
            into += (self._hand[0],)  # from here on without a call: see `dpex.system.interrupts`
            del self._hand[0]
            most -= 1

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
        except BaseException:
            self._engine.returned += read
            raise
        count, pickle = read[0]
        hand += (RawSamples(count, pickle),)
        self.largest_bytes = max(self.largest_bytes, len(pickle))
        return True

    def delivered(self, first: int) -> None:
        """Note that batches before number ``first`` were delivered, and are not needed again."""
        forwarded = self._schedule.forwarded
        while forwarded and self._first < first:
            del forwarded[0]  # from here on without a call: see `dpex.system.interrupts`
            self._first += 1

    def point(self, first: int) -> ResumePoint | None:
        """Return where the reading is once the batches before number ``first`` were delivered.

        None: see `dpex.engine.engine.Engine.point`.
        """
        self.delivered(first)
        return self._engine.point()

    def descriptors(self) -> list[int]:
        """Return descriptors that turn readable when there may be more; none once it is over."""
        return [] if self.is_over else self._engine.descriptors()
