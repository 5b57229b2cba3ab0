"""Processes of this machine as the trainer sees them: the workers, and others that it did not fork itself."""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import select
import signal
import socket
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from dpex.pools.local.worker_process import BATCH, END, receive
from dpex.schedule.schedule import Ticket
from dpex.system.clock import monotonic
from dpex.transport.arena import Segment, SegmentSpec, open_segment
from dpex.transport.codec import Decoder
from dpex.worker.fetch import Failure, StreamEnd

UNKNOWN_EXIT = 255
"""The exit code of a child that another caller has reaped, as in `asyncio`, or the kernel, as SIGCHLD is ignored."""
_LOOK_S = 0.001
"""Seconds between two looks at a process that is waited for."""


class ProcessHandle:
    """A process that was forked for the trainer, with an interface like `multiprocessing.Process`.

    ``is_child``: the trainer itself has forked it, and must reap it.
    """

    def __init__(self, name: str, worker: int = -1, pid: int | None = None, *, is_child: bool = False) -> None:
        self.name = name
        self.worker = worker
        self.pid = pid
        self.exitcode: int | None = None
        self.daemon = True
        self._is_child = is_child

    def is_alive(self) -> bool:
        """Return True if the process runs, or is about to."""
        if self.exitcode is None and self.pid is not None:
            return self._reap() if self._is_child else _exists(self.pid)
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended, at most ``timeout`` seconds. One that is about to run is not waited for."""
        deadline = None if timeout is None else monotonic() + timeout
        while self.pid is not None and self.is_alive() and (deadline is None or monotonic() < deadline):
            time.sleep(_LOOK_S)

    def _reap(self) -> bool:
        """Take the exit code of a child that has ended; return True if it has not."""
        try:
            ended, status = os.waitpid(self.pid or 0, os.WNOHANG)
        except ChildProcessError:
            self.exitcode = UNKNOWN_EXIT
        else:
            self.exitcode = os.waitstatus_to_exitcode(status) if ended else None
        return self.exitcode is None

    def terminate(self) -> None:
        """SIGTERM."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.pid is not None and self.exitcode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class LocalWorkerHandle:
    """A worker: its process, its socket, its segments, the tickets it was sent, and its row on the board.

    worker_id: The ``get_worker_info().id`` in a worker of a shared queue: the lowest that was free.
    """

    def __init__(self, number: int, worker_id: int, process: ProcessHandle, sock: socket.socket, row: int) -> None:
        self.number = number
        self.worker_id = worker_id
        self.process = process
        self.socket = sock
        self.row = row
        self.segments: dict[int, Segment] = {}
        self.decoder = Decoder(_without_owning(self.lease))
        self.held: dict[tuple[int, int], Ticket] = {}
        self.leased: dict[tuple[int, int], Any] = {}
        """Slots of the batch that is being decoded: were decoding broken off, they would go back and be overwritten."""
        self.outbox: deque[bytes] = deque()
        """Messages that its full socket did not take. They go before any other message."""
        self.is_up = False
        """It makes batches: it counts as running."""
        self.is_leaving = False
        """It was asked to leave, and finishes what it holds."""
        self.hung_up = False
        """The worker has closed its end of the socket. The template reports how it ended."""
        self.hung: tuple[int, str] | None = None
        """Place in its batch of the sample that takes too long, and the text of the warning; the worker ends for it."""
        self.refused: str | None = None
        """Why the worker ends without having made a batch: its ``worker_init_fn`` failed."""
        self.announces_memory = False
        """The next message brings descriptors: `map_announced` must be called before it is received."""

    def map_announced(self, buffer: memoryview) -> None:
        """Map the segments whose descriptors come with the next message; it may be received then.

        Raises OSError where no descriptor or address space is left for them. The message stays in the socket, so that
        nothing is lost, and can be received once there is room.
        """
        announced = receive(self.socket, buffer[:1], socket.MSG_PEEK)
        if announced is not None:
            self._map(buffer, announced[1])

    def _map(self, buffer: memoryview, fds: list[int]) -> None:
        count = self.socket.recv_into(buffer, 0, socket.MSG_PEEK)
        segments = {}
        try:
            for spec in marshal.loads(buffer[:count])[0][1]:
                segments[spec[0]] = self.open_segment(SegmentSpec(*spec), fds.pop(0))
        except OSError as error:
            kept = f"what worker {self.process.pid} made is kept, and comes once there is room"
            raise OSError(error.errno, f"{error.strerror}; {kept}") from error
        finally:
            for fd in fds:
                os.close(fd)
        self.segments.update(segments)

    def open_segment(self, spec: SegmentSpec, fd: int) -> Segment:
        """Map a segment that the worker announced; the descriptor is closed. Raises OSError."""
        return open_segment(spec, fd)

    def lease(self, segment: int, slot: int, nbytes: int) -> Any:
        """A slot of the result that is being read, as an array; it goes back once that and `leased` are gone."""
        leased, key = self.leased, (segment, slot)
        if key not in leased:  # it goes there without a turn of the interpreter: see `dpex.system.interrupts`
            leased.update(zip((key,), map(self.segments[segment].view, (slot,), (nbytes,)), strict=False))
        return leased[key]


def _without_owning(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that does not keep its object alive, for a part that the object owns.

    Otherwise the two would own each other, and the memory of a worker that has left would stay mapped until Python
    collects garbage, which may take long.
    """
    found = weakref.WeakMethod(method)
    return lambda *arguments: found()(*arguments)  # type: ignore[misc]


class LocalResult:
    """An undecoded result; calling it decodes, a second time it gives None: the memory may be another batch's by then.

    Decoding that an exception broke off can be done again.
    """

    __slots__ = ("_kind", "_node", "_worker")

    def __init__(self, worker: LocalWorkerHandle, kind: int, node: Any) -> None:
        self._worker, self._kind, self._node = worker, kind, node

    def __call__(self) -> Any:
        if self._kind == END:
            return StreamEnd()
        if self._node is None:
            return None
        value = self._worker.decoder.decode(self._node)
        if self._kind != BATCH:
            value = Failure(pickle.loads(value))
        self._node = None  # from here on without a call: see `dpex.system.interrupts`
        self._worker.leased = {}
        return value


def readable_within(fd: int, timeout_s: float | None) -> bool:
    """Return True if a descriptor (of any number, unlike with `select`) turns readable within that time."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s) * 1000))


def how_it_ended(pid: int, code: int) -> str:
    """A sentence for people; the wording of PyTorch where it has one."""
    if code >= 0:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly with exit code {code}"
    try:
        description = signal.strsignal(-code) or signal.Signals(-code).name
    except ValueError:
        description = f"signal {-code}"
    hint = " (the kernel's out-of-memory killer sends this signal too)" if -code == signal.SIGKILL else ""
    return f"DataLoader worker (pid {pid}) is killed by signal: {description}{hint}"
