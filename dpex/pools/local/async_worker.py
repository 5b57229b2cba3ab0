"""The loop of a worker whose dataset is asynchronous: it makes several batches at the same time.

The worker takes a message of tickets while fewer than ``WorkerConfig.concurrency`` samples wait or are being loaded. So
a batch that waits for its last sample occupies the slot of one sample, not of a batch. Each message in progress has a
row on the board.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

from dpex.worker.async_loop import loop_of_process


class SendsBatches(Protocol):
    """The part of a worker process (`dpex.pools.local.worker_process.LocalWorker`) that its loop uses."""

    core: Any
    row: Any
    number: int

    def keep(self, epoch: int, number: int, made: Any, times: Any, logical: int, cpu_s: Any, /) -> float: ...

    def flush(self, group: int, /) -> None: ...

    def give_back(self) -> None: ...


class AsyncWorker:
    """Serves tickets until its socket ends or it is asked to leave.

    ``read`` returns the next message, or None at the end of the socket. It raises BlockingIOError instead of waiting.
    ``tickets`` is the descriptor of this socket, which other workers read, too. After ``idle_s`` without a message the
    worker gives memory back.
    """

    def __init__(self, worker: SendsBatches, tickets: int, read: Callable[[], Any], idle_s: float) -> None:
        self._worker, self._core, self._row = worker, worker.core, worker.row
        self._tickets, self._read, self._idle_s = tickets, read, idle_s
        self._under_way: set[asyncio.Task[None]] = set()
        self._broken: BaseException | None = None
        """The error with which the worker ends: the training process has ended, or closed the loader."""
        self._has_news: asyncio.Event

    def serve(self) -> bool:
        """Serve; return True once the worker was asked to leave, and False at the end of the socket."""
        loop = loop_of_process()
        loop.show_tickets(self._row.show)
        return bool(loop.run(self._serve()))

    async def _serve(self) -> bool:
        self._has_news = asyncio.Event()
        is_leaving = False
        while self._broken is None:
            if not await self._has_room():
                continue
            try:
                message = self._read()
            except BlockingIOError:
                await self._message()
                continue
            if message is None or message[0] == "leave":
                is_leaving = message is not None
                break
            self._begin(*message[1:])
            del message
            await asyncio.sleep(0)  # starts the tasks, so that their samples count as open
        return await self._end(is_leaving=is_leaving)

    async def _has_room(self) -> bool:
        """Return True if another message can be taken. Otherwise wait for an event that may change this, and return
        False."""
        samples = self._core.samples
        assert samples is not None
        if self._row.can_hold and samples.slots.open < samples.slots.most:
            return True
        samples.slots.on_room = self._has_news.set
        self._has_news.clear()
        await self._has_news.wait()
        return False

    async def _message(self) -> None:
        """Wait until a message has arrived, which another worker may take first, or until a ticket is done."""
        loop, fd = asyncio.get_running_loop(), self._tickets
        idle = None if self._under_way else loop.call_later(self._idle_s, self._worker.give_back)
        self._has_news.clear()
        loop.add_reader(fd, self._has_news.set)
        try:
            await self._has_news.wait()
        finally:
            loop.remove_reader(fd)
            if idle is not None:
                idle.cancel()

    def _begin(self, group: int, epoch: int, _: int, tickets: list[tuple[int, Any]]) -> None:
        if group < self._row.wanted_from():
            self._worker.flush(group)
            return
        row, left = self._row.hold(group), [len(tickets)]
        for number, index in tickets:
            task = asyncio.get_running_loop().create_task(self._make(row, group, epoch, number, index, left))
            self._under_way.add(task)
            task.add_done_callback(self._made)

    async def _make(self, row: int, group: int, epoch: int, number: int, index: Any, left: list[int]) -> None:
        """Make a ticket of a message. ``left[0]``: count of its tickets that are not made yet."""
        self._row.check_open()
        made, times = await self._core.make_beside(number, index, epoch)
        worker, began = self._worker, time.process_time()
        worker.keep(epoch, number, made, times, worker.number, lambda _: times.cpu_s + time.process_time() - began)
        if self._core.samples is not None:
            self._core.samples.cpu_since = time.process_time()
        left[0] -= 1
        self._worker.flush(0 if left[0] else group)
        if not left[0]:
            self._row.release(row)

    def _made(self, task: asyncio.Task[None]) -> None:
        self._under_way.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = self._broken or task.exception()
        self._has_news.set()

    async def _end(self, *, is_leaving: bool) -> bool:
        """Finish the batches under way if the worker was asked to leave; else cancel them."""
        if not is_leaving:
            loop_of_process().is_ending = True
            for task in self._under_way:
                task.cancel()
        if self._under_way:
            await asyncio.wait(self._under_way)
        loop_of_process().is_ending = False
        if self._broken is not None:
            raise self._broken
        return is_leaving
