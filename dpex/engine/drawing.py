"""Draws from the sampler. An exception of a signal handler that comes out of the sampler loses no index.

A sampler that is a generator of Python ends with such an exception. That is an error behind the last index, as the
epoch would look complete otherwise. Of a stream that another engine reads (`ReadBatches`), the batches that are there
are drawn, without a wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpex.engine.read_batches import RETURNED_AT_MOST, ReadBatches
from dpex.errors import InterruptedSamplerError
from dpex.schedule.engine_state import EngineState
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import Schedule
from dpex.system.interrupts import has_ended, is_interrupt, taken
from dpex.worker.decoded_stream import FailedRead

_INTERRUPTED = (
    "{kind}, raised by a signal handler, came out of the sampler, a generator that ended with it: this epoch has "
    "{drawn} batches and no more. Those not yet returned come with the next calls of next(). Begin a new epoch for all "
    "batches; to go on after such an exception, use a sampler whose iterator is no generator"
)


def draws_ahead_safely(sampler: Any) -> bool:
    """Return True for samplers of torch's that draw their order at once, so that drawing ahead is not noticed.

    A `RandomSampler` draws from its generator again when it ends, which the owner of that generator could notice.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.generator is None
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


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
        while schedule.drawn <= last and self.draw_some(1):
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

    def draw_some(self, count: int) -> bool:
        """Put ``count`` indices, or all that are left, into ``drawn``, which is empty. Return False if none is left."""
        self._draw_indices(count)
        return bool(self.drawn)

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
