"""Connect an agent to its trainer, over the network or, on the trainer's own machine, over a Unix socket.

The Unix socket has an abstract name, which leaves nothing behind and can be reached within one network namespace only:
a container with a network of its own connects as another machine would. Over it descriptors and numbers of processes
are passed on, so both ends must count processes alike, too.

This module imports no torch: an agent connects before it begins to import that.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from dpex.pools.agent.handshake import introduce
from dpex.system.clock import monotonic

CONNECT_S = 10.0
"""Seconds that an agent tries to connect before its frames go through Ray."""
_TRY_AGAIN_S = (0.02, 0.2)
"""Pause before an agent tries again that was dropped while many came; drawn at random, lest all come again at once."""
_KEEPALIVE = (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3))
_GIVE_UP = ("TCP_USER_TIMEOUT", 15_000)
"""Milliseconds for which sent bytes may stay unacknowledged. Keepalive asks only while nothing is under way; else the
kernel tries for a quarter of an hour, while the training waits for that machine's batches."""


class LocalAddress(NamedTuple):
    """The address for agents of the same machine: the machine (see `this_machine`), and the name of an abstract socket
    without its leading zero byte."""

    machine: str
    name: str


class TrainerAddress(NamedTuple):
    """The trainer's address, also on the same machine (``local``), and what an agent needs to introduce itself."""

    address: str
    port: int
    secret: bytes
    agent: int
    local: LocalAddress | None = None

    def __repr__(self) -> str:
        """Without the secret, which must not get into logs."""
        return f"TrainerAddress(address={self.address!r}, port={self.port}, agent={self.agent})"


def this_machine() -> str:
    """Return a name of this machine since it was booted, and of its numbering of processes; "" if unknown."""
    with contextlib.suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{Path('/proc/self/ns/pid').readlink()}"
    return ""


def listen_here(backlog: int) -> tuple[socket.socket, LocalAddress] | None:
    """Return a socket that listens for agents of this machine, and its address; None where there can be none."""
    here = this_machine()
    if not sys.platform.startswith("linux") or not here:
        return None
    address = LocalAddress(here, f"dpex-{secrets.token_hex(16)}")
    found = socket.socket(socket.AF_UNIX)
    try:
        found.bind(f"\0{address.name}")
        found.listen(backlog)
    except OSError:
        found.close()
        return None
    return found, address


def connect(target: TrainerAddress, limit_s: float = CONNECT_S) -> socket.socket:
    """Return a connection that the trainer has accepted. An agent that is dropped meanwhile tries again.

    Raises:
        OSError: The trainer cannot be reached, does not answer, or is not the one that knows the secret.
    """
    deadline = monotonic() + limit_s
    while True:
        try:
            return _accepted(target, deadline)
        except (ConnectionResetError, BrokenPipeError):
            pause_s = random.Random().uniform(*_TRY_AGAIN_S)  # the dataset's own generator stays as it is
            if monotonic() + pause_s >= deadline:
                raise
            time.sleep(pause_s)


def _accepted(target: TrainerAddress, deadline: float) -> socket.socket:
    connection = _local_connection(target, deadline) or socket.create_connection(
        (target.address, target.port), _left_s(deadline)
    )
    try:
        introduce(target.secret, target.agent, connection.sendall, reader(connection, deadline))
        tune(connection, is_trainer=False)
        return connection
    except BaseException:
        connection.close()
        raise


def _local_connection(target: TrainerAddress, deadline: float) -> socket.socket | None:
    """Return a connection to the trainer on this machine; None if it is elsewhere, or in another container."""
    if target.local is None or target.local.machine != this_machine():
        return None
    found = socket.socket(socket.AF_UNIX)
    try:
        found.settimeout(_left_s(deadline))
        found.connect(f"\0{target.local.name}")
    except OSError:
        found.close()
        return None
    return found


def reader(connection: socket.socket, deadline: float) -> Callable[[int], bytes]:
    """Return a function that reads that many bytes of a connection, all of them before ``deadline``."""

    def read(nbytes: int) -> bytes:
        found = b""
        while len(found) < nbytes:
            connection.settimeout(_left_s(deadline))
            data = connection.recv(nbytes - len(found))
            if not data:
                raise ConnectionResetError("the other end closed the connection")
            found += data
        return found

    return read


def _left_s(deadline: float) -> float:
    left_s = deadline - monotonic()
    if left_s <= 0:
        raise TimeoutError("the other end did not answer in time")
    return left_s


def tune(connection: socket.socket, *, is_trainer: bool) -> None:
    """Have a connection block without a limit, send small things at once, and notice a lost machine within 15 seconds.

    An agent waits longer for a trainer that takes nothing, whose process may only be stopped. Its guardian ends the
    agent of a trainer that is gone.
    """
    connection.settimeout(None)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*_KEEPALIVE, _GIVE_UP) if is_trainer else _KEEPALIVE:
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
