"""Body of a worker process whose workers are threads; see `dpex.worker.threads`.

The main thread owns the control socket, over which the trainer asks for one worker after the other. Each worker has a
thread, a socket, a row on the board and slots of its own, and serves as a worker process does. The process ends with
its last worker: who leaves last closes the control socket for writing, so that either the trainer's request for a
further worker is still read, or the trainer sees that it came too late.

A thread that ends otherwise than by leaving ends the process.
"""

from __future__ import annotations

import marshal
import mmap
import os
import socket
import threading
import traceback
from collections.abc import Callable

from dpex.pools.local.worker_process import LocalWorker, WorkerPlan
from dpex.worker.setup import prepare_process
from dpex.worker.threads import SharedProcessState, ThreadCore, end_process, stack_here

_REQUEST_BYTES = 256
"""Longer than any request for a worker, which is its number and its row."""


def ask_for_worker(control: socket.socket | None, number: int, row: int, results: int) -> bool:
    """The trainer's side: ask a process for a further worker; False if it has ended, or is about to."""
    if control is None:
        return False
    try:
        socket.send_fds(control, [marshal.dumps((number, row))], [results])
    except OSError:
        return False
    return True


def run_threads(open_plan: Callable[[], WorkerPlan], fds: list[int], board_bytes: int) -> None:
    """Process body; ``fds`` are the control socket, the board, and the shared ticket socket."""
    prepare_process()
    board = mmap.mmap(fds[1], board_bytes)
    os.close(fds[1])
    _WorkerThreads(open_plan, socket.socket(fileno=fds[0]), board, socket.socket(fileno=fds[2])).run()


class _WorkerThreads:
    def __init__(
        self, open_plan: Callable[[], WorkerPlan], control: socket.socket, board: mmap.mmap, tickets: socket.socket
    ) -> None:
        self._open_plan = open_plan
        self._control = control
        self._board = board
        self._tickets = tickets
        self._commons: SharedProcessState | None = None
        self._lock = threading.Lock()
        self._running = 0
        self._threads: list[threading.Thread] = []

    def run(self) -> None:
        while True:
            try:
                request, fds, _, _ = socket.recv_fds(self._control, _REQUEST_BYTES, 1)
            except ConnectionResetError:  # the trainer is gone, and had not read everything
                break
            if not request:
                break
            number, row = marshal.loads(request)
            self._start(number, row, socket.socket(fileno=fds[0]))
        for thread in self._threads:
            thread.join()

    def _start(self, number: int, row: int, results: socket.socket) -> None:
        if self._commons is None:
            self._commons = SharedProcessState(self._open_plan().setup, number)
        else:
            self._commons.generators.share()
        with self._lock:
            self._running += 1
        thread = threading.Thread(
            target=self._serve, args=(self._commons, number, row, results), name=f"dpex-worker-{number}"
        )
        self._threads = [other for other in self._threads if other.is_alive()]
        try:
            thread.start()
        except RuntimeError as error:  # the system has no room for another one
            results.send(marshal.dumps((("refused", str(error)), ())))
            results.close()
            with self._lock:
                self._running -= 1
            return
        self._threads.append(thread)

    def _serve(self, commons: SharedProcessState, number: int, row: int, results: socket.socket) -> None:
        def tell(generator: str) -> None:
            results.send(marshal.dumps((("draws", generator), ())))

        try:
            core = ThreadCore(commons, tell)
            worker = LocalWorker(core, True, number, results, self._board, row)
            stack_here(worker.collate)
            try:
                worker.serve(self._tickets)
            finally:
                core.leave()
        except (BrokenPipeError, ConnectionResetError):
            pass  # the trainer is gone, or closed the loader
        except BaseException:
            traceback.print_exc()
            end_process(1)
        results.close()
        with self._lock:
            self._running -= 1
            if not self._running:
                self._control.shutdown(socket.SHUT_RD)
