"""Batches that another engine reads. An engine that decodes draws from them in place of a sampler.

Batches that are read already are taken without a wait, and `ReadBatches.descriptors` turn readable when there are more.
The thread that drives the decoding engine drives the reading engine by these calls. An exception of a signal handler
loses nothing (see `dpex.system.interrupts`).

A later run resumes the reading behind the batches that the decoding engine has delivered. Batches that were taken here
and are not delivered yet are read again.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Protocol

from dpex.errors import IteratorClosedError
from dpex.schedule.progress import ResumePoint
from dpex.schedule.schedule import Schedule
from dpex.system.interrupts import is_interrupt
from dpex.worker.decoded_stream import FailedRead, RawSamples

RETURNED_AT_MOST = 4
"""Delivered batches whose places are kept: an exception of a signal handler may keep one or two from the training loop,
and then they are not delivered yet."""


class ReadingEngine(Protocol):
    """The engine that reads, as far as it is used here; see `dpex.engine.engine.Engine`."""

    returned: deque[Any]

    @property
    def schedule(self) -> Schedule:
        """The tickets of its present epoch."""

    def next_if_ready(self, hand: list[Any]) -> bool:
        """Put the next batch into ``hand``, without a wait. Return False if it is not there yet."""

    def point(self) -> ResumePoint | None:
        """Return where its pass is."""

    def descriptors(self) -> list[int]:
        """Return descriptors that turn readable when its workers have something to report."""


class ReadBatches:
    """See the module.

    Args:
        engine: The reading engine, which has begun an epoch.
        first: The number that the decoding engine gives the first batch.
        in_order: Batches are delivered in the order in which they were drawn here. Without it, `point` is unknown.

    Attributes:
        is_over: There are no more batches.
        largest_bytes: Bytes of the largest batch so far.
    """

    def __init__(self, engine: ReadingEngine, first: int, *, in_order: bool) -> None:
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
