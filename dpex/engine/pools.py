"""The worker pools of an engine. `Pools` performs the instructions to them, and handles their events.

The caller holds the engine's lock. The consumer's thread handles all events (`Pools.collect`). The pinning thread
handles only batches and random states (`Pools.take_results`); it leaves errors, the first other event and all later
events to the consumer, in order.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.measure.batch_times import BatchTimes
from dpex.measure.sampling import SlowestSamples
from dpex.measure.timeline import Timeline
from dpex.pools.base import WorkerPool
from dpex.schedule.engine_state import EngineState
from dpex.schedule.events import (
    Adopt,
    AskState,
    Discard,
    EnterEpoch,
    Instruction,
    Notice,
    PoolEvent,
    PoolStatus,
    Raise,
    Scale,
    Send,
    Snapshot,
    TicketMade,
    ToWorker,
)
from dpex.schedule.sample_policy import AS_TORCH, SamplePolicy
from dpex.system.user_warnings import is_first, warn
from dpex.worker.sample_guard import SampleErrors

logger: logging.Logger = logging.getLogger("dpex")

NOT_BLOCKED, ANY = -2, -1
"""Values in place of the number of the awaited batch."""


class Pools:
    """The pools of an engine. A pool is made when it is first needed, and lives as long as the engine, which closes it.

    ``state`` receives the events, and gives the instructions.
    """

    def __init__(
        self, state: EngineState, make_pool: Callable[[str, int], WorkerPool], samples: SamplePolicy = AS_TORCH
    ) -> None:
        self._state = state
        self._placement = state.placement
        self._make_pool = make_pool
        self.by_name: dict[str, WorkerPool] = {}
        self.fatal: Exception | None = None
        """The error that ends the epoch at the next ``next()``, or None."""
        self.refused: str | None = None
        """The reason why a tuner cannot have remote workers, or None."""
        self._deferred: deque[PoolEvent] = deque()
        self._has_taken_results = False
        self.sample_errors: SampleErrors = SampleErrors(samples)
        self.awaited = NOT_BLOCKED
        """The number of the awaited batch, or `NOT_BLOCKED` or `ANY`."""
        self.awaited_times: BatchTimes | None = None
        """The times of the awaited batch, once it has arrived."""
        self.slow_samples: SlowestSamples = SlowestSamples()
        self.timeline: Timeline | None = None
        """Receives each batch while a timeline is recorded."""

    def open(self) -> None:
        """Start the pools of the first settings. If one of them cannot start, close all."""
        self._placement.request_start()
        try:
            self.perform()
        except BaseException:
            for pool in self.by_name.values():
                pool.close(0.0)
            raise

    def descriptors(self) -> list[int]:
        return [fd for pool in self.by_name.values() for fd in pool.descriptors()]

    def raise_fatal(self) -> None:
        """Raise the error that ends the epoch, if any, once."""
        if self.fatal is not None:
            error, self.fatal = self.fatal, None
            raise error

    # -- events --------------------------------------------------------------------------------------------------

    def collect(self, now: float) -> bool:
        """Handle all events. Return True if this call or a `take_results` since the last call handled an event.

        Raises:
            Exception: The error that ends the epoch.
        """
        has_events, self._has_taken_results = self._has_taken_results, False
        while self._deferred:
            self._handle(self._deferred.popleft(), now)
        for name, pool in list(self.by_name.items()):
            events = pool.poll()
            self.report(name)
            has_events = has_events or bool(events)
            while events:
                self._handle(events.popleft(), now)
        if self._placement.instructions:
            self.perform()
        if self.fatal is not None:
            self.raise_fatal()
        return has_events

    def take_results(self) -> bool:
        """Handle batches and states. Return True if there was an event."""
        if self._deferred:
            return False
        for name, pool in list(self.by_name.items()):
            events = pool.poll()
            self.report(name)
            self._deferred.extend(events)
            events.clear()
        if not self._deferred:
            return False
        self._has_taken_results = True
        while self._deferred and isinstance(self._deferred[0], (TicketMade, Snapshot)):
            self._handle(self._deferred.popleft(), 0.0)
        return True

    @property
    def must_wait_for_the_consumer(self) -> bool:
        """Return True if the pinning thread must leave further events to the consumer."""
        return self.fatal is not None or bool(self._deferred)

    def _handle(self, event: PoolEvent, now: float) -> None:
        if type(event) is not TicketMade:
            self._state.apply_event(event, now)
            return
        slowest, number = event.times.slowest, event.number
        if (
            (slowest and slowest[0] > self.slow_samples.least_s)
            or self.awaited in (number, ANY)
            or self.sample_errors.is_on
        ):
            self._measure(event)
        if self.timeline is not None:
            self.timeline.made(event.epoch, number, event.worker, event.times)
        self._state.apply_made(event)

    def _measure(self, event: TicketMade) -> None:
        """Keep the facts about a result that is slow, awaited, or has failed samples."""
        ticket = self._state.schedule.ticket(event.number)
        if ticket is None or event.epoch != self._state.epoch:
            return
        times = event.times
        if times.slowest and times.slowest[0] > self.slow_samples.least_s:
            self.slow_samples.add(times.slowest[0], ticket.index, times.slowest[1])
        if self.sample_errors.is_on:
            said = self.sample_errors.made((event.epoch, event.number), times.samples, times.failed)
            self._placement.instructions += said
        if self.awaited in (event.number, ANY):
            self.awaited_times = times

    def report(self, name: str) -> None:
        pool = self.by_name[name]
        counts = pool.counts
        status = PoolStatus(
            tuple(pool.workers()),
            counts.requested,
            counts.running,
            pool.failed,
            pool.crashes,
            counts.most,
            counts.why_most,
        )
        if status != self._placement.pools.get(name):
            self._placement.update_status(name, status)

    # -- instructions --------------------------------------------------------------------------------------------

    def perform(self) -> None:
        out = self._placement.instructions
        while out:
            instruction = out[0]
            if type(instruction) is Send:
                self._send(instruction)
            else:
                del out[0]
                _PERFORM[type(instruction)](self, instruction)

    def _send(self, send: Send) -> None:
        """Send a message of tickets. If it is refused, take back all waiting messages to the same receiver."""
        is_sent = False
        try:
            is_sent = self.by_name[send.pool].send(send.tickets, send.epoch, send.worker)
        finally:  # also if no file descriptor is left, which raises an OSError
            if is_sent:
                del self._placement.instructions[0]
            else:
                self._state.refused(send)

    def _to_worker(self, instruction: ToWorker) -> None:
        pool = self.by_name[instruction.pool]
        if instruction.worker in pool.workers():  # else it has ended, and its `WorkerGone` will follow
            if isinstance(instruction, Adopt):
                pool.adopt(instruction.worker, instruction.logical, instruction.state)
            else:
                pool.ask_state(instruction.worker, instruction.logical)
        self.report(instruction.pool)

    def _scale(self, scale: Scale) -> None:
        try:
            self._ask(scale)
        except Exception as error:
            self._placement.scale_refused(scale, str(error))
            if not scale.optional:
                raise
            self.refused = str(error)
        else:
            self.report(scale.pool)

    def _ask(self, scale: Scale) -> None:
        pool = self.by_name.get(scale.pool)
        if pool is not None:
            pool.resize(scale.wanted)
            return
        pool = self.by_name[scale.pool] = self._make_pool(scale.pool, scale.wanted)
        pool.new_epoch(max(0, self._state.epoch))

    def _enter_epoch(self, instruction: EnterEpoch) -> None:
        for pool in self.by_name.values():
            pool.new_epoch(instruction.epoch)

    def _discard(self, instruction: Discard) -> None:
        for value in instruction.values:
            try:
                value()
            except Exception:  # the result cannot be decoded, which does not matter, because it is not wanted
                logger.debug("a result that is not wanted cannot be decoded", exc_info=True)

    def _say(self, instruction: Notice) -> None:
        if instruction.once and not is_first(instruction.once):
            return
        if instruction.warning:
            warn(instruction.text)
        else:
            logger.info(instruction.text)

    def _raise(self, instruction: Raise) -> None:
        self.fatal = instruction.error


_PERFORM: dict[type[Instruction], Callable[[Pools, Any], None]] = {
    Adopt: Pools._to_worker,
    AskState: Pools._to_worker,
    Scale: Pools._scale,
    EnterEpoch: Pools._enter_epoch,
    Discard: Pools._discard,
    Notice: Pools._say,
    Raise: Pools._raise,
}
