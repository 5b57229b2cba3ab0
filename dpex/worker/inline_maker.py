"""Makes the tickets of one iterator under ``seeding="batch"`` in the training process: what they are made with."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from dpex.profile.live_timer import TicketTimer
from dpex.transport.arena import Arena
from dpex.worker.collate import ArenaCollate
from dpex.worker.drawless import draws_nothing
from dpex.worker.fetch import Fetcher
from dpex.worker.in_process import InProcessMaker, Run
from dpex.worker.outcome import Stages
from dpex.worker.own_generators import reseeding
from dpex.worker.setup import WorkerSetup

INLINE_ARENA_BYTES = 1 << 20
"""Batches from this size on are stacked into reused memory when they are made in the training process."""


class InlineMaker:
    """Makes tickets in the training process under ``seeding="batch"``, as a worker would."""

    def __init__(self, setup: WorkerSetup, arena: Arena, timer: TicketTimer, disturbed: Callable[[str], None]) -> None:
        collate_fn = setup.collate_fn
        draws = not draws_nothing(setup.dataset, collate_fn)
        self._process = InProcessMaker(setup.base_seed, setup.modes, disturbed, draws=draws)
        if collate_fn is default_collate:
            collate_fn = ArenaCollate(arena, INLINE_ARENA_BYTES, in_worker=False, threads=self._process.threads)
        fetcher, own = Fetcher(setup, setup.dataset, collate_fn, timer, time.thread_time), setup.own_generators()
        self._fetch, self._unmeasured = reseeding(fetcher.fetch, own), reseeding(fetcher.unmeasured, own)

    def __call__(self, number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
        """The batch and its stage times; errors come as they are."""
        return self._process.make(self._fetch, index, number, epoch)

    def make_run(self, indices: deque[Any], count: int, numbers: tuple[int, int], into: Run) -> None:
        """Batches without stage times, see `InProcessMaker.make_run`."""
        self._process.make_run(self._unmeasured, indices, count, numbers, into)
