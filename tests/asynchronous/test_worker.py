"""The loop of an asynchronous worker, with a socket of the test and no dataset."""

import asyncio
import socket
from types import SimpleNamespace
from typing import Any

from dpex.pools.local.async_worker import AsyncWorker
from dpex.worker.async_samples import Slots
from tests.asynchronous.works import turn


def test_an_idle_worker_wakes_for_messages_and_one_give_back() -> None:
    here, there = socket.socketpair()
    here.setblocking(False)
    reads: list[bytes | None] = []

    def read() -> None:
        reads.append(None)
        reads[-1] = here.recv(1) or None

    async def serve() -> None:
        loop: Any = asyncio.get_running_loop()
        core = SimpleNamespace(samples=SimpleNamespace(slots=Slots(4)))
        parts: Any = SimpleNamespace(core=core, row=SimpleNamespace(can_hold=True), give_back=lambda: None)
        serving = asyncio.create_task(AsyncWorker(parts, here.fileno(), read, 3600.0)._serve())
        for _ in range(100):
            await turn()
        assert reads == [None]
        assert not loop._ready
        assert len(loop._scheduled) == 1
        there.close()
        assert await serving is False
        assert len(reads) == 2

    asyncio.run(serve())
    here.close()
