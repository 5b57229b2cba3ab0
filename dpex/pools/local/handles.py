"""The trainer's side of its workers: a handle of each worker, and the ticket queue and the board that they share.

The kernel hands each message of the shared socket to exactly one worker. The *board*, shared memory in which each
worker has rows (see `worker_process`), shows which worker has a message. The trainer's own row holds the number of the
first message that is still wanted, and a flag that ends the workers.

A request to leave is a message in the same socket: the worker that takes it leaves.
"""

from __future__ import annotations

import array
import contextlib
import marshal
import mmap
import os
import pickle
import signal
import socket
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dpex.pools.local.fork_server import private_pair
from dpex.pools.local.forking import ProcessHandle
from dpex.pools.local.worker_process import BATCH, BOARD_ROW, CONTROL_ROW, END, IDLE, TICKET_BYTES, receive
from dpex.schedule.schedule import Ticket
from dpex.transport.arena import Segment, SegmentSpec, open_segment
from dpex.transport.codec import Lease, decode
from dpex.transport.memory import memory_file
from dpex.worker.fetch import Failure, StreamEnd

BOARD_ROWS = 4096
"""Maximum number of workers of a pool, plus one for the trainer. No machine can run as many workers."""
BOARD_BYTES = BOARD_ROWS * len(IDLE)
_LEAVE = pickle.dumps(("leave",))
NO_ROOM = (
    "Could not start all of the {wanted} local workers ({why}). Training continues with the workers that run. If a "
    "limit on processes (a container's pids limit, ulimit -u), descriptors (ulimit -n) or memory is reached, raise it, "
    "or request fewer workers."
)
NOT_BEGUN = "{why}. Training continues with the local workers that run. No other is started until resize() asks for it."
_LONGEST_MESSAGE = 100 << 10
"""Bytes above which a message travels in a file. A socket usually holds 208 KB (net.core.wmem_default)."""


class LocalWorkerHandle:
    """A worker: its process, socket and segments, the tickets that it holds, and its first row on the board.

    ``worker_id``: The lowest free number. If tickets are shared, it is ``get_worker_info().id`` in the worker.
    """

    def __init__(self, number: int, worker_id: int, process: ProcessHandle, sock: socket.socket, row: int) -> None:
        self.number = number
        self.worker_id = worker_id
        self.process = process
        self.socket = sock
        self.row = row
        self.segments: dict[int, Segment] = {}
        self.held: dict[tuple[int, int], Ticket] = {}
        self.outbox: deque[bytes] = deque()
        """Messages for which the socket had no room. They are sent before any other message."""
        self.is_up = False
        """The worker takes tickets, so it counts as running."""
        self.has_begun = False
        """The worker has imported the script, unpickled the dataset and run ``worker_init_fn``."""
        self.is_leaving = False
        """The worker was asked to leave, and finishes its tickets."""
        self.hung_up = False
        """The worker has closed its end of the socket. The template reports how it ended."""
        self.hung: tuple[int, str] | None = None
        """Position of the sample whose timeout ends the worker, and the text of the warning."""
        self.refused: str | None = None
        """The error of the user's code that ends the worker before its first batch."""
        self.announces_memory = False
        """True while a message with descriptors is due: call `map_announced` before the next receive."""

    def map_announced(self, buffer: memoryview) -> None:
        """Map the segments whose descriptors come with the next message, if any. The caller then receives the message.

        Raises OSError if no descriptor or address space is left for them. The message then stays in the socket, so that
        nothing is lost, and can be received later.
        """
        announced = receive(self.socket, buffer[:1], socket.MSG_PEEK)
        if announced is not None and announced[1]:
            self._map(buffer, announced[1])

    def _map(self, buffer: memoryview, fds: list[int]) -> None:
        count = self.socket.recv_into(buffer, 0, socket.MSG_PEEK)
        segments = {}
        try:
            for spec in marshal.loads(buffer[:count])[0][1]:
                segments[spec[0]] = self.open_segment(SegmentSpec(*spec), fds.pop(0))
        except OSError as error:
            kept = f"the batches of worker {self.process.pid} are made again after a resume, once there is room"
            raise OSError(error.errno, f"{error.strerror}; {kept}") from error
        finally:
            for fd in fds:
                os.close(fd)
        self.segments.update(segments)

    def open_segment(self, spec: SegmentSpec, fd: int) -> Segment:
        """Map a segment that the worker announced; the descriptor is closed. Raises OSError."""
        return open_segment(spec, fd)

    def lease(self, segment: int, slot: int, nbytes: int) -> Any:
        """Return an array over a slot of the result that is being read. Freeing the array frees the slot."""
        return self.segments[segment].view(slot, nbytes)


class Result:
    """An undecoded result. Call once to decode. Later calls return None, because the slot may have been reused.

    ``lease`` returns a view of a slot.
    """

    __slots__ = ("_kind", "_lease", "_node")

    def __init__(self, lease: Lease, kind: int, node: Any) -> None:
        self._lease, self._kind, self._node = lease, kind, node

    def __call__(self) -> Any:
        if self._kind == END:
            return StreamEnd()
        if self._node is None:
            return None
        node, self._node = self._node, None
        value = decode(node, self._lease)
        return value if self._kind == BATCH else Failure(pickle.loads(value))


def how_it_ended(pid: int, code: int) -> str:
    """Return a sentence for the user, in PyTorch's words if PyTorch has such a sentence."""
    if code >= 0:
        return f"DataLoader worker (pid(s) {pid}) exited unexpectedly with exit code {code}"
    try:
        description = signal.strsignal(-code) or signal.Signals(-code).name
    except ValueError:
        description = f"signal {-code}"
    hint = " (the kernel's out-of-memory killer sends this signal too)" if -code == signal.SIGKILL else ""
    return f"DataLoader worker (pid {pid}) is killed by signal: {description}{hint}"


# -- messages ----------------------------------------------------------------------------------------------------------


class Board:
    """The shared memory in which workers write their messages and current tickets. A row is named by its offset."""

    def __init__(self) -> None:
        self.fd: int = memory_file("dpex-board", BOARD_BYTES)
        self._memory = mmap.mmap(self.fd, BOARD_BYTES)
        self._free = deque(range(CONTROL_ROW + len(IDLE), BOARD_BYTES, len(IDLE)))
        self._wanted_from = 0

    def take_row(self) -> int:
        """Give a new worker the rows that have been free longest; return the offset of the first of them."""
        row = self._free.popleft()
        self._memory[row : row + len(IDLE)] = IDLE
        return row

    def give_row(self, row: int) -> None:
        self._free.append(row)

    def read(self, row: int) -> tuple[list[int], int | None]:
        """Return the messages that a worker holds, and the number of its current ticket or None."""
        rows = list(BOARD_ROW.iter_unpack(self._memory[row : row + len(IDLE)]))
        return [group for group, _ in rows if group], rows[0][1] - 1 if rows[0][1] else None

    def want_from(self, group: int) -> None:
        """Tell workers not to make tickets of messages before ``group`` any more."""
        self._wanted_from = group
        BOARD_ROW.pack_into(self._memory, CONTROL_ROW, 0, group)

    def end(self) -> None:
        """Tell every worker to end before its next ticket."""
        BOARD_ROW.pack_into(self._memory, CONTROL_ROW, 1, self._wanted_from)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class TicketQueue:
    """The socket that all workers read.

    ``groups``: epoch and tickets of each message that is not known to be done, by the message's number. ``leaves``:
    count of requests to leave that no worker has answered.
    """

    def __init__(self) -> None:
        self.socket: socket.socket
        self.socket, self._theirs = private_pair()
        self.reading_end: int = self._theirs.fileno()
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self.groups: dict[int, tuple[int, list[Ticket]]] = {}
        self.leaves: int = 0

    def send(self, group: int, epoch: int, tickets: list[Ticket], data: bytes) -> bool:
        """Queue a message of tickets; return False if the socket is full."""
        if not write(self.socket, data):
            return False
        self.groups[group] = epoch, tickets
        return True

    def ask_to_leave(self, count: int) -> bool:
        """Ask ``count`` workers to leave. Return False if the socket is full; the caller repeats the rest later."""
        for _ in range(count):
            if not write(self.socket, _LEAVE):
                return False
            self.leaves += 1
        return True

    def drain(self) -> None:
        """Drop all messages that no worker has taken."""
        with contextlib.suppress(BlockingIOError):
            while received := receive(self._theirs, self._buffer, socket.MSG_DONTWAIT):
                for fd in received[1]:
                    os.close(fd)
        self.leaves = 0

    def close(self) -> None:
        self.socket.close()
        self._theirs.close()


def hang_up(sock: socket.socket) -> None:
    """Make the other end read the end of the stream. Harmless if the other end is gone."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def write(sock: socket.socket, data: bytes) -> bool:
    """Send one message without blocking; return False if the socket is full.

    A message to a reader that has ended counts as sent, because the tickets in it come back as lost.
    """
    if sock.fileno() < 0:
        return True
    try:
        if len(data) <= _LONGEST_MESSAGE:
            sock.send(data)
        else:
            _send_as_file(sock, data)
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        return True
    return True


def _send_as_file(sock: socket.socket, data: bytes) -> None:
    fd = memory_file("dpex-tickets")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sock.sendmsg([b"f"], ancillary)
    finally:
        os.close(fd)


def pack(message: Any) -> bytes:
    """Pickle a message. Use torch's reducers only if plain pickle fails, because they are slower."""
    try:
        return pickle.dumps(message, 5)
    except Exception:
        return bytes(ForkingPickler.dumps(message, 5))
