"""Messages to workers, and what all workers of a pool share: the socket they take tickets from, and the board.

The kernel hands each message of the shared socket to exactly one worker. The *board* shows which one has it: a page of
shared memory where each worker has a row (see `worker_process`). The trainer's own row holds the first message that is
still wanted, and shows when to end.

A request to leave is a message in the same socket: the worker that takes it leaves.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import pickle
import socket
import termios
from collections import deque
from multiprocessing.reduction import ForkingPickler
from typing import Any

from dpex.pools.local.fork_server import private_pair
from dpex.pools.local.worker_process import BOARD_ROW, CONTROL_ROW, IDLE, TICKET_BYTES, receive
from dpex.schedule.schedule import Ticket

BOARD_ROWS = 4096
"""As many workers as a pool may have at once, and more than a machine can run."""
BOARD_BYTES = BOARD_ROWS * BOARD_ROW.size
LEAVE = pickle.dumps(("leave",))
_LONGEST_MESSAGE = 100 << 10
"""Bytes; a longer one goes as a file. A socket usually holds 208 KB (net.core.wmem_default), bookkeeping included."""


class Board:
    """The page of shared memory on which workers write their current ticket. A row is named by its offset."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("dpex-board")
        os.ftruncate(self.fd, BOARD_BYTES)
        self._memory = mmap.mmap(self.fd, BOARD_BYTES)
        self._free = deque(range(CONTROL_ROW + BOARD_ROW.size, BOARD_BYTES, BOARD_ROW.size))
        self._wanted_from = 0

    def take_row(self) -> int:
        """A row for a new worker; the one that has been free for longest."""
        row = self._free.popleft()
        BOARD_ROW.pack_into(self._memory, row, *IDLE)
        return row

    def give_row(self, row: int) -> None:
        """Take back the row of a worker that has ended."""
        self._free.append(row)

    def read(self, row: int) -> tuple[int, int | None]:
        """The message a worker works on (0: none), and the number of the ticket in it."""
        group, working_on = BOARD_ROW.unpack_from(self._memory, row)
        return group, working_on - 1 if working_on else None

    def is_idle(self, row: int) -> bool:
        """Return True if that worker waits for a message, or has just taken one."""
        return BOARD_ROW.unpack_from(self._memory, row) == IDLE

    def want_from(self, group: int) -> None:
        """Tickets of messages before ``group`` are not made any more."""
        self._wanted_from = group
        BOARD_ROW.pack_into(self._memory, CONTROL_ROW, 0, group)

    def end(self) -> None:
        """Every worker ends before its next ticket."""
        BOARD_ROW.pack_into(self._memory, CONTROL_ROW, 1, self._wanted_from)

    def close(self) -> None:
        """Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class TicketQueue:
    """The socket that all workers read.

    ``groups`` are the epochs and tickets of messages not yet known to be done, by number; ``leaves`` counts requests to
    leave that no worker is known to have followed.
    """

    def __init__(self) -> None:
        self._ours, self._theirs = private_pair()
        self._buffer = memoryview(bytearray(TICKET_BYTES))
        self.groups: dict[int, tuple[int, list[Ticket]]] = {}
        self.leaves = 0

    @property
    def reading_end(self) -> int:
        """The descriptor that every worker gets."""
        return self._theirs.fileno()

    def send(self, group: int, epoch: int, tickets: list[Ticket], data: bytes, sent: list[Any]) -> None:
        """Queue a message of tickets; nothing is in ``sent`` if the socket is full."""
        self.groups[group] = epoch, tickets
        write(self._ours, data, sent)
        if not sent:
            del self.groups[group]

    def ask_to_leave(self, count: int) -> bool:
        """Let that many workers leave; False if the socket is full: ask for the rest later."""
        for _ in range(count):
            if not write(self._ours, LEAVE, []):
                return False
            self.leaves += 1
        return True

    def is_empty(self) -> bool:
        """Return True if workers have taken all messages (SIOCOUTQ: bytes that the other end has not read)."""
        number = array.array("i", [0])
        fcntl.ioctl(self._ours.fileno(), termios.TIOCOUTQ, number)
        return number[0] == 0

    def drop_before(self, epoch: int, group: int) -> int:
        """Forget the messages of epochs before ``epoch``. Return the first message that is left, or else ``group``."""
        self.groups = {number: held for number, held in self.groups.items() if held[0] >= epoch}
        return min(self.groups, default=group)

    def forget(self) -> dict[int, tuple[int, ...]]:
        """Return the numbers of all tickets that are out, by epoch; no request to leave is out either.

        For when no worker holds any.
        """
        with contextlib.suppress(BlockingIOError):
            while received := receive(self._theirs, self._buffer, socket.MSG_DONTWAIT):
                for fd in received[1]:
                    os.close(fd)
        self.leaves = 0
        lost: dict[int, tuple[int, ...]] = {}
        for epoch, tickets in self.groups.values():
            lost[epoch] = lost.get(epoch, ()) + tuple(ticket.number for ticket in tickets)
        self.groups.clear()
        return lost

    def shut_down(self) -> None:
        """Wake every worker that waits for a message: none will follow."""
        hang_up(self._ours)

    def close(self) -> None:
        """Idempotent."""
        self._ours.close()
        self._theirs.close()


def hang_up(sock: socket.socket) -> None:
    """Let the other end read the end of the stream; harmless if it is gone."""
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def write(sock: socket.socket, data: bytes, sent: list[Any]) -> bool:
    """Send one message without blocking; False, and nothing in ``sent``, if the socket is full.

    What goes to a reader who is gone counts as sent: its tickets come back as lost.
    """
    if sock.fileno() < 0:
        sent += (0,)
        return True
    try:
        if len(data) <= _LONGEST_MESSAGE:
            sent.extend(map(sock.send, (data,)))  # see `dpex.system.interrupts`
        else:
            _send_as_file(sock, data, sent)
    except BlockingIOError:
        return False
    except (BrokenPipeError, ConnectionResetError):
        sent += (0,)
    return True


def _send_as_file(sock: socket.socket, data: bytes, sent: list[Any]) -> None:
    fd = os.memfd_create("dpex-tickets")
    try:
        with os.fdopen(fd, "wb", closefd=False) as file:
            file.write(data)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sent.extend(map(sock.sendmsg, ([b"f"],), (ancillary,)))
    finally:
        os.close(fd)


def pack(message: Any) -> bytes:
    """Pickle a message; torch's own rules only where plain pickle fails, as they are slower."""
    try:
        return pickle.dumps(message, 5)
    except Exception:
        return bytes(ForkingPickler.dumps(message, 5))
