"""A worker pool in this process, so that a renewal costs no process: its workers make all tickets when it is polled."""

import os
from collections import deque
from collections.abc import Callable
from typing import Any

from fake_pool import FakePool, Work

from dpex.schedule.events import PoolEvent
from dpex.worker.states import unpack_state


class PromptPool(FakePool):
    """Implements `dpex.pools.base.WorkerPool`; see `FakePool` for its batches."""

    def __init__(self, workers: int, *, shared: bool, make: Callable[[Work], Any]) -> None:
        super().__init__(shared=shared, make=make)
        self._bell = os.eventfd(1, os.EFD_CLOEXEC)
        self.resize(workers)

    def adopt(self, worker: int, logical: int, state: Any) -> None:
        """See `WorkerPool.adopt`. Bytes stand for a stream that is read again, without what it has delivered."""
        super().adopt(worker, logical, unpack_state(state).dataset.skip if isinstance(state, bytes) else state)

    def descriptors(self) -> list[int]:
        """See `WorkerPool.descriptors`: one that is readable always, as `poll` has something always."""
        return [self._bell]

    def poll(self) -> deque[PoolEvent]:
        """See `WorkerPool.poll`."""
        self.start()
        self.work()
        return super().poll()

    def close(self, grace_s: float = 5.0) -> None:
        """See `WorkerPool.close`."""
        super().close(grace_s)
        if self._bell >= 0:
            os.close(self._bell)
        self._bell = -1
