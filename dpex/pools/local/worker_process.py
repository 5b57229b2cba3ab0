"""Body of a local worker process. It receives tickets by a socket, and sends batches by a socket and shared memory.

Descriptors of new memory travel in a message of their own, ``("segments", specs)``. A message ``("coming",)`` precedes
it, so that the trainer can map the memory before it receives the message. After "coming" the trainer looks for
descriptors in each message until "segments", because a notice may come between the two.

Tickets come from one of two sockets. With logical workers each process has its own. Otherwise all processes read one
shared socket, a queue without locks or threads: the kernel hands each message to exactly one reader. Before a process
works on a message, it writes the message's number into shared memory, the *board*, so that the trainer knows the
tickets of a killed worker.
"""

from __future__ import annotations

import array
import contextlib
import errno
import marshal
import mmap
import os
import pickle
import resource
import select
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dpex._torch import ExceptionWrapper
from dpex.measure.batch_times import BatchTimes, encoded_times
from dpex.measure.sampling import as_text
from dpex.schedule.progress import START
from dpex.system.clock import monotonic
from dpex.transport.arena import Arena, SegmentSpec
from dpex.transport.codec import INLINE_BYTES, Encoder
from dpex.transport.memory import trim_heap
from dpex.transport.pickling import cloud_dumps, dump_batch, dump_error, dump_remote
from dpex.worker.batch_seeding import current
from dpex.worker.core import WorkerCore
from dpex.worker.fetch import ArenaCollate, Failure, SampledCpu, StreamEnd, where
from dpex.worker.sample_guard import begin_watch
from dpex.worker.setup import WorkerSetup, keep_for, prepare_process
from dpex.worker.states import SnapshotPace

TICKET_BYTES = 1 << 18
"""Maximum bytes of a ticket or result message. A longer message uses a file or a slot."""
_RESULT_BYTES = 48 << 10
"""Bytes above which a result goes through a slot, and above which collected results are sent at once."""
_ERROR_END = 8000
"""Characters from the end of an error's text that are sent if the error itself cannot be sent."""
IDLE_S = 0.4
"""Seconds without a message, after which a worker gives back the memory of free slots and of freed samples. When
messages are that rare, the page faults of the next batch cost little compared with a training step."""
_FLUSH_S = 0.001
"""Maximum seconds for which results of tiny batches are collected, so that one message carries several."""
_TOO_MANY = (
    "A worker cannot send the memory of a batch: sockets of this user hold more unread file descriptors than the limit "
    "of {limit} allows. The worker waits until training processes read theirs. Raise the limit (ulimit -n)"
)
_PATIENCE_S = 5.0
"""Seconds of waiting before `_TOO_MANY` is shown. A training process that is only late ends the wait earlier."""
_LOOK_S = 0.01
"""Seconds between two attempts to send descriptors."""
BOARD_ROW = struct.Struct("<QQ")
"""A row of a worker: number of a message that it holds, and 1 + the ticket that it works on (0: none)."""
ROWS = 32
"""Rows of a worker. A worker that makes several batches at the same time writes each message into a row of its own, and
the ticket that it works on into the first row."""
CONTROL_ROW = 0
"""Row of the trainer: 1 once the workers must end, else 0; and the number of the first message that is still wanted."""
_MESSAGE_BYTES = 96 << 10
"""Longest message that goes through the socket, which takes 208 KiB by default (net.core.wmem_default). A longer one,
such as the state of a large dataset, goes through the arena."""
_CANNOT_TELL = (
    "state_dict() of the dataset failed, so its state is not kept. A later run makes the earlier batches again, and "
    "streams stay where they are"
)
IDLE = bytes(ROWS * BOARD_ROW.size)
NO_GROUP = 0
"""The argument of `LocalWorker.flush` for a message in progress, in place of the number of a finished message."""

BATCH, ERROR, END = 0, 1, 2

fd_array_bytes: int = socket.CMSG_LEN(64 * array.array("i").itemsize)


@dataclass(frozen=True)
class WorkerPlan:
    """The plan of every worker of a pool.

    ``shared_queue``: tickets come from the shared socket. ``remote``: the trainer is on another machine, so classes and
    functions that it cannot import are pickled by value.
    """

    setup: WorkerSetup
    shared_queue: bool
    remote: bool = False


def receive(sock: socket.socket, buffer: memoryview, flags: int = 0) -> tuple[memoryview, list[int]] | None:
    """Return a message and its descriptors, or None at the end of the stream.

    Raises OSError if this process has too few free descriptors for those in the message. The kernel has then dropped
    some. With ``MSG_PEEK`` among the ``flags`` the message can be read again.
    """
    count, ancillary, told, _ = sock.recvmsg_into([buffer], fd_array_bytes, flags)
    if not count:
        return None
    fds: list[int] = []
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            numbers = array.array("i")
            numbers.frombytes(data[: len(data) - len(data) % numbers.itemsize])
            fds += numbers
    if told & socket.MSG_CTRUNC:
        for fd in fds:
            os.close(fd)
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: raise the limit (ulimit -n), or close some")
    return buffer[:count], fds


def read_ticket_message(view: memoryview, fds: list[int]) -> Any:
    """Unpickle a message of the trainer. A long message is in a file, whose descriptor is in ``fds``."""
    if not fds:
        return pickle.loads(view)
    with os.fdopen(fds[0], "rb", closefd=True) as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
        return pickle.loads(memory)


class BoardRow:
    """A worker's view of the board: its own rows and the trainer's row. ``row``: the offset of its first row."""

    def __init__(self, board: mmap.mmap, row: int) -> None:
        self._board = board
        self._row = row
        self._free = list(range(row + BOARD_ROW.size, row + len(IDLE), BOARD_ROW.size))

    def begin(self, group: int, number: int) -> None:
        BOARD_ROW.pack_into(self._board, self._row, group, number + 1)

    @property
    def can_hold(self) -> bool:
        return bool(self._free)

    def hold(self, group: int) -> int:
        row = self._free.pop()
        BOARD_ROW.pack_into(self._board, row, group, 0)
        return row

    def show(self, number: int | None) -> None:
        """Write the current ticket into the first row, without a message. None: the worker waits."""
        BOARD_ROW.pack_into(self._board, self._row, 0, 0 if number is None else number + 1)

    def release(self, row: int) -> None:
        BOARD_ROW.pack_into(self._board, row, 0, 0)
        self._free.append(row)

    def check_open(self) -> None:
        """Raise BrokenPipeError if workers are to end before their next ticket."""
        if self._board[CONTROL_ROW]:
            raise BrokenPipeError("the trainer closed the loader")

    def wanted_from(self) -> int:
        return int(BOARD_ROW.unpack_from(self._board, CONTROL_ROW)[1])


class LocalWorker:
    """Serves tickets until its socket ends or it is asked to leave."""

    def __init__(self, plan: WorkerPlan, worker: int, results: socket.socket, row: BoardRow) -> None:
        self.number: int = worker
        self._results = results
        self.row: BoardRow = row
        self._segments: list[SegmentSpec] = []
        self._fds: list[int] = []
        self._arena = Arena(self._announce)
        self._encoder = Encoder(self._arena, dump_remote if plan.remote else dump_batch)
        self._dump_error = partial(cloud_dumps, remote=True) if plan.remote else dump_error
        self.core: WorkerCore = WorkerCore(plan.setup, worker)
        self._shared_queue = plan.shared_queue
        self.collate: ArenaCollate = ArenaCollate(self._arena, INLINE_BYTES, in_worker=True)
        self._out: list[tuple[Any, ...]] = []
        self._out_bytes = 0
        self._largest = 0
        """Bytes of the largest batch so far."""
        self._flushed = 0.0
        self._cpu = SampledCpu(time.process_time)
        self._snapshots = SnapshotPace(self.core.setup.snapshot_every)
        self._has_stream_ended = False
        self._cannot_tell = False
        self._latest: dict[int, tuple[int, int]] = {}
        """Epoch and number of the latest ticket of each logical worker since this process adopted it."""

    def serve(self, tickets: socket.socket) -> None:
        if (timeout_s := self.core.setup.samples.timeout_s) is not None:
            begin_watch(timeout_s, partial(self._hangs, timeout_s))
        if self._shared_queue:
            self.core.adopt(self.number)
            if why := self.core.unfit(self.number):
                self._send(("refused", why))
                return
            self._send(("begun",))
        self._send(("serving", os.getpid()))
        buffer = memoryview(mmap.mmap(-1, TICKET_BYTES))  # only its used pages take memory
        tickets.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, int(IDLE_S * 1e6)))
        while True:
            if self._shared_queue and self.core.samples is not None:
                self._serve_several(tickets, buffer)
                return
            try:
                received = receive(tickets, buffer)
            except BlockingIOError:
                self.give_back()
                poller = select.poll()
                poller.register(tickets, select.POLLIN)
                poller.poll()
                continue
            if received is None:
                return
            message = read_ticket_message(*received)
            del received
            if message[0] == "tickets":
                self._group(*message[1:])
            elif message[0] == "adopt":
                self._adopt(*message[1:])
            elif message[0] == "ask_state":
                self._ask_state(message[1])
            elif message[0] == "leave":
                self._send(("bye",))
                return

    def _serve_several(self, tickets: socket.socket, buffer: memoryview) -> None:
        """Serve an asynchronous dataset, making several batches at the same time."""
        from dpex.pools.local.async_worker import AsyncWorker

        def read() -> Any:
            received = receive(tickets, buffer, socket.MSG_DONTWAIT)
            return None if received is None else read_ticket_message(*received)

        if AsyncWorker(self, tickets.fileno(), read, IDLE_S).serve():
            self._send(("bye",))

    def give_back(self) -> None:
        """Give unused memory back to the system. Called when no message has come for a while."""
        self._arena.release_free_pages()
        trim_heap()

    def _hangs(self, timeout_s: float, place: int, index: Any, stack: str) -> None:
        """Report a sample that takes too long. The watching thread calls this, and then ends the process."""
        what = f"loading sample {as_text(index)} took longer than timeout_s={timeout_s:g} of the SamplePolicy"
        why = f"worker {os.getpid()} was ended, as {what}\nIt was here:\n{stack}"
        self._results.send(marshal.dumps((("hung", place, why), ())))

    def _adopt(self, logical: int, state: bytes | None) -> None:
        self.core.adopt(logical, state)
        self._send(("begun",))
        self._latest.pop(logical, None)
        if state is not None:
            return
        if self.core.setup.iterable:
            if self.core.logicals[logical].has_dataset_state:
                self._send(("snapshot", logical, *START, None))  # None: the state at the start; a run can resume there
        elif self.core.logicals[logical].own:  # a later run cannot recreate the generators' first states
            self._tell_state(logical, *START)

    def _ask_state(self, logical: int) -> None:
        """Report the state of a dataset now, and include it in all later snapshots.

        A dataset that was given a state and has made no batch since is not asked, because it may apply the state only
        in ``__iter__``, and would report its former state until then. The trainer has the given state.
        """
        if self.core.logicals[logical].is_asked and logical not in self._latest:
            return
        self.core.logicals[logical].is_asked = True
        if not self.core.setup.iterable or self.core.logicals[logical].has_dataset_state:
            self._tell_state(logical, *self._latest.get(logical, START))

    def _group(self, group: int, epoch: int, logical: int, tickets: list[tuple[int, Any]]) -> None:
        logical = self.number if self._shared_queue else logical
        wanted_from = self.row.wanted_from() if self._shared_queue else 0
        last, count = tickets[-1][0], len(tickets)
        for number, index in tickets:
            self.row.check_open()
            if group < wanted_from:
                break
            self.row.begin(group, number)
            now = self._make(epoch, number, index, logical)
            del index
            if number != last and (now - self._flushed > _FLUSH_S or self._out_bytes > _RESULT_BYTES):
                self.flush(NO_GROUP)
        tickets.clear()
        self.flush(group)
        if not self._shared_queue:
            self._latest[logical] = epoch, last
            if self._snapshots.is_due(logical, count) or self._has_stream_ended:
                self._has_stream_ended = False
                self._tell_state(logical, epoch, last)
        self.row.show(None)

    def _make(self, epoch: int, number: int, index: Any, logical: int) -> float:
        """Make a ticket, and keep its result until the next flush; return the present time."""
        entered = self._cpu.begin()
        made, times = self.core.make(number, index, logical, epoch)
        return self.keep(epoch, number, made, times, logical, lambda now: self._cpu.end(now - entered))

    def keep(
        self, epoch: int, number: int, made: Any, times: BatchTimes, logical: int, cpu_s: Callable[[float], float]
    ) -> float:
        """Encode a result, and keep it until the next flush; return the present time.

        ``cpu_s(now)`` returns the CPU seconds of the ticket, which ended at the time ``now``.
        """
        began = monotonic()
        kind, node = self._encoded(made, logical)
        nbytes = self._encoder.nbytes
        if nbytes > self._largest:
            self._largest = nbytes
            keep_for(nbytes)
        now = monotonic()
        sent = encoded_times(times, encode_s=now - began, cpu_s=cpu_s(now), nbytes=nbytes, ended_at=now)
        self._out.append((epoch, number, kind, node, sent))
        return now

    def _encoded(self, made: Any, logical: int) -> tuple[int, Any]:
        if isinstance(made, StreamEnd):
            self._has_stream_ended = True
            return END, None
        if isinstance(made, Failure):
            return ERROR, self._error(made.wrapper)
        try:
            return BATCH, self._fitting(made)
        except Exception:
            return ERROR, self._error(ExceptionWrapper(where=where(logical)))

    def _fitting(self, made: Any) -> Any:
        """Encode a batch; one that is too long for a message goes into a slot."""
        node = self._encoder.encode(made)
        size = len(marshal.dumps(node)) if node[0] not in (1, 2) else 0
        if size > _RESULT_BYTES:
            return self._encoder.spill(node)
        self._out_bytes += size or 256
        if node[0] == 1:
            self._out_bytes += len(node[1])
        return node

    def _error(self, wrapper: ExceptionWrapper) -> Any:
        """Encode an error. If it cannot be pickled, or memory is short, only the end of its text is sent."""
        try:
            return self._fitting(self._dump_error(wrapper))
        except Exception:
            text = f"{wrapper.exc_type.__name__} (it cannot be sent as it is)\n{wrapper.exc_msg[-_ERROR_END:]}"
            return self._fitting(dump_error(ExceptionWrapper((RuntimeError, RuntimeError(text), None), wrapper.where)))

    def _tell_state(self, logical: int, epoch: int, number: int) -> None:
        """Send the state of a logical worker after ticket ``number``, if the dataset can report it."""
        if self._cannot_tell:
            return
        began = monotonic()
        try:
            state = self.core.snapshot(logical)
        except Exception as error:
            self._cannot_tell = True
            self._send(("notice", f"{_CANNOT_TELL}: {error!r}", True, _CANNOT_TELL))
            return
        if state is not None:
            self._send(("snapshot", logical, epoch, number, state))
        self._snapshots.took(monotonic() - began)

    def _announce(self, spec: SegmentSpec, fd: int) -> None:
        self._segments.append(spec)
        self._fds.append(fd)
        if len(self._fds) == 32:
            self._send_segments()

    def flush(self, group: int) -> None:
        """Send the kept results. ``group``: Number of the message of tickets that is now finished, or `NO_GROUP`."""
        out, self._out = self._out, []
        self._out_bytes = 0
        if out or (group and self._shared_queue):
            self._send(("made", group, out))
        self._flushed = monotonic()

    def _send(self, message: tuple[Any, ...]) -> None:
        retired = self._arena.retired()
        data = marshal.dumps((message, retired))
        if len(data) > _MESSAGE_BYTES:
            _, (_, *place) = self._encoder.spill(message)
            data = marshal.dumps((("spilled", *place), [*retired, *self._arena.retired()]))
        if self._fds:
            self._send_segments()
        self._results.send(data)

    def _send_segments(self) -> None:
        self._results.send(marshal.dumps((("coming",), ())))
        data = marshal.dumps((("segments", [tuple(spec) for spec in self._segments]), ()))
        began, is_told = monotonic(), False
        while not self._has_sent(data, self._fds):
            if not is_told and monotonic() - began > _PATIENCE_S:
                limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
                self._results.send(marshal.dumps((("notice", _TOO_MANY.format(limit=limit), True, _TOO_MANY), ())))
                is_told = True
            time.sleep(_LOOK_S)
        for fd in self._fds:
            os.close(fd)
        self._segments, self._fds = [], []

    def _has_sent(self, data: bytes, fds: list[int]) -> bool:
        """Send a message with descriptors; return False if sockets hold too many unread descriptors of this user."""
        try:
            socket.send_fds(self._results, [data], fds)
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:
                raise
            return False
        return True


def run_worker(open_plan: Callable[[], WorkerPlan], fds: list[int], board_bytes: int, worker: int, row: int) -> None:
    """Process body; ``fds`` are the worker's own socket, the board, and the shared ticket socket if there is one."""
    prepare_process()
    results = socket.socket(fileno=fds[0])
    board = mmap.mmap(fds[1], board_bytes)
    os.close(fds[1])
    tickets = socket.socket(fileno=fds[2]) if len(fds) > 2 else results
    gone = (BrokenPipeError, ConnectionResetError)  # the training process has ended, or closed the loader
    with results, tickets, contextlib.suppress(*gone):
        try:
            plan = open_plan()
        except Exception:  # raised by the user's script or dataset
            why = f"a worker failed before its first batch:\n{traceback.format_exc().strip()[-_ERROR_END:]}"
            results.send(marshal.dumps((("refused", why), ())))
            return
        current.seed, current.is_per_batch = None, plan.setup.per_batch_seed
        local_worker = LocalWorker(plan, worker, results, BoardRow(board, row))
        local_worker.collate.install()
        try:
            local_worker.serve(tickets)
        finally:
            if (loops := sys.modules.get("dpex.worker.async_loop")) is not None:
                loops.close_loop_of_process()  # which awaits ``aclose()`` of asynchronous datasets
