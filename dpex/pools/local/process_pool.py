"""The worker processes of a local pool, and in which of them a new worker goes.

A process is forked with its one worker, or, where workers may share it, with a control socket over which it is asked
for each (see `worker_threads`).
"""

from __future__ import annotations

from dpex.pools.local.fork_server import private_pair
from dpex.pools.local.handles import LocalWorkerHandle, ProcessHandle, WorkerProcess
from dpex.pools.local.packing import LATER, NEW, Packing
from dpex.pools.local.shared_queue import BOARD_BYTES
from dpex.pools.local.starter import ProcessSource
from dpex.pools.local.worker_threads import ask_for_worker

DREW = (
    "The dataset declares itself thread-safe, but one of its batches moved {generator}, which all threads of a process "
    "share. The batches stay right; but each worker is a process of its own from now on, which takes more memory. Draw "
    "from a generator that is made for the sample, for example numpy.random.default_rng((dpex.batch_seed(), index))."
)
DIED_TOGETHER = (
    "Processes whose threads make batches died repeatedly: each worker is a process of its own from now on, so that "
    "the batch at fault can be told."
)


class WorkerProcesses:
    """``fds`` are what every worker gets: the board, and the shared ticket socket if there is one."""

    def __init__(self, packing: Packing, fds: list[int]) -> None:
        self.packing = packing
        self.processes: dict[int, WorkerProcess] = {}
        self.handles: list[ProcessHandle] = []
        """The latest process at each place, as torch lists its workers; a new one takes the place of one that ended."""
        self._fds = fds
        self._last = -1

    def has_room(self) -> bool:
        """Whether a worker can be placed now; else when `Packing.tried` or `Packing.keep_apart` has been called."""
        return self._choose() != LATER

    def _choose(self) -> int:
        return self.packing.place({p.number: len(p.workers) for p in self.processes.values() if p.takes_more})

    def start(self, worker: int, worker_id: int, row: int, results: int, source: ProcessSource) -> WorkerProcess:
        """The process of a new worker, which gets the descriptor ``results``. One that cannot start is heard of
        there."""
        place = self._choose()
        if place != NEW:
            process = self.processes[place]
            if ask_for_worker(process.control, worker_id, row, results):
                return process
            process.shut()  # its last worker is about to leave
        process = self._new_process(worker)
        if not self.packing.together:
            fds = [results, *self._fds]
            process.handle.name = source.start_process(process.number, "worker", fds, (BOARD_BYTES, worker_id, row))
            return process
        process.control, theirs = private_pair()
        with theirs:
            fds = [theirs.fileno(), *self._fds]
            process.handle.name = source.start_process(process.number, "threads", fds, (BOARD_BYTES,))
        ask_for_worker(process.control, worker_id, row, results)
        return process

    def _new_process(self, worker: int) -> WorkerProcess:
        self._last += 1
        process = self.processes[self._last] = WorkerProcess(self._last, worker)
        for place, former in enumerate(self.handles):
            if former.exitcode is not None:
                self.handles[place] = process.handle
                return process
        self.handles.append(process.handle)
        return process

    def ended(self, number: int, code: int) -> list[LocalWorkerHandle]:
        """A process has ended; returns the workers that were still there."""
        process = self.processes.pop(number)
        process.shut()
        process.handle.exitcode = code
        return list(process.workers.values())

    def close(self) -> None:
        """Idempotent."""
        for process in self.processes.values():
            process.shut()
        self.processes.clear()
