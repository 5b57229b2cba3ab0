"""Workers that are threads of the training process: a worker pool of one's own.

    python examples/thread_pool.py

For datasets that wait, for an object store or a database. The threads share the dataset, so it must allow several calls
at once. They share the global random generators, too, so it must not draw from those. A thread cannot be killed: a
sample that hangs keeps its thread, and its batch never comes.
"""

import contextlib
import os
import threading
import time
from collections import deque
from queue import SimpleQueue
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from dpex import DpexDataLoader
from dpex.pools import base


class ThreadPool(base.WorkerPool):
    """Threads that take tickets from one queue. `poll` hands their events to the engine, in the engine's thread."""

    name = "local"

    def __init__(self, setup: base.WorkerSetup, workers: int) -> None:
        self.counts = base.PoolCounts()
        self.times = base.PoolTimes()
        self._setup = setup
        self._epoch = 0
        self._tickets: SimpleQueue[tuple[int, base.Ticket] | None] = SimpleQueue()
        self._threads: dict[int, threading.Thread] = {}
        self._started = 0
        self._happened: deque[base.PoolEvent] = deque()
        self._events: deque[base.PoolEvent] = deque()
        self._lock = threading.Lock()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.resize(workers)

    def resize(self, wanted: int) -> None:
        """Start missing threads. Surplus threads leave once the tickets that were sent before are made."""
        for _ in range(wanted - self.counts.wanted):
            number, self._started = self._started, self._started + 1
            thread = threading.Thread(target=self._serve, args=(number,), name=f"worker-{number}", daemon=True)
            self._threads[number] = thread
            thread.start()
        for _ in range(self.counts.wanted - wanted):
            self._tickets.put(None)
        self.counts.wanted = wanted
        self.counts.requested = self.counts.running = len(self._threads)

    def workers(self) -> list[int]:
        return list(self._threads)[: self.counts.wanted]

    def send(self, tickets: Any, epoch: int, worker: Any = None) -> bool:
        for ticket in tickets:
            self._tickets.put((epoch, ticket))
        return True

    def new_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def descriptors(self) -> list[int]:
        return [self._bell]

    def poll(self) -> deque[base.PoolEvent]:
        with contextlib.suppress(OSError):  # nothing happened, or the pool is closed
            os.eventfd_read(self._bell)
        while self._happened:
            event = self._happened.popleft()
            if isinstance(event, base.TicketMade):
                self.times.count(event.times)
            elif isinstance(event, base.WorkerGone):
                self._threads.pop(event.worker, None)
                self.counts.requested = self.counts.running = len(self._threads)
            self._events.append(event)
        return self._events

    def close(self, grace_s: float) -> None:
        bell, self._bell = self._bell, -1
        if bell < 0:
            return
        self._epoch = -1  # tickets that wait are not made
        deadline = time.monotonic() + grace_s
        for _ in self._threads:
            self._tickets.put(None)
        for thread in self._threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        with self._lock:
            os.close(bell)

    # -- in the threads ------------------------------------------------------------------------------------------

    def _serve(self, number: int) -> None:
        self._tell(base.WorkerUp(self.name, number))
        fetcher = base.Fetcher(self._setup, cpu=time.thread_time)
        while (message := self._tickets.get()) is not None:
            epoch, ticket = message
            if epoch == self._epoch:
                self._make(number, fetcher, epoch, ticket)
        self._tell(base.WorkerGone(self.name, number, self._epoch, (), None, expected=True, why="it left"))

    def _make(self, number: int, fetcher: base.Fetcher, epoch: int, ticket: base.Ticket) -> None:
        batch, times = None, base.BatchTimes()
        try:
            batch, times = fetcher.fetch(ticket.index)
        except Exception:
            batch = base.failure(number)
        self._tell(base.TicketMade(epoch, ticket.number, number, lambda: batch, times=times))

    def _tell(self, event: base.PoolEvent) -> None:
        self._happened.append(event)
        with self._lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)


class ThreadedLoader(DpexDataLoader[Any]):
    local_pool = ThreadPool


def collate_slowly(samples: list[tuple[torch.Tensor]]) -> torch.Tensor:
    time.sleep(0.04)
    return torch.stack([row for (row,) in samples])


def main() -> None:
    options: Any = {"dataset": TensorDataset(torch.arange(400)), "batch_size": 8, "collate_fn": collate_slowly}
    began = time.perf_counter()
    by_torch = list(DataLoader(**options))
    between = time.perf_counter()
    with ThreadedLoader(**options, num_workers=8, seeding="batch") as loader:
        by_threads = list(loader)
    print(f"torch without workers {between - began:.2f} s, 8 threads {time.perf_counter() - between:.2f} s")
    print("the same batches" if all(map(torch.equal, by_torch, by_threads)) else "other batches")


if __name__ == "__main__":
    main()
