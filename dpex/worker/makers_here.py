"""What makes batches of one iterator in the training process; each maker is made when it is first needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.profile.live_timer import TicketTimer
from dpex.transport.arena import Arena
from dpex.worker.in_process import Run
from dpex.worker.inline_maker import InlineMaker
from dpex.worker.outcome import Stages
from dpex.worker.setup import WorkerSetup
from dpex.worker.stand_in import StandIn


class MakersHere:
    """See the module; used by the consumer's thread.

    Args:
        setup: of the workers.
        timer: says of which batches single steps are timed.
        disturbed: is told the name of a thread that may have moved the random generators.
    """

    def __init__(self, setup: WorkerSetup, timer: TicketTimer, disturbed: Callable[[str], None]) -> None:
        self._setup = setup
        self._timer = timer
        self._disturbed = disturbed
        self._inline: InlineMaker | None = None
        self._stand_in: StandIn | None = None

    def make(self, number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
        """See `InlineMaker`; for ``seeding="batch"``."""
        inline = self._inline
        if inline is None:
            inline = self._inline = InlineMaker(self._setup, Arena(shared=False), self._timer, self._disturbed)
        return inline(number, index, epoch)

    def make_run(self, indices: deque[Any], count: int, numbers: tuple[int, int], into: Run) -> None:
        """See `InlineMaker.make_run`; after a first batch by `make`."""
        self._inline.make_run(indices, count, numbers, into)  # type: ignore[union-attr]

    def make_stand_in(self, logical: int, number: int, index: Any, epoch: int) -> tuple[Any, Stages]:
        """See `StandIn.make`; for ``seeding="worker"``."""
        if self._stand_in is None:
            self._stand_in = StandIn(self._setup)
        return self._stand_in.make(logical, number, index, epoch)

    def stop_standing_in(self) -> None:
        """Give back what standing in takes."""
        self._stand_in = None
