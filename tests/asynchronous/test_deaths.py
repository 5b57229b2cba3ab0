"""A worker that makes several batches at the same time dies: all of them are lost at once, and made again."""

import asyncio
import os
import signal
from typing import Any

import pytest

from dpex.schedule.events import WorkerGone
from tests.asynchronous.works import Indices, turn
from tests.pools.test_local_pool import driven

pytestmark = pytest.mark.timeout(120)


class Waits(Indices):
    """Samples that never come; sample ``fatal`` ends its worker once four others wait."""

    def __init__(self, fatal: int = -1) -> None:
        super().__init__()
        self.fatal = fatal
        self.open = 0

    async def __getitem__(self, index: int) -> Any:
        self.open += 1
        while index == self.fatal:
            await turn()
            if self.open == 5:
                os.kill(os.getpid(), signal.SIGKILL)
        return await asyncio.get_running_loop().create_future()


def test_a_death_gives_back_all_messages_that_the_worker_held() -> None:
    with driven(1, dataset=Waits()) as driver:
        ((_, worker),) = driver.pool._workers.items()
        driver.send(*range(5))
        driver.listen_until(lambda: len(driver.pool._board.read(worker.row)[0]) == 5)
        os.kill(driver.pids()[0], signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert (sorted(gone.lost), gone.working_on, gone.expected) == ([0, 1, 2, 3, 4], None, False)
        assert not driver.pool._queue.groups  # type: ignore[union-attr]


def test_a_death_in_a_step_names_the_ticket_of_that_step() -> None:
    with driven(1, dataset=Waits(fatal=2)) as driver:
        driver.send(*range(5))
        driver.listen_until(lambda: driver.of(WorkerGone))
        gone = driver.of(WorkerGone)[0]
        assert (sorted(gone.lost), gone.working_on) == ([0, 1, 2, 3, 4], 2)
