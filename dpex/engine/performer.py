"""Performs what the engine's state asks for, and reports how pools stand.

Used by the thread that holds the engine's lock. Each instruction leaves the list once it has been performed and not
before, so that the next turn resumes what a signal handler interrupted by an exception (`resume`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dpex.pools.base import WorkerPool
from dpex.schedule.engine_state import EngineState
from dpex.schedule.events import Event, PoolStatus, Refused, Reported, ScaleRefused
from dpex.schedule.instructions import (
    Adopt,
    AskState,
    Discard,
    EnterEpoch,
    Instruction,
    Raise,
    Say,
    Scale,
    Send,
    ToWorker,
)
from dpex.system.interrupts import is_interrupt
from dpex.system.user_warnings import is_first, warn

logger = logging.getLogger("dpex")


class Performer:
    """The pools of an engine; one is made when it is first needed, and lives as long as the engine, which closes it.

    ``fatal``: what ends the epoch at the consumer's next turn.
    """

    def __init__(self, state: EngineState, make_pool: Callable[[str, int], WorkerPool]) -> None:
        self._state = state
        self._placement = state.placement
        self._make_pool = make_pool
        self.pools: dict[str, WorkerPool] = {}
        self.fatal: Exception | None = None

    def tell(self, event: Event, now: float = 0.0) -> None:
        """Hand in an event and perform what follows from it."""
        if self._state.handle(event, now):
            self.perform()

    def perform(self) -> None:
        """Perform all instructions, in order."""
        out = self._placement.instructions
        while out:
            _PERFORM[type(out[0])](self, out[0])

    def resume(self) -> None:
        """Resume what was interrupted. Messages are decided anew, as their receivers may be gone by now."""
        for instruction in list(self._placement.instructions):
            if isinstance(instruction, Send):
                self._state.handle(Refused(instruction))
        self.perform()

    def report(self, name: str) -> None:
        """Report the status of a pool, if it has changed."""
        status = status_of(self.pools[name])
        if status != self._placement.pools.get(name):
            self._state.handle(Reported(name, status))

    def raise_fatal(self) -> None:
        """Raise what ends the epoch, if anything does, once."""
        if self.fatal is not None:
            error, self.fatal = self.fatal, None
            raise error

    # -- instructions --------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        sent: list[Any] = []
        try:
            self.pools[send.pool].send(send.tickets, send.epoch, send.worker, sent, again=send.again)
        finally:
            if sent:
                del self._placement.instructions[0]
            else:
                self._state.handle(Refused(send))

    def _to_worker(self, instruction: ToWorker) -> None:
        pool = self.pools[instruction.pool]
        if instruction.worker in pool.workers():  # else it has ended, and the news of it are on their way
            if isinstance(instruction, Adopt):
                pool.adopt(instruction.worker, instruction.logical, instruction.state, instruction.streams)
            else:
                pool.ask_state(instruction.worker, instruction.logical)
        del self._placement.instructions[0]
        self.report(instruction.pool)

    def _scale(self, scale: Scale) -> None:
        try:
            self._ask(scale)
        except Exception as error:
            if is_interrupt(error):
                raise
            del self._placement.instructions[0]
            self._state.handle(ScaleRefused(scale, str(error)))
            if not scale.optional:
                raise
        else:
            del self._placement.instructions[0]
            self.report(scale.pool)

    def _ask(self, scale: Scale) -> None:
        pool = self.pools.get(scale.pool)
        if pool is not None:
            pool.resize(scale.wanted)
            return
        pool = self.pools[scale.pool] = self._make_pool(scale.pool, scale.wanted)
        pool.new_epoch(max(0, self._state.epoch))

    def _enter_epoch(self, instruction: EnterEpoch) -> None:
        for pool in self.pools.values():
            pool.new_epoch(instruction.epoch)
        del self._placement.instructions[0]

    def _discard(self, instruction: Discard) -> None:
        for value in instruction.values:
            try:
                value()
            except Exception as error:  # it cannot be decoded, and is not wanted
                if is_interrupt(error):
                    raise
        del self._placement.instructions[0]

    def _say(self, instruction: Say) -> None:
        del self._placement.instructions[0]
        if instruction.once and not is_first(instruction.once):
            return
        if instruction.warning:
            warn(instruction.text)
        else:
            logger.info(instruction.text)

    def _raise(self, instruction: Raise) -> None:
        self.fatal = instruction.error
        del self._placement.instructions[0]


def status_of(pool: WorkerPool) -> PoolStatus:
    """Return the status of a pool."""
    counts = pool.counts
    return PoolStatus(
        tuple(pool.workers()),
        counts.requested,
        counts.running,
        pool.failed,
        pool.crashes,
        counts.most,
        counts.why_most,
    )


_PERFORM: dict[type[Instruction], Callable[[Performer, Any], None]] = {
    Send: Performer._send,
    Adopt: Performer._to_worker,
    AskState: Performer._to_worker,
    Scale: Performer._scale,
    EnterEpoch: Performer._enter_epoch,
    Discard: Performer._discard,
    Say: Performer._say,
    Raise: Performer._raise,
}
